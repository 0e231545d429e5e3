"""The fewest bytes that a case must move, whatever runs it, and the arithmetic that its definition asks for."""

from holdfast.planner import Direction, Floor, floor

from .case import Case


def _floors(case: Case) -> list[Floor]:
    """Of the case's passes, as the planner counts them."""
    problem = case.work.problem(case.arguments("meta"), dict(case.options), case.passes != "fwd")
    passes: tuple[Direction, ...] = ("forward",) if case.passes == "fwd" else ("forward", "backward")
    return [floor(problem, each, case.state) for each in passes]


def floor_bytes(case: Case) -> int:
    """Bytes when each pass reads each of its inputs once and writes each of its outputs once."""
    return sum(each.moved for each in _floors(case))


def operations(case: Case) -> int:
    """Arithmetic of the step-by-step definition, a multiply-add being two."""
    return sum(each.operations for each in _floors(case))


def history_bytes(case: Case) -> int:
    """Bytes of the state after every step in float32, which a backward pass that stores its whole history keeps."""
    sizes = dict(case.sizes)
    return 4 * case.work.state_size(sizes) * sizes.get("T", sizes.get("G", 1))
