"""Why calls run in full each time, counted: otherwise a program would be slower without a word."""

from holdfast.kernels.select import clearable_cache

_REFUSED: dict[tuple[str, str], int] = clearable_cache()


def count_refusal(name: str, reason: str) -> None:
    """Counts a signature of what has that name, whose calls are not replayed. reason: what keeps them from it."""
    _REFUSED[name, reason] = _REFUSED.get((name, reason), 0) + 1


def refusals() -> dict[tuple[str, str], int]:
    """(name of what was called, reason) -> signatures that this process runs in full each time."""
    return dict(_REFUSED)
