"""The command line's tree, and what its errors look like."""

import sys
from typing import Annotated

import typer

from .bench_command import bench
from .data import data
from .doctor import doctor
from .errors import UserError, one_line
from .explain import explain
from .train import train

app = typer.Typer(
    name="holdfast",
    help="Fused kernels for recurrent sequence models that hold the state on the chip.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(doctor)
app.command()(explain)
app.add_typer(train, name="train")
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        from holdfast import __version__

        typer.echo(f"holdfast {__version__}")
        raise typer.Exit()


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def run() -> None:
    """Runs the command line. What a user can mend is one line on stderr and status 2; a bug keeps its traceback."""
    try:
        app()
    except (UserError, ValueError, OSError) as error:
        print(f"holdfast: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
