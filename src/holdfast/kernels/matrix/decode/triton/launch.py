"""The launch of a few tokens on a pool of states."""

import torch
from torch import Tensor

from holdfast.kernels.matrix.decode.call import NormalizedPool, NormalizedTokens, Pool
from holdfast.kernels.runtime.launch import launch
from holdfast.planner import Plan
from holdfast.recurrences.definition import MatrixCall

from .normalizer import normalizer_decode_pool
from .update import matrix_decode_pool

# channels of n that a warp has
CHANNELS = 128


def _rows(x: Tensor) -> Tensor:
    """x [B, L, heads, D], its last two axes dense."""
    return x if x.stride(3) == 1 and (x.stride(2) == x.shape[3] or x.shape[2] == 1) else x.contiguous()


def update(plan: Plan, call: MatrixCall, pool: Pool, divisor: Tensor | None = None) -> Tensor:
    """Return o [B, L, H, V]; the pool's states go on. divisor: of o, float32 [B, L, H], contiguous."""
    batch, tokens, heads, values = call.v.shape
    keys = call.k.shape[3]
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    q, k, v, e = (None if x is None else _rows(x) for x in (call.q, call.k, call.v, call.e))
    g, beta = (None if x is None else x.contiguous() for x in (call.g, call.beta))
    tensors = (q, k, e, v, g, beta, divisor, o, pool.states, *pool.slots)
    strides = (n for x in (q, k, e, v) for n in ((0, 0) if x is None else x.stride()[:2]))
    numbers = (heads, pool.states.shape[0], call.scale, pool.states.stride(0), *strides)
    constants = {
        "TOKENS": tokens,
        "GROUP": heads // call.q.shape[2],
        "ERASE_GROUP": 1 if e is None else heads // e.shape[2],
        "K": keys,
        "V": values,
        "BLOCK_K": 1 << (keys - 1).bit_length(),
        "BLOCK_V": plan["columns"],
        "VECTOR": g is not None and g.dim() == 4,
        "DELTA": call.delta,
        "ERASE_BEFORE_DECAY": call.delta and call.erase_before_decay,
        "KEYS_LAST": pool.keys_last,
        "EACH": pool.slots.is_each,
    }
    if batch and pool.states.shape[0]:
        splits = -(-values // plan["columns"])
        launch(matrix_decode_pool, (batch * heads * splits,), tensors, numbers, constants, plan["warps"])
        return o
    return o.zero_()


def update_normalized(plan: Plan, call: NormalizedTokens, pool: NormalizedPool) -> Tensor:
    """Return h [B, L, H, V]; the pool's C, n and m go on."""
    batch, tokens, heads, _ = call.v.shape
    keys = call.k.shape[3]
    q, k = _rows(call.q), _rows(call.k)
    i, f = (x if x.stride(2) == 1 or heads == 1 else x.contiguous() for x in (call.i, call.f))
    g, beta, divisor = (call.v.new_empty(batch, tokens, heads, dtype=torch.float32) for _ in range(3))
    divisor = divisor if call.normalize else None
    if batch and pool.m.shape[0]:
        tensors = (q, k, i, f, pool.n, pool.m, g, beta, divisor, *pool.slots)
        strides = (n for x in (q, k, i, f) for n in x.stride()[:2])
        numbers = (heads, pool.m.shape[0], call.scale, call.eps, pool.n.stride(0), pool.m.stride(0), *strides)
        block = 1 << (keys - 1).bit_length()
        constants = {
            "TOKENS": tokens,
            "GROUP": heads // q.shape[2],
            "K": keys,
            "BLOCK_K": block,
            "EXPONENTIAL": call.exponential,
            "EACH": pool.slots.is_each,
        }
        launch(normalizer_decode_pool, (batch * heads,), tensors, numbers, constants, max(1, block // CHANNELS))
    written = MatrixCall(q, k, call.v, g, beta, scale=call.scale)
    return update(plan, written, Pool(pool.C, pool.slots, pool.keys_last), divisor)
