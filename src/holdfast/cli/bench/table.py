"""How figures are written, in the terminal and on the page."""

from .clock import bound_by_host
from .result import Result

COLUMNS = ("runner", "ms", "quartiles", "x floor", "first s", "host ms", "memory", "error", "what")


def milliseconds(value: float | None) -> str:
    """Three significant digits, without exponent."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def mebibytes(value: int | None) -> str:
    """MiB, one digit below ten."""
    if value is None:
        return ""
    size = value / 2**20
    return f"{size:.1f} MiB" if size < 10 else f"{size:.0f} MiB"


def ratio(value: float | None) -> str:
    """Three significant digits, never an exponent."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def said(result: Result) -> str:
    """Why there is no time, or what to know about the one there is."""
    if result.status != "ok":
        return f"{result.status}: {result.detail}"
    words = [result.note] if result.note else []
    if result.step_errors:
        last = ", ".join(f"{values[-1]:.1e} at {level}%" for level, values in result.step_errors.items())
        words.append(f"absolute error at the last step: {last}")
    if result.checked_at and result.checked_at != result.sizes:
        words.append("checked at " + " ".join(f"{axis}{size}" for axis, size in result.checked_at.items()))
    if result.checked_by:
        words.append(f"checked against {result.checked_by} in float64")
    if result.low_ms and result.high_ms and result.high_ms > 1.5 * result.low_ms:
        words.append("unsteady: was something else running?")
    # replays leave the host out already
    if "replay" in (result.method or ""):
        words.append("replayed")
    elif bound_by_host(result.median_ms, result.host_ms):
        words.append("bound by the host")
    if result.predicted_ms and result.median_ms:
        words.append(f"predicted {milliseconds(result.predicted_ms)} ms")
    if result.dram_bytes is not None:
        against = f", {result.dram_bytes / result.predicted_bytes:.2f} x predicted" if result.predicted_bytes else ""
        words.append(f"DRAM {mebibytes(result.dram_bytes)}{against}, matrix units {result.tensor_percent:.0f}% busy")
    if result.counters_note:
        words.append(f"no counters: {result.counters_note}")
    return "; ".join(words)


def cells(result: Result) -> tuple[str, ...]:
    """One row, a string for each of COLUMNS."""
    spread = "" if result.low_ms is None else f"{milliseconds(result.low_ms)} - {milliseconds(result.high_ms)}"
    return (
        result.runner,
        milliseconds(result.median_ms),
        spread,
        ratio(result.floor_ratio),
        "" if result.first_call_s is None else f"{result.first_call_s:.2f}",
        milliseconds(result.host_ms),
        mebibytes(result.memory_bytes),
        "" if result.error is None else f"{result.error:.1e}",
        said(result),
    )
