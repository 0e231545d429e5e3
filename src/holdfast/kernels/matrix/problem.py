"""What planning needs to know of a call of a matrix recurrence."""

from torch import Tensor

from holdfast.planner import Problem
from holdfast.recurrences.definition import MatrixCall


def problem(op: str, call: MatrixCall, cu_seqlens: Tensor | None, grad: bool) -> Problem:
    """What planning needs to know of a call: its sizes, v's dtype and traits.

    Sizes are B, T, H, Hq, K and V, of packed sequences N, with an erase key He, its heads. op: the recurrence's name.
    call: q, k [B, T, Hq, K], v [B, T, H, V] and the rest of a MatrixCall, checked. cu_seqlens: int32 or int64 [N + 1],
    or None. grad: whether a backward pass may follow. Reads no values.
    """
    batch, length, heads, width = call.v.shape
    sizes = {"B": batch, "T": length, "H": heads, "Hq": call.q.shape[2], "K": call.k.shape[3], "V": width}
    if cu_seqlens is not None:
        sizes["N"] = cu_seqlens.shape[0] - 1
    if call.e is not None:
        sizes["He"] = call.e.shape[2]
    traits = {
        "decay=vector": call.g is not None and call.g.dim() == 4,
        "decay=scalar": call.g is not None and call.g.dim() == 3,
        "delta": call.delta,
        "erase_key": call.e is not None,
        "erase_before_decay": call.erase_before_decay,
        "beta": call.beta is not None,
        "normalizer": call.stabilizer is not None,
        "varlen": cu_seqlens is not None,
        "needs_grad": grad,
    }
    return Problem.of(op, "matrix", call.v.dtype, sizes, traits)
