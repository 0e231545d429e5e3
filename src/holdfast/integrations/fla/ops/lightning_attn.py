"""fla.ops.lightning_attn: a constant decay a head, weaker in later layers."""

from torch import Tensor

from holdfast import ops

from ..call import Result, carried, refuse, run_op


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool = False,
) -> Result:
    """`holdfast.lightning` of layer layer_idx, from 0."""
    return fused_recurrent_lightning_attn(
        q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens,
        head_first=head_first,
    )  # fmt: skip


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> Result:
    """`holdfast.lightning` of layer layer_idx, from 0; reverse: from the last token to the first."""
    refuse(head_first=head_first)
    given = {"q": q, "k": k, "v": v, "layer": layer_idx, "num_layers": num_layers, "scale": scale}
    return run_op(ops.lightning, given | carried(q, initial_state, output_final_state, cu_seqlens), reverse=reverse)
