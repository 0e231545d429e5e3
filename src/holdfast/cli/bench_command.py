"""holdfast bench: measure cases and suites; holdfast bench report: look at the results."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .sizes import sizes_of

if TYPE_CHECKING:
    import torch

RESULTS = Path("benchmarks") / "results"

bench = typer.Typer(
    help="Measure backends and peers, right first and then fast; `report` makes a page of the results.",
    invoke_without_command=True,
    no_args_is_help=True,
    add_completion=False,
)


def _words(text: str) -> list[str] | None:
    return [word.strip() for word in text.split(",") if word.strip()] or None


def _place(path: Path) -> tuple[str, str]:
    """In the report: by folder, then a whole suite before parts of it, whose names begin with its own."""
    return str(path.parent), path.stem


@bench.callback()
def measure(
    context: typer.Context,
    suite: Annotated[str, typer.Option(help="Suites by name, such as smoke; an unknown one lists them.")] = "",
    op: Annotated[str, typer.Option(help="Instead of a suite: an op, with --shape.")] = "",
    shape: Annotated[str, typer.Option(help="Sizes, such as B=4,T=4096,H=32,K=128,V=128.")] = "",
    dtype: Annotated[str, typer.Option(help="The inputs' dtype, with --op; bfloat16 by default.")] = "",
    passes: Annotated[str, typer.Option("--pass", help="fwd or fwd+bwd, with --op; both by default.")] = "",
    match: Annotated[str, typer.Option(help="Only a suite's cases with one of these texts, such as lstm,D64.")] = "",
    runners: Annotated[
        str,
        typer.Option(
            help="Only these, by name or first word, such as holdfast,fla; -NAME leaves one out, NAME@TEXT takes it in "
            "cases with that text alone; all by default."
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="cuda, cpu, ...; auto is CUDA where there is one.")] = "auto",
    graph: Annotated[bool, typer.Option("--graph", help="Time CUDA-graph replays instead of plain calls.")] = False,
    scaled: Annotated[bool, typer.Option("--scaled", help="Cut a suite's sizes down to what a CPU manages.")] = False,
    cold: Annotated[
        int, typer.Option(min=0, help="Measure first calls, this many side by side, each in a cold child process.")
    ] = 0,
    tune: Annotated[bool, typer.Option("--tune", help="With --op: time its plans, for the device's table.")] = False,
    counters: Annotated[str, typer.Option(help="Read hardware counters (ncu) of these runners, as --runners.")] = "",
    seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Time for the runs of each row; 1 by default, 0.2 with models.")
    ] = None,
    parts: Annotated[
        str, typer.Option(help="With --suite models: training, layers, host, decoding, longer; all by default.")
    ] = "",
    commit: Annotated[str, typer.Option(help="The commit that is measured, where git cannot say.")] = "",
    out: Annotated[Path | None, typer.Option(help="Where to write; by default under benchmarks/results.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Drop the rows of a run that was cut short.")] = False,
) -> None:
    """Measure suites, or one op, on this machine.

    Each row is compared with the float64 oracle first; one that is off is reported as wrong and gets no time. A run
    that was cut short goes on where it stopped.
    """
    if context.invoked_subcommand:
        return
    from .bench.case import DTYPES, PASSES, Case
    from .bench.suites import suite_named
    from .device import choose_device
    from .errors import UserError

    if bool(suite) == bool(op):
        raise UserError("bench: expected either --suite NAME or --op NAME --shape B=..,T=..")
    if tune and not op:
        raise UserError("--tune: expected --op NAME --shape B=..,T=.., not a suite")
    idle = {"--match": match, "--scaled": scaled} if op else {"--shape": shape, "--dtype": dtype, "--pass": passes}
    if tune:
        idle |= {"--graph": graph, "--cold": cold, "--counters": counters, "--commit": commit, "--fresh": fresh}
    for option, given in idle.items():
        if given:
            raise UserError(f"{option}: has no meaning with {'--tune' if tune else '--op' if op else '--suite'}")
    sizes, dtype = tuple(sizes_of(shape).items()), dtype or "bfloat16"
    if out and len(_words(suite) or []) > 1:
        raise UserError("--out: one file holds one suite; leave it out with several")
    if op and dtype not in DTYPES:
        raise UserError(f"--dtype: expected one of {', '.join(DTYPES)}; got {dtype!r}")
    if "models" in (_words(suite) or []) and suite != "models":
        raise UserError("--suite models: has rows of its own kind; leave the other suites to another command")
    if parts and suite != "models":
        raise UserError("--parts: has no meaning without --suite models")
    target = choose_device(device)
    if suite == "models":
        idle = {"--runners": runners, "--graph": graph, "--cold": cold, "--counters": counters}
        for option, given in idle.items():
            if given:
                raise UserError(f"{option}: has no meaning with --suite models")
        _measure_models(target, match, parts, scaled, seconds, commit, out, fresh)
        return
    seconds = seconds or 1.0
    if tune:
        from .bench import clock
        from .bench.selection import Selection
        from .bench.tune import tune_case

        clock.SECONDS = seconds
        tune_case(op, sizes, dtype, [passes or "fwd+bwd"], target, Selection.of(runners), path=out)
        return
    if graph and target.type != "cuda":
        raise UserError(f"--graph: CUDA graphs need an NVIDIA GPU; the device is {target}")
    options = {"--op": op, "--shape": shape, "--dtype": dtype if op else "", "--pass": passes, "--match": match}
    options |= {"--runners": runners, "--counters": counters, "--device": device if device != "auto" else ""}
    options |= {"--cold": str(cold or ""), "--seconds": "" if seconds == 1.0 else f"{seconds:g}"}
    words = [word for option, value in options.items() if value for word in (option, value)]
    words += ["--scaled"] * scaled + ["--graph"] * graph

    from .bench.live import Choices, Named, measure_live
    from .bench.selection import Selection

    named = []
    for each in _words(suite) or []:
        chosen = suite_named(each)
        if target.type != "cuda" and not (chosen.small or scaled):
            raise UserError(
                f"--suite {each}: made for a GPU; on {target} add --scaled for small sizes, or take --suite smoke"
            )
        texts = _words(match) or [""]
        cases = [case for case in chosen.cases(scaled) if any(text in f"{case.label}: {case}" for text in texts)]
        if not cases:
            raise UserError(f"--match {match}: no case of suite {each} has this text")
        line = shlex.join(["holdfast", "bench", "--suite", each, *words])
        named.append(Named(f"{each}-scaled" if scaled else each, f"{chosen.title}: {chosen.source}", line, cases))
    if op:
        cases = [Case(op, sizes, dtype, each) for each in ([passes] if passes else PASSES)]
        named = [Named(op, f"{op} alone", shlex.join(["holdfast", "bench", *words]), cases)]
    choices = Choices(
        wanted=Selection.of(runners),
        counters=Selection.of(counters) if counters else None,
        graph=graph,
        cold=cold,
        seconds=seconds,
        commit=commit,
        out=out,
        fresh=fresh,
    )
    measure_live(named, target, choices, RESULTS)


def _measure_models(
    device: "torch.device",
    match: str,
    parts: str,
    scaled: bool,
    seconds: float | None,
    commit: str,
    out: Path | None,
    fresh: bool,
) -> None:
    from .bench.models.live import SECONDS, Choices, measure_models
    from .bench.models.mixers import chosen
    from .bench.models.scale import FULL, SMALL
    from .bench.models.suite import PARTS
    from .bench.session import new_process
    from .errors import UserError

    if device.type != "cuda" and not scaled:
        raise UserError(f"--suite models: made for a GPU; on {device} add --scaled for small sizes")
    wanted = tuple(_words(parts) or PARTS)
    for part in wanted:
        if part not in PARTS:
            raise UserError(f"--parts: expected some of {', '.join(PARTS)}; got {part!r}")
    mixers = chosen(_words(match) or [""])
    if match and len(mixers) == 1 and "attention" not in match:
        raise UserError(f"--match {match}: no mixer has this text")
    options = {"--match": match, "--parts": parts, "--seconds": f"{seconds:g}" if seconds else ""}
    words = [word for option, value in options.items() if value for word in (option, value)] + ["--scaled"] * scaled
    command = shlex.join(["holdfast", "bench", "--suite", "models", *words])
    scale, name = (SMALL, "models-scaled") if scaled else (FULL, "models")
    choices = Choices(mixers, scale, command, name, wanted, seconds or SECONDS, commit, out, fresh)
    if broken := measure_models(choices, device, RESULTS):
        typer.echo(f"{broken}; a new process goes on")
        new_process()


@bench.command()
def report(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Files of holdfast bench; by default all under benchmarks/results.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = RESULTS / "report.html",
) -> None:
    """Draw results as plots and tables on one self-contained HTML page."""
    from holdfast.planner.whole_file import write_text

    from .bench.figure import can_plot
    from .bench.models.row import is_models_record
    from .bench.models.row import read as read_models
    from .bench.page import page
    from .bench.record import is_record, read
    from .errors import UserError

    found = list(
        results
        or [path for path in sorted(RESULTS.glob("*/*.json"), key=_place) if is_record(path) or is_models_record(path)]
    )
    if not found:
        raise UserError(f"bench report: no results under {RESULTS}; run holdfast bench --suite smoke first")
    models = [path for path in found if is_models_record(path)]
    records = [read(path) for path in found if path not in models]
    write_text(out, page(records, [read_models(path) for path in models]))
    if not can_plot():
        typer.echo("holdfast: matplotlib is not installed, so the page has no plots: pip install matplotlib", err=True)
    typer.echo(f"written to {out}, from {len(found)} file{'s' if len(found) > 1 else ''}")
