"""Cutting axis 1 into chunks, and back."""

import mlx.core as mx


def cut(x: mx.array, size: int, filler: float) -> mx.array:
    """[B, L, ...] -> [B, chunks, size, ...], the last chunk filled up."""
    missing = -x.shape[1] % size
    x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=filler)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def join(x: mx.array, length: int) -> mx.array:
    """[B, chunks, size, ...] -> [B, length, ...]."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
