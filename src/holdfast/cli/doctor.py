"""holdfast doctor: what this machine has, and whether every backend that it can run is right."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import UserError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from holdfast.ops.verify import Verdict


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def doctor(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda where there is one, cpu as well.")
    ] = None,
    self_check: Annotated[
        bool,
        typer.Option("--self-check", help="Also plant a fault in all that each kernel writes; each has to be noticed."),
    ] = False,
    fuzz: Annotated[
        float | None, typer.Option(help="Instead, make random calls of every op for so many seconds.", min=0)
    ] = None,
    scenarios: Annotated[int | None, typer.Option(help="Fuzz so many scenarios, or fewer in --fuzz.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Of the fuzzer's scenarios; 0 by default.", min=0)] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that fuzz side by side.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the fuzzer's rows here, as JSON lines.")] = None,
    replay: Annotated[str | None, typer.Option(help="Instead, run the scenario of a fuzzer's line again.")] = None,
) -> None:
    """Say what this machine has, and check every backend against the float64 oracle, forward and gradients.

    Exits with status 1 if a backend, or with --fuzz and --replay a scenario, is wrong, or a fault goes unnoticed.
    """
    if replay is not None:
        if fuzz is not None or scenarios is not None:
            raise UserError("--replay: runs one scenario; leave --fuzz and --scenarios out")
        from .fuzz import replay as run_again

        return run_again(replay)
    if fuzz is not None or scenarios is not None:
        return _fuzz(fuzz, scenarios, seed or 0, device, workers, out)
    for name, given in (("seed", seed), ("workers", workers), ("out", out)):
        if given is not None:
            raise UserError(f"--{name}: belongs to --fuzz or --scenarios")
    import torch
    from rich.console import Console

    from holdfast.ops.verify import verify

    from .device import choose_device
    from .report import plain

    console = Console()
    devices = [choose_device(device or "cpu")]
    if device is None and torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    plain(console, f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("holdfast", "torch", "triton", "cuda-core", "cuda-bindings", "mlx"):
        plain(console, f"  {package:14} {_version(package)}")
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    plain(console, f"  GPUs           {', '.join(gpus) or 'none that CUDA sees'}")

    wrong = []
    for target in devices:
        with console.status("checking"):
            verdicts = list(verify(target))
        console.print(_by_op(verdicts, target))
        for reason, backends in _reasons(verdicts).items():
            plain(console, f"not run, {', '.join(backends)}: {reason}")
        for each in verdicts:
            if each.status == "wrong":
                wrong.append(f"{each.op}, backend {each.backend}, on {target}: {each.detail}")
    for line in wrong:
        typer.echo(f"holdfast: wrong: {line}", err=True)
    if wrong:
        raise typer.Exit(1)
    console.print("All backends that this machine can run are right.")
    if self_check:
        from .planted import show

        noticed = [show(target, console) for target in devices]
        if not all(noticed):
            raise typer.Exit(1)


def _by_op(verdicts: "list[Verdict]", target: "torch.device") -> "Table":
    """A row an op: its backends by what came of them, those that ran with their error."""
    from rich.table import Table

    table = Table("op", "right (error)", "wrong", "not run", title=f"against the oracle, on {target}")
    for op in dict.fromkeys(each.op for each in verdicts):
        found: dict[str, list[str]] = {"right": [], "wrong": [], "skipped": []}
        for each in verdicts:
            if each.op == op:
                error = "" if each.error is None else f" ({each.error:.0e})"
                found[each.status].append(each.backend + error)
        table.add_row(op, *(", ".join(names) for names in found.values()))
    return table


def _reasons(verdicts: "list[Verdict]") -> dict[str, list[str]]:
    """Why backends did not run, and which; with their ops where they run others."""
    ran = {each.backend for each in verdicts if each.status != "skipped"}
    found: dict[str, list[str]] = {}
    for each in verdicts:
        if each.status == "skipped":
            name = f"{each.backend} ({each.op})" if each.backend in ran else each.backend
            found.setdefault(each.detail, []).append(name)
    return {reason: list(dict.fromkeys(names)) for reason, names in found.items()}


def _fuzz(
    seconds: float | None, scenarios: int | None, seed: int, device: str | None, workers: int | None, out: Path | None
) -> None:
    from holdfast.fuzz.workers import default_workers

    from .device import choose_device
    from .fuzz import fuzz

    kind = choose_device(device or "auto").type
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: the fuzzer runs on cpu and cuda")
    fuzz(seconds, scenarios, seed, kind, default_workers(kind) if workers is None else workers, out)
