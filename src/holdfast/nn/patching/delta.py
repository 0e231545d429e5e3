"""The two functions of a delta rule as transformers' layers call them, in terms of Holdfast's ops."""

from typing import Any

from torch import Tensor

from holdfast.ops import gated_delta_rule, kda, step
from holdfast.ops.check import needs_grad

from ..check import wide

RULES = {"gated_delta_rule": gated_delta_rule, "kda": kda}


def chunk_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    rule: str,
    backend: str | None,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """A prompt, or a batch of training.

    rule: of RULES. chunk_size is left to the backend; unused are the model's other keywords.
    """
    if initial_state is not None:
        initial_state = initial_state.to(wide(value.dtype))
    return RULES[rule](
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        backend=backend,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )


def recurrent_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    rule: str,
    backend: str | None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """One token of decoding. The cache's state is updated where it lies, unless a gradient may flow through it."""
    inputs = {"q": query, "k": key, "v": value, "g": g, "beta": beta}
    if initial_state is None or value.shape[1] != 1 or needs_grad(*inputs.values(), initial_state):
        return chunk_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            rule=rule,
            backend=backend,
            **rest,
        )
    state = initial_state.to(wide(value.dtype)).contiguous()
    o = step(rule, inputs | {"qk_l2norm": use_qk_l2norm_in_kernel}, state, backend)
    return o, state if output_final_state else None
