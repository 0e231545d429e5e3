"""A walk over a sequence's chunks in vector decay's sweep: which tokens a turn has, and its tiles' copies."""

from holdfast.kernels.lib.gluon.compat import gl, gluon, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK

# chunks of queries and keys (one comes, one is weighed, one is multiplied), and of values
STAGES = gl.constexpr(3)
PAIR = gl.constexpr(2)


@gluon.jit
def token_of(i, walk, REVERSE: gl.constexpr):
    """The first token of the chunk that has turn i."""
    _, count, aside = walk
    if REVERSE:
        token = (count - 1 - i) * CHUNK
    else:
        token = i * CHUNK
    if aside is not None:
        token += aside[0]
    return token


@gluon.jit
def fetch_keys(keys, walk, i, stage, REVERSE: gl.constexpr):
    """Has the queries and keys of turn i copied in, if there is one. Who waits for them expects them already."""
    q_desc, k_desc, tiles, come, head = keys
    batch, count, _ = walk
    token = token_of(i, walk, REVERSE)
    tma_load(q_desc, [batch, token, head, 0], come.index(stage), tiles.index(2 * stage + 1), pred=i < count)
    tma_load(k_desc, [batch, token, head, 0], come.index(stage), tiles.index(2 * stage), pred=i < count)


@gluon.jit
def fetch_values(values, walk, i, turn, REVERSE: gl.constexpr):
    """fetch_keys for values."""
    v_desc, v_tiles, come, head = values
    batch, count, _ = walk
    token = token_of(i, walk, REVERSE)
    tma_load(v_desc, [batch, token, head, 0], come.index(turn), v_tiles.index(turn), pred=i < count)
