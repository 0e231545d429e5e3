"""holdfast bench: measure cases and suites; holdfast bench report: look at the results."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

RESULTS = Path("benchmarks") / "results"

bench = typer.Typer(
    help="Measure backends and peers, right first and then fast; `report` makes a page of the results.",
    invoke_without_command=True,
    no_args_is_help=True,
    add_completion=False,
)


def _sizes(shape: str) -> tuple[tuple[str, int], ...]:
    sizes = []
    for item in filter(None, shape.split(",")):
        name, _, value = item.partition("=")
        if not value.strip().isdigit():
            raise ValueError(f"--shape: expected AXIS=SIZE,... such as B=4,T=4096,H=32,K=128,V=128; got {item!r}")
        sizes.append((name.strip(), int(value)))
    return tuple(sizes)


def _words(text: str) -> list[str] | None:
    return [word.strip() for word in text.split(",") if word.strip()] or None


@bench.callback()
def measure(
    context: typer.Context,
    suite: Annotated[str, typer.Option(help="A suite's name, such as smoke; an unknown one lists them.")] = "",
    op: Annotated[str, typer.Option(help="Instead of a suite: an op, with --shape.")] = "",
    shape: Annotated[str, typer.Option(help="Sizes, such as B=4,T=4096,H=32,K=128,V=128.")] = "",
    dtype: Annotated[str, typer.Option(help="The inputs' dtype, with --op.")] = "bfloat16",
    passes: Annotated[str, typer.Option("--pass", help="fwd or fwd+bwd, with --op; both by default.")] = "",
    match: Annotated[str, typer.Option(help="Only a suite's cases with this text in them, such as lstm or D64.")] = "",
    runners: Annotated[
        str, typer.Option(help="Only these, by name or first word, such as holdfast,fla; all by default.")
    ] = "",
    device: Annotated[str, typer.Option(help="cuda, cpu, ...; auto is CUDA where there is one.")] = "auto",
    graph: Annotated[bool, typer.Option("--graph", help="Time CUDA-graph replays instead of plain calls.")] = False,
    scaled: Annotated[bool, typer.Option("--scaled", help="Cut a suite's sizes down to what a CPU manages.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write; by default under benchmarks/results.")] = None,
) -> None:
    """Measure a suite, or one op, on this machine.

    Each row is compared with the float64 oracle first; one that is off is reported as wrong and gets no time.
    """
    if context.invoked_subcommand:
        return
    from .bench.case import DTYPES, PASSES, Case
    from .bench.suites import suite_named
    from .device import choose_device
    from .errors import UserError

    if bool(suite) == bool(op):
        raise UserError("bench: expected either --suite NAME or --op NAME --shape B=..,T=..")
    if suite:
        chosen = suite_named(suite)
        target = choose_device(device)
        if target.type != "cuda" and not (chosen.small or scaled):
            raise UserError(
                f"--suite {suite}: made for a GPU; on {target} add --scaled for small sizes, or take --suite smoke"
            )
        cases = [case for case in chosen.cases(scaled) if match in f"{case.label}: {case}"]
        if not cases:
            raise UserError(f"--match {match}: no case of suite {suite} has this text")
        title = f"{chosen.title}: {chosen.source}"
        name = f"{suite}-scaled" if scaled else suite
    else:
        if dtype not in DTYPES:
            raise UserError(f"--dtype: expected one of {', '.join(DTYPES)}; got {dtype!r}")
        cases = [Case(op, _sizes(shape), dtype, each) for each in ([passes] if passes else PASSES)]
        target, title, name = choose_device(device), f"{op} alone", op
    if graph and target.type != "cuda":
        raise UserError(f"--graph: CUDA graphs need an NVIDIA GPU; the device is {target}")
    options = {"--suite": suite, "--op": op, "--shape": shape, "--dtype": dtype if op else "", "--pass": passes}
    options |= {"--match": match, "--runners": runners, "--device": device if device != "auto" else ""}
    words = [word for option, value in options.items() if value for word in (option, value)]
    words += ["--scaled"] * scaled + ["--graph"] * graph

    from .bench.live import measure_live

    measure_live(
        name, title, shlex.join(["holdfast", "bench", *words]), cases, target, _words(runners), graph, out, RESULTS
    )


@bench.command()
def report(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Files of holdfast bench; by default all under benchmarks/results.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = RESULTS / "report.html",
) -> None:
    """Draw results as plots and tables on one self-contained HTML page."""
    from .bench.page import page
    from .bench.plot import can_plot
    from .bench.record import is_record, read, write_text
    from .errors import UserError

    found = list(results or [path for path in sorted(RESULTS.glob("*/*.json")) if is_record(path)])
    if not found:
        raise UserError(f"bench report: no results under {RESULTS}; run holdfast bench --suite smoke first")
    write_text(out, page([read(path) for path in found]))
    if not can_plot():
        typer.echo("holdfast: matplotlib is not installed, so the page has no plots: pip install matplotlib", err=True)
    typer.echo(f"written to {out}, from {len(found)} file{'s' if len(found) > 1 else ''}")
