"""A state in registers on its way to memory."""

from .compat import gl, gluon
from .layouts import to_vectorized_rows, vectorized_row_layout


@gluon.jit
def save_state(
    ptr, state, row, KEYS: gl.constexpr, VALUES: gl.constexpr, TRANSPOSED: gl.constexpr, LAYOUT: gl.constexpr
):
    """Store a rounded state [V, K] whose rows begin at `row`, as [VALUES, KEYS], or transposed."""
    V: gl.constexpr = state.shape[0]
    K: gl.constexpr = state.shape[1]
    layout: gl.constexpr = LAYOUT if TRANSPOSED else vectorized_row_layout(V, K)
    rows = row + gl.arange(0, V, gl.SliceLayout(1, layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, layout))
    if KEYS == K and VALUES % V == 0:
        inside: gl.constexpr = None
    else:
        inside = (rows < VALUES)[:, None] & (columns < KEYS)[None, :]
    if TRANSPOSED:
        at = columns[None, :] * VALUES + rows[:, None]
    else:
        at = rows[:, None] * KEYS + columns[None, :]
        # 16 bytes a thread, not 4
        state = to_vectorized_rows(state)
    gl.store(ptr + at, state, mask=inside)
