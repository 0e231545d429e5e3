"""Summaries of spans by an op's name and arguments: what a public call says, checked and taken apart."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast import ops
from holdfast.ops.check import prepare
from holdfast.ops.span_call import LINEAR, SpanCall
from holdfast.recurrences import RECURRENCES
from holdfast.recurrences.definition import Recurrence
from holdfast.recurrences.summary import Summary

_PASSED_ON = ("initial_state", "output_final_state", "cu_seqlens")

SIGNATURES = {name: inspect.signature(getattr(ops, name)) for name in LINEAR}


def recurrence_of(op: Callable[..., Any] | str) -> Recurrence:
    """The definition behind a public op or its name.

    Raises TypeError for what is neither, ValueError for an op whose time cannot be cut.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", None)
    if not isinstance(name, str):
        raise TypeError(f"op: expected an op of Holdfast or its name; got {type(op).__name__}")
    recurrence = RECURRENCES.get(name)
    if name == "rnn" or (recurrence is not None and recurrence.family == "dense"):
        raise ValueError(f"op: expected a recurrence that is linear in its state; {why_dense_cannot(name)}")
    if name not in LINEAR:
        raise ValueError(f"op: expected an op of the matrix or diagonal family; got {name!r}")
    return recurrence


def why_dense_cannot(name: str) -> str:
    """Why a dense recurrence has no summary."""
    return (
        f"{name} takes its state through a nonlinear function at every step, so that a span's effect on a state has no "
        "summary: its time cannot be cut. Spread its batch over the ranks instead"
    )


@dataclass(frozen=True, slots=True)
class Bound:
    """A whole call of an op: the span, and what else was given, checked."""

    call: SpanCall
    initial_state: Summary | None
    output_final_state: bool
    cu_seqlens: Tensor | None


def bind(op: Callable[..., Any] | str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Bound:
    """Checks the arguments of a public op, as the op itself does, and takes them apart.

    Raises TypeError or ValueError for what the op refuses, and where an op of the dense family is named.
    """
    recurrence = recurrence_of(op)
    bound = SIGNATURES[recurrence.name].bind(*arguments, **named)
    bound.apply_defaults()
    given = dict(bound.arguments)
    cu_seqlens, final = given.pop("cu_seqlens"), given.pop("output_final_state")
    # as the definition lists them: the first carries the dtype
    tensors = prepare(recurrence, cu_seqlens, {name: given.pop(name) for name in recurrence.arguments})
    state = tensors.pop("initial_state")
    call = SpanCall.of(recurrence, tensors, given)
    return Bound(call, None if state is None else call.private(state), final, cu_seqlens)


def summary(op: Callable[..., Any] | str, /, *arguments: Any, **named: Any) -> Summary:
    """The summary of a span: what it adds to a state, and how it carries one through.

    Args:
        op: an op of the matrix or diagonal family, such as `holdfast.gla`, or its name.
        arguments, named: the op's own for the span's tokens, [B, T, ...]; its B sequences are the summary's rows.
            initial_state, output_final_state and cu_seqlens are left out.

    Returns:
        `Summary`, differentiable in all tensors.

    Raises:
        ValueError, TypeError: as the op raises; for an op of the dense family, whose time cannot be cut; for a state
            or packed sequences, which a summary has no place for.
    """
    bound = bind(op, arguments, named)
    if bound.initial_state is not None or bound.cu_seqlens is not None or bound.output_final_state:
        raise ValueError(
            f"{bound.call.name}: expected a call without {', '.join(_PASSED_ON)}: a summary is of one span of each "
            "sequence, whatever the state before it"
        )
    return bound.call.summary()


def outputs(op: Callable[..., Any] | str, state: Summary, /, *arguments: Any, **named: Any) -> tuple[Tensor, Summary]:
    """The outputs of a span from the state before it, and the state behind it.

    Args:
        op: as in `summary`.
        state: a Summary without carry, or whose carry is not read: `merge` of all that came before.
        arguments, named: as in `summary`.

    Returns:
        o as the op returns it, and the state behind the span as a Summary without carry.

    Raises:
        ValueError, TypeError: as `summary` does, and as the op does for a state of the wrong shape.
    """
    bound = bind(op, arguments, named)
    if bound.initial_state is not None:
        raise ValueError(f"initial_state: expected None, as {bound.call.name} takes it from state; got one")
    return bound.call.outputs(state, bound.cu_seqlens)


def state_of(op: Callable[..., Any] | str, state: Summary, /, *arguments: Any, **named: Any) -> Any:
    """A Summary as the state that op takes and returns: (C, n, m) of mlstm, else the tensor. Arguments as in
    `summary`."""
    return bind(op, arguments, named).call.public(state)
