"""Mamba-1's three functions as transformers' layers call them, in terms of Holdfast's ops."""

from typing import Any

from torch import Tensor

from holdfast.ops import mamba1, step
from holdfast.ops.check import needs_grad

from ..check import wide


def inner(*arguments: Any, **named: Any) -> None:
    """None, upon which the layer goes on to its convolution and scan, one after the other."""


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    backend: str | None,
    **unused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """A prompt, or a batch of training: y [batch, D, T]; unused are the model's other keywords.

    hidden_states, dt and z [batch, D, T], B and C [batch, N, T].
    """
    dtype = hidden_states.dtype
    y, state = mamba1(
        hidden_states.mT,
        dt.mT,
        A,
        B.mT.to(dtype),
        C.mT.to(dtype),
        D,
        None if z is None else z.mT.to(dtype),
        delta_bias,
        delta_softplus,
        output_final_state=return_last_state,
        backend=backend,
    )
    return (y.mT, state) if return_last_state else y.mT


def selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    *,
    backend: str | None,
    **unused: Any,
) -> Tensor:
    """One token of decoding: y [batch, D]; state [batch, D, N] is updated where it lies.

    hidden_states, dt and z [batch, D], B and C [batch, N].
    """
    dtype = hidden_states.dtype
    inputs = {"x": hidden_states, "dt": dt, "B": B.to(dtype), "C": C.to(dtype), "z": None if z is None else z.to(dtype)}
    inputs = {name: None if x is None else x[:, None] for name, x in inputs.items()}
    inputs |= {"A": A, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    after = state.to(wide(dtype)).contiguous()
    if needs_grad(*(x for x in inputs.values() if isinstance(x, Tensor)), state):
        y, after = mamba1(**inputs, initial_state=after, output_final_state=True, backend=backend)
    else:
        y = step("mamba1", inputs, after, backend)
    if after is not state:
        state.copy_(after)
    return y[:, 0]
