"""What a segment adds to the state, on its way from the launch that finds it to the sweeps of later segments.

Forward, a segment's sweep adds up itself what the segments before it have left (segment_states.py), rounded as the
state is when it is multiplied. Both have a state as an accumulator of one layout; it is kept as their threads have it.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.lib.gluon.compat import gl, gluon
from holdfast.kernels.lib.gluon.layouts import vectorized_row_layout
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait

# segments whose states a thread has at once
_AT_ONCE = gl.constexpr(2)


@gluon.jit
def store_segment_sum(ptr, state, dtype: gl.constexpr):
    """Writes a state [V, K], rounded, for segment_initial_state."""
    V: gl.constexpr = state.shape[0]
    K: gl.constexpr = state.shape[1]
    layout: gl.constexpr = vectorized_row_layout(V, K)
    gl.store(ptr + _places(0, V, K, layout), _in_eights(state.to(dtype), layout))


@gluon.jit
def segment_initial_state(state, added_ptr, decay_ptr, row, H, LAYOUT: gl.constexpr):
    """The state [V, K] that enters this block's segment, from the one before the sequence. Its rows begin at `row`.

    added, decay: of each segment but the last, as in scalar_decay/hopper/forward.py. The first segment's block waits
    for no launch.
    """
    V: gl.constexpr = state.shape[0]
    K: gl.constexpr = state.shape[1]
    at = _places(row, V, K, vectorized_row_layout(V, K))
    segment = gl.program_id(2)
    if segment > 0:
        grid_dependency_wait()
    size = gl.num_programs(1) * (V * K)
    entry = (gl.program_id(0) // H).to(gl.int64) * ((gl.num_programs(2) - 1) * H) + gl.program_id(0) % H
    for begin in range(0, segment, _AT_ONCE):
        # all loads before any use: one after another each would take its whole latency
        adds = ()
        decays = ()
        for j in gl.static_range(_AT_ONCE):
            there = begin + j < segment
            of = entry + (begin + j) * H
            adds = adds + (gl.load(added_ptr + of * size + at, mask=(at >= 0) & there, other=0.0),)
            if decay_ptr is not None:
                decays = decays + (gl.load(decay_ptr + of, mask=there, other=0.0),)
        for j in gl.static_range(_AT_ONCE):
            if decay_ptr is not None:
                state *= gl.exp2(decays[j])
            state += _in_eights(adds[j], LAYOUT).to(gl.float32)
    return state


@gluon.jit
def _places(row, V: gl.constexpr, K: gl.constexpr, layout: gl.constexpr):
    """Where a state is kept: by tiles of 8 x 32, of which a warp has whole ones, 16 bytes a thread."""
    rows = row + gl.arange(0, V, gl.SliceLayout(1, layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, layout))
    tile = (rows // 8)[:, None] * (K // 32) + (columns // 32)[None, :]
    return tile * 256 + (rows % 8)[:, None] * 32 + (columns % 32)[None, :]


@gluon.jit
def _in_eights(x, layout: gl.constexpr):
    """Of 32 columns each thread's eight beside each other, or back: only their places change, not who has them."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [rows, columns // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(x, [rows, columns]), layout, assert_trivial=True)
