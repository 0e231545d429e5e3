"""One assignment that satisfies a model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from .expression import Expression, Named, Variable


class Solution(Mapping[str, int]):
    """The value of every variable by name; solution[expression] works out an expression."""

    __slots__ = ("_known", "_variables")

    def __init__(self, variables: Sequence[Variable], known: Mapping[Expression, int]) -> None:
        """known: the value of every variable, and what has been worked out of expressions."""
        self._variables = variables
        self._known = known

    def with_names(self, named: Iterable[Named]) -> dict[str, int]:
        """Of the variables and of those expressions."""
        found = {variable.name: self._known[variable] for variable in self._variables}
        for each in named:
            found[each.name] = each.value(self._known)
        return found

    def __getitem__(self, key: str | Expression) -> int:
        if isinstance(key, Expression):
            return key.value(self._known)
        for variable in self._variables:
            if variable.name == key:
                return self._known[variable]
        raise KeyError(f"no variable {key!r}; there are {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        return iter([variable.name for variable in self._variables])

    def __len__(self) -> int:
        return len(self._variables)

    def __hash__(self) -> int:
        return hash(tuple([self._known[variable] for variable in self._variables]))

    def __repr__(self) -> str:
        return f"Solution({', '.join(f'{name}={value}' for name, value in self.items())})"
