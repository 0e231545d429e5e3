"""One token of decoding: each cell of the state is read once, used, and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.lib.triton.normalizer import denominator_floor
from holdfast.kernels.runtime.launch import launch
from holdfast.planner import Plan
from holdfast.recurrences.definition import MatrixCall


@triton.jit
def update_state(state, k, e, v, decay, beta, DELTA: tl.constexpr, ERASE_BEFORE_DECAY: tl.constexpr):
    """Return the state [BLOCK_K, BLOCK_V] after a token: MatrixCall's decay, erasure and write."""
    if ERASE_BEFORE_DECAY:
        v -= tl.sum(state * e[:, None], 0)
    state *= decay[:, None]
    if DELTA and not ERASE_BEFORE_DECAY:
        v -= tl.sum(state * e[:, None], 0)
    return state + (beta * k)[:, None] * v[None, :]


@triton.jit
def matrix_decode(
    q_ptr, k_ptr, e_ptr, v_ptr, g_ptr, beta_ptr, m_ptr, state_ptr, o_ptr, next_ptr,
    H, scale, eps, q_batch, q_head, k_batch, k_head, e_batch, e_head, v_batch, v_head, g_batch, g_head, g_key,
    beta_batch, beta_head, m_batch, m_head, state_key,
    GROUP: tl.constexpr, ERASE_GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, VECTOR: tl.constexpr, DELTA: tl.constexpr, ERASE_BEFORE_DECAY: tl.constexpr,
):  # fmt: skip
    """Grid (B * H * blocks of V's columns,): MatrixCall's step.

    q, k [B, H / GROUP, K], e [B, H / ERASE_GROUP, K], v [B, H, V], g [B, H] or, with VECTOR, [B, H, K], beta, m [B, H],
        strides; e, g, beta and m may be None
    state, next [B, H, K, state_key] float32: before and, written, after. They may be the same memory unless there is a
        normaliser, whose column all blocks read. state may be None
    o [B, H, V], written
    """
    SPLITS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    split = tl.program_id(0) % SPLITS
    head = ((tl.program_id(0) // SPLITS) % H).to(tl.int64)
    batch = ((tl.program_id(0) // SPLITS) // H).to(tl.int64)
    rows = tl.arange(0, BLOCK_K)
    columns = split * BLOCK_V + tl.arange(0, BLOCK_V)
    in_rows = rows < K
    in_columns = columns < V
    inside = in_rows[:, None] & in_columns[None, :]
    at = (batch * H + head) * K * state_key
    cells = rows[:, None] * state_key + columns[None, :]

    q = tl.load(q_ptr + batch * q_batch + (head // GROUP) * q_head + rows, mask=in_rows, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + batch * k_batch + (head // GROUP) * k_head + rows, mask=in_rows, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + batch * v_batch + head * v_head + columns, mask=in_columns, other=0.0).to(tl.float32)
    if state_ptr is None:
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    else:
        state = tl.load(state_ptr + at + cells, mask=inside, other=0.0)
    decay = tl.full([BLOCK_K], 1.0, tl.float32)
    if g_ptr is not None:
        g = g_ptr + batch * g_batch + head * g_head
        if VECTOR:
            decay = tl.exp(tl.load(g + rows * g_key, mask=in_rows, other=0.0).to(tl.float32))
        else:
            decay *= tl.exp(tl.load(g).to(tl.float32))
    e = k
    if e_ptr is not None:
        e_at = e_ptr + batch * e_batch + (head // ERASE_GROUP) * e_head + rows
        e = tl.load(e_at, mask=in_rows, other=0.0).to(tl.float32)
    beta = 1.0
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + batch * beta_batch + head * beta_head).to(tl.float32)
    state = update_state(state, k, e, v, decay, beta, DELTA, ERASE_BEFORE_DECAY)
    o = scale * tl.sum(state * q[:, None], 0)
    if m_ptr is not None:
        norm = (beta * k).to(tl.float32)
        if state_ptr is not None:
            norm += decay * tl.load(state_ptr + at + rows * state_key + V, mask=in_rows, other=0.0)
        floor = denominator_floor(tl.load(m_ptr + batch * m_batch + head * m_head).to(tl.float32))
        o /= tl.maximum(tl.abs(scale * tl.sum(norm * q, 0)), floor) + eps
        tl.store(next_ptr + at + rows * state_key + V, norm, mask=in_rows & (split == 0))
    tl.store(next_ptr + at + cells, state, mask=inside)
    tl.store(o_ptr + (batch * H + head) * V + columns, o.to(o_ptr.dtype.element_ty), mask=in_columns)


def step(plan: Plan, call: MatrixCall, after: Tensor) -> Tensor:
    """Return o [B, 1, H, V]; after, contiguous [B, H, K, V (+ 1)], gets the state, and may be call.initial_state."""
    batch, _, heads, values = call.v.shape
    keys = call.k.shape[3]
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in call[:3])
    e = call.e if call.e is None or call.e.stride(-1) == 1 else call.e.contiguous()
    state = None if call.initial_state is None else call.initial_state.contiguous()
    gates = [(0, 0, 0) if x is None else (*x.stride(), 0)[:1] + (*x.stride(), 0)[2:4] for x in (call.g, call.beta)]
    m = (0, 0) if call.stabilizer is None else call.stabilizer.stride()[::2]
    splits = -(-values // plan["columns"])
    if batch:
        tensors = (q, k, e, v, call.g, call.beta, call.stabilizer, state, o, after)
        strides = ((0, 0) if x is None else (x.stride(0), x.stride(2)) for x in (q, k, e, v))
        numbers = (
            heads, call.scale, call.eps, *(n for pair in strides for n in pair),
            *gates[0], *gates[1][:2], *m, values + (call.stabilizer is not None),
        )  # fmt: skip
        constants = {
            "GROUP": heads // q.shape[2],
            "ERASE_GROUP": 1 if e is None else heads // e.shape[2],
            "K": keys,
            "V": values,
            "BLOCK_K": 1 << (keys - 1).bit_length(),
            "BLOCK_V": plan["columns"],
            "VECTOR": call.g is not None and call.g.dim() == 4,
            "DELTA": call.delta,
            "ERASE_BEFORE_DECAY": call.delta and call.erase_before_decay,
        }
        launch(matrix_decode, (batch * heads * splits,), tensors, numbers, constants, plan["warps"])
    return o
