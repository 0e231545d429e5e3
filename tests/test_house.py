"""The rules of the house, and proof that each check can fail."""

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from model_rules import hand_made_plans
from source_tree import imported_names, nodes, parse, python_files

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "holdfast"

# From the bottom up. A floor imports from itself and from lower ones, never from a neighbour.
NEIGHBOURS = ("mlx", "parallel", "fuzz", "integrations")
LEVELS = (("planner",), ("recurrences",), ("kernels",), ("ops",), ("nn",), NEIGHBOURS, ("cli",))
HEIGHT = {floor: height for height, floors in enumerate(LEVELS) for floor in floors}
# holdfast/__init__.py and __main__.py see every floor, so only the top floor may import from them.
ROOF = "holdfast"
ON_ROOF = ("__init__", "__main__")

MAX_LINES = 600
WRITTEN_BY_HAND = {".py", ".cu", ".cuh", ".h", ".metal", ".sh", ".md"}


def forbidden_imports(source: Path) -> list[str]:
    """Imports in the package at `source` that climb the floors; in the planner, also any from outside Python itself."""
    found = []
    for path in python_files(source):
        place = path.relative_to(source)
        floor = place.parts[0].removesuffix(".py")
        if floor in ON_ROOF:
            continue
        if floor not in HEIGHT:
            found.append(f"{place}: on no floor")
            continue
        for line, name in imported_names(parse(path), ("holdfast", *place.parts[:-1])):
            top, _, rest = name.partition(".")
            if top != "holdfast":
                if floor == "planner" and top not in sys.stdlib_module_names:
                    found.append(f"{place}:{line}: planner imports {top}")
                continue
            target = rest.split(".")[0]
            if target not in HEIGHT:
                target = ROOF
            is_below = target in HEIGHT and HEIGHT[target] < HEIGHT[floor]
            if not (target == floor or is_below or (target == ROOF and floor == "cli")):
                found.append(f"{place}:{line}: {floor} imports {target}")
    return found


def long_files(root: Path) -> list[str]:
    found = []
    for folder in ("src", "tests", "benchmarks", "experiments"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in WRITTEN_BY_HAND and path.is_file():
                lines = len(path.read_text(encoding="utf-8").splitlines())
                if lines > MAX_LINES:
                    found.append(f"{path.relative_to(root)}: {lines} lines")
    return found


def files_named_utils(root: Path) -> list[str]:
    folders = ("src", "tests", "benchmarks", "experiments")
    return [str(path.relative_to(root)) for folder in folders for path in sorted((root / folder).rglob("utils.py"))]


def environment_reads(source: Path) -> list[str]:
    names = {"environ", "environb", "getenv", "getenvb"}
    found = []
    for path in python_files(source):
        for node in nodes(parse(path)):
            is_attribute = isinstance(node, ast.Attribute) and node.attr in names
            is_import = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and names & {alias.name for alias in node.names}
            )
            if is_attribute or is_import:
                found.append(f"{path.relative_to(source)}:{node.lineno}")
    return found


def modules_without_docstring(source: Path) -> list[str]:
    return [str(path.relative_to(source)) for path in python_files(source) if not ast.get_docstring(parse(path))]


def open_keyword_functions(source: Path) -> list[str]:
    """Public functions and methods of ops that take **kwargs, which would swallow a misspelt argument."""
    found = []
    for path in python_files(source / "ops"):
        tree = parse(path)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for node in [*tree.body, *(node for owner in classes for node in owner.body)]:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not node.name.startswith("_") and node.args.kwarg:
                found.append(f"{path.relative_to(source)}:{node.lineno}: {node.name}")
    return found


# what makes a tensor of the default dtype, which the user sets, where it is told no other
MADE = {"empty", "empty_strided", "empty_permuted", "zeros", "ones", "full", "eye", "arange", "linspace", "logspace"}
MADE |= {"tensor", "as_tensor", "scalar_tensor", "rand", "randn"}


def tensors_without_dtype(source: Path) -> list[str]:
    """Tensors that kernels, ops and mappings make without naming their dtype: a kernel is compiled for one of them."""
    found = []
    for floor in ("kernels", "ops", "recurrences"):
        for path in python_files(source / floor):
            for node in nodes(parse(path)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MADE:
                    is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                    if is_torch and not any(keyword.arg == "dtype" for keyword in node.keywords):
                        found.append(f"{path.relative_to(source)}:{node.lineno}")
    return found


def flags_said_to_be_off(source: Path) -> list[str]:
    """Flags of dataclasses that are False in words, as they are without: a slip, where all others are fixed."""
    found = []
    for path in python_files(source):
        for node in nodes(parse(path)):
            for made in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(made, ast.Call) and ast.unparse(made.func) == "dataclass":
                    off = {flag.arg for flag in made.keywords if ast.unparse(flag.value) == "False"}
                    found += [f"{path.relative_to(source)}: {node.name}: {flag}" for flag in off & {"frozen", "slots"}]
    return found


# files where private names of another package may be used, which look whether they are there
FOR_PRIVATE_NAMES = {
    "kernels/runtime/torch_private.py", "recurrences/torch_private.py",
    "kernels/lib/gluon/compat.py", "kernels/lib/triton/compat.py", "kernels/runtime/driver.py",
}  # fmt: skip
# a name without a meaning for PyTorch or Triton: Python's own, and operators, whose names ATen promises
PYTHONS = {"_asdict", "_exit", "_fields", "_make", "_replace"}
OPERATORS = {"aten", "_aten"}


# to be gone: place -> names. Nothing may come to it
PRIVATE_NAMES_LEFT = {
    "kernels/chunk/intra/hopper/backward_single_tile.py": {"v_tile._keep_alive", "given_tile._keep_alive"}
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_attributes(trees: Iterable[ast.Module]) -> set[str]:
    """Private names that the package's classes have, or that it sets on something."""
    found: set[str] = set()
    for tree in trees:
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                found |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                targets = [x for part in node.body if isinstance(part, ast.Assign) for x in part.targets]
                targets += [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                found |= {x.id for x in targets if isinstance(x, ast.Name)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def private_names(source: Path) -> list[str]:
    """Private names of PyTorch and Triton outside of FOR_PRIVATE_NAMES: imports, attributes, and modules in strings."""
    trees = {path: parse(path) for path in python_files(source)}
    own, found = own_attributes(trees.values()), []
    for path, tree in trees.items():
        place = path.relative_to(source)
        if place.as_posix() in FOR_PRIVATE_NAMES:
            continue
        for line, name in imported_names(tree, ("holdfast", *place.parts[:-1])):
            top, *parts = name.split(".")
            if top in ("torch", "triton") and any(map(is_private, parts)):
                found.append(f"{place}:{line}: {name}")
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | PYTHONS:
                if ast.unparse(node.value).split(".")[-1] not in OPERATORS:
                    found.append(f"{place}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                top, *parts = node.value.split(".")
                if top in ("torch", "triton") and any(map(is_private, parts)) and node.value.isascii():
                    found.append(f"{place}:{node.lineno}: {node.value}")
    return found


def test_floors_import_downwards():
    assert forbidden_imports(SOURCE) == []


def test_every_plan_is_a_solution_of_an_integer_problem():
    assert hand_made_plans(SOURCE) == []


def test_no_file_is_too_long():
    assert long_files(ROOT) == []


def test_no_file_is_named_utils():
    assert files_named_utils(ROOT) == []


def test_source_reads_no_environment_variable():
    assert environment_reads(SOURCE) == []


def test_every_module_has_a_docstring():
    assert modules_without_docstring(SOURCE) == []


def test_public_ops_take_no_open_keywords():
    assert open_keyword_functions(SOURCE) == []


def test_tensors_name_their_dtype():
    assert tensors_without_dtype(SOURCE) == []


def test_dataclasses_are_fixed():
    assert flags_said_to_be_off(SOURCE) == []


def test_private_names_of_others_have_files_of_their_own():
    found: dict[str, set[str]] = {}
    for complaint in private_names(SOURCE):
        place, _, name = complaint.split(":")
        found.setdefault(place, set()).add(name.strip())
    assert found == PRIVATE_NAMES_LEFT


def test_the_checks_see_the_source():
    assert {path.relative_to(SOURCE).parts[0] for path in python_files(SOURCE)} >= {"planner", "kernels", "ops"}


@pytest.fixture
def plant(tmp_path):
    """Writes one file of a small tree and returns the tree's root."""

    def write(place: str, text: str) -> Path:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("place", "code", "complaint"),
    [
        ("kernels/matrix/a.py", "import holdfast.ops.gla", "kernels imports ops"),
        ("kernels/matrix/a.py", "from holdfast.nn import LSTM", "kernels imports nn"),
        ("kernels/matrix/a.py", "from holdfast import ops", "kernels imports ops"),
        ("kernels/matrix/a.py", "from ...ops import gla", "kernels imports ops"),
        ("kernels/matrix/__init__.py", "from ...ops.gla import gla", "kernels imports ops"),
        ("kernels/a.py", "from .. import nn", "kernels imports nn"),
        ("ops/a.py", "def f():\n    if True:\n        from ..nn import lstm", "ops imports nn"),
        ("ops/a.py", "import importlib\nimportlib.import_module('holdfast.nn')", "ops imports nn"),
        ("ops/a.py", "import holdfast", "ops imports holdfast"),
        ("ops/a.py", "from holdfast import gla", "ops imports holdfast"),
        ("ops/a.py", "from holdfast import *", "ops imports holdfast"),
        ("mlx/a.py", "from holdfast.parallel import ring", "mlx imports parallel"),
        ("parallel/a.py", "from holdfast.mlx import gla", "parallel imports mlx"),
        ("nn/a.py", "from holdfast.cli import main", "nn imports cli"),
        ("planner/a.py", "from holdfast.recurrences import gla", "planner imports recurrences"),
        ("planner/a.py", "def f():\n    import torch", "planner imports torch"),
        ("planner/a.py", "from numpy.typing import NDArray", "planner imports numpy"),
        ("attic.py", "", "on no floor"),
    ],
)
def test_an_import_that_climbs_is_found(plant, place, code, complaint):
    (found,) = forbidden_imports(plant(place, code))
    assert found.startswith(place)
    assert found.endswith(complaint)


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("__init__.py", "from holdfast.ops import gla\nfrom .cli import main"),
        ("cli/a.py", "import holdfast\nfrom holdfast import __version__, nn"),
        ("parallel/a.py", "import torch\nfrom ..nn import lstm\nfrom holdfast.planner import Plan"),
        ("kernels/matrix/a.py", "from . import b\nfrom .. import common\nfrom ...planner import Plan\nimport triton"),
        ("kernels/__init__.py", "from .matrix import a\nfrom ..recurrences import gla"),
        ("planner/a.py", "from __future__ import annotations\nimport math\nfrom .device import Device"),
    ],
)
def test_an_import_that_descends_is_allowed(plant, place, code):
    assert forbidden_imports(plant(place, code)) == []


@pytest.mark.parametrize(
    "place", ["src/holdfast/kernels/a.cu", "tests/test_a.py", "benchmarks/a.py", "experiments/a.py"]
)
def test_a_long_file_is_found(plant, place):
    assert long_files(plant(place, "x = 1\n" * MAX_LINES)) == []
    assert long_files(plant(place, "x = 1\n" * (MAX_LINES + 1))) == [f"{place}: {MAX_LINES + 1} lines"]


def test_measured_data_may_be_long(plant):
    assert long_files(plant("benchmarks/results/h200/gla.json", "1\n" * (MAX_LINES + 1))) == []


def test_a_dataclass_that_is_not_fixed_is_found(plant):
    assert flags_said_to_be_off(plant("ops/a.py", "@dataclass(frozen=True, slots=True)\nclass A: ...")) == []
    (found,) = flags_said_to_be_off(plant("ops/a.py", "@dataclass(frozen=False, slots=True)\nclass A: ..."))
    assert found == "ops/a.py: A: frozen"


def test_a_file_named_utils_is_found(plant):
    assert files_named_utils(plant("src/holdfast/ops/utils.py", "")) == ["src/holdfast/ops/utils.py"]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['A']",
        "import os as o\no.getenv('A')",
        "from os import environ",
        "def f():\n    os.environ",
    ],
)
def test_an_environment_variable_is_found(plant, code):
    (found,) = environment_reads(plant("ops/a.py", code))
    assert found.startswith("ops/a.py:")


def test_other_parts_of_os_are_allowed(plant):
    assert environment_reads(plant("ops/a.py", "import os\nfrom os import path\nos.cpu_count()")) == []


def test_a_missing_docstring_is_found(plant):
    plant("ops/a.py", '"""Has one."""\n')
    assert modules_without_docstring(plant("ops/b.py", "x = 1\n")) == ["ops/b.py"]


MODEL = """
def candidates(problem, device, direction):
    return planned(problem, device, direction, Kernel(model, candidate))

def model(problem, device, direction):
    model = KernelModel(device)
    model.variable("rows", powers_of_two(16, 64), "largest")
    model.block(4, 255, 1024)
    return model
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("for rows in (16, 32):\n    pass", "a loop over numbers of its own"),
        ("ROWS = (16, 32)\nfor rows in ROWS if x else (4,):\n    pass", "a loop over numbers of its own"),
        ("WARPS = {2: (4, 8)}\n[x for x in WARPS[size] if x]", "a loop over numbers of its own"),
        ("{rows: f(rows) for rows in powers_of_two(16, 64)}", "a loop over numbers of its own"),
        ("min(range(B // 4, -1, -1), key=seconds)", "min of numbers of its own"),
        ("next(filter(right, [16, 32]))", "filter of numbers of its own"),
        ("while rows * columns > 64:\n    rows //= 2", "a loop until something fits"),
        ("if grid.fits(device):\n    pass", "asks whether a launch fits, which constraints say"),
        ("for found in given:\n    yield found", "a loop makes candidates"),
        ("[Candidate.of(plan) for plan in plans]", "a loop makes candidates"),
    ],
)
def test_a_plan_made_by_hand_is_found(plant, code, said):
    line = len((MODEL + code).splitlines()) - code.count(":\n")
    assert hand_made_plans(plant("planner/models/a.py", MODEL + code)) == [f"planner/models/a.py:{line}: {said}"]


@pytest.mark.parametrize("code", ["def candidates(): return ranked(f())", "p = Plan('decode', (('columns', 32),))"])
def test_a_plan_without_a_model_is_found(plant, code):
    assert hand_made_plans(plant("planner/models/a.py", code)) == ["planner/models/a.py: declares no model"]


def test_models_and_loops_over_names_and_launches_are_allowed(plant):
    plant("planner/models/pytorch.py", "def predicted(): ...\nfor rows in (16, 32):\n    pass")
    more = 'B, T = (problem[name] for name in "BT")\nfor _ in range(windows - 1):\n    whole = whole.after(last)'
    assert hand_made_plans(plant("planner/models/a.py", MODEL + more)) == []


@pytest.mark.parametrize("code", ["def gla(q, **kwargs): ...", "class Gla:\n    def run(self, **rest): ..."])
def test_an_open_keyword_is_found(plant, code):
    (found,) = open_keyword_functions(plant("ops/a.py", code))
    assert found.startswith("ops/a.py:")


def test_open_keywords_are_allowed_in_private_and_elsewhere(plant):
    plant("nn/a.py", "def lstm(**kwargs): ...")
    assert open_keyword_functions(plant("ops/a.py", "def _gla(**kwargs): ...\ndef gla(q, k): ...")) == []


@pytest.mark.parametrize(
    "code",
    ["torch.empty(3, device=d)", "torch.zeros(shape)", "f(torch.full(\n    (2,),\n    0.0,\n))", "torch.tensor([1])"],
)
@pytest.mark.parametrize("floor", ["kernels", "ops", "recurrences"])
def test_a_tensor_without_dtype_is_found(plant, code, floor):
    (found,) = tensors_without_dtype(plant(f"{floor}/a.py", f"import torch\n{code}"))
    assert found == f"{floor}/a.py:2"


def test_tensors_with_a_dtype_or_one_to_be_like_are_allowed(plant):
    code = "torch.empty(3, dtype=torch.float32)\nx.new_empty(3)\ntorch.zeros_like(x)\ntorch.exp(x)\nnp.zeros(3)"
    plant("nn/a.py", "torch.ones(3)")
    assert tensors_without_dtype(plant("kernels/a.py", code)) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch import _C", "torch._C"),
        ("from triton.compiler.code_generator import _is_gluon", "triton.compiler.code_generator._is_gluon"),
        ("import torch\ntorch._C.is_there", "torch._C"),
        ("from torch.autograd import forward_ad\nforward_ad._current_level", "forward_ad._current_level"),
        ("def count(x):\n    return x._version", "x._version"),
        ("import sys\n'torch._dynamo' in sys.modules", "torch._dynamo"),
        ("@gluon.jit\ndef kernel(tile):\n    tile._keep_alive()", "tile._keep_alive"),
    ],
)
def test_a_private_name_of_another_package_is_found(plant, code, name):
    # a function of that name is no attribute of anything
    plant("cli/b.py", "def _version(): ...")
    (found,) = private_names(plant("ops/a.py", code))
    assert found.startswith("ops/a.py:")
    assert found.endswith(f": {name}")


def test_own_private_names_and_files_for_others_are_allowed(plant):
    code = "import torch\nfrom torch.utils._pytree import tree_map\ntorch._C.is_there"
    for place in FOR_PRIVATE_NAMES:
        plant(place, code)
    plant("nn/b.py", "class A:\n    _kept = 1\n    def _run(self):\n        self._held = 2")
    own = "from .b import _other\na._kept, a._run(), a._held, call._replace(x=1), os._exit(0)\ntorch.__version__"
    assert private_names(plant("nn/a.py", f"{own}\ntorch.ops.aten._to_copy")) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uninitialised_memory_is_nan(dtype):
    x = torch.ones(3, 4, dtype=dtype)
    made = (torch.empty(5, dtype=dtype), torch.empty_like(x), x.new_empty(7), x.new_empty_strided((2, 2), (4, 1)))
    assert all(m.isnan().all() for m in made)


@pytest.mark.gpu
def test_uninitialised_memory_is_nan_on_the_gpu():
    x = torch.ones(3, 4, device="cuda")
    assert all(m.isnan().all() for m in (torch.empty(5, device="cuda"), torch.empty_like(x), x.new_empty(7)))


@pytest.mark.parametrize("run", [1, 2])
def test_each_test_starts_from_the_same_seed(run, request):
    drawn = torch.rand(()).item()
    first = request.config.stash.setdefault(DRAWN, drawn)
    assert drawn == first


DRAWN = pytest.StashKey[float]()
