"""Options of `holdfast train`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .config import DTYPES, MIXERS, PRESETS, LanguageModelConfig, check_choice
from .data import Globs, TextPath
from .errors import UserError

train = typer.Typer(help="Train small models with any Holdfast mixer.", no_args_is_help=True)

DEFAULT = LanguageModelConfig()
MIXER_HELP = f"One of {', '.join(MIXERS)}."


def _option(text: str, name: str, panel: str = "Training") -> object:
    # None tells a resumed run that an option was not given, so the default is only named.
    default = getattr(DEFAULT, name)
    return typer.Option(help=text if default is None else f"{text} Default: {default}.", rich_help_panel=panel)


def _preset(name: str | None, demo: bool, resume: Path | None) -> Mapping[str, Any]:
    if name is None:
        return PRESETS["demo"] if demo else {}
    check_choice("preset", name, PRESETS)
    for option, there in (("--demo", demo), ("--resume", resume)):
        if there:
            raise UserError(f"--preset: expected no {option} beside it, which has settings of its own")
    return PRESETS[name]


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
    tie: Annotated[
        bool | None,
        typer.Option(
            "--tie/--no-tie",
            help="Whether the head has the embedding's weights. Default: tie.",
            rich_help_panel="Model",
            show_default=False,
        ),
    ] = None,
    vocabulary: Annotated[
        int | None,
        _option(
            "Tokens of the embedding and the head: the data's, which is the default, or rounded up.",
            "vocabulary",
            "Model",
        ),
    ] = None,
    length: Annotated[int | None, _option("Tokens a sequence: bytes, or those of --data.", "length")] = None,
    batch: Annotated[int | None, _option("Sequences a step, of all processes together.", "batch")] = None,
    accumulate: Annotated[
        int | None, _option("Parts that a process takes its sequences in, one after another.", "accumulate")
    ] = None,
    local_batch: Annotated[
        int | None, _option("Instead of --accumulate, sequences that a process takes at a time.", "local_batch")
    ] = None,
    steps: Annotated[int | None, _option("Steps in all.", "steps")] = None,
    lr: Annotated[float | None, _option("Peak learning rate.", "lr")] = None,
    min_lr: Annotated[
        float | None, _option("Learning rate that a cosine ends at. By default a tenth of --lr.", "min_lr")
    ] = None,
    warmup_steps: Annotated[
        int | None,
        _option("Steps of linear warm-up. By default a tenth of them all, at most 200.", "warmup_steps"),
    ] = None,
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
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to keep curves for TensorBoard, which has to be installed."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Settings that options given override: flashrnn-165m, the language model of the FlashRNN paper, on "
            "--data of 50,257 tokens; or demo.",
        ),
    ] = None,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="--preset demo: a small model on the standard library, done in under two minutes."),
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
        "tie": tie,
        "vocabulary": vocabulary,
        "length": length,
        "batch": batch,
        "accumulate": accumulate,
        "local_batch": local_batch,
        "steps": steps,
        "lr": lr,
        "min_lr": min_lr,
        "warmup_steps": warmup_steps,
        "seed": seed,
        "dtype": dtype,
        "validate_every": validate_every,
        "save_every": save_every,
        "threads": threads,
        "sharding": sharding,
        "cp": cp,
        "tp": tp,
    }
    raise typer.Exit(
        train_language_model(given, _preset(preset, demo, resume), device, out, resume, prompt, tensorboard)
    )


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
