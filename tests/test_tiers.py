"""The tiers of the suite leave nothing out: what `make test` does not run, `make test-all` does."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiers import OneTriton, is_slow_by_name, line_of_what_is_left

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def test_plain(): ...
@pytest.mark.slow
def test_slow(): ...
@pytest.mark.gpu
def test_gpu(): ...
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_both(n): ...
"""
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make, whose recipes these are")


def options_of_tiers() -> list[list[str]]:
    """What the recipes behind `make test-all` give pytest, but for newest-triton's, which runs tests a second time."""
    # a make that runs this test passes its own arguments on
    passed_on = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in passed_on}
    command = ["make", "-n", "test-all"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return [shlex.split(found) for found in re.findall(r"^\.venv/bin/python -m pytest (.*)$", said, re.MULTILINE)]


def collected(options: list[str], *where: object, folder: Path = ROOT) -> tuple[list[str], list[str]]:
    """The tests that pytest chooses, and all that it prints."""
    alone = ["-p", "no:cacheprovider", "--collect-only", "-n", "0"]
    command = [sys.executable, "-m", "pytest", *(options or ["-q"]), *alone, *map(str, where)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return [line for line in lines if "::" in line and " " not in line.partition("[")[0]], lines


@needs_make
def test_each_test_is_in_one_tier(tmp_path):
    (tmp_path / "test_a.py").write_text(TESTS)
    settings = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path]
    chosen = [collected(options, *settings)[0] for options in options_of_tiers()]
    assert [[test.partition("::")[2] for test in tests] for tests in chosen] == [
        ["test_plain", "test_gpu"],
        ["test_slow", "test_both[1]", "test_both[2]"],
    ]


@needs_make
@pytest.mark.slow
def test_the_suites_tiers_hold_all_of_it():
    (first, printed), (rest, _) = (collected(options) for options in options_of_tiers())
    # what pytest says at the end: "so many/of all tests collected (the others deselected)"
    (of_all,) = (int(found[1]) for line in printed if (found := re.match(r"\d+/(\d+) tests collected", line)))
    assert len(first) > 1000
    assert len({*first} | {*rest}) == len(first) + len(rest) == of_all
    assert line_of_what_is_left(len(rest)) in printed
    assert not [test for test in first if is_slow_by_name(test.partition("[")[0].removeprefix("tests/"))]


SIZES = """
import pytest

@pytest.mark.sizes("K", "V")
@pytest.mark.parametrize(("K", "V", "beta"), [(64, 64, 0), (64, 128, 0), (64, 64, 1)])
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles(capability, K, V, beta): ...
@pytest.mark.parametrize("K", [64, 128])
def test_that_compiles(K): ...
def test_all_compile(): ...
def test_cuda_compiles(): ...
"""


@needs_make
def test_newest_triton_compiles_each_kernel_once_for_hopper(tmp_path):
    (tmp_path / "test_a.py").write_text(SIZES)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    recipe = re.search(r"pytest (.*) tests/kernels (.*) \$\(ARGS\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    options = shlex.split(f"{recipe[1]} {recipe[2]}")
    tests, _ = collected(options, "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path)
    assert [test.partition("::")[2] for test in tests] == [
        "test_it_compiles[90-64-64-0]",
        "test_it_compiles[90-64-64-1]",
        "test_that_compiles[64]",
        "test_that_compiles[128]",
        "test_all_compile",
    ]


def test_the_first_of_cases_that_differ_in_sizes_is_compiled():
    one = OneTriton()
    assert one.has("a", {"K": 64, "target": 100}, ("K",))
    assert not one.has("a", {"K": 64, "beta": None}, ("K",))
    assert one.has("a", {"beta": None, "K": 128}, ("K",))
    assert not one.has("a", {"K": 128, "beta": 1}, ("K",))
    assert not one.has("b", {"K": 128, "beta": None}, ("K",))


@needs_make
def test_ci_runs_both_tiers_and_the_first_once():
    said = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make (.*test.*)$", said, re.MULTILINE) == ["test test-all"]
    tiers = options_of_tiers()
    assert [options[options.index("-m") + 1] for options in tiers] == ["not slow", "slow"]
    # nothing that would choose among the tests, or name some of them
    assert not {"-k", "--ignore", "--deselect", "--lf"} & {option for options in tiers for option in options}
    assert all(not Path(ROOT, option).exists() for options in tiers for option in options)


@pytest.mark.parametrize(
    ("test", "is_slow"),
    [
        ("kernels/matrix/scalar_decay/hopper/test_backend.py::test_plans_compile_and_fit", True),
        ("kernels/matrix/vector_decay/triton/test_backend.py::test_compiles_packed", True),
        ("kernels/dense/triton/test_backend.py::test_it_compiles_and_keeps_its_registers", True),
        ("kernels/diagonal/triton/test_backend.py::TestScan::test_it_compiles", True),
        ("kernels/matrix/scalar_decay/hopper/test_backend.py::test_right_on_the_emulator", False),
        ("kernels/matrix/scalar_decay/hopper/test_backend.py::test_compilers_are_named", False),
        ("kernels/runtime/test_compile_pool.py::test_a_child_process_compiles_itself", False),
        ("ops/test_matrix.py::test_compiles_as_one_graph", False),
    ],
)
def test_what_compiles_kernels_is_slow_by_its_name(test, is_slow):
    assert is_slow_by_name(test) == is_slow


COMPILERS = {"compile_for", "compile_launch"}


def quick_tests_that_compile(text: str, path: str) -> list[str]:
    """Tests that call a compiler, themselves or through functions of their file, and are slow neither by name nor mark.

    path: of the file, from the folder of the tests on.
    """
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    used = {
        name: {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        | {argument.arg for argument in function.args.args}
        for name, function in functions.items()
    }
    compiling: set[str] = set()
    while more := {name for name in used if used[name] & (COMPILERS | compiling)} - compiling:
        compiling |= more
    return [
        f"{path}::{name}"
        for name in sorted(compiling)
        if name.startswith("test_")
        and not is_slow_by_name(f"{path}::{name}")
        and not any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in functions[name].decorator_list)
    ]


def test_what_compiles_kernels_is_slow():
    tests = ROOT / "tests"
    found = [
        test
        for path in sorted(tests.rglob("test_*.py"))
        for test in quick_tests_that_compile(path.read_text(encoding="utf-8"), path.relative_to(tests).as_posix())
    ]
    assert not found, f"@pytest.mark.slow is missing: {found}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def test_it_fits():\n    compile_for(kernel, 90, {})", True),
        ("def made():\n    return compile_launch(x)\ndef test_it_fits():\n    made()", True),
        ("@pytest.fixture\ndef made():\n    return compile_launch(x)\ndef test_it_fits(made): ...", True),
        ("@pytest.mark.slow\ndef test_it_fits():\n    compile_for(kernel, 90, {})", False),
        ("def test_it_compiles():\n    compile_for(kernel, 90, {})", False),
        ("def made():\n    return compile_launch(x)\ndef test_it_fits(): ...", False),
    ],
)
def test_a_quick_test_that_compiles_is_found(code, found):
    assert bool(quick_tests_that_compile(code, "kernels/matrix/test_a.py")) == found
