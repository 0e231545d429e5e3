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


def partitions(path):
    """Line -> warps and registers a thread of a kernel's partitions, where both are written out."""
    found = {}
    for node in nodes(parse(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warp_specialize"):
            lists = [
                [getattr(x, "value", None) for x in each.elts] for each in node.args[1:] if isinstance(each, ast.List)
            ]
            if len(lists) == 2 and all(isinstance(x, int) for each in lists for x in each):
                found[node.lineno] = tuple(lists)
    return found


PARTITIONS = {path: found for path in python_files(KERNELS) if (found := partitions(path))}


@pytest.mark.parametrize("path", PARTITIONS, ids=lambda path: path.relative_to(KERNELS).as_posix())
def test_a_thread_asks_for_registers_that_there_are(path):
    """By eights, from 24 to 256; and a block's partitions together have 65536, beside those of the first."""
    for line, (warps, registers) in PARTITIONS[path].items():
        assert len(warps) == len(registers), line
        assert all(each % 8 == 0 and 24 <= each <= 256 for each in registers), line
        assert all(each in (1, 2, 4, 8) for each in warps), line
        assert sum(32 * n * each for n, each in zip(warps, registers, strict=True)) < 65536, line


def test_partitions_are_found():
    assert sum(map(len, PARTITIONS.values())) >= 8
