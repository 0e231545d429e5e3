"""Modules over ranks: the mixers of holdfast.nn, or all of them in a model."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from holdfast.nn import (
    GLA,
    KDA,
    MLSTM,
    RGLRU,
    RWKV7,
    SLSTM,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    Mamba,
    Mamba2,
    RetNet,
    RotLRU,
)
from holdfast.nn.short_convolution import ShortConvolution
from holdfast.nn.stack import Stack

from . import ops
from .calls import why_dense_cannot
from .convolution import convolve
from .group import Layout, check_group, ranks_of
from .positions import positions

_MIXERS = (GLA, KDA, MLSTM, RGLRU, RWKV7, DeltaNet, GatedDeltaNet, GatedDeltaProduct, Mamba2, RetNet, RotLRU)
_DENSE = (SLSTM, Stack, nn.RNNBase, nn.RNNCellBase)


def context_parallel(module: nn.Module, group: Any, layout: Layout = "contiguous") -> nn.Module:
    """Lets the mixers in a module take parts of sequences: each rank of the group gives its own tokens.

    module: a mixer of `holdfast.nn` other than SLSTM, or a model that has some; it is changed and returned. All else in
    it has to treat tokens one by one, as projections, norms and MLPs do, or know of the group itself, as attention
    under torch's own context parallelism does. Parameters and state_dict stay as they are.
    group, layout: as in `holdfast.parallel.gla`; a group of None takes mixers back to whole sequences.

    A forward pass takes this rank's x [B, T, d_model] and the cu_seqlens of all ranks' tokens. A state given is read on
    the rank that holds a sequence's first token, without cu_seqlens the first; others may give None. The state
    returned is on every rank without cu_seqlens; with it, the rows of the sequences that end on this rank, and zeros in
    the others. A parameter's gradient is that of this rank's tokens: their sum over the group is that of all.

    Raises TypeError or ValueError for a group that is none or an unknown layout; ValueError for a module without
    mixers, with a `Mamba`, or with a recurrence whose time cannot be cut, named with its place.
    """
    found = []
    for name, part in module.named_modules():
        if isinstance(part, _DENSE):
            where = f"{type(part).__name__} at {name!r}" if name else type(part).__name__
            raise ValueError(f"module: expected recurrences that are linear in their state; {why_dense_cannot(where)}")
        if isinstance(part, Mamba):
            where = f"one at {name!r}" if name else "Mamba"
            raise ValueError(f"module: expected no Mamba, whose scan takes no parts of sequences yet; got {where}")
        if isinstance(part, _MIXERS):
            found.append(part)
    if not found:
        names = ", ".join(mixer.__name__ for mixer in _MIXERS)
        raise ValueError(f"module: expected a mixer of holdfast.nn ({names}) or a model with one; found none")
    if group is not None:
        check_group(group, layout)
    for mixer in found:
        _change(mixer, group, layout)
    return module


def _change(mixer: nn.Module, group: Any, layout: Layout) -> None:
    instead = {"op": partial(getattr(ops, type(mixer).op.__name__), group=group, layout=layout)}
    if isinstance(mixer, RetNet):
        instead["positions"] = partial(_positions, group, layout)
    parts = [(mixer, instead)]
    for convolution in mixer.children():
        if isinstance(convolution, ShortConvolution):
            parts.append((convolution, {"forward": partial(_convolve, convolution, group, layout)}))
    for part, attributes in parts:
        for name, value in attributes.items():
            # in the instance, before the class's own
            part.__dict__.pop(name, None)
            if group is not None:
                setattr(part, name, value)


def _convolve(
    convolution: ShortConvolution,
    group: Any,
    layout: Layout,
    x: Tensor,
    tail: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return convolve(convolution, x, tail, cu_seqlens, ranks_of(group, layout, x.device))


def _positions(
    group: Any, layout: Layout, x: Tensor, sequences: int, seen: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    return positions(x, sequences, seen, cu_seqlens, ranks_of(group, layout, x.device))
