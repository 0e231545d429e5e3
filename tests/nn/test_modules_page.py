"""docs/modules.md cannot go stale: it has every module with its constructor as it is."""

import inspect
from pathlib import Path

import pytest

import holdfast.nn

PAGE = Path(__file__).parents[2] / "docs" / "modules.md"


def constructor(name: str) -> str:
    parameters = inspect.signature(getattr(holdfast.nn, name)).parameters.values()
    arguments, keyword_only = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            arguments.append("*")
        keyword_only = keyword_only or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        star = "*" * (p.kind is p.VAR_POSITIONAL)
        arguments.append(star + p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return f"{name}({', '.join(arguments)})"


@pytest.mark.parametrize("name", holdfast.nn.__all__)
def test_every_module_is_on_the_page(name):
    text = " ".join(PAGE.read_text().split())
    assert constructor(name) in text
