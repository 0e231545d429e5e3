"""The ranks that share a sequence, and what they send one another: all of it goes through here."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")


# torch 2.13 renamed them
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that share a sequence, in the order of its parts. Each holds as many spans as spans says.

    A sequence of rank-many parts (contiguous), or of twice as many (zigzag), of which rank r holds the r-th, and then
    also the r-th from the end.
    """

    group: ProcessGroup
    rank: int
    size: int
    spans: int = 1

    @property
    def count(self) -> int:
        """Spans of all ranks."""
        return self.size * self.spans

    def place(self, rank: int, span: int) -> int:
        """The number, in the order of the tokens, of a rank's span."""
        return rank if span == 0 else self.count - 1 - rank

    @property
    def places(self) -> list[int]:
        """Of this rank's spans."""
        return [self.place(self.rank, span) for span in range(self.spans)]

    def in_order(self, held: list[list[Any]]) -> list[Any]:
        """What held[rank][span] lists, in the order of the tokens."""
        found: list[Any] = [None] * self.count
        for rank, spans in enumerate(held):
            for span, x in enumerate(spans):
                found[self.place(rank, span)] = x
        return found


def check_group(group: Any, layout: Layout) -> ProcessGroup:
    """The ProcessGroup behind a DeviceMesh of one axis, or the group itself.

    Raises TypeError for what is neither; ValueError for a mesh of several axes, a group that this process is not in
    and an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}; got {layout!r}")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected a mesh of one axis, such as mesh['cp']; got one of {group.ndim}, "
                f"{group.mesh_dim_names or tuple(group.shape)}"
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup or a DeviceMesh of one axis; got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group: expected a group that this process is in; got one that it is not in")
    return group


def ranks_of(group: Any, layout: Layout, device: torch.device) -> Ranks:
    """The ranks of a group, as `check_group` takes it, for tensors on a device.

    Raises as `check_group` does, and ValueError for a group that does not send the device's tensors.
    """
    group = check_group(group, layout)
    served = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if device.type not in served:
        raise ValueError(
            f"group: expected one that sends tensors on {device.type}, where the arguments are; got one for "
            f"{', '.join(served)}"
        )
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group), 2 if layout == "zigzag" else 1)


@contextmanager
def _telling(ranks: Ranks, name: str, what: str):
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: rank {ranks.rank} of {ranks.size} could not exchange {what} with the others of its "
            f"context-parallel group: one of them has ended, waits elsewhere or sent something else. "
            f"{type(error).__name__}: {error}"
        ) from error


class _Gather(torch.autograd.Function):
    """[M] of every rank as [ranks, M]. Backwards each rank gets the sum of its row's gradients: both passes send each
    rank's message once to each other rank."""

    @staticmethod
    def forward(ctx: Any, message: Tensor, ranks: Ranks, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return gather_on_device(message.contiguous(), ranks, name, "summaries")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        own = grad.new_empty(grad.shape[1])
        with _telling(ctx.ranks, ctx.name, "gradients of summaries"):
            _reduce_scatter(own, grad.contiguous().view(-1), group=ctx.ranks.group)
        return own, None, None


def gather(message: Tensor, ranks: Ranks, name: str) -> Tensor:
    """message [M], of one length everywhere, of every rank: [ranks, M], differentiable.

    Every rank has to take part in the backward pass if one does: see `held`. Raises RuntimeError, which names the op,
    where a rank has gone.
    """
    return _Gather.apply(message, ranks, name)


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathered: Tensor, x: Tensor) -> Tensor:
        ctx.like = gathered.shape, gathered.dtype, gathered.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device), grad


def held(x: Tensor, gathered: Tensor) -> Tensor:
    """x, in whose backward pass the exchange of gathered takes part, though nothing of it went into x.

    The first rank needs nothing of the others, and they wait for it.
    """
    return _Held.apply(gathered, x) if gathered.requires_grad else x


def gather_on_device(own: Tensor, ranks: Ranks, name: str, what: str = "sizes") -> Tensor:
    """own [M], of any dtype, of every rank: [ranks, M], without a gradient."""
    gathered = own.new_empty(ranks.size, own.numel())
    with _telling(ranks, name, what):
        _all_gather(gathered.view(-1), own, group=ranks.group)
    return gathered


def gather_integers(numbers: list[int], device: torch.device, ranks: Ranks, name: str) -> list[list[int]]:
    """As many integers of every rank, on the host."""
    return gather_on_device(torch.tensor(numbers, dtype=torch.int64, device=device), ranks, name).tolist()


_AGREED: set[tuple[Any, ...]] = set()


def agree(
    sizes: dict[str, tuple[int, Callable[[int], Any]]],
    length: int,
    is_packed: bool,
    device: torch.device,
    ranks: Ranks,
    name: str,
) -> list[int] | None:
    """Every rank's number of tokens, if the ranks were asked, and the certainty that they agree in all else.

    They are asked on a CPU and for packed sequences, in each call; else the host would have to wait for the device, so
    only the first call of its like asks. sizes: what has to agree, by the name of the argument at fault, as an integer,
    and how that is shown. Raises ValueError, on every rank, where they differ.
    """
    numbers = [number for number, _ in sizes.values()]
    like = (ranks, name, device.type, *numbers)
    if not (is_packed or device.type == "cpu" or like not in _AGREED):
        return None
    every = gather_integers([length, *numbers], device, ranks, name)
    for n, (argument, (_, shown)) in enumerate(sizes.items(), 1):
        found = [numbers[n] for numbers in every]
        if len(set(found)) > 1:
            listed = ", ".join(f"{shown(x)} on rank {rank}" for rank, x in enumerate(found))
            raise ValueError(f"{argument}: expected the same on every rank of the group; got {listed}")
    if len(_AGREED) >= 4096:
        _AGREED.clear()
    _AGREED.add(like)
    return [numbers[0] for numbers in every]
