"""causal_conv1d: the short depthwise convolution in front of a recurrence, and its steps of decoding."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.conv.call import ACTIVATIONS, Activation, ConvCall
from holdfast.kernels.conv.torch.backend import PyTorchConv
from holdfast.kernels.conv.triton.backend import TritonConv
from holdfast.kernels.runtime.replay.replay import replayed, replayed_below
from holdfast.kernels.select import clearable_cache, resolve
from holdfast.kernels.slots import Slots
from holdfast.kernels.varlen import sequence_count
from holdfast.planner import Direction, Plan, Problem
from holdfast.recurrences.definition import Argument
from holdfast.recurrences.scalars import flag

from .autocast import without_autocast
from .check import check_arguments, name_of, needs_grad
from .derivatives import refuse_forward_mode
from .registration import define, differentiable
from .slot_checks import check_slots

BACKENDS = (TritonConv(), PyTorchConv())

_TENSORS = {
    "x": Argument("inputs, a token after another", "B T D"),
    "weight": Argument("taps of each channel, the last for the present token", "D W", "float"),
    "bias": Argument("what is added to each channel", "D", "float", required=False),
}
ARGUMENTS = _TENSORS | {
    "initial_state": Argument("inputs before the first, oldest first", "sequences W-1 D", "state", required=False)
}
UPDATE_ARGUMENTS = _TENSORS | {"conv_state": Argument("inputs before the first, oldest first", "B W-1 D", "float")}
_IN_A_POOL = _TENSORS | {"conv_state": Argument("inputs before the first, oldest first", "slots W-1 D", "float")}


@replayed
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A convolution over the last W tokens, each channel by itself, and its activation:

        y_t = activation(sum_j weight[:, j] * x_{t - W + 1 + j} + bias)

    In float32 (float64 for float64 inputs); `triton` reads and writes each tensor once.

    Source: the short convolution of H3, Fu et al. 2022 (arXiv:2212.14052), as Mamba has it, Gu and Dao 2023
    (arXiv:2312.00752).

    Args:
        x: [B, T, D], with any strides of B and T: a slice of a wider projection is read where it lies.
        weight: [D, W], any floating dtype, the last column for the present token.
        bias: [D], any floating dtype; None for 0.
        activation: "silu", or None for none.
        initial_state: the W - 1 inputs before each sequence's first, [N, W - 1, D], oldest first, float32 (float64 for
            float64 inputs); zeros by default. N is B, or the number of sequences with cu_seqlens.
        output_final_state: whether to return each sequence's last W - 1 inputs.
        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. No sequence sees another.
        backend: forces a backend by name; by default the one with the least predicted time that can serve the call.

    Returns:
        y [B, T, D] in x's dtype, and the last inputs [N, W - 1, D], to continue from, or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for an unknown
            activation; for a backend that is unknown or cannot serve the call.
    """
    flag("output_final_state", output_final_state)
    given = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    checked = check_arguments(ARGUMENTS, cu_seqlens, given)
    call = ConvCall(**checked, activation=_named(activation))
    y, final = conv_forward(*call[:5], cu_seqlens, output_final_state, needs_grad(*call[:4]), name_of(backend))
    return y, final if output_final_state else None


@partial(replayed, changes=True)
@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    backend: str | None = None,
    *,
    slots: Tensor | None = None,
    next_slots: Tensor | None = None,
    accepted: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d` of one token a sequence, or a few, with the state's memory used again.

    A captured CUDA graph therefore decodes token after token on the same state. Gradients are not recorded.

    Args:
        x: [B, T, D], or [B, D] for one token.
        conv_state: the W - 1 inputs before, [B, W - 1, D], oldest first, channels side by side, any floating dtype;
            overwritten by the last W - 1 inputs.
        weight, bias, activation, backend: as in `causal_conv1d`.
        slots: int32 [B]; with it conv_state is a pool [S, W - 1, D], and each sequence's inputs are in the slot of that
            number. What is no slot, such as -1, is a row of padding: it touches nothing, and its outputs are 0.
        next_slots, accepted: as in `pooled_step`, beside slots.

    Returns:
        y in x's shape and dtype.

    Raises:
        ValueError, TypeError: as `causal_conv1d`.
        NotImplementedError: for a tensor with a tangent, as of torch.func.jvp.
    """
    if slots is None and (next_slots is not None or accepted is not None):
        raise TypeError("slots: expected a tensor beside next_slots and accepted; got None")
    one = isinstance(x, Tensor) and x.dim() == 2
    given = {"x": x[:, None] if one else x, "weight": weight, "bias": bias, "conv_state": conv_state}
    refuse_forward_mode("causal_conv1d_update", given.values())
    checked = check_arguments(UPDATE_ARGUMENTS if slots is None else _IN_A_POOL, None, given)
    if conv_state.numel() and conv_state.stride(2) != 1:
        raise ValueError(f"conv_state: expected channels side by side; got strides {list(conv_state.stride())}")
    tensors = [checked[name] for name in ("x", "weight", "bias")]
    places: tuple[Tensor | None, ...] = (None, None, None)
    if slots is not None:
        places = check_slots(slots, next_slots, accepted, tensors[0], tensors[0].shape[1])
    y = conv_update(*tensors, conv_state, *places, _named(activation), name_of(backend))
    return y[:, 0] if one else y


def _named(activation: Any) -> str:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected 'silu' or None; got {activation!r}")
    return activation or ""


def problem(call: ConvCall, cu_seqlens: Tensor | None, grad: bool) -> Problem:
    """What planning needs to know of a call: sizes B, T, D of x [B, T, D], W of weight [D, W], of packed sequences N.

    Of heads that are normalised H and K. And x's dtype and traits. cu_seqlens: int32 or int64 [N + 1], or None. grad:
    whether a backward pass may follow. Reads no values and raises nothing for a call that was checked.
    """
    sizes = dict(zip("BTD", call.x.shape, strict=True)) | {"W": call.weight.shape[1]}
    if cu_seqlens is not None:
        sizes["N"] = sequence_count(call.x, cu_seqlens)
    if call.heads:
        sizes |= {"H": call.heads, "K": call.head_dim}
    traits = {"bias": call.bias is not None, "varlen": cu_seqlens is not None, "needs_grad": grad}
    traits["heads"] = call.heads > 0
    return Problem.of("causal_conv1d", "conv", call.x.dtype, sizes, traits)


_SELECTED: dict[tuple[Any, ...], tuple[Any, Plan]] = clearable_cache()


def select(
    call: ConvCall, cu_seqlens: Tensor | None, grad: bool, direction: Direction, backend: str
) -> tuple[Any, Plan]:
    """The backend that runs a pass of a call, and its plan: for a layer's own ops too.

    call: x [B, T, D] and the rest of a ConvCall, checked. cu_seqlens: int32 or int64 [N + 1], or None. grad: whether a
    backward pass may follow. backend: a name, or "" for the one with the least predicted time. Raises ValueError for
    one that is unknown or cannot serve the call.
    """
    x, offsets = call.x, None if cu_seqlens is None else cu_seqlens.numel()
    # what `problem` reads, in less time than it takes to make and hash a Problem
    key = (
        BACKENDS,
        x.shape,
        x.dtype,
        x.device,
        call.weight.shape,
        call.bias is None,
        call[5:],
        offsets,
        grad,
        direction,
        backend,
    )
    found = _SELECTED.get(key)
    if found is None:
        what, device = problem(call, cu_seqlens, grad), describe(x.device)
        found = _SELECTED[key] = resolve(BACKENDS, what, device, backend, direction)
    return found


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str,
    cu_seqlens: Tensor | None,
    final: bool,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """ConvCall -> (y [B, T, D] in x's dtype, the last inputs [N, W - 1, D] in float32 or wider; [0] without final)."""
    call = ConvCall(x, weight, bias, initial_state, activation)
    chosen, plan = select(call, cu_seqlens, grad, "forward", backend)
    with without_autocast(x):
        y, last = chosen.forward(plan, call, cu_seqlens, final)
    return y.contiguous(), x.new_empty(0) if last is None else last.contiguous()


def _forward_fake(x, weight, bias, initial_state, activation, cu_seqlens, final, grad, backend):
    sequences = sequence_count(x, cu_seqlens)
    wide = torch.promote_types(x.dtype, torch.float32)
    last = x.new_empty(sequences, weight.shape[1] - 1, x.shape[2], dtype=wide) if final else x.new_empty(0)
    return torch.empty_like(x, memory_format=torch.contiguous_format), last


def _gradients(
    grad_y: Tensor | None,
    grad_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of x, weight, bias and initial_state; an empty tensor for one that was not given."""
    call = ConvCall(x, weight, bias, initial_state, activation)
    chosen, plan = select(call, cu_seqlens, True, "backward", backend)
    with without_autocast(x):
        grads = chosen.backward(plan, call, cu_seqlens, grad_y, grad_final)
    return tuple(x.new_empty(0) if grad is None else grad.contiguous() for grad in grads)


def _gradients_fake(grad_y, grad_final, x, weight, bias, initial_state, activation, cu_seqlens, backend):
    return tuple(
        x.new_empty(0) if of is None else torch.empty_like(of, memory_format=torch.contiguous_format)
        for of in (x, weight, bias, initial_state)
    )


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    *tensors, activation, cu_seqlens, _, _, backend = inputs
    ctx.save_for_backward(*tensors, cu_seqlens)
    ctx.rest = activation, backend


def _backward(ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Any, ...]:
    *tensors, cu_seqlens = ctx.saved_tensors
    activation, backend = ctx.rest
    # what was not asked for is no state, and has no gradient but zeros
    grad_final = None if grad_final is None or grad_final.dim() == 1 else grad_final
    grads = conv_backward(grad_y, grad_final, *tensors, activation, cu_seqlens, backend)
    return tuple(None if x is None else grad for x, grad in zip(tensors, grads, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
conv_backward = replayed_below(define("conv_backward", replayed_below(_gradients), _gradients_fake))
_conv = define("conv_forward", replayed_below(_forward), _forward_fake)
conv_forward = differentiable(_conv, _save, _backward, inputs=4, run=replayed_below(_conv))


def _update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    read: Tensor | None,
    write: Tensor | None,
    accepted: Tensor | None,
    activation: str,
    backend: str,
) -> Tensor:
    """y [B, T, D] in x's dtype; conv_state [B, W - 1, D], or the pool [S, W - 1, D] beside slots, is updated."""
    call = ConvCall(x, weight, bias, None, activation)
    slots = None if read is None else Slots(read, write, accepted)
    chosen, plan = select(call, None, False, "forward", backend)
    with without_autocast(x):
        if isinstance(chosen, TritonConv):
            return chosen.update(call, conv_state, slots)
        if slots is not None:
            return _pooled(chosen, plan, call, conv_state, slots)
        wide = torch.promote_types(x.dtype, torch.float32)
        y, last = chosen.forward(plan, call._replace(initial_state=conv_state.to(wide)), None, True)
    conv_state.copy_(last)
    return y


def _pooled(chosen: Any, plan: Plan, call: ConvCall, pool: Tensor, slots: Slots) -> Tensor:
    """y [B, T, D] by a backend that knows no slots, token by token; it reads them on the host."""
    wide, length = torch.promote_types(call.x.dtype, torch.float32), call.x.shape[1]
    state, there = slots.get(pool), slots.are_read(pool.shape[0])[:, None, None]
    slots.put(pool, state, 0, length)
    outputs = [call.x[:, :0]]
    for token in range(length):
        one = call._replace(x=call.x[:, token : token + 1], initial_state=state.to(wide))
        y, last = chosen.forward(plan, one, None, True)
        state = last.to(pool.dtype)
        outputs.append(torch.where(there, y, 0.0))
        slots.put(pool, state, token + 1, length)
    return torch.cat(outputs, 1)


def _update_fake(x, weight, bias, conv_state, read, write, accepted, activation, backend):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


conv_update = define("conv_update", _update, _update_fake, mutates=["conv_state"])
