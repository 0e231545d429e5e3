"""Whether Gluon kernels can be built on this machine."""

from functools import cache


@cache
def without_gluon() -> str | None:
    """Why they cannot, or None if they can."""
    try:
        from . import gluon  # noqa: F401
    # names inside its modules have changed before
    except (ImportError, AttributeError) as missing:
        return f"it needs Triton's Gluon as of 3.6 or newer: {missing}"
    return None
