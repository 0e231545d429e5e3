"""What Python leaves open where nothing is said, the planner and the commands say: values do not change, and what goes
together is as long. And what is drawn where nobody names a seed is the same in each run."""

import ast
from pathlib import Path

import pytest

from source_tree import nodes, parse, python_files

SOURCE = Path(__file__).resolve().parents[1] / "src" / "holdfast"
# cached properties need a place for what they keep
WITHOUT_SLOTS = {"planner/movement/chain.py: Chain"}
# of an op's outputs the last ones may be left out
SHORTER = ["cli/bench/measure.py"]


def said(call: ast.expr) -> set[str]:
    """The options of a call that are True."""
    keywords = call.keywords if isinstance(call, ast.Call) else []
    return {x.arg for x in keywords if isinstance(x.value, ast.Constant) and x.value.value is True}


def values(floor: str) -> dict[str, set[str]]:
    """Each dataclass and what its decorator says."""
    return {
        f"{path.relative_to(SOURCE)}: {node.name}": said(decorator)
        for path in python_files(SOURCE / floor)
        for node in nodes(parse(path))
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if ast.unparse(decorator).startswith("dataclass")
    }


def test_the_planners_values_do_not_change_and_take_little_room():
    """Thousands of them are made for a plan."""
    found = values("planner")
    assert found
    assert {name for name, options in found.items() if options != {"frozen", "slots"}} == WITHOUT_SLOTS
    assert all(found[name] == {"frozen"} for name in WITHOUT_SLOTS)


def test_the_commands_values_do_not_change():
    found = values("cli")
    assert found
    assert [name for name, options in found.items() if options != {"frozen"}] == []


@pytest.mark.parametrize("floor", ["planner", "cli"])
def test_what_goes_together_is_as_long(floor):
    zips = [
        (str(path.relative_to(SOURCE)), "strict" in said(node))
        for path in python_files(SOURCE / floor)
        for node in nodes(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip"
    ]
    assert zips
    assert [path for path, is_strict in zips if not is_strict] == (SHORTER if floor == "cli" else [])


# of what the bench and a sample draw, by the file and the parameter; weights by torch's own generator with 0
SEEDS = {
    "cli/config.py: seed": 0,
    "cli/train_parity.py: seed": 0,
    "cli/train.py: seed": 0,
    "cli/generate.py: seed": 0,
    "cli/bench/case.py: seed": 0,
    "cli/bench/measure.py: seed": 1,
    "cli/bench/models/check.py: torch.Generator().manual_seed": 1,
    "cli/bench/models/training.py: torch.Generator().manual_seed": 0,
    "cli/bench/peers/torch_nn.py: torch.manual_seed": 0,
    **{
        f"cli/bench/models/{file}.py: torch.manual_seed": 0 for file in ("model", "check", "decoding", "layers", "host")
    },
}


def seeds(tree: ast.Module) -> dict[str, object]:
    """Calls of manual_seed with a number, and defaults of what is named seed."""
    found: dict[str, object] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "manual_seed":
            if not isinstance(node.args[0], ast.Name | ast.Attribute | ast.BinOp):
                found[ast.unparse(node.func)] = ast.literal_eval(node.args[0])
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "seed" and node.value:
            found["seed"] = ast.literal_eval(node.value)
        elif isinstance(node, ast.arguments) and node.defaults:
            named = zip(node.args[-len(node.defaults) :], node.defaults, strict=True)
            found |= {name.arg: ast.literal_eval(value) for name, value in named if name.arg == "seed"}
    return {name: seed for name, seed in found.items() if seed is not None}


def test_runs_draw_the_same():
    files = {path.relative_to(SOURCE): seeds(parse(path)) for path in python_files(SOURCE / "cli")}
    assert {f"{path}: {name}": seed for path, found in files.items() for name, seed in found.items()} == SEEDS
