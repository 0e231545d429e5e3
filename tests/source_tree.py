"""Python files of the source tree, as the tests that keep its rules read them."""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return _parsed(path.read_text(encoding="utf-8"))


# by the text, which is the same where a test has copied the tree
@lru_cache(maxsize=2048)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def nodes(tree: ast.AST) -> list[ast.AST]:
    """Those of ast.walk, kept with the tree: to walk anew for each rule is most of what the rules take."""
    if not hasattr(tree, "walked"):
        tree.walked = list(ast.walk(tree))
    return tree.walked


def _importing(tree: ast.Module) -> list[ast.AST]:
    """Statements and calls that import, kept with the tree."""
    if not hasattr(tree, "importing"):
        calls = ("import_module", "__import__")
        tree.importing = [
            node
            for node in nodes(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            or (isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in calls)
        ]
    return tree.importing


def imported_names(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that the module imports, at any depth in its code."""
    for node in _importing(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            outer = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*outer, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{start}.{alias.name}"
        else:
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value)
