"""What holdfast.cli takes where nothing is said, on record: `PYTHONPATH=src:tests python -m cli.recorded_defaults`.

Of each of its modules the arguments that functions and classes need not be given, and the numbers, texts and flags that
have a name. A change shows as a difference of defaults.txt.
"""

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

import holdfast.cli

DEFAULTS = Path(__file__).parent / "defaults.txt"
SIMPLE = (bool, int, float, str, type(None))


def is_simple(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(is_simple, value))
    if isinstance(value, dict):
        return all(map(is_simple, value)) and all(map(is_simple, value.values()))
    return isinstance(value, SIMPLE)


def said(value: Any) -> str:
    """Of a set in order, and of a long text its beginning and length."""
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    found = repr(value)
    return found if len(found) <= 200 else f"{found[:100]}... of {len(found)}"


def limits(parameter: inspect.Parameter) -> str:
    """The least and the most that an option takes."""
    for each in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(each, typer.models.ParameterInfo) and (each.min, each.max) != (None, None):
            return f" of {each.min} to {each.max}"
    return ""


def of_functions(module: ModuleType) -> Iterator[str]:
    made = [x for x in vars(module).values() if getattr(x, "__module__", None) == module.__name__]
    methods = [y for x in made if inspect.isclass(x) for y in vars(x).values() if inspect.isfunction(y)]
    for function in dict.fromkeys([*filter(inspect.isfunction, made), *methods]):
        for parameter in inspect.signature(function).parameters.values():
            given, limited = parameter.default, limits(parameter)
            if limited or (given is not inspect.Parameter.empty and is_simple(given)):
                yield f"{function.__qualname__}({parameter.name}={said(given)}){limited}"


def of_names(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        if name.strip("_").isupper() and is_simple(value):
            yield f"{name} = {said(value)}"


def lines() -> list[str]:
    found = []
    for each in sorted(pkgutil.walk_packages(holdfast.cli.__path__, "holdfast.cli."), key=lambda each: each.name):
        if each.name.endswith("__main__"):
            continue
        module = import_module(each.name)
        found += [f"{each.name}: {line}" for line in (*of_functions(module), *of_names(module))]
    return found


if __name__ == "__main__":
    DEFAULTS.write_text("\n".join(lines()) + "\n", encoding="utf-8")
