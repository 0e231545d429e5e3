"""A benchmark case: which op, at which sizes, in which dtype, which pass."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from holdfast.ops.parity import leaves

from .workload import Workload, workload

Pass = Literal["fwd", "fwd+bwd"]
PASSES = get_args(Pass)
# time: how long a run takes. error: how the output's error grows over the steps. host: what a call costs the host.
Kind = Literal["time", "error", "host"]
KINDS = get_args(Kind)
DTYPES = ("float64", "float32", "bfloat16", "float16")

# Elements of the arguments of which the backward pass of the PyTorch backend in float64 holds about ten times as many.
IN_CHUNKS_BUDGET = {"cpu": 0, "cuda": 2**29}

# Elements of state over all steps that the oracle may go through: with the gradients, about ten float64 tensors of
# this many elements.
ORACLE_BUDGET = {"cpu": 2**23, "cuda": 2**27}


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    sizes: (axis, size) pairs, as the op's example names them. options: (name, value) pairs of the op's arguments that
    are not tensors, such as ("gating", "sigmoid"). label: which series of a plot the case belongs to. kind: what is
    measured. state: whether an initial state goes in and the final one comes out, as in decoding.
    """

    op: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str = "float32"
    passes: Pass = "fwd"
    label: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    kind: Kind = "time"
    state: bool = False

    def __post_init__(self) -> None:
        workload(self.op).check_sizes(dict(self.sizes))
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.passes not in PASSES:
            raise ValueError(f"pass: expected one of {', '.join(PASSES)}; got {self.passes!r}")
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}; got {self.kind!r}")
        if self.state and not self.work.has_state:
            raise ValueError(f"state: {self.op} takes no initial state here")

    @property
    def work(self) -> Workload:
        return workload(self.op)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def shape(self) -> str:
        """Sizes in words, such as "B4 T4096 H32 K128 V128"."""
        return " ".join(f"{axis}{size}" for axis, size in self.sizes)

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options)
        state = " with state" if self.state else ""
        kind = "" if self.kind == "time" else f" {self.kind}"
        return f"{self.op}{options} {self.shape} {self.dtype} {self.passes}{state}{kind}"

    def arguments(self, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        """Random tensor arguments of the op; on the meta device, their shapes and dtypes alone."""
        if str(device) == "meta":
            return self.work.example(dict(self.sizes), self.torch_dtype, device, seed, self.state)
        drawn = _draw(self.op, self.sizes, self.torch_dtype, device, seed, self.state)
        for x in leaves(drawn):
            x.requires_grad_(False)
        return dict(drawn)

    def with_sizes(self, sizes: dict[str, int]) -> "Case":
        """The same case at other sizes."""
        return replace(self, sizes=tuple((axis, sizes[axis]) for axis, _ in self.sizes))


# Runners of one case share what is drawn, once for the case and once for its smaller form: drawing takes seconds at the
# larger sizes.
@lru_cache(maxsize=2)
def _draw(
    op: str, sizes: tuple[tuple[str, int], ...], dtype: torch.dtype, device: torch.device | str, seed: int, state: bool
) -> dict[str, Any]:
    return workload(op).example(dict(sizes), dtype, device, seed, state)


# Steps that a GPU takes for the oracle one by one, each a few small kernels, where there is another way.
MOST_STEPS = 1024


def better_in_chunks(case: Case, device: torch.device) -> bool:
    """Whether the PyTorch backend is to say in float64 what the case's result is: the steps are many, and it can."""
    held = sum(x.numel() for x in leaves(case.arguments("meta")))
    if case.work.in_chunks is None or held > IN_CHUNKS_BUDGET.get(device.type, 0):
        return False
    return dict(case.sizes)["T"] > MOST_STEPS or checked(case, device) != case


def checked(case: Case, device: torch.device) -> Case:
    """The case whose results are compared with the oracle: this one, or a smaller one where this is too large for it.

    Time is cut first, to no less than 256 steps, then the batch, then heads; widths stay, since kernels are made for
    them.
    """
    budget = ORACLE_BUDGET.get(device.type, ORACLE_BUDGET["cpu"])
    sizes = dict(case.sizes)
    # the axis along which chunks or steps follow one another
    time = "G" if case.op == "inter_chunk_scan" else "T"
    for axis, least in ((time, 256), ("B", 1), ("H", 1)):
        excess = case.work.state_steps(sizes) / budget
        if excess <= 1 or axis not in sizes:
            continue
        shares = sizes[axis] // sizes["Hq"] if axis == "H" and "Hq" in sizes else 1
        sizes[axis] = min(sizes[axis], max(least, math.floor(sizes[axis] / excess)))
        if axis == "H" and "Hq" in sizes:
            sizes["Hq"] = max(1, sizes["H"] // shares)
            sizes["H"] = sizes["Hq"] * shares
    if case.op != "inter_chunk_scan" and sizes[time] < dict(case.sizes)[time]:
        # peers want whole chunks
        sizes[time] = max(256, sizes[time] // 256 * 256)
    return case.with_sizes(sizes)
