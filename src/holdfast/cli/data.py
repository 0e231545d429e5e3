"""Options of `holdfast data`."""

from pathlib import Path
from typing import Annotated

import typer

# which text, here and in `holdfast train lm`
TextPath = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="A file, or a folder to walk. By default the Python standard library."),
]
Globs = Annotated[list[str] | None, typer.Option(help='Which files of the folder, such as "*.rs". May be repeated.')]

data = typer.Typer(help="Make what models are trained on.", no_args_is_help=True)


@data.callback()
def _group() -> None:
    pass


@data.command()
def prepare(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    text: TextPath = None,
    glob: Globs = None,
    tokenizer: Annotated[
        str, typer.Option(help="bytes; bpe, trained on the text; or a tokenizer.json of the tokenizers library.")
    ] = "bytes",
    vocabulary: Annotated[int, typer.Option(help="Tokens of bpe.", min=1)] = 32000,
) -> None:
    """Turn text into a folder of tokens for `holdfast train lm --data`, which reads them as it needs them."""
    from .text import find_text
    from .tokens import prepare as write

    made = write(find_text(text, tuple(glob or ())), out, tokenizer, vocabulary)
    typer.echo(
        f"{made.name}: {len(made.train):,} {made.unit} to train on ({made.train_files} files), "
        f"{len(made.validation):,} to validate on ({made.validation_files} files), vocabulary {made.vocabulary:,}, "
        f"{made.bytes_per_token[0]:.2f} bytes a token, in {out}"
    )
