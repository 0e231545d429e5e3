"""From a problem to the backend and the plan that run it."""

from functools import lru_cache

from holdfast.planner import Device, Direction, Plan, Problem

from .backend import Backend, choose


@lru_cache(maxsize=4096)
def resolve(
    backends: tuple[Backend, ...], problem: Problem, device: Device, name: str | None, direction: Direction
) -> tuple[Backend, Plan]:
    """The backend that runs a pass of the call, and its best plan. Raises as `choose` does."""
    chosen = choose(backends, problem, device, name)
    return chosen, chosen.candidates(problem, device, direction)[0].plan
