"""Options of `holdfast train`."""

from pathlib import Path
from typing import Annotated

import typer

from .config import DEMO, DTYPES, MIXERS, LanguageModelConfig
from .data import Globs, TextPath

train = typer.Typer(help="Train small models with any Holdfast mixer.", no_args_is_help=True)

DEFAULT = LanguageModelConfig()
MIXER_HELP = f"One of {', '.join(MIXERS)}."


def _option(text: str, name: str, panel: str = "Training") -> object:
    # None tells a resumed run that an option was not given, so the default is only named.
    return typer.Option(help=f"{text} Default: {getattr(DEFAULT, name)}.", rich_help_panel=panel)


@train.command()
def lm(
    text: TextPath = None,
    glob: Globs = None,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Instead of text, tokens that `holdfast data prepare` made.")
    ] = None,
    mixer: Annotated[str | None, _option(MIXER_HELP, "mixer", "Model")] = None,
    layers: Annotated[int | None, _option("Blocks of a mixer and an MLP.", "layers", "Model")] = None,
    width: Annotated[int | None, _option("Channels of the model.", "width", "Model")] = None,
    heads: Annotated[int | None, _option("Heads (rglru and rotlru have none).", "heads", "Model")] = None,
    length: Annotated[int | None, _option("Tokens a sequence: bytes, or those of --data.", "length")] = None,
    batch: Annotated[int | None, _option("Sequences a step, of all processes together.", "batch")] = None,
    accumulate: Annotated[
        int | None, _option("Parts that a process takes its sequences in, one after another.", "accumulate")
    ] = None,
    steps: Annotated[int | None, _option("Steps in all.", "steps")] = None,
    lr: Annotated[float | None, _option("Peak learning rate.", "lr")] = None,
    seed: Annotated[int | None, _option("Decides weights, data order and sample.", "seed")] = None,
    dtype: Annotated[str | None, _option(f"{' or '.join(DTYPES)} (by autocast).", "dtype")] = None,
    validate_every: Annotated[int | None, _option("Steps between validations.", "validate_every")] = None,
    threads: Annotated[int | None, _option("CPU threads; 0 leaves it to torch.", "threads")] = None,
    device: Annotated[
        str, typer.Option(help="A torch device; auto takes CUDA if there is one.", rich_help_panel="Training")
    ] = "auto",
    sharding: Annotated[
        str | None,
        _option(
            "Of processes that torchrun starts: ddp, each holds the model; fsdp, each a part of it.",
            "sharding",
            "Several processes",
        ),
    ] = None,
    cp: Annotated[
        int | None, _option("Processes that share a sequence, each some of its tokens.", "cp", "Several processes")
    ] = None,
    tp: Annotated[
        int | None, _option("Processes that share a layer, each some of its heads.", "tp", "Several processes")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to keep the checkpoint.", rich_help_panel="Checkpoints")
    ] = None,
    save_every: Annotated[int | None, _option("Steps between checkpoints.", "save_every", panel="Checkpoints")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on exactly where that checkpoint stopped.", rich_help_panel="Checkpoints"),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="What the sample starts with. By default, how the validation text starts.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="A small model on the standard library, done in under two minutes.")
    ] = False,
) -> None:
    """Train a language model on text, byte by byte, or on tokens.

    Prints validation in bits a byte on the way and a sample at the end. On several GPUs:
    torchrun --nproc-per-node 4 -m holdfast.cli train lm ...
    """
    from .train_lm import train_language_model

    given = {
        "text": None if text is None else str(Path(text).absolute()),
        "glob": tuple(glob) if glob else None,
        "data": None if data is None else str(Path(data).absolute()),
        "mixer": mixer,
        "layers": layers,
        "width": width,
        "heads": heads,
        "length": length,
        "batch": batch,
        "accumulate": accumulate,
        "steps": steps,
        "lr": lr,
        "seed": seed,
        "dtype": dtype,
        "validate_every": validate_every,
        "save_every": save_every,
        "threads": threads,
        "sharding": sharding,
        "cp": cp,
        "tp": tp,
    }
    raise typer.Exit(train_language_model(given, DEMO if demo else {}, device, out, resume, prompt))


@train.command()
def parity(
    mixer: Annotated[str, typer.Option(help=MIXER_HELP)] = "lstm",
    layers: Annotated[int, typer.Option(help="Blocks of a mixer and an MLP.")] = 1,
    width: Annotated[int, typer.Option(help="Channels of the model.")] = 64,
    heads: Annotated[int, typer.Option(help="Heads (rglru and rotlru have none).")] = 1,
    steps: Annotated[int, typer.Option(help="Steps; the first tenth is warm-up.")] = 500,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-2,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 256,
    seed: Annotated[int, typer.Option(help="Decides weights and data.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; a model this small gains little from more.")] = 1,
    device: Annotated[str, typer.Option(help="A torch device; auto takes CUDA if there is one.")] = "auto",
) -> None:
    """Train on the parity of up to 40 bits, and report accuracy on up to 256.

    The state-tracking task of the FlashRNN paper: nonlinear recurrences solve it, linear ones with positive decay
    do not.
    """
    from .train_parity import ParityConfig, train_parity

    raise typer.Exit(train_parity(ParityConfig(mixer, layers, width, heads, steps, lr, batch, seed, threads), device))
