"""Ops over ranks beside the same op in one process."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import holdfast
from holdfast import parallel
from holdfast.ops.span_call import TIMED
from holdfast.recurrences import RECURRENCES, Draw, Sizes


@dataclass(frozen=True)
class Setting:
    """lengths: tokens of each rank. bounds: offsets of packed sequences, or None. options: other arguments of the op.
    initial: whether there is an initial state."""

    lengths: tuple[int, ...]
    batch: int = 2
    bounds: tuple[int, ...] | None = None
    initial: bool = True
    layout: str = "contiguous"
    options: tuple[tuple[str, Any], ...] = ()
    query_heads: int = 2
    vector: bool = False
    seed: int = 3


def parts(lengths: tuple[int, ...], layout: str) -> list[list[tuple[int, int]]]:
    """Of each rank, from where to where in the whole its tokens run."""
    if layout == "contiguous":
        each = [[n] for n in lengths]
        places = [[rank] for rank in range(len(lengths))]
    else:
        each = [[n // 2, n // 2] for n in lengths]
        places = [[rank, 2 * len(lengths) - 1 - rank] for rank in range(len(lengths))]
    sizes = {place: n for spans, held in zip(places, each, strict=True) for place, n in zip(spans, held, strict=True)}
    starts, total = {}, 0
    for place in sorted(sizes):
        starts[place] = total
        total += sizes[place]
    return [[(starts[place], starts[place] + sizes[place]) for place in spans] for spans in places]


def held_by(x: Tensor, own: list[tuple[int, int]]) -> Tensor:
    return torch.cat([x[:, start:end] for start, end in own], 1)


def drawn(name: str, setting: Setting, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments for all tokens, the same on every rank."""
    draw, total = Draw(setting.seed, dtype), sum(setting.lengths)
    batch = 1 if setting.bounds else setting.batch
    arguments = RECURRENCES[name].example(draw, Sizes(batch, total, H=4, K=3, V=5, D=6, Hq=setting.query_heads))
    if setting.vector:
        arguments["A"] = -draw.gate(4, 3)
    if setting.bounds:
        rows = len(setting.bounds) - 1
        state = arguments["initial_state"]
        grown = tuple(draw.state(rows, *x.shape[1:]) for x in (state if name == "mlstm" else (state,)))
        arguments["initial_state"] = grown if name == "mlstm" else grown[0]
    if not setting.initial:
        arguments["initial_state"] = None
    return arguments | dict(setting.options)


def leaves(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among arguments, an initial state's one by one."""
    found = {}
    for name, x in arguments.items():
        for n, part in enumerate(x if isinstance(x, tuple) else (x,)):
            if isinstance(part, Tensor) and part.is_floating_point():
                found[f"{name}.{n}"] = part
    return found


def with_grad(arguments: dict[str, Any]) -> dict[str, Any]:
    def fresh(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(fresh(part) for part in x)
        return x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x

    return {name: fresh(x) for name, x in arguments.items()}


def tensors(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def weights(x: Tensor, seed: int) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x.dtype)


def owners(setting: Setting) -> list[int]:
    """The rank that holds each packed sequence's last token; of an empty one, its place."""
    held = parts(setting.lengths, setting.layout)
    order = sorted((span, rank) for rank, spans in enumerate(held) for span in spans if span[1] > span[0])
    found = []
    for start, end in pairwise(setting.bounds):
        last = end - 1 if end > start else start
        inside = [rank for (first, after), rank in order if first <= last < after]
        found.append(inside[0] if inside else (0 if setting.layout == "zigzag" else len(setting.lengths) - 1))
    return found


def op_equals_one_process(
    rank: int, size: int, name: str, setting: Setting, tolerance: float, dtype: torch.dtype
) -> float:
    """Output, final states and all gradients; returns the largest error."""
    arguments = drawn(name, setting, dtype)
    timed = TIMED[name]
    cu_seqlens = None if setting.bounds is None else torch.tensor(setting.bounds)
    own = parts(setting.lengths, setting.layout)[rank]

    whole = with_grad(arguments)
    o, final = getattr(holdfast, name)(**whole, output_final_state=True, cu_seqlens=cu_seqlens)
    shares = size if setting.bounds is None else 1
    loss = (o * weights(o, 1)).sum()
    # of a batch every rank has the final state, and each puts its own weight on it
    seeds = range(10, 10 + shares)
    loss = loss + sum((x * weights(x, seed)).sum() for x in tensors(final) for seed in seeds)
    loss.backward()

    def local(key: str, x: Any) -> Any:
        return held_by(x, own) if isinstance(x, Tensor) and x.dim() in timed.get(key, ()) else x

    here = with_grad({key: local(key, x) for key, x in arguments.items()})
    mine, after = getattr(parallel, name)(
        **here, output_final_state=True, cu_seqlens=cu_seqlens, group=dist.group.WORLD, layout=setting.layout
    )
    loss = (mine * held_by(weights(o, 1), own)).sum()
    seed = 10 + rank if setting.bounds is None else 10
    loss = loss + sum((x * weights(x, seed)).sum() for x in tensors(after))
    loss.backward()

    errors = {"o": (mine, held_by(o, own))}
    is_here = torch.ones(len(tensors(final)[0]), dtype=torch.bool)
    if setting.bounds is not None:
        is_here = torch.tensor([owner == rank for owner in owners(setting)])
    for n, (x, y) in enumerate(zip(tensors(after), tensors(final), strict=True)):
        keep = is_here.view(-1, *(1,) * (y.dim() - 1))
        errors[f"final.{n}"] = (x, torch.where(keep, y, 0))
    expected = leaves(whole)
    for key, x in leaves(here).items():
        argument = key.partition(".")[0]
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        right = expected[key].grad
        right = torch.zeros_like(expected[key]) if right is None else right
        if x.dim() in timed.get(argument, ()):
            right = held_by(right, own)
        else:
            dist.all_reduce(grad)
        errors[f"d{key}"] = (grad, right)
    found = {}
    for key, (x, right) in errors.items():
        assert x.shape == right.shape, f"{key}: {list(x.shape)} for {list(right.shape)}"
        assert x.dtype == right.dtype, f"{key}: {x.dtype} for {right.dtype}"
        found[key] = (x - right).abs().max().item() if x.numel() else 0.0
    wrong = {key: error for key, error in found.items() if not error <= tolerance}
    assert not wrong, f"{name}: {wrong}"
    return max(found.values())
