"""Bad input is refused before anything is launched: the error names the argument, what was expected and what came."""

from collections.abc import Sequence

import mlx.core as mx

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
BACKENDS = ("metal", "cuda", "mlx")
# sizes that may be zero; every other size is at least one
MAY_BE_EMPTY = ("B", "L")


def check_arrays(given: dict[str, tuple[mx.array, str]]) -> dict[str, int]:
    """Checks each array against its axes, such as "B L H K"; returns the size of each axis.

    Axes of the same name agree; the first array that has an axis decides its size. Raises TypeError for what is no mlx
    array of float32, bfloat16 or float16, ValueError for a shape that disagrees.
    """
    sizes: dict[str, int] = {}
    for name, (x, axes) in given.items():
        check_float(name, x)
        check_shape(name, x, axes, sizes)
    return sizes


def check_float(name: str, x: mx.array) -> None:
    if not isinstance(x, mx.array):
        raise TypeError(f"{name}: expected an mlx array; got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float32, bfloat16 or float16; got {_name(x.dtype)}")


def check_shape(name: str, x: mx.array, axes: str, sizes: dict[str, int]) -> None:
    """Checks x against its axes and adds the sizes that it decides."""
    letters = axes.split()
    fits = x.ndim == len(letters) and all(sizes.get(a, n) == n for a, n in zip(letters, x.shape, strict=True))
    if not fits:
        expected = ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in letters)
        raise ValueError(f"{name}: expected shape [{expected}]; got {list(x.shape)}")
    for axis, size in zip(letters, x.shape, strict=True):
        if size == 0 and axis not in MAY_BE_EMPTY:
            raise ValueError(f"{name}: expected {axis} of at least 1; got shape {list(x.shape)}")
        sizes[axis] = size


def check_state(state: mx.array | None, shape: Sequence[int], name: str = "initial_state") -> mx.array:
    """The state to start from: zeros for None. Raises TypeError unless float32, ValueError for another shape."""
    if state is None:
        return mx.zeros(tuple(shape), mx.float32)
    if not isinstance(state, mx.array):
        raise TypeError(f"{name}: expected an mlx array; got {type(state).__name__}")
    if state.dtype != mx.float32:
        raise TypeError(f"{name}: expected float32; got {_name(state.dtype)}")
    if tuple(state.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {list(shape)}; got {list(state.shape)}")
    return state


def check_divides(name: str, part: int, whole_name: str, whole: int) -> None:
    if whole % part:
        raise ValueError(f"{name}: expected a divisor of {whole_name} = {whole}; got {part}")


def check_count(name: str, count: int) -> int:
    """A whole number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name}: expected an int; got {type(count).__name__}")
    if count < 1:
        raise ValueError(f"{name}: expected at least 1; got {count}")
    return count


def check_backend(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, or None; got {backend!r}")


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
