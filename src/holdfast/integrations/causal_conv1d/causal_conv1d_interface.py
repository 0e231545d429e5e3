"""causal_conv1d.causal_conv1d_interface: the convolution of whole sequences, and of the next tokens."""

import torch
from torch import Tensor

from holdfast import ops
from holdfast.integrations.integers import check_integers
from holdfast.integrations.pool_rows import PoolRows
from holdfast.integrations.sequence_numbers import offsets_of
from holdfast.ops.check import check_arguments
from holdfast.recurrences.definition import Argument
from holdfast.recurrences.scalars import flag

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]

_TENSORS = {
    "x": Argument("inputs", "B D T"),
    "weight": Argument("taps of each channel, the last for the present token", "D W", "float"),
    "bias": Argument("what is added to each channel", "D", "float", required=False),
}
_STATE = Argument("inputs, oldest first", "B D W-1", "float", required=False)
_FN = _TENSORS | {"initial_states": _STATE, "final_states_out": _STATE}
_UPDATE = _TENSORS | {"conv_state": Argument("inputs before the first, oldest first", "B D S", "float")}
# one row of it for each sequence
_POOLED = _TENSORS | {"conv_state": Argument("inputs before the first, oldest first", "rows D S", "float")}
_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`holdfast.causal_conv1d` of x [B, D, T], which is read fastest where its channels lie side by side.

    Args:
        weight, bias: [D, W] and [D], any floating dtype.
        seq_idx: int32 or int64 [B, T], the number of each token's sequence, rising along a row; no sequence sees
            another, and negative numbers are of padding, whose outputs are 0. It is read on the host.
        initial_states: [B, D, W - 1], any floating dtype; not beside seq_idx.
        return_final_states: whether to return the last W - 1 inputs too; not beside seq_idx.
        final_states_out: [B, D, W - 1], where they are written; only beside return_final_states.
        activation: None, "silu" or "swish", which is the same.

    Returns:
        y [B, D, T] in x's dtype, its channels side by side, and with return_final_states (y, states [B, D, W - 1] in
        x's dtype, or final_states_out itself).

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message, for a
            combination that is not served, and for an unknown activation.
    """
    given = {"x": x, "weight": weight, "bias": bias}
    given |= {"initial_states": initial_states, "final_states_out": final_states_out}
    x, weight, bias, initial_states, out = check_arguments(_FN, None, given).values()
    activation = _named(activation)
    flag("return_final_states", return_final_states)
    if out is not None and not return_final_states:
        raise ValueError("final_states_out: expected return_final_states=True beside it; got False")
    if seq_idx is not None:
        _refuse_beside_numbers(initial_states=initial_states is not None, return_final_states=return_final_states)
        return _numbered(x, weight, bias, seq_idx, activation)
    if initial_states is not None:
        initial_states = initial_states.mT.to(torch.promote_types(x.dtype, torch.float32))
    y, last = ops.causal_conv1d(x.mT, weight, bias, activation, initial_states, return_final_states)
    if last is None:
        return y.mT
    last = last.mT.to(x.dtype)
    return y.mT, last if out is None else out.copy_(last)


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """`holdfast.causal_conv1d_update`: the next tokens of a batch, its states updated in place; no gradients.

    One launch where conv_state is [B, D, W - 1] with its channels side by side and cache_seqlens is left out.

    Args:
        x: [B, D], or [B, D, T] for several tokens.
        conv_state: [B, D, S], S at least W - 1, the inputs before, oldest first, any floating dtype.
        weight, bias, activation: as in `causal_conv1d_fn`.
        cache_seqlens: int32 or int64 [B], tokens that each sequence has had; conv_state is a ring then, in which the
            next token's place is cache_seqlens % S.
        conv_state_indices: int32 or int64 [B], each sequence's row of conv_state [rows, D, S], no row twice; negative
            for padding, whose outputs are 0.

    Returns:
        y in x's shape and dtype.

    Raises:
        ValueError, TypeError: as `causal_conv1d_fn`.
    """
    one = isinstance(x, Tensor) and x.dim() == 2
    given = {"x": x[..., None] if one else x, "weight": weight, "bias": bias, "conv_state": conv_state}
    expected = _UPDATE if conv_state_indices is None else _POOLED
    x, weight, bias, conv_state = check_arguments(expected, None, given).values()
    activation, before, size = _named(activation), weight.shape[1] - 1, conv_state.shape[2]
    if size < before:
        raise ValueError(f"conv_state: expected {before} inputs at least, as W = {before + 1}; got {size}")
    for name, numbers in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if numbers is not None:
            check_integers(name, numbers, x, B=x.shape[0])
    if cache_seqlens is None and size == before and conv_state.stride(1) == 1:
        places = None if conv_state_indices is None else conv_state_indices.to(torch.int32)
        y = ops.causal_conv1d_update(x.mT, conv_state.mT, weight, bias, activation, slots=places).mT
        return y[..., 0] if one else y
    slots = None if conv_state_indices is None else PoolRows(conv_state_indices)
    state = conv_state
    if slots is not None:
        x, state = slots.inputs(x), slots.read(conv_state)
    if cache_seqlens is None:
        window = state[..., size - before :]
        new = torch.cat([state, x.to(state.dtype)], 2)[..., x.shape[2] :]
    else:
        seen = cache_seqlens if slots is None else slots.inputs(cache_seqlens)
        window, new = _ring(state, x, seen.long(), before)
    window = window.mT.clone(memory_format=torch.contiguous_format)
    y = ops.causal_conv1d_update(x.mT, window, weight, bias, activation).mT
    if slots is None:
        conv_state.copy_(new)
    else:
        slots.write(conv_state, new)
        y = slots.outputs(y)
    return y[..., 0] if one else y


def _named(activation: str | None) -> str | None:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation: expected 'silu', 'swish' or None; got {activation!r}")
    return _ACTIVATIONS[activation]


def _refuse_beside_numbers(**asked: bool) -> None:
    for name, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"{name}: not served beside seq_idx, whose sequences begin and end within a row")


def _numbered(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, activation: str | None) -> Tensor:
    batch, channels, length = x.shape
    check_integers("seq_idx", seq_idx, x, B=batch, T=length)
    if not seq_idx.numel():
        return ops.causal_conv1d(x.mT, weight, bias, activation)[0].mT
    rows = x.mT.reshape(1, batch * length, channels)
    y = ops.causal_conv1d(rows, weight, bias, activation, cu_seqlens=offsets_of(seq_idx))[0]
    return torch.where(seq_idx[..., None] >= 0, y.view(batch, length, channels), 0).mT


def _ring(state: Tensor, x: Tensor, seen: Tensor, before: int) -> tuple[Tensor, Tensor]:
    """The inputs [B, D, before] in front of the tokens x [B, D, T], and the ring [B, D, S] with these put in."""
    (batch, channels, size), length = state.shape, x.shape[2]

    def places(first: int, end: int) -> Tensor:
        numbers = torch.arange(first, end, dtype=torch.int64, device=x.device)
        return ((seen[:, None] + numbers) % size)[:, None].expand(batch, channels, -1)

    # of tokens that come to one place only the last is written
    first = max(0, length - size)
    return state.gather(2, places(-before, 0)), state.scatter(2, places(first, length), x[..., first:].to(state.dtype))
