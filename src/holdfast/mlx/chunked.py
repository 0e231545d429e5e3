"""Scans in plain mlx without a step for each token: what runs where mlx has no GPU.

A matrix state goes through a chunk of tokens in matrix products. A vector state goes through all chunks side by side,
and then from chunk to chunk. Gates are any real numbers: decays between two tokens are products of the gates between
them, built up by halving, so that nothing is divided by one and no logarithm is taken.
"""

from functools import partial

import mlx.core as mx

from .chassis import Arrays

# Tokens of a chunk of a matrix state, a power of two: the products among its tokens against its pass through the state.
CHUNK = 32


def products_within(q: mx.array, k: mx.array, gates: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Decayed products of the tokens of each chunk, and the decays from its start and to its end.

    Args:
        q, k: [..., C, K], C a power of two.
        gates: [..., C, K], or [..., C, 1] for one a token.

    Returns:
        [..., C, C]: at t, s the sum over channels of q_t k_s times the gates after s up to t; zero for s > t.
        from_start, to_end, like gates: the gates up to t from the chunk's first; those after t to its last.
    """
    if gates.shape[-1] == 1 != q.shape[-1]:
        one = mx.ones_like(gates)
        decay, from_start, to_end = products_within(one, one, gates)
        return decay * (q @ _transposed(k)), from_start, to_end
    # [..., blocks, tokens of a block, ...]: blocks of 1, 2, 4, ... tokens
    q, k, from_start = (x[..., None, :] for x in (q, k, gates))
    to_end = mx.ones_like(from_start)
    found = (q * k).sum(-1, keepdims=True)
    while found.shape[-3] > 1:
        (_, q_late), (k_early, _) = _pairs(q), _pairs(k)
        (early, late), (to_middle, to_last) = _pairs(from_start), _pairs(to_end)
        across = (q_late * late) @ _transposed(k_early * to_middle)
        found = _lower(*_pairs(found), across)
        from_start = mx.concatenate([early, late * early[..., -1:, :]], axis=-2)
        to_end = mx.concatenate([to_middle * late[..., -1:, :], to_last], axis=-2)
        q, k = (_joined(x) for x in (q, k))
    return tuple(x.squeeze(-3) for x in (found, from_start, to_end))


def _transposed(x: mx.array) -> mx.array:
    """Rows and columns exchanged in memory too: mlx's products on Linux read rows twice as fast as columns."""
    return mx.contiguous(x.swapaxes(-1, -2))


def _pairs(blocks: mx.array) -> tuple[mx.array, mx.array]:
    """The blocks of even number and those of odd number."""
    return blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]


def _joined(blocks: mx.array) -> mx.array:
    """Two blocks made one."""
    *lead, count, size, width = blocks.shape
    return blocks.reshape(*lead, count // 2, 2 * size, width)


def _lower(first: mx.array, second: mx.array, across: mx.array) -> mx.array:
    """[[first, 0], [across, second]]."""
    upper = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([upper, mx.concatenate([across, second], axis=-1)], axis=-2)


def cut(x: mx.array, filler: float, chunk: int = CHUNK) -> mx.array:
    """[B, L, H, ...] -> [B, H, chunks, C, ...], the last chunk filled up."""
    missing = -x.shape[1] % chunk
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=filler)
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).moveaxis(3, 1)


def join(x: mx.array, length: int) -> mx.array:
    """[B, H, chunks, C, ...] -> [B, length, H, ...]."""
    x = x.moveaxis(1, 3)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def gla(inputs: Arrays, state: mx.array) -> tuple[mx.array, mx.array]:
    """Gated linear attention of q, k [B, L, H, K], v [B, L, H, V], gates [B, L, H] or [B, L, H, K]; float32."""
    q, k, v, gates = inputs
    length = v.shape[1]
    # tokens past the end decay nothing and write nothing
    q, k, v = (cut(x, 0.0) for x in (q, k, v))
    gates = cut(gates if gates.ndim == 4 else gates[..., None], 1.0)
    inside, from_start, to_end = products_within(q, k, gates)
    writes = _transposed(k * to_end) @ v
    decays = from_start[..., -1, :, None]
    states = []
    for n in range(v.shape[2]):
        states.append(state)
        state = decays[:, :, n] * state + writes[:, :, n]
    y = inside @ v + (q * from_start) @ mx.stack(states, axis=2)
    return join(y, length), state


def unit_lower_inverse(A: mx.array) -> mx.array:
    """The inverse of I + the part of A [..., C, C] below the diagonal, by halving; C a power of two."""
    half = A.shape[-1] // 2
    if half == 0:
        return mx.ones_like(A)
    corners = mx.stack([A[..., :half, :half], A[..., half:, half:]], axis=-3)
    both = unit_lower_inverse(corners)
    first, second = both[..., 0, :, :], both[..., 1, :, :]
    return _lower(first, second, -(second @ A[..., half:, :half] @ first))


def delta(inputs: Arrays, state: mx.array) -> tuple[mx.array, mx.array]:
    """The gated delta rule of q, k [B, L, H, K], v [B, L, H, V], gates [B, L, H] or [B, L, H, K] and beta [B, L, H].

    What the tokens of a chunk write, u_t = beta_t (v_t - S'^T k_t), solves a triangular system: what a token finds is
    what the chunk's first state has for its key, and what the tokens before it wrote.
    """
    q, k, v, gates, beta = inputs
    length = v.shape[1]
    q, k, v, beta = (cut(x, 0.0) for x in (q, k, v, beta[..., None]))
    gates = cut(gates if gates.ndim == 4 else gates[..., None], 1.0)
    inside, from_start, to_end = products_within(mx.stack([q, k]), k[None], gates[None])
    inside, among_keys = inside
    from_start, to_end = from_start[0], to_end[0]
    solved = unit_lower_inverse(beta * among_keys)
    values, keys = solved @ (beta * v), solved @ (beta * k * from_start)
    to_final = _transposed(k * to_end)
    decays = from_start[..., -1, :, None]
    states, writes = [], []
    for n in range(v.shape[2]):
        states.append(state)
        writes.append(values[:, :, n] - keys[:, :, n] @ state)
        state = decays[:, :, n] * state + to_final[:, :, n] @ writes[-1]
    y = inside @ mx.stack(writes, axis=2) + (q * from_start) @ mx.stack(states, axis=2)
    return join(y, length), state


def ssd(inputs: Arrays, state: mx.array) -> tuple[mx.array, mx.array]:
    """The scan of Mamba-2: in the words of gated linear attention q is C, k is B, v is delta u."""
    u, delta, B, C, A = inputs
    heads_a_group = u.shape[2] // B.shape[2]
    B, C = (mx.repeat(x, heads_a_group, axis=2) for x in (B, C))
    gates = mx.exp(delta[..., None] * A)
    y, state = gla([C, B, delta[..., None] * u, gates], state.swapaxes(-1, -2))
    return y, state.swapaxes(-1, -2)


def linear_scan(a: mx.array, x: mx.array, h: mx.array) -> mx.array:
    """h_t = a_t h_{t-1} + x_t over axis 1 of [B, L, D], real or complex; not differentiated through."""
    batch, length, width = x.shape
    # as many tokens of a chunk as chunks: both are loops, side by side over the other
    size = max(1, round(length**0.5))
    missing = -length % size
    if missing:
        a, x = (mx.pad(z, [(0, 0), (0, missing), (0, 0)]) for z in (a, x))
    a, x = (z.reshape(batch, -1, size, width) for z in (a, x))
    columns = [(a[:, :, 0], x[:, :, 0])]
    for i in range(1, size):
        decay, local = columns[-1]
        columns.append((a[:, :, i] * decay, a[:, :, i] * local + x[:, :, i]))
    decays, locals_ = (mx.stack(z, axis=2) for z in zip(*columns, strict=True))
    entering = []
    for n in range(x.shape[1]):
        entering.append(h)
        h = decays[:, n, -1] * h + locals_[:, n, -1]
    found = decays * mx.stack(entering, axis=1)[:, :, None] + locals_
    return found.reshape(batch, -1, width)[:, :length]


def _adjoint(a: mx.array, grad: mx.array, last: mx.array) -> mx.array:
    """d_t = grad_t + a_{t+1} d_{t+1}, from `last`, the gradient of the final state."""
    later = mx.concatenate([a[:, 1:], mx.ones_like(a[:, :1])], axis=1)
    return linear_scan(later[:, ::-1], grad[:, ::-1], last)[:, ::-1]


def _before(h: mx.array, first: mx.array) -> mx.array:
    return mx.concatenate([first[:, None], h[:, :-1]], axis=1)


@mx.custom_function
def _rglru(a: mx.array, x: mx.array, state: mx.array) -> mx.array:
    return linear_scan(a, x, state)


@_rglru.vjp
def _rglru_vjp(given, grad, h):
    a, _, state = given
    d = _adjoint(a, grad, mx.zeros_like(state))
    return d * _before(h, state), d, a[:, 0] * d[:, 0]


def rglru(inputs: Arrays, state: mx.array) -> tuple[mx.array, mx.array]:
    h = _rglru(*inputs, state)
    return h, h[:, -1]


def _turn(a: mx.array, cs: mx.array, sn: mx.array) -> mx.array:
    return mx.stack([a * cs, a * sn], axis=-1).flatten(-2).view(mx.complex64)


_as_pairs = partial(mx.view, dtype=mx.complex64)


@mx.custom_function
def _rotlru(a: mx.array, cs: mx.array, sn: mx.array, x: mx.array, state: mx.array) -> mx.array:
    return linear_scan(_turn(a, cs, sn), _as_pairs(x), _as_pairs(state)).view(mx.float32)


@_rotlru.vjp
def _rotlru_vjp(given, grad, h):
    a, cs, sn, _, state = given
    turn = mx.conj(_turn(a, cs, sn))
    d = _adjoint(turn, _as_pairs(grad), _as_pairs(mx.zeros_like(state)))
    met = d * mx.conj(_before(_as_pairs(h), _as_pairs(state)))
    along, across = mx.real(met), mx.imag(met)
    to_state = (turn[:, 0] * d[:, 0]).view(mx.float32)
    return cs * along + sn * across, a * along, a * across, d.view(mx.float32), to_state


def rotlru(inputs: Arrays, state: mx.array) -> tuple[mx.array, mx.array]:
    h = _rotlru(*inputs, state)
    return h, h[:, -1]
