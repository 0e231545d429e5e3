"""The order in which vector decay's forward kernel takes its chunks, and the TMA loads of their tiles."""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import gl, gluon, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK

# stages of q and k (one is loaded, one becomes operands, one is multiplied), and of v
QK_STAGES = gl.constexpr(3)
V_STAGES = gl.constexpr(2)


class ChunkOrder(NamedTuple):
    """The chunks of this block's sequence; REVERSE says beside it whether the last comes first."""

    batch: gl.tensor
    chunks: gl.tensor  # their number
    # of a packed sequence, else None: its first token, that less 64 times its first chunk, the token behind its last
    first: gl.tensor | None
    shift: gl.tensor | None
    end: gl.tensor | None


class QKLoads(NamedTuple):
    """q and k: descriptors, tiles [2 QK_STAGES, 1, 64, 1, K] (k, then q of each stage), barriers, head."""

    q_desc: gl.tensor
    k_desc: gl.tensor
    tiles: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    head: gl.tensor


class VLoads(NamedTuple):
    """v: its descriptor, tiles [V_STAGES, 1, 64, 1, V], barriers, head."""

    desc: gl.tensor
    tiles: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    head: gl.tensor


@gluon.jit
def chunk_token(i, order, REVERSE: gl.constexpr):
    """Return the first token of the chunk of iteration i."""
    if REVERSE:
        token = (order.chunks - 1 - i) * CHUNK
    else:
        token = i * CHUNK
    if order.first is not None:
        token += order.first
    return token


@gluon.jit
def load_qk(qk, order, i, stage, REVERSE: gl.constexpr):
    """Issue the TMA loads of q and k for iteration i; no-op past the end. The caller has announced their bytes."""
    token = chunk_token(i, order, REVERSE)
    at = [order.batch, token, qk.head, 0]
    tma_load(qk.q_desc, at, qk.ready.index(stage), qk.tiles.index(2 * stage + 1), pred=i < order.chunks)
    tma_load(qk.k_desc, at, qk.ready.index(stage), qk.tiles.index(2 * stage), pred=i < order.chunks)


@gluon.jit
def load_v(v, order, i, stage, REVERSE: gl.constexpr):
    """Issue the TMA load of v for iteration i, as load_qk."""
    token = chunk_token(i, order, REVERSE)
    tma_load(v.desc, [order.batch, token, v.head, 0], v.ready.index(stage), v.tiles.index(stage), pred=i < order.chunks)
