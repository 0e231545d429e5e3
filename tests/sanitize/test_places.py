"""Which of several files of one name a sanitizer means, in a planted tree of kernels and in the house's own."""

import re
import shutil
from types import SimpleNamespace

import pytest

from holdfast.kernels.runtime import nvrtc
from sanitize import races, sources, worker
from sanitize.findings import findings
from sanitize.places import AMBIGUOUS, first_warps, is_there, located, place, stands
from sanitize.sources import HOUSE, Tree

TREE = {
    # two kernels of one name; the second one's last line has a number at which the first file has nothing
    "a/hopper/forward.py": """\
from holdfast.kernels.lib.gluon.decay import load
from ...lib.gluon.hand_on import total
from .forward_mma import multiply
from .decay import weigh

@gluon.jit
def gate(x):
    weigh(x)
    load(x)

@gluon.jit
def fwd(x):
    total(x)
    gl.warp_specialize([(multiply, (x,)), (gate, (x,))], [1], [24])
    x.load()
""",
    "a/hopper/forward_mma.py": """\



@gluon.jit
def multiply(x):
    x.one()
    x.two()
    x.three()
    x.four()
    x.five()
    x.six()
    x.seven()
    x.eight()
    x.nine()
    x.ten()
    x.eleven()
""",
    # lines 4 and 5 stand in a function here and in lib; 7 and 8 here alone, 10 and 11 there alone
    "a/hopper/decay.py": """\


@gluon.jit
def weigh(x):
    x.store(1)

def on_the_host(x):
    return x
""",
    "lib/gluon/decay.py": """\


@gluon.jit
def load(x):
    x.store(2)



@gluon.jit
def load_more(x):
    x.store(3)
""",
    "lib/gluon/hand_on.py": "from .sums import Sums as total\n",
    "lib/gluon/sums.py": """\
class Sums:
    @gluon.jit
    def add(self, x):
        more(x)

@gluon.jit
def more(x):
    x.store(4)
""",
    "b/hopper/forward.py": """\
from ...lib.gluon import decay

@gluon.jit
def fwd(x):
    decay.load_more(x)







    x.store()


    x.store()
""",
    "b/hopper/sums.py": """\
@gluon.jit
def other(x):
    x.store(5)
    x.store(6)
""",
    "dense/cuda/one_block/forward.cu": "__global__ void one(int x) {\n}\n",
    "dense/cuda/ptx.cuh": "\n",
}
A, B = "a/hopper/forward.py", "b/hopper/forward.py"


@pytest.fixture
def tree(tmp_path):
    for file, text in TREE.items():
        path = tmp_path / "kernels" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(tmp_path / "kernels")


def without(tree: Tree, room: str) -> Tree:
    """The same tree, in another place, without what is in a room."""
    other = tree.root.with_name("other")
    shutil.copytree(tree.root, other, ignore=shutil.ignore_patterns(room))
    return Tree(other)


def test_kernels_and_what_they_reach(tree):
    ours = {name for name in tree.kernels if name not in sources.MADE}
    assert ours == {"a.hopper.forward.fwd", "b.hopper.forward.fwd", "b.hopper.sums.other", "dense.cuda.one"}
    first, second = tree.entries("fwd")
    # through a name that another file hands on, and a class's method; another room's, and a module's function
    assert tree.reached(first) == {
        "a.hopper.forward.fwd",
        "a.hopper.forward.gate",
        "a.hopper.forward_mma.multiply",
        "a.hopper.decay.weigh",
        "lib.gluon.decay.load",
        "lib.gluon.sums.Sums",
        "lib.gluon.sums.more",
    }
    assert tree.reached(second) == {"b.hopper.forward.fwd", "lib.gluon.decay.load_more"}
    assert (tree.entries("one"), tree.entries("step_forward"), tree.entries("")) == ([], [], [])


def test_a_name_that_one_file_has_needs_no_kernel(tree):
    assert located("forward_mma.py", 6, "", tree=tree) == "a/hopper/forward_mma.py"
    assert located("forward_mma.py", 6, "triton_poi_fused", tree=tree) == "a/hopper/forward_mma.py"


def test_the_kernel_tells_its_own_file(tree):
    # Sums is in fwd's reach, the other file of the name in that of the kernel `other` alone
    assert located("sums.py", 3, "fwd", tree=tree) == "lib/gluon/sums.py"
    assert located("sums.py", 3, "other", tree=tree) == "b/hopper/sums.py"


def test_the_line_tells_files_apart_that_a_kernel_reaches_both(tree):
    one = without(tree, "b")
    assert located("decay.py", 7, "fwd", tree=one) == "a/hopper/decay.py or lib/gluon/decay.py"
    (one.root / "a/hopper/decay.py").write_text(TREE["a/hopper/decay.py"].replace("\n\n@", "\n\n\n\n\n\n\n@"))
    one = Tree(one.root)
    assert located("decay.py", 5, "fwd", tree=one) == "lib/gluon/decay.py"
    assert located("decay.py", 10, "fwd", tree=one) == "a/hopper/decay.py"


def test_what_cannot_be_told_is_not_guessed(tree):
    both = "a/hopper/decay.py or lib/gluon/decay.py"
    one = without(tree, "b")
    assert located("decay.py", 5, "fwd", tree=one) == both
    assert place(both, 5, one) == ("", AMBIGUOUS)
    assert is_there(both, one)
    assert not stands(both, "", AMBIGUOUS, one)
    # no kernel, or none of the house's
    assert located("forward.py", 4, "", tree=tree) == f"{A} or {B}"
    assert located("forward.py", 4, "triton_poi_fused", tree=tree) == f"{A} or {B}"
    # the function tells, if it is said, and so do folders
    assert located("decay.py", 5, "fwd", "weigh", tree=one) == "a/hopper/decay.py"
    assert located("decay.py", 5, "fwd", "load", tree=one) == "lib/gluon/decay.py"
    assert located("decay.py", 5, "fwd", "fwd", tree=one) == both
    assert located("/x/holdfast/kernels/lib/gluon/decay.py", 5, "fwd", tree=one) == "lib/gluon/decay.py"


def test_two_kernels_of_one_name_are_told_apart_by_the_line(tree):
    assert located("forward.py", 8, "fwd", tree=tree) == f"{A} or {B}"
    assert located("forward.py", 16, "fwd", tree=tree) == B
    assert located("forward.py", 2, "fwd", tree=tree) == f"{A} or {B}"


def test_a_file_of_others_is_none_of_ours(tree):
    assert located("/usr/lib/torch/forward.py", 4, "fwd", tree=tree) == "forward.py"
    assert located("/x/holdfast/kernels/gone/forward.py", 4, "fwd", tree=tree) == "forward.py"
    assert located("reduce.cuh", 4, "fwd", tree=tree) == "reduce.cuh"
    assert located("", 0, "fwd", tree=tree) == ""
    assert not any(is_there(file, tree) for file in ("forward.py", "reduce.cuh", ""))
    assert place("reduce.cuh", 4, tree) == ("", "")


def test_lines_of_the_first_warps_are_found_by_the_kernel(tree):
    one = without(tree, "b")
    mma = "a/hopper/forward_mma.py"
    # the kernel's own lines, but its first one; lines behind it, where its file has none; another function's
    assert first_warps(A, 12, "fwd", "Read", one) == {A}
    assert first_warps(A, 13, "fwd", "Read", one) == first_warps(A, 13, tree=one) == {mma}
    assert first_warps(A, 16, "fwd", "Read", one) == {mma}
    assert first_warps(A, 16, tree=one) == {A}
    assert first_warps(A, 8, "fwd", "Read", one) == {A}
    assert located("forward.py", 16, "fwd", access="Read", tree=one) == mma
    assert located("forward.py", 16, "fwd", tree=one) == A
    # with another kernel of the name it is one of two
    assert located("forward.py", 16, "fwd", access="Read", tree=tree) == f"{mma} or {B}"


@pytest.mark.parametrize(("own", "expected"), [("weigh(x)", "a/hopper/forward_mma.py"), ("x.load(y)", A)])
def test_a_line_of_another_partition_is_of_the_first_warps_if_theirs_alone_makes_the_access(tree, own, expected):
    (tree.root / A).write_text(TREE[A].replace("weigh(x)", own))
    mma = "a/hopper/forward_mma.py"
    (tree.root / mma).write_text(TREE[mma].replace("x.three()", "x.load(y)"))
    one = without(tree, "b")
    assert first_warps(A, 8, "fwd", "Read", one) == {expected}
    assert first_warps(A, 8, "fwd", "Write", one) == first_warps(A, 9, "fwd", "Read", one) == {A}


def test_first_warps_in_two_files_are_told_apart_or_both_told(tree):
    again = "    gl.warp_specialize([(weigh, (x,)), (gate, (x,))], [1], [24])\n"
    (tree.root / A).write_text(TREE[A] + again)
    one = without(tree, "b")
    assert first_warps(A, 13, "fwd", "Read", one) == {"a/hopper/forward_mma.py", "a/hopper/decay.py"}
    assert located("forward.py", 13, "fwd", access="Read", tree=one) == "a/hopper/forward_mma.py"


def test_a_place_that_cannot_be_told_is_in_the_finding_and_not_explained():
    files = sorted(file for file in HOUSE.files if file.endswith("/forward.py"))
    assert len(files) > 1
    (found,) = findings(["========= Error: Race reported between Write access at nobody+0x70 in forward.py:1"])
    assert [p.key() for p in found.places] == [("Write", " or ".join(files), "", AMBIGUOUS)]
    assert not found.in_pytorch()
    (pair,) = races.unexplained([found])
    assert pair.first == found.places[0].key()


def test_places_of_the_table_are_never_taken_for_others():
    """Each line as every kernel that it is listed for has it: with folders it is found, without them it is not lost."""
    for lines in races.table():
        for file, function, text in lines.reads + lines.writes:
            printed = next((name for name, each in HOUSE.line_names.items() if each == file), file.rpartition("/")[2])
            for line in (n for n in range(1, 500) if place(file, n) == (function, text)):
                for kernel in lines.kernels:
                    assert file in located(printed, line, kernel).split(" or "), (kernel, file, text)
                    if file.endswith(".py"):
                        assert located(f"/x/holdfast/kernels/{file}", line, kernel) == file


def test_the_tables_kernels_are_there():
    cuda = "".join((sources.KERNELS / file).read_text() for file in HOUSE.line_names.values())
    for kernel in {kernel for lines in races.table() for kernel in lines.kernels}:
        # a function of CUDA C++ that was not compiled into its kernel has its class and parameters in its name
        member = kernel.partition("(")[0].rpartition("::")[2]
        assert kernel in sources.names() or f" {member}(" in cuda, kernel


def test_what_a_line_has_that_accesses_memory_is_a_function():
    gluons = {"load", "store", "index", "slice", "tma_", "warpgroup_mma", "copy_to_shared"}
    called = set(re.findall(r"[a-z_]{4,}", races._ACCESS.pattern)) - gluons
    assert called
    assert called <= {name.rpartition(".")[2] for name in HOUSE.definitions}


def test_cuda_files_have_line_names_of_their_own(tree):
    forward = "dense/cuda/one_block/forward.cu"
    assert tree.line_names == {"one_block_forward.cu": forward, "ptx.cuh": "dense/cuda/ptx.cuh"}
    assert located("one_block_forward.cu", 1, "one", tree=tree) == forward
    assert located("/x/one_block_forward.cu", 1, "one", tree=tree) == forward
    (tree.root / "dense/cuda/one_block_forward.cu").touch()
    with pytest.raises(ValueError, match="two files have one name"):
        _ = Tree(tree.root).line_names


def test_cuda_sources_are_compiled_with_their_places(monkeypatch):
    """Each file as it is after its name, whatever is made before and behind it; the name is of one file."""
    given = []
    compiler = SimpleNamespace(Cubin=nvrtc.Cubin, compile_source=lambda *arguments: given.append(arguments))
    monkeypatch.setattr(worker, "nvrtc", compiler)
    worker.with_lines()
    compiler.compile_source("int x;\n" + "\nint y;\n".join(map(part, HOUSE.line_names.values())), "sm_90a", ("-a",))
    ((text, *rest),) = given
    assert rest == ["sm_90a", ("-a", "--generate-line-info"), None]
    found = dict(re.findall(r'#line 1 "(\w+\.cuh?)"\n(.*?)\n#line 1 "made.cu"\n', text, re.DOTALL))
    assert {located(name, 1, ""): text for name, text in found.items()} == {
        file: part(file) for file in HOUSE.line_names.values()
    }


def part(file: str) -> str:
    return (sources.KERNELS / file).read_text()
