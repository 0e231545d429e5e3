"""Where Gluon kernels for Hopper can run."""

from functools import cache

from holdfast.planner import Device, Problem

DTYPES = ("bfloat16", "float16")


def refusal(problem: Problem, device: Device, dtypes: tuple[str, ...] = DTYPES) -> str | None:
    """Why no kernel for Hopper can serve the problem on the device, in words; None where one may.

    Whether Gluon is there is left to `without_gluon`, for last: it imports Triton.
    """
    if device.kind != "cuda" or device.capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (H100, H200); the inputs are on {device.name}"
    if problem.dtype not in dtypes:
        return f"it takes {', '.join(dtypes[:-1])} and {dtypes[-1]}; got {problem.dtype}"
    return None


@cache
def without_gluon() -> str | None:
    """Why they cannot be built on this machine, or None if they can."""
    try:
        from . import compat as gluon  # noqa: F401
    # names inside its modules have changed before
    except (ImportError, AttributeError) as missing:
        return f"it needs Triton's Gluon as of 3.6 or newer: {missing}"
    return None
