"""What the partitions of mLSTM's kernels on Hopper share, by name."""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import gl


class Stages(NamedTuple):
    """A ring of stages: vectors [stages * n, 64] of a chunk's tokens, its decay, and the stages' barriers.

    decay_vectors: as lib/gluon/decay.py has them. token_vectors: the names of decay.py. tiles_ready: the copies of a
    stage have landed; decay_ready: its vectors are there; stage_empty: all of it may be filled again.
    """

    decay_vectors: gl.shared_memory_descriptor
    token_vectors: gl.shared_memory_descriptor
    chunk_decays: gl.shared_memory_descriptor
    tiles_ready: gl.shared_memory_descriptor
    decay_ready: gl.shared_memory_descriptor
    stage_empty: gl.shared_memory_descriptor


class Heads(NamedTuple):
    """How heads are counted: H of them, of which `qk_group` share a q and k and `v_group` a v."""

    H: gl.tensor
    qk_group: gl.tensor
    v_group: gl.tensor
