"""step: one token of a matrix recurrence or of mamba1, its state updated in place."""

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.planner.choices import no_choice
from holdfast.recurrences import RECURRENCES
from holdfast.recurrences.definition import MatrixCall, Recurrence, SelectiveCall
from holdfast.recurrences.mlstm import Gating
from holdfast.recurrences.oracle_matrix import floor_of
from holdfast.recurrences.scalars import number
from holdfast.recurrences.simple_gla import default_scale
from holdfast.recurrences.torch_private import tree_leaves

from . import matrix, selective
from .check import name_of, prepare
from .delta_inputs import fastest_inputs
from .derivatives import refuse_forward_mode
from .kda_gate import fastest_log_decay
from .mlstm import check_gating, fastest_gates

# of the mappings, read once: to read a signature takes longer than to launch the kernel
_PARAMETERS = {name: frozenset(signature(recurrence.map).parameters) for name, recurrence in RECURRENCES.items()}
# what its mapping takes beyond belongs to longer sequences
_PARAMETERS["mlstm"] -= {"cu_seqlens", "gates_of"}
# of the delta rules, whose inputs and gates a GPU prepares by one launch each
_PREPARED = {name: parameters & {"inputs_of", "decay_of"} for name, parameters in _PARAMETERS.items()}
for _name, _parameters in _PREPARED.items():
    _PARAMETERS[_name] -= _parameters


@partial(replayed, changes=True)
@torch.no_grad()
def step(
    op: str, arguments: Mapping[str, Any], state: Tensor | tuple[Tensor, Tensor, Tensor], backend: str | None = None
) -> Tensor:
    """One step of decoding: what `op` returns for one token, with the state's memory used again.

    A captured CUDA graph therefore decodes token after token on the same state. Gradients are not recorded.

    Args:
        op: a matrix recurrence, or "mamba1".
        arguments: the op's arguments by name, tensors of one token (T = 1) and options such as scale; no initial_state.
        state: [B, H, K, V], float32 (float64 for float64 inputs), contiguous; overwritten by the state after the token.
            Of "mlstm" the tuple (C [B, H, K, V], n [B, H, K], m [B, H]), each overwritten; of "mamba1" [B, D, N].
        backend: as in every op.

    Returns:
        o [B, 1, H, V] in the inputs' dtype; of "mamba1" [B, 1, D].

    Raises:
        ValueError, TypeError: for an unknown op or argument, for an argument of the wrong shape, dtype or device, named
            in the message; for a backend that is unknown or cannot serve the call.
        NotImplementedError: for a tensor with a tangent, as of torch.func.jvp.
    """
    recurrence = _known(op, ("matrix", "selective"))
    given, options = _checked(recurrence, arguments, state)
    if op == "mlstm":
        return _mlstm(given, name_of(backend), **options)
    call, finish = mapped(recurrence, given, options)
    _check_token(given[next(iter(recurrence.arguments))], state)
    if isinstance(call, SelectiveCall):
        return selective.selective_step(*call[:8], state, call.softplus, op, name_of(backend))
    o = matrix.matrix_step(*call[:6], state, *call[7:], recurrence.name, name_of(backend))
    return o if finish is None else finish(o, state)[0]


def checked_tokens(
    op: str, families: tuple[str, ...], arguments: Mapping[str, Any]
) -> tuple[Recurrence, dict[str, Any], dict[str, Any]]:
    """The recurrence of that name, of some families, its checked tensors without a state, and its options.

    Raises ValueError or TypeError as `step` does.
    """
    recurrence = _known(op, families)
    return recurrence, *_checked(recurrence, arguments, None)


def mapped(recurrence: Recurrence, given: Mapping[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """What a recurrence makes of checked tensors and options, as its `map` returns it."""
    prepared = _PREPARED[recurrence.name]
    if "inputs_of" in prepared:
        options = options | {"inputs_of": fastest_inputs(given["q"])}
    if "decay_of" in prepared:
        options = options | {"decay_of": fastest_log_decay(given["g"])}
    return recurrence.map(**given, **options)


def _known(op: str, families: tuple[str, ...]) -> Recurrence:
    known = [name for name, recurrence in RECURRENCES.items() if recurrence.family in families]
    if op not in known:
        raise ValueError(no_choice("op", known, op))
    return RECURRENCES[op]


def _checked(recurrence: Recurrence, arguments: Mapping[str, Any], state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checked tensors, the state as the initial one, and the options."""
    options = {name: x for name, x in arguments.items() if name not in recurrence.arguments}
    for name in options:
        if name not in _PARAMETERS[recurrence.name]:
            raise TypeError(f"arguments: expected names that {recurrence.name} takes; got {name!r}")
    if "initial_state" in arguments:
        raise TypeError("arguments: expected no initial_state, which is state; got one")
    tensors = {name: arguments.get(name) for name in recurrence.arguments if name != "initial_state"}
    given = prepare(recurrence, None, tensors | {"initial_state": state})
    refuse_forward_mode("step", tree_leaves((given, options)))
    return given, options


def _check_token(first: Tensor, state: Tensor) -> None:
    if first.shape[1] != 1:
        raise ValueError(f"arguments: expected one token (T = 1); got T = {first.shape[1]}")
    if not state.is_contiguous():
        raise ValueError(f"state: expected a contiguous tensor; got strides {list(state.stride())}")


def _mlstm(
    given: dict[str, Any],
    backend: str,
    gating: Gating = "exp",
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The token of an mLSTM: C by the kernel of the others, in place; n, a column beside C's V, by PyTorch's own."""
    check_gating(gating, normalize)
    if any(x is None for x in given["initial_state"] or (None,)):
        raise TypeError("state: expected the tensors (C, n, m); got None")
    q, k, v, (C, n, m) = *(given[name] for name in "qkv"), given["initial_state"]
    _check_token(v, C)
    # of one token, nothing beside C: so that h is rounded once
    q, k, wide = q.to(C.dtype), k.to(C.dtype), v.to(C.dtype)
    scale, eps = default_scale(scale, k), number("eps", eps, 0)
    g, beta, here, last = fastest_gates(given["i"], given["f"], C.dtype)(
        given["i"], given["f"], m, None, gating == "exp"
    )
    h = matrix.matrix_step(*MatrixCall(q, k, wide, g, beta, None, C, scale=scale, eps=eps), "mlstm", backend)
    m.copy_(last)
    if normalize:
        q, k = (x[:, 0].repeat_interleave(v.shape[2] // x.shape[2], 1) for x in (q, k))
        n.mul_(g[:, 0, :, None].exp()).add_(beta[:, 0, :, None] * k)
        inner = scale * (n * q).sum(-1)[:, None]
        h = h / (torch.maximum(inner.abs(), floor_of(here)) + eps)[..., None]
    return h.to(v.dtype)
