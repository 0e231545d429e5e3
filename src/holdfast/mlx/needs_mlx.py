"""Imported before all else that holdfast.mlx has: says what is missing where mlx is not there or too old."""

import sys

LEAST = (0, 32, 1)


def missing() -> str | None:
    """What is wrong with the mlx that is installed, or None."""
    wanted = f"mlx {'.'.join(map(str, LEAST))} or newer: pip install holdfast-mlx"
    try:
        import mlx.core as mx
    except ImportError as error:
        return f"needs {wanted} ({error})"
    version = tuple(int(part) for part in mx.__version__.split(".")[:3] if part.isdigit())
    return f"needs {wanted} (there is {mx.__version__})" if version < LEAST else None


def require() -> None:
    """Raises ImportError where mlx is missing; ends `python -m holdfast.mlx.selftest` with a line and status 2.

    Python imports the package before the module that -m names, so the self-test has no say of its own.
    """
    reason = missing()
    if reason is None:
        return
    if "holdfast.mlx.selftest" in sys.orig_argv:
        print(f"holdfast.mlx {reason}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(f"holdfast.mlx {reason}", name="mlx")


require()
