"""How many warps a launch names: Triton compiles for powers of two alone, which only a GPU would tell."""

import ast
from pathlib import Path

import pytest

from source_tree import nodes, parse, python_files

KERNELS = Path(__file__).parents[2] / "src/holdfast/kernels"


def numbers(tree):
    """A module's constants, of tuples of names too."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names, values = node.targets[0], node.value
            names, values = (x.elts if isinstance(x, ast.Tuple) else [x] for x in (names, values))
            found |= {
                name.id: value.value
                for name, value in zip(names, values, strict=False)
                if isinstance(name, ast.Name) and isinstance(value, ast.Constant)
            }
    return found


def named(path):
    """Line -> warps, of calls of launch whose warps are a number or a module's constant."""
    tree, found = parse(path), {}
    constants = numbers(tree)
    for node in nodes(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "launch":
            continue
        # behind the constants, of which the launches by descriptors have one argument less before them
        for given in node.args[4:6]:
            value = given.value if isinstance(given, ast.Constant) else constants.get(ast.unparse(given))
            if isinstance(value, int):
                found[node.lineno] = value
    return found


LAUNCHES = {path: found for path in python_files(KERNELS) if (found := named(path))}


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.relative_to(KERNELS).as_posix())
def test_warps_are_powers_of_two(path):
    odd = {line: warps for line, warps in LAUNCHES[path].items() if warps not in (1, 2, 4, 8, 16, 32)}
    assert odd == {}


def test_launches_are_found():
    assert sum(map(len, LAUNCHES.values())) >= 20
