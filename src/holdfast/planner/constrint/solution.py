"""One assignment that satisfies a model."""

from collections.abc import Iterator, Mapping

from .expression import Expression, Variable


class Solution(Mapping[str, int]):
    """The value of every variable by name; solution[expression] works out an expression."""

    __slots__ = ("_known", "_values")

    def __init__(self, values: Mapping[Variable, int], known: Mapping[Expression, int] | None = None) -> None:
        """known: what has been worked out of expressions, beside the variables' values."""
        self._values = dict(values)
        self._known: Mapping[Expression, int] = {**self._values, **(known or {})}

    def __getitem__(self, key: str | Expression) -> int:
        if isinstance(key, Expression):
            return key.value(self._known)
        for variable, value in self._values.items():
            if variable.name == key:
                return value
        raise KeyError(f"no variable {key!r}; there are {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        return iter([variable.name for variable in self._values])

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.values()))

    def __repr__(self) -> str:
        return f"Solution({', '.join(f'{name}={value}' for name, value in self.items())})"
