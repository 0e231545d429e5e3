"""Why a model has no solution: a smallest set of constraints that already clash."""

from collections.abc import Callable, Sequence
from functools import cached_property

from .constraint import Constraint
from .domain import describe
from .search import SearchLimit


def clashing(
    constraints: Sequence[Constraint], is_feasible: Callable[[Sequence[Constraint]], bool]
) -> tuple[tuple[Constraint, ...], bool]:
    """Of constraints that clash, some that still do, and whether dropping any one of those leaves a solution.

    Constraints are dropped one after another, last first, as long as the rest still clash. A constraint stays where
    the search without it reaches its limit; then the set clashes too, but may not be minimal.
    """
    kept = list(constraints)
    is_minimal = True
    for place in reversed(range(len(kept))):
        without = kept[:place] + kept[place + 1 :]
        try:
            if not is_feasible(without):
                kept = without
        except SearchLimit:
            is_minimal = False
    return tuple(kept), is_minimal


class Infeasible(Exception):
    """A model has no solution.

    constraints: a set of them that clash. is_minimal: whether dropping any one of these leaves a solution; False only
    where the search reached its limit. Both are worked out when first asked for, so that nobody else pays for them.
    """

    def __init__(
        self,
        constraints: Sequence[Constraint],
        labels: Sequence[str | None],
        is_feasible: Callable[[Sequence[Constraint]], bool],
    ) -> None:
        super().__init__()
        self._all = tuple(constraints)
        self._labels = tuple(labels)
        self._is_feasible = is_feasible

    @cached_property
    def _clash(self) -> tuple[tuple[Constraint, ...], bool]:
        return clashing(self._all, self._is_feasible)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return self._clash[0]

    @property
    def is_minimal(self) -> bool:
        return self._clash[1]

    def words(self) -> list[str]:
        """Each clashing constraint as it was written, after its label where it has one."""
        labels = {id(constraint): label for constraint, label in zip(self._all, self._labels, strict=True)}
        return [
            f"{labels[id(constraint)]}: {constraint}" if labels[id(constraint)] else str(constraint)
            for constraint in self.constraints
        ]

    def __str__(self) -> str:
        lines = [f"no solution; these clash{'' if self.is_minimal else ' (fewer may already)'}:"]
        lines += [f"  {text}" for text in self.words()]
        variables = dict.fromkeys(variable for constraint in self.constraints for variable in constraint.variables())
        if variables:
            lines.append("where " + ", ".join(f"{variable} is {describe(variable.domain)}" for variable in variables))
        return "\n".join(lines)
