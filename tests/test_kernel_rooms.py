"""The rules of the kernels' rooms (kernels/README.md), and proof that each check can fail.

What broke them when they were made is listed in kernel_rooms.toml. A list is what is found, no more and no less: a new
offender fails, and so does one that is mended and still listed. The failure prints the list as it should be.
"""

import tomllib
from pathlib import Path

import pytest

import kernel_rooms as rooms

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "holdfast"
README = SOURCE / "kernels" / "README.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
LISTS = Path(__file__).with_name("kernel_rooms.toml")
MOST_FILES = 15

# rule -> its check. Those of names alone list places, the others count.
RULES = {
    "crossings": rooms.crossings,
    "between_targets": rooms.between_targets,
    "told_twice": rooms.told_twice,
    "parameters": rooms.with_many_parameters,
    "holes": rooms.holes,
    "launches_elsewhere": rooms.launches_elsewhere,
    "past_the_backend": rooms.past_the_backend,
    "synonyms": lambda source: rooms.synonyms(source, rooms.banned_words(GLOSSARY.read_text())),
    "same_entries": rooms.same_entries,
}


def counted(found: list[str] | dict[str, int]) -> dict[str, int]:
    return found if isinstance(found, dict) else dict.fromkeys(found, 1)


def complaint(rule: str, listed: dict[str, int], found: dict[str, int]) -> str:
    """What is new and what may be taken out of a rule's list, and the list as it should be; "" if it is that."""
    more = {place: count for place, count in found.items() if count > listed.get(place, 0)}
    less = {place: count for place, count in listed.items() if count > found.get(place, 0)}
    if not more and not less:
        return ""
    lines = [f"new: {place}: {listed.get(place, 0)} -> {count}" for place, count in more.items()]
    lines += [f"mended, so take it out: {place}: {count} -> {found.get(place, 0)}" for place, count in less.items()]
    table = [f'"{place}" = {count}' for place, count in sorted(found.items())]
    return "\n".join(
        [*lines, f"with what is mended taken out and nothing mended, {LISTS.name} reads:", f"[{rule}]", *table]
    )


@pytest.mark.parametrize("rule", RULES)
def test_the_house_has_no_offender_but_those_listed(rule):
    listed = tomllib.loads(LISTS.read_text()).get(rule, {})
    told = complaint(rule, listed, counted(RULES[rule](SOURCE)))
    assert not told, told


def test_every_list_is_of_a_rule():
    assert set(tomllib.loads(LISTS.read_text())) <= set(RULES)


@pytest.mark.parametrize("check", [rooms.upward, rooms.other_aggregates])
def test_the_house_has_no_offender(check):
    assert check(SOURCE) == []


def test_rooms_are_not_full():
    assert rooms.full_rooms(SOURCE, MOST_FILES) == []


def test_file_names_are_those_of_the_readme():
    listed, found = rooms.listed_stems(README.read_text()), rooms.stems(SOURCE)
    assert len(listed) == len(set(listed)), "a name stands there twice"
    assert {name: places for name, places in found.items() if name not in listed} == {}
    assert set(listed) - set(found) == set(), "no file has this name"


def test_the_readme_maps_every_room():
    text = README.read_text()
    found = {rooms.room_of(module.path.parts[:-1]) for module in rooms.modules(SOURCE) if len(module.path.parts) > 1}
    assert [room for room in sorted(found) if f"`{'/'.join(room)}/" not in text] == []


def test_a_list_is_what_is_found():
    assert complaint("holes", {"a": 2, "b": 1}, {"a": 2, "b": 1}) == ""
    for listed, found in (({}, {"a": 1}), ({"a": 1}, {}), ({"a": 1}, {"a": 2}), ({"a": 2}, {"a": 1})):
        told = complaint("holes", listed, found)
        assert ("mended" in told.splitlines()[0]) == (listed.get("a", 0) > found.get("a", 0))
        assert told.endswith("[holes]" + "".join(f'\n"{place}" = {count}' for place, count in found.items()))


@pytest.fixture
def plant(tmp_path):
    """Writes files of a small house, by their places below holdfast/, and returns its root. Folders hold no file."""

    def write(files: dict[str, str]) -> Path:
        rooms_there = ("matrix/gla/hopper", "matrix/gla/triton", "matrix/ssd/triton", "matrix/state_passing")
        for folder in (*rooms_there, "lib/gluon/hopper", "runtime", "dense", "norm/triton"):
            (tmp_path / "kernels" / folder).mkdir(parents=True, exist_ok=True)
        for folder in ("gla", "ssd"):
            (tmp_path / "planner" / "models" / "matrix" / folder).mkdir(parents=True, exist_ok=True)
        for place, text in files.items():
            path = tmp_path / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


GLA = "kernels/matrix/gla/hopper/a.py"
# apart, since the names of modules that are not there are found in this file too
HOUSE = "holdfast"


@pytest.mark.parametrize(
    ("place", "code", "target"),
    [
        (GLA, f"from {HOUSE}.kernels.matrix.ssd.triton import forward", "kernels.matrix.ssd"),
        (GLA, "from ...ssd.triton.forward import forward", "kernels.matrix.ssd"),
        (GLA, "def f():\n    import holdfast.kernels.dense.saved", "kernels.dense"),
        (GLA, f"from {HOUSE}.planner.models.matrix.ssd import hopper", "planner.models.matrix.ssd"),
        ("kernels/matrix/wide.py", "from .ssd.triton.backend import A", "kernels.matrix.ssd"),
        ("kernels/dense/a.py", "from holdfast.kernels.matrix import args", "kernels.matrix"),
    ],
)
def test_a_crossing_is_found(plant, place, code, target):
    assert rooms.crossings(plant({place: code})) == [f"{place.removeprefix('kernels/')} -> {target}"]


@pytest.mark.parametrize(
    "code",
    [
        "from ..triton.forward import forward\nfrom . import launch",
        "from holdfast.kernels.lib.gluon.pdl import wait\nfrom holdfast.kernels.runtime import launch",
        "from holdfast.kernels.matrix.args import A\nfrom holdfast.kernels.backend import Backend",
        "from holdfast.kernels.matrix.state_passing.hopper.launch import run",
        f"from {HOUSE}.planner.models.matrix.gla import hopper\nfrom holdfast.planner.models.matrix.wide import Cut",
        "from holdfast.planner import Plan\nimport torch",
    ],
)
def test_what_a_room_may_import(plant, code):
    assert rooms.crossings(plant({GLA: code})) == []


def test_what_hopper_takes_from_triton_is_found(plant):
    code = f"from ..triton.launch import a\nfrom {HOUSE}.kernels.matrix.gla.triton import states\n"
    allowed = "from ..triton.segment_scan import b\nfrom holdfast.kernels.lib.triton import tiles\n"
    found = rooms.between_targets(plant({GLA: code + allowed}))
    assert found == ["matrix/gla/hopper/a.py -> triton.launch", "matrix/gla/hopper/a.py -> triton.states"]


@pytest.mark.parametrize(
    ("place", "code", "is_found"),
    [
        ("kernels/runtime/a.py", "from holdfast.kernels.lib.gluon import pdl", True),
        ("kernels/runtime/a.py", "from ..matrix.args import A", True),
        ("kernels/runtime/a.py", "from .launch import launch\nfrom holdfast.kernels import backend", False),
        ("kernels/lib/gluon/a.py", "from holdfast.kernels.dense import saved", True),
        ("kernels/lib/gluon/a.py", "from .hopper import wgmma", True),
        ("kernels/lib/gluon/hopper/a.py", "from . import wgmma\nfrom ..pdl import wait", False),
        ("kernels/lib/triton/a.py", "from holdfast.kernels.runtime import launch", False),
        ("kernels/autograd/a.py", "from holdfast.kernels.dense import saved", True),
    ],
)
def test_what_serves_all_knows_no_room(plant, place, code, is_found):
    assert bool(rooms.upward(plant({place: code}))) == is_found


def test_file_names_are_read():
    text = "| `no` | |\n\n## The files of a room\n\n| name | step |\n| --- | --- |\n"
    text += "| `forward`, `forward_mma` | `not_this` |\n\n## More\n| `nor` |"
    assert rooms.listed_stems(text) == ["forward", "forward_mma"]


def test_file_names_are_found(plant):
    files = {"kernels/matrix/args.py": "", "kernels/dense/cuda/grid.cu": "", GLA: "", "kernels/runtime/launch.py": ""}
    assert set(rooms.stems(plant({**files, "kernels/select.py": "", "kernels/dense/__init__.py": ""}))) == {
        "args", "grid", "a",
    }  # fmt: skip


def test_a_name_that_the_path_says_is_found(plant):
    bad = ["matrix/gla/hopper/gla_forward.py", "dense/triton_loop.py", "matrix/gla/hopper/a_b_c_d.py", "norm/x_ssd.py"]
    good = ["matrix/gla/hopper/glad.py", "matrix/gla/hopper/a_b_c.py", "matrix/ssd/triton/chunk_inverse.py"]
    found = rooms.told_twice(plant({f"kernels/{place}": "" for place in bad + good}))
    assert found == sorted(bad)


JITS = """
@gluon.jit
def leaf({leaf}): return a0
@gluon.jit
def entry({entry}): warp_specialize([(leaf, ())])
class Each:
    @gluon.jit
    def method(self, {method}): return leaf(1)
def host(self, {host}): entry[(1,)]()
"""


def many(count):
    return ", ".join(f"a{n}" for n in range(count))


def test_many_parameters_are_found(plant):
    few = JITS.format(leaf=many(8), entry=many(40), method=many(8), host=many(10))
    assert rooms.with_many_parameters(plant({GLA: few})) == {}
    more = JITS.format(leaf=many(9), entry=many(41), method=many(9), host=many(11))
    assert rooms.with_many_parameters(plant({GLA: more})) == {
        "device matrix/gla/hopper/a.py leaf": 9,
        "device matrix/gla/hopper/a.py method": 9,
        "entry matrix/gla/hopper/a.py entry": 41,
        "host matrix/gla/hopper/a.py host": 11,
    }


@pytest.mark.parametrize(
    "call", ["from .b import f\n{}f()", "from . import b\n{}b.f()", "from .b import f as g\n{}g()"]
)
def test_a_function_that_another_file_calls_is_no_entry(plant, call):
    b = f"@triton.jit\ndef f({many(12)}): pass"
    caller = call.format("@triton.jit\ndef k(): ")
    found = rooms.with_many_parameters(plant({GLA: caller, "kernels/matrix/gla/hopper/b.py": b}))
    assert found == {"device matrix/gla/hopper/b.py f": 12}


def test_holes_are_found(plant):
    code = "@gluon.jit\ndef f(x):\n    a, _, (b, _) = x\n    _ = x\n    for _, c in x: pass\ndef g(x): _, a = x"
    assert rooms.holes(plant({GLA: code})) == {"matrix/gla/hopper/a.py f": 3}


@pytest.mark.parametrize(
    ("place", "code", "is_found"),
    [
        (GLA, "from holdfast.kernels.runtime.launch import launch", True),
        (GLA, "def f():\n    from holdfast.kernels.runtime.descriptor_launch import launch as go", True),
        (GLA, "kernel[(1, 2)](x)", True),
        (GLA, "kernel[grid](x)", True),
        (GLA, "TABLE[name](x)", False),
        (GLA, "@gluon.jit\ndef f(x): x[(1, 2)]()", False),
        (GLA, "from holdfast.kernels.runtime.launch import on_device_of", False),
        ("kernels/matrix/gla/hopper/launch_back.py", "kernel[grid](x)", False),
        ("kernels/runtime/a.py", "kernel[grid](x)", False),
    ],
)
def test_a_launch_elsewhere_is_found(plant, place, code, is_found):
    assert bool(rooms.launches_elsewhere(plant({place: code}))) == is_found


def test_what_ops_takes_but_a_backend_is_found(plant):
    bad = f"from {HOUSE}.kernels.matrix.gla.hopper.backend import kept_shape\n"
    bad += "def f():\n    from holdfast.kernels.norm.triton import rows\n"
    good = (
        f"from {HOUSE}.kernels.matrix.gla.hopper.backend import Gla\nfrom holdfast.kernels.matrix.args import empty\n"
    )
    good += "from holdfast.kernels.select import resolve\nfrom holdfast.kernels.runtime.launch import launch\n"
    assert rooms.past_the_backend(plant({"ops/gla.py": bad + good})) == [
        "ops/gla.py -> matrix.gla.hopper.backend.kept_shape",
        "ops/gla.py -> norm.triton.rows",
    ]


def test_a_full_room_is_found(plant):
    root = plant({f"kernels/dense/{n}.cu": "" for n in range(3)})
    assert rooms.full_rooms(root, 3) == []
    assert rooms.full_rooms(root, 2) == ["kernels/dense: 3 files"]


def test_synonyms_are_found(plant):
    code = "def _sweep_all(kept, x): sweep_kept = swept = 1\nclass KeptSweep: pass\nx.kept\n"
    code += "SWEEP, x.place_of, placed_of = 1, 2, 3"
    found = rooms.synonyms(plant({GLA: code, "kernels/dense/a.py": "kept = 1"}), ("sweep", "kept", "place_of", "no"))
    assert found == {"kept": 4, "place_of": 1, "sweep": 4}


def test_banned_words_are_those_of_the_glossary():
    page = "# G\n\n## A\n\n| term | meaning | from | instead of |\n| --- | --- | --- | --- |\n"
    page += "| saved | x `y` | JAX | `kept`, `keeps` |\n| gate | z | | |\n\n"
    page += "## B\n\n| term | meaning |\n| --- | --- |\n| `z` | `w` |\n"
    assert rooms.banned_words(page) == {"kept": ["saved"], "keeps": ["saved"]}
    assert rooms.banned_words(GLOSSARY.read_text())


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("from triton.language.core import _aggregate as aggregate", True),
        ("from triton.experimental.gluon import aggregate", True),
        ("from triton.language import core\n@core._aggregate\nclass A: pass", True),
        ("from holdfast.kernels.lib.gluon.compat import aggregate\n@aggregate\nclass A: pass", False),
        ("from holdfast.kernels.lib.triton.compat import aggregate, gl\n@aggregate\nclass A: pass", False),
        (
            "from __future__ import annotations\nfrom holdfast.kernels.lib.gluon.compat import aggregate\n"
            "@aggregate\nclass A: pass",
            True,
        ),
        ("from __future__ import annotations\nfrom holdfast.kernels.lib.gluon.compat import gl", False),
    ],
)
def test_another_aggregate_is_found(plant, code, is_found):
    shim = {"kernels/lib/gluon/compat.py": "from triton.language.core import _aggregate as aggregate"}
    assert bool(rooms.other_aggregates(plant({GLA: code, **shim}))) == is_found


def test_entries_of_one_name_are_found(plant):
    entry = (
        "@triton.jit\ndef forward(): pass\n@triton.jit\ndef {}(): forward_part()\n@triton.jit\ndef forward_part(): pass"
    )
    files = {GLA: entry.format("gla"), "kernels/dense/a.py": entry.format("dense")}
    assert rooms.same_entries(plant(files)) == {"forward": 2}
