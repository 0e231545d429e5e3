"""The holdfast command. Nothing here imports torch until a command runs that needs it."""


def main() -> None:
    """Runs the command line; the entry point of the `holdfast` script."""
    from .app import run

    run()
