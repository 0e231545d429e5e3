"""A call of one of flash-linear-attention's ops, as one of Holdfast's: states, sequences, and time turned round."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

import torch
from torch import Tensor

Arguments = dict[str, Any]
Result = tuple[Tensor, Tensor | None]
Parameters = ParamSpec("Parameters")

# arguments with a time axis, their second
_IN_TIME = ("q", "k", "v", "g", "beta", "x")


def refuse(**asked: object) -> None:
    """Raises ValueError for an argument that is given."""
    for name, value in asked.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: Holdfast's op has none")


def carried(
    x: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool = False,
) -> Arguments:
    """Arguments that every op has. x: its first tensor, whose dtype says that of states."""
    if isinstance(initial_state, Tensor):
        initial_state = initial_state.mT if state_v_first else initial_state
        # as fla's kernels compute
        initial_state = initial_state.to(torch.promote_types(x.dtype, torch.float32))
    return {"initial_state": initial_state, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}


def no_attentions(output_attentions: bool) -> None:
    """Raises ValueError where scores of all pairs of tokens are asked for."""
    if output_attentions:
        raise ValueError("output_attentions: expected False, as scores of all pairs of tokens are never formed; got "
                         f"{output_attentions!r}")  # fmt: skip


def run_op(op: Callable[..., Result], given: Arguments, state_v_first: bool = False, reverse: bool = False) -> Result:
    """What op returns for the arguments, its state [N, H, V, K] with state_v_first.

    reverse: from each sequence's last token to its first, from where the initial state enters.
    """
    o, state = op(**(_turned(given) if reverse else given))
    if reverse:
        o = o.flip(1)
        state = state.flip(0) if state is not None and given["cu_seqlens"] is not None else state
    return o, state.mT.contiguous() if state_v_first and state is not None else state


def _turned(given: Arguments) -> Arguments:
    """The arguments with time turned round, and so the order of packed sequences."""
    # a decay [H] has no time
    turned = {name: x.flip(1) for name, x in given.items() if name in _IN_TIME and x is not None and x.dim() > 1}
    cu_seqlens, state = given["cu_seqlens"], given["initial_state"]
    if cu_seqlens is not None:
        turned["cu_seqlens"] = cu_seqlens[-1] - cu_seqlens.flip(0)
        turned["initial_state"] = None if state is None else state.flip(0)
    return given | turned


def named_as(
    module: str, name: str, op: Callable[..., Result], arguments: Callable[Parameters, tuple[Arguments, bool]]
) -> Callable[Parameters, Result]:
    """fla's op of that name, defined in that module, with the parameters of what maps them onto those of Holdfast's."""

    @wraps(arguments)
    def run(*given: Parameters.args, **named: Parameters.kwargs) -> Result:
        return run_op(op, *arguments(*given, **named))

    run.__module__ = module
    run.__name__ = run.__qualname__ = name
    run.__signature__ = signature(arguments).replace(return_annotation=Result)
    run.__doc__ = f"`holdfast.{op.__name__}`, with what `{arguments.__name__}` makes of the arguments."
    return run
