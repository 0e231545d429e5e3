"""explain: how a call would run, what that should cost, what else was weighed, and why others were passed over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module

import torch

from holdfast.kernels.backend import Backend, describe
from holdfast.kernels.runtime.replay.refusals import refusals
from holdfast.kernels.select import ScoredCandidate, decide
from holdfast.planner import Candidate, Device, Direction, Floor, Plan, Problem, floor
from holdfast.planner.choices import no_choice
from holdfast.recurrences import RECURRENCES, Draw, Recurrence, Sizes

from . import explain_model
from .chunk_primitives import CHUNK_PRIMITIVES
from .families import backends_of, problem_of
from .parity import leaves

# candidates that the text shows of each pass; the data has all
SHOWN = 6
# axes of a family's examples
AXES = {
    "matrix": ("B", "T", "H", "Hq", "K", "V"),
    "diagonal": ("B", "T", "D"),
    "dense": ("B", "T", "H", "D"),
    "selective": ("B", "T", "D", "N"),
}
# a call may have none of these
MAY_BE_EMPTY = ("B", "T", "G")


@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate for a pass. measured: seconds, where a table of the device has them."""

    candidate: Candidate
    measured: float | None = None

    @property
    def plan(self) -> Plan:
        return self.candidate.plan

    @property
    def seconds(self) -> float | None:
        """Measured or else predicted; None where neither is known."""
        if self.measured is not None:
            return self.measured
        return None if self.candidate.prediction is None else self.candidate.seconds


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass does. beaten: every other candidate, the fastest first. floor: what any kernel would cost."""

    direction: Direction
    chosen: Choice
    beaten: tuple[Choice, ...]
    floor: Floor
    floor_seconds: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call would do.

    passes: forward, and backward where one follows. passed_over: backend -> why another runs instead. ignored: what the
    device's measured table has of the call that does not apply, and why. in_full: of the calls that this process made,
    and of what their op runs, (name, why) -> signatures that run in full each time, where others are replayed.
    """

    problem: Problem
    device: Device
    passes: tuple[Pass, ...]
    passed_over: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    in_full: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """Of the forward pass."""
        return self.passes[0].chosen.plan

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.problem.sizes)
        traits = ", ".join(sorted(self.problem.traits)) or "none"
        lines = [
            f"{self.problem.op} ({self.problem.family} family) on {self.device.name}, {self.problem.dtype}",
            f"  sizes    {sizes}",
            f"  traits   {traits}",
        ]
        for each in self.passes:
            lines += _told(each)
        lines += [f"  not      {name}: {reason}" for name, reason in self.passed_over.items()]
        lines += [f"  ignored  {note}" for note in self.ignored]
        for (name, reason), count in self.in_full.items():
            signatures = f"{count} signature{'' if count == 1 else 's'}"
            lines.append(f"  replay   none of {signatures} of {name}: {reason}")
        return "\n".join(lines)


def explain(
    op: str,
    sizes: Mapping[str, int] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    needs_grad: bool = True,
    varlen: bool = False,
    backend: str | None = None,
    calls: int = 0,
) -> Explanation:
    """Plans a call of an op without running it: the plans, their costs, and why each other backend would not run.

    Of calls of the op that this process has made on a GPU it tells which are not replayed from a record, and why.

    Args:
        op: the op's name, such as "gla" or "intra_chunk".
        sizes: axis -> size: of the matrix family B, T, H, Hq (query or group heads), K, V; of the diagonal one B, T, D;
            of the dense one B, T, H, D; of the selective one B, T, D, N; of inter_chunk_scan B, G, H, K, V, r (columns
            of W and Y; 0 for none) and Kg (decays a head, 1 or K); of intra_chunk B, T, H, Hq, K, V and C. Axes left
            out keep small defaults.
        dtype: of the inputs, torch's name.
        device: one that Device.named knows, such as "cpu" or "h200"; it need not be present. "cuda" is the GPU here.
        needs_grad: whether a backward pass follows. varlen: whether sequences are packed.
        backend: forces a backend, as the op's argument of that name does.
        calls: how often to make an example call of a recurrence first, on device "cuda"; the second one is recorded.

    Raises:
        ValueError: for an unknown op, axis, dtype, device or backend; with every reason if no backend can run the call;
            for a measured table that cannot be read.
    """
    if op not in RECURRENCES and op not in CHUNK_PRIMITIVES:
        raise ValueError(no_choice("op", [*RECURRENCES, *CHUNK_PRIMITIVES], op))
    scalar = getattr(torch, dtype, None)
    if not isinstance(scalar, torch.dtype) or not scalar.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point dtype such as 'bfloat16'; got {dtype!r}")
    target = _device(device)
    backends, problem = named_problem(op, sizes or {}, scalar, needs_grad, varlen)
    explanation = _explanation(backends, problem, target, backend)
    if calls:
        if device != "cuda" or op not in RECURRENCES:
            raise ValueError(f"calls: expected 0 for {op!r} on {device!r}; got {calls}")
        _call(RECURRENCES[op], Sizes(**sizes or {}), Draw(0, scalar, device), needs_grad, varlen, backend, calls)
    return replace(explanation, in_full=_in_full(problem))


def _device(name: str) -> Device:
    if name != "cuda":
        return Device.named(name)
    if not torch.cuda.is_available():
        raise ValueError(
            "device: expected a GPU here for 'cuda', or a name such as 'h200' for one elsewhere; got no GPU"
        )
    return describe(torch.device("cuda", torch.cuda.current_device()))


def named_problem(
    op: str, sizes: Mapping[str, int], dtype: torch.dtype, grad: bool, varlen: bool
) -> tuple[tuple[Backend, ...], Problem]:
    """The backends of an op, and the problem that an example call of these sizes poses.

    op, sizes: as of `explain`. dtype: of the inputs. grad: whether a backward pass may follow. varlen: whether
    sequences are packed. Raises ValueError for an axis that the op does not have or a size below its least.
    """
    known = AXES[RECURRENCES[op].family] if op in RECURRENCES else tuple(CHUNK_PRIMITIVES[op].sizes)
    for name, size in sizes.items():
        if name not in known:
            raise ValueError(f"sizes: expected axes among {', '.join(known)}; got {name!r}")
        least = 0 if name in MAY_BE_EMPTY or (op in CHUNK_PRIMITIVES and CHUNK_PRIMITIVES[op].sizes[name] == 0) else 1
        if size < least:
            raise ValueError(f"sizes: expected {name} >= {least}; got {size}")
    packed = torch.empty(2, dtype=torch.int32, device="meta") if varlen else None
    draw = Draw(0, dtype, "meta")
    if op in CHUNK_PRIMITIVES:
        primitive = CHUNK_PRIMITIVES[op]
        return primitive.backends(), primitive.problem(draw, {**primitive.sizes, **sizes}, packed, grad)
    recurrence = RECURRENCES[op]
    arguments = recurrence.example(draw, Sizes(**sizes))
    return backends_of(recurrence), problem_of(recurrence, arguments, packed, grad)


def _call(
    recurrence: Recurrence, sizes: Sizes, draw: Draw, grad: bool, varlen: bool, backend: str | None, calls: int
) -> None:
    """Makes example calls, with a backward pass behind each if grad."""
    arguments = recurrence.example(draw, replace(sizes, B=1) if varlen else sizes)
    for x in leaves(arguments):
        x.requires_grad_(grad)
    if varlen:
        arguments["cu_seqlens"] = torch.tensor([0, sizes.T], dtype=torch.int32, device=draw.device)
    op = getattr(import_module(__name__.rpartition(".")[0]), recurrence.name)
    for _ in range(calls):
        outputs = leaves(op(**arguments, backend=backend))
        if grad:
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])


def _in_full(problem: Problem) -> dict[tuple[str, str], int]:
    of_family = (f"{problem.op}_", f"{problem.family}_")
    return {
        (name, reason): count
        for (name, reason), count in refusals().items()
        if name == problem.op or name.startswith(of_family)
    }


def _explanation(backends: tuple[Backend, ...], problem: Problem, device: Device, name: str | None) -> Explanation:
    decision = decide(backends, problem, device, name)
    passes = []
    for direction, ranked in decision.ranked.items():
        least = floor(problem, direction)
        chosen, *beaten = map(_choice, ranked)
        passes.append(Pass(direction, chosen, tuple(beaten), least, least.seconds(device)))
    order = [backend.name for backend in backends if backend.name in decision.passed_over]
    passed_over = {name: decision.passed_over[name] for name in order}
    return Explanation(problem, device, tuple(passes), passed_over, decision.ignored)


def _choice(scored: ScoredCandidate) -> Choice:
    return Choice(scored.candidate, scored.measured)


def _told(each: Pass) -> list[str]:
    """A pass in lines of text."""
    chosen, least = each.chosen, each.floor
    lines = [f"  {each.direction}", f"    runs     {chosen.plan}"]
    if chosen.measured is not None:
        lines.append(f"    measured {_time(chosen.measured)}{_ratio(chosen.measured, each.floor_seconds)}")
    prediction = chosen.candidate.prediction
    if prediction is None:
        lines.append("    time     no model of this backend on this device")
    else:
        parts = ("memory", "arithmetic", "serial", "launch", "exchange", "apart")
        shown = [f"{part} {_time(getattr(prediction, part))}" for part in parts if getattr(prediction, part)]
        whole = f"{_time(prediction.seconds)}{_ratio(prediction.seconds, each.floor_seconds)}"
        lines.append(f"    model    {whole}, bound by {prediction.bound}: {', '.join(shown)}")
    if chosen.candidate.moved:
        lines.append(f"    moves    {_bytes(chosen.candidate.moved)}, {_operations(chosen.candidate.operations)}")
    if chosen.candidate.blocks:
        lines.append(f"    takes    {_footprint(chosen.candidate)}")
    seconds = "" if each.floor_seconds is None else f", {_time(each.floor_seconds)}"
    lines.append(f"    floor    {_bytes(least.moved)}, {_operations(least.operations)}{seconds}")
    if chosen.candidate.report is not None:
        lines += explain_model.told(chosen.candidate.report())
    lines += _beaten(each)
    return lines


def _beaten(each: Pass) -> list[str]:
    """The candidates that were passed over, in columns; those of unknown time are told as backends alone."""
    known = [other for other in each.beaten if other.seconds is not None]
    if not known:
        return []
    head = ("beat", "time", "moves", "blocks", "shared", "registers", "plan")
    rows = [head]
    for other in known[:SHOWN]:
        cost, time = other.candidate, f"{_time(other.seconds or 0)}{'' if other.measured is None else ' measured'}"
        sizes = (str(cost.blocks), _bytes(cost.shared), str(cost.registers)) if cost.blocks else ("", "", "")
        rows.append(("", time, _bytes(cost.moved) if cost.moved else "", *sizes, str(other.plan)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # the first column is as wide as the words of the lines above
    lines = ["    " + " ".join([row[0].ljust(8), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]) for row in rows]
    more = len(known) - SHOWN
    return [*lines, f"{'':13}and {more} more"] if more > 0 else lines


def _time(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.0f} s" if seconds >= 1000 else f"{seconds:.4g} s"
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def _ratio(seconds: float, least: float | None) -> str:
    if not least:
        return ""
    ratio = seconds / least
    return f" ({ratio:.0f} x the floor)" if ratio >= 100 else f" ({ratio:.2f} x the floor)"


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    """In the largest unit of which there is at least one; never with an exponent."""
    power = next((n for n in range(len(units) - 1, 0, -1) if count >= base**n), 0)
    value = count / base**power
    return f"{value:.0f} {units[power]}" if value >= 1000 else f"{value:.4g} {units[power]}"


def _bytes(count: int) -> str:
    return _scaled(count / 2**10, 2**10, ("KiB", "MiB", "GiB", "TiB"))


def _operations(count: int) -> str:
    return _scaled(count / 1e3, 1000, ("Kop", "Mop", "Gop", "Top"))


def _footprint(candidate: Candidate) -> str:
    blocks = f"{candidate.blocks} block{'' if candidate.blocks == 1 else 's'}"
    return f"{blocks} of {_bytes(candidate.shared)} shared, {candidate.registers} registers a thread"
