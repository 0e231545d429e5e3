"""fla.ops.hgrn: a decay a channel, without a matrix."""

from torch import Tensor

from holdfast import ops

from ..call import Result, carried, run_op


def chunk_hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False) -> Result:
    """`holdfast.hgrn` of x and g [B, T, D]; gradients go through states too, as they do not there."""
    return fused_recurrent_hgrn(x, g, initial_state, output_final_state)


def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`holdfast.hgrn` of x and g [B, T, D]."""
    return run_op(ops.hgrn, {"x": x, "g": g} | carried(x, initial_state, output_final_state, cu_seqlens))
