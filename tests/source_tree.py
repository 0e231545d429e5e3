"""Python files of the source tree, as the tests that keep its rules read them."""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return _parsed(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2048)
def _parsed(path: Path, _: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that the module imports, at any depth in its code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            outer = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*outer, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{start}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value)
