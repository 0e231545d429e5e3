"""The linear scan h_t = a_t h_{t-1} + x_t in vectorised PyTorch, over real or complex numbers, either way in time.

Time is cut into chunks of about sqrt(T) steps. First every chunk runs from zero, all chunks at once, for its last state
and the product of its gates; then the state that enters each chunk follows from those, chunk by chunk; then every chunk
runs again from the state that enters it. No division and no logarithm: a gate may have either sign, or be zero. Three
passes over short loops, and no memory beyond the output but a state or two a chunk.
"""

import math

import torch
from torch import Tensor


def chunk_size(length: int) -> int:
    """Return the steps of a chunk: balances the loop inside chunks with the loop over them."""
    return max(1, math.isqrt(length))


def scan(a: Tensor, x: Tensor, state: Tensor, out: Tensor, chunk: int, reverse: bool = False) -> Tensor:
    """Write h_t = a_t h_{t-1} + x_t to out [B, T, D] and return the last h [B, D], from state before the first.

    a and state have the dtype of the computation; x and out may be narrower, and may be one tensor. reverse runs from
    the last step to the first: h_t = a_t h_{t+1} + x_t.
    """
    length = x.shape[1]
    chunks = length // chunk
    whole = chunks * chunk
    if chunks > 1:
        first = length - whole if reverse else 0
        cut = [z.narrow(1, first, whole).unflatten(1, (chunks, chunk)) for z in (a, x, out)]
        state = _run_chunks(*cut, _entries(*cut[:2], state, reverse), reverse)[:, 0 if reverse else -1]
    else:
        whole = 0
    rest = 0 if reverse else whole
    cut = [z.narrow(1, rest, length - whole).unsqueeze(1) for z in (a, x, out)]
    return _run_chunks(*cut, state.unsqueeze(1), reverse)[:, 0]


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)


def _run_chunks(a: Tensor, x: Tensor, out: Tensor, h: Tensor, reverse: bool) -> Tensor:
    """Run all chunks [B, n, C, D] side by side from h [B, n, D]; return their last states."""
    for t in _order(x.shape[2], reverse):
        if out.dtype == h.dtype:
            h = torch.addcmul(x[:, :, t], a[:, :, t], h, out=out[:, :, t])
        else:
            h = torch.addcmul(x[:, :, t], a[:, :, t], h)
            out[:, :, t] = h
    return h


def _entries(a: Tensor, x: Tensor, state: Tensor, reverse: bool) -> Tensor:
    """Return the state that enters each chunk, [B, n, D]."""
    first, *others = _order(x.shape[2], reverse)
    last, product = x[:, :, first].to(state.dtype), a[:, :, first]
    for t in others:
        last = torch.addcmul(x[:, :, t], a[:, :, t], last)
        product = product * a[:, :, t]
    entries = torch.empty_like(last, memory_format=torch.contiguous_format)
    for n in _order(entries.shape[1], reverse):
        entries[:, n] = state
        state = torch.addcmul(last[:, n], product[:, n], state)
    return entries
