"""What is no integer problem in the planner's models, found in a tree of source; test_house.py says what is allowed."""

import ast
from collections.abc import Iterator
from pathlib import Path

from source_tree import nodes, parse, python_files

# calls that decide between values
CHOICES = {"min", "max", "next", "filter", "map", "product", "chain"}
LOOPS = (ast.For, ast.While, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)


def hand_made_plans(source: Path) -> list[str]:
    """Models whose plans are not solutions of an integer problem that they declare, in the package at `source`."""
    found = []
    for path in python_files(source / "planner" / "models"):
        tree = parse(path)
        if makes_plans(tree):
            place = path.relative_to(source)
            found += [] if declares(tree) else [f"{place}: declares no model"]
            found += [f"{place}:{line}: {what}" for line, what in sorted(set(made_by_hand(tree)))]
    return found


def makes_plans(tree: ast.Module) -> bool:
    """Whether the module offers candidates, or a plan with integers in it."""
    offers = any(isinstance(node, ast.FunctionDef) and node.name == "candidates" for node in tree.body)
    return offers or any(called(node) == "Plan" and len(node.args) + len(node.keywords) > 1 for node in nodes(tree))


def declares(tree: ast.Module) -> bool:
    """Whether the module makes a ConstrINT model with constraints or names, or hands on one that another declares."""
    makes = any(called(node) in ("KernelModel", "Model") for node in nodes(tree))
    states = any(called(node) in ("add", "block", "let", "require", "model") for node in nodes(tree))
    return makes and states


def made_by_hand(tree: ast.Module) -> Iterator[tuple[int, str]]:
    numbers = constants_of_numbers(tree)
    for node in nodes(tree):
        if called(node) == "fits":
            yield node.lineno, "asks whether a launch fits, which constraints say"
        if isinstance(node, LOOPS) and any(
            isinstance(part, ast.Yield) or is_candidate(part) for part in ast.walk(node)
        ):
            yield node.lineno, "a loop makes candidates"
        iterable = node.iter if isinstance(node, ast.For | ast.comprehension) else None
        if iterable is not None and is_of_numbers(iterable, numbers):
            yield iterable.lineno, "a loop over numbers of its own"
        if isinstance(node, ast.While):
            yield node.lineno, "a loop until something fits"
        given = node.args if called(node) in CHOICES else []
        if any(is_of_numbers(each, numbers) or called(each) == "range" for each in given):
            yield node.lineno, f"{called(node)} of numbers of its own"


def called(node: ast.AST) -> str:
    """The last name of what a call calls, else nothing."""
    return ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""


def is_candidate(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).removesuffix(".of") == "Candidate"


def constants_of_numbers(tree: ast.Module) -> set[str]:
    """Names of the module's own tuples, lists and dicts of integers."""
    named = [node for node in tree.body if isinstance(node, ast.Assign)]
    return {
        target.id
        for node in named
        if is_of_numbers(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def is_of_numbers(node: ast.AST, numbers: set[str]) -> bool:
    """Whether something to loop over is a literal of integers, a name of one, or a range between constants."""
    if isinstance(node, ast.IfExp):
        return is_of_numbers(node.body, numbers) or is_of_numbers(node.orelse, numbers)
    if isinstance(node, ast.GeneratorExp | ast.ListComp):
        return any(is_of_numbers(each.iter, numbers) for each in node.generators)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(is_number(each) for each in node.elts)
    if isinstance(node, ast.Dict):
        return any(key is not None and is_number(key) for key in node.keys)
    if isinstance(node, ast.Call) and called(node) in ("range", "powers_of_two"):
        return all(is_number(given) for given in node.args)
    name = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(name, ast.Name) and name.id in numbers


def is_number(node: ast.AST) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, int)
