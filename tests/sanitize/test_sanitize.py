"""The sanitizer's calls reach every kernel; what its output says is read, and races are held against the table."""

import gzip
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.kernels.runtime import descriptor_launch
from holdfast.kernels.runtime.watching import WATCHERS, watched
from sanitize import places, races, recorded_launches, sources
from sanitize.__main__ import PRINTED, Job, report, run, run_again
from sanitize.barrier_tables import put_right, with_right_tables
from sanitize.calls import CALLS, planned
from sanitize.dry import pretending
from sanitize.findings import findings
from sanitize.launched import name_of_cuda
from sanitize.races import Lines, Pair
from sanitize.tma_writes import counted_as_written

PRODUCTS, SWEEP, SPREAD = (
    "matrix/scalar_decay/hopper/forward_mma.py",
    "matrix/scalar_decay/hopper/forward.py",
    "dense/cuda/many_blocks/forward.cu",
)
STORE = (
    PRODUCTS,
    "mma_partition",
    "buffers.o_tiles.index(slot).reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))",
)
WEIGH = (SWEEP, "_decay_partition", "publish_decays(")
READ = (
    PRODUCTS,
    "mma_partition",
    "read = stages.decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, o_layout))",
)
WRITTEN = (
    PRODUCTS,
    "_written",
    "write = decays.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, read_layout))",
)
# written by a function that several kernels share
SHARED = next(line for lines in races.table() for line in lines.writes if line[0] == "lib/gluon/decay.py")
DELTA = "matrix/delta_rule/hopper/forward.py"
KNOWN = (Lines(("scalar_decay_fwd",), "the mbarriers decays_ready and empty", (READ, WRITTEN), (WEIGH,)),)


def line_of(place: tuple[str, str, str]) -> int:
    file, function, text = place
    (line,) = (n for n in range(1, 500) if places.place(file, n) == (function, text))
    return line


def at(place: tuple[str, str, str]) -> str:
    """File and line, as the tool prints them if it leaves out folders."""
    return f"{place[0].rpartition('/')[2]}:{line_of(place)}"


def with_folders(place: tuple[str, str, str]) -> str:
    """File and line, as the tool prints them if it is asked for folders."""
    return f"/x/src/holdfast/kernels/{place[0]}:{line_of(place)}"


def output(planted: str = "") -> list[str]:
    """As the tool prints it, in the forms of two of its versions, with the worker's marks between."""
    return f"""\
========= COMPUTE-SANITIZER
@@ simple_gla, small
========= Error: Race reported between Write access at scalar_decay_fwd+0x2f70 in {with_folders(WEIGH)}
=========     and Read access at scalar_decay_fwd+0x5c10 in {with_folders(READ)} [64 hazards]
=========     and Read access at scalar_decay_fwd+0x5d00 in {with_folders(WRITTEN)} [32 hazards]
=========
{planted}@@ simple_gla, again
========= Warning: Race reported between Read access at 0x5c10 in {at(READ)}:scalar_decay_fwd
=========     and Write access at 0x2f70 in {at(WEIGH)}:scalar_decay_fwd [4 hazards]
========= Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect.
@@ lstm
========= Invalid __global__ read of size 4 bytes
=========     at dense_many_blocks_forward(int *, const char *)+0x1a0 in many_blocks_forward.cu:100
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f0000000010 is out of bounds
=========     and is 13 bytes after the nearest allocation at 0x7f0000000000 of size 4 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x2f] in libcuda.so.1
=========
========= Uninitialized __global__ memory read of size 2 bytes
=========     at scalar_decay_fwd+0x70 in {at(READ)}
=========     by thread (4,0,0) in block (1,0,0)
=========
========= Barrier error detected. Divergent thread(s) in block
=========     at scalar_decay_fwd+0x90 in {at(WEIGH)}
========= Target application returned an error
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
========= ERROR SUMMARY: 3 errors
""".splitlines()


def test_the_output_is_read():
    first, again, invalid, uninitialised, barrier = findings(output())
    assert (first.kind, first.kernel, first.call, first.count) == (
        "Error: Race reported",
        "scalar_decay_fwd",
        "simple_gla, small",
        96,
    )
    assert [p.key() for p in first.places] == [("Write", *WEIGH), ("Read", *READ), ("Read", *WRITTEN)]
    assert (again.kernel, again.call, again.count) == ("scalar_decay_fwd", "simple_gla, again", 4)
    assert (invalid.kind, invalid.call) == ("Invalid __global__ read of size 4 bytes", "lstm")
    assert [(p.file, p.line, p.function) for p in invalid.places] == [(SPREAD, 100, "dense_many_blocks_forward")]
    assert uninitialised.kind == "Uninitialized __global__ memory read of size 2 bytes"
    assert barrier.kind == "Barrier error detected. Divergent thread(s) in block"


# as initcheck printed them on an H200: reads of what a kernel of ours had stored by TMA, and a name without a line
SUM = (
    "void at::native::reduce_kernel<(int)128, (int)4, at::native::ReduceOp<c10::BFloat16, at::native::func_wrapper_t"
    "<c10::BFloat16, at::native::sum_functor<c10::BFloat16, float, c10::BFloat16>::operator ()(at::TensorIterator &)"
    "::[lambda(float, float) (instance 1)]>, unsigned int, c10::BFloat16, (int)4, (int)8>>(T3)"
)
COPY = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)"
    "::[lambda() (instance 3)]::operator ()() const::[lambda() (instance 6)]::operator ()() const::[lambda(double) "
    "(instance 1)], std::array<char *, (unsigned long)2>, (int)4, TrivialOffsetCalculator<(int)1, unsigned int>, "
    "at::native::memory::LoadWithCast<(int)1>>(int, T1, T2, T4, T5, T6, T7)"
)


def read_by(kernel: str) -> str:
    return f"""\
========= Uninitialized __global__ memory read of size 8 bytes
=========     at {kernel}
=========     by thread (0,0,0) in block (8,0,0)
=========     Address 0x7fd8a695ca00
=========
"""


def test_kernels_of_pytorch_are_told_from_ours():
    places = (
        f"{SUM}+0xb5a0",
        f"{SUM}+0xb5a0",
        f"{COPY}+0x870",
        "scalar_decay_fwd+0x70",
        f"scalar_decay_fwd+0x70 in {at(READ)}",
        "0x70",
    )
    found = list(findings("".join(map(read_by, places)).splitlines()))
    assert [f.kernel for f in found] == [SUM, SUM, COPY, "scalar_decay_fwd", "scalar_decay_fwd", ""]
    assert [f.in_pytorch() for f in found] == [True, True, True, False, False, False]
    spread = "dense_many_blocks_forward(at::Tensor, const char *)+0x1a0 in many_blocks_forward.cu:100"
    (invalid,) = findings(read_by(spread).splitlines())
    assert not invalid.in_pytorch()


def test_a_record_that_cannot_be_read_leaves_the_others(monkeypatch):
    def fail(file: str, line: int) -> tuple[str, str]:
        raise IsADirectoryError(file)

    monkeypatch.setattr("sanitize.findings.place", fail)
    found = list(findings(output()))
    assert len(found) == 5
    assert all("IsADirectoryError" in f.kind and f.text and not f.in_pytorch() for f in found)


@pytest.fixture
def job(tmp_path):
    def make(tool: str, log: str, done: list[int], numbers: tuple[int, ...] = (0, 1, 2), stopped: bool = False) -> Job:
        made = Job(tool, list(numbers), Path(tempfile.mkdtemp(dir=tmp_path)))
        made.log, made.out = made.folder / "log", made.folder / "done.json"
        made.log.write_text(log)
        made.out.write_text(json.dumps({"done": done, "failed": {}, "kernels": [], "stopped": stopped}))
        made.finish()
        return made

    return make


def test_the_report_tells_both_apart_and_keeps_the_output(job, tmp_path):
    marks = [f"@@ {CALLS[n].name}\n" for n in range(3)]
    log = f"{marks[0]}{read_by(f'{SUM}+0xb5a0') * 3}{marks[1]}{read_by(f'{COPY}+0x870')}{marks[2]}@@ end\n"
    first, clean = job("", "".join(marks), [0, 1, 2]), job("initcheck", log, [0, 1, 2])
    said = report(tmp_path, [0, 1, 2], [first], [clean], ["initcheck", "racecheck"])
    of = said["tools"]["initcheck"]
    assert [(f["kernel"], f["count"]) for f in of["in kernels of PyTorch"]] == [(SUM, 3), (COPY, 1)]
    assert (of["findings"], of["failed"], of["not run"]) == ([], {}, [])
    # a tool that was cut off before its first call has said nothing, and that is told
    assert len(said["tools"]["racecheck"]["not run"]) == 3
    assert gzip.decompress((tmp_path / "initcheck.txt.gz").read_bytes()).decode() == log
    assert not report(tmp_path, [0, 1, 2], [first], [clean], ["initcheck"])["bad"]
    for tool, kernel in (("initcheck", "scalar_decay_fwd+0x70"), ("memcheck", f"{SUM}+0xb5a0")):
        faulty = job(tool, f"{marks[0]}{read_by(kernel)}{marks[1]}{marks[2]}", [0, 1, 2])
        said = report(tmp_path, [0, 1, 2], [first], [faulty], [tool])
        assert said["bad"]
        assert len(said["tools"][tool]["findings"]) == 1


def test_calls_after_the_last_record_printed_run_again(job, monkeypatch):
    monkeypatch.setitem(PRINTED, "initcheck", 2)
    marks = [f"@@ {CALLS[n].name}\n" for n in range(3)]
    reads = read_by(f"{SUM}+0xb5a0")
    full = job("initcheck", f"========= COMPUTE-SANITIZER\n{marks[0]}{reads * 2}{marks[1]}{marks[2]}", [0, 1, 2])
    assert (full.cut, full.said["done"], full.left(), full.lost()) == (0, [0], [1, 2], [])
    ended = job("initcheck", f"{marks[0]}{marks[1]}{reads * 2}", [0])
    assert (ended.cut, ended.said["done"], ended.left(), ended.lost()) == (1, [0], [2], [1])
    whole = job("initcheck", f"========= COMPUTE-SANITIZER\n{marks[0]}{reads}{marks[1]}{marks[2]}", [0, 1, 2])
    assert (whole.cut, whole.left(), whole.lost()) == (None, [], [])


def test_a_process_that_stopped_lost_no_call(job):
    # after the first call CUDA worked no more: the second one runs in another process, and did not fail in this one
    marks = [f"@@ {CALLS[n].name}\n" for n in range(3)]
    stopped = job("synccheck", marks[0], [0], stopped=True)
    assert (stopped.left(), stopped.lost()) == ([1, 2], [])
    fell = job("synccheck", "".join(marks[:2]), [0])
    assert (fell.left(), fell.lost()) == ([1, 2], [1])


def test_a_limit_ends_what_runs_and_keeps_what_it_said(tmp_path, monkeypatch):
    text = (
        "import sys, time\n"
        "out, tool, *numbers = sys.argv[4:]\n"
        "print('@@ first', flush=True)\n"
        "open(out, 'w').write('{\"done\": [' + numbers[0] + ']}')\n"
        "print('@@ second', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", text]
    start = Job.start
    monkeypatch.setattr(Job, "start", lambda self, prefix: start(self, command))
    folders = [Path(tempfile.mkdtemp(dir=tmp_path)) for _ in range(3)]
    waiting = [Job("racecheck", [n, n + 1], folder) for n, folder in zip((0, 2, 4), folders, strict=True)]
    # the worker's own command follows: its OUT and numbers are what the text above finds behind it
    program = SimpleNamespace(command=lambda tool: [])
    ended = run(waiting, program, 2, time.monotonic() + 3)
    assert [job.log.read_text().split() for job in ended] == [["@@", "first", "@@", "second"]] * 2
    assert [job.process.returncode for job in ended] == [-signal.SIGKILL] * 2
    assert [job.lost() for job in ended] == [[], []]


def test_what_failed_or_has_no_place_runs_again_alone(tmp_path, monkeypatch):
    """The first three calls together: one failed, and of one a record has no place."""
    race = "========= Error: Race reported between Write access at\n=========     and Read access at  [4 hazards]"
    text = (
        "import json, sys\n"
        "out, tool, *numbers = sys.argv[4:]\n"
        "together = len(numbers) > 1\n"
        "for n in numbers:\n"
        f" print('@@', {[call.name for call in CALLS[:3]]!r}[int(n)])\n"
        f" together and n == '1' and print({race!r})\n"
        "failed = {2: 'gave up'} if together else {}\n"
        "open(out, 'w').write(json.dumps({'done': [*map(int, numbers)], 'failed': failed}))\n"
    )
    start = Job.start
    monkeypatch.setattr(Job, "start", lambda self, prefix: start(self, [sys.executable, "-c", text]))
    program, until = SimpleNamespace(command=lambda tool: []), time.monotonic() + 60
    first = run([Job("racecheck", [0, 1, 2], Path(tempfile.mkdtemp(dir=tmp_path)))], program, 1, until)
    assert [job.unsettled() for job in first] == [[1, 2]]
    before = report(tmp_path, [0, 1, 2], [], first, ["racecheck"])["tools"]["racecheck"]
    assert (len(before["findings"]), before["failed"]) == (1, {CALLS[2].name: "gave up"})
    again = run_again(first, program, tmp_path, until)
    assert [job.numbers for job in again] == [[1], [2]]
    after = report(tmp_path, [0, 1, 2], [], first + again, ["racecheck"])["tools"]["racecheck"]
    assert (after["findings"], after["failed"], after["not run"], after["unexplained"]) == ([], {}, [], [])
    assert after["run again"] == sorted(CALLS[n].name for n in (1, 2))


def test_memory_behind_descriptors_counts_as_written(monkeypatch):
    """Copied onto itself, all that the descriptor's tensor is a view of, before the launch runs."""
    x, copied = torch.arange(6.0), []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *rest: copied.append(len(self)) or copy(self, *rest))
    descriptor = SimpleNamespace(base=x[1:].view(1, 5))
    with counted_as_written():
        assert WATCHERS
        descriptor_launch.watched(None, (descriptor, x, 3), lambda: copied.append("launched"))
    assert copied == [24, "launched"]
    assert torch.equal(x, torch.arange(6.0))
    assert not WATCHERS
    assert descriptor_launch.watched is watched


def test_pairs_of_the_table_are_explained():
    assert races.unexplained(list(findings(output()))[:2], KNOWN) == []


def test_an_unexplained_pair_is_told():
    planted = f"""\
========= Error: Race reported between Write access at scalar_decay_fwd+0x7000 in {at(STORE)}
=========     and Write access at scalar_decay_fwd+0x7000 in {at(STORE)} [8 hazards]
=========
"""
    first, race, *_ = findings(output(planted))
    assert race.call == "simple_gla, small"
    assert races.unexplained([first, race], KNOWN) == [Pair("scalar_decay_fwd", ("Write", *STORE), ("Write", *STORE))]
    # the same lines in another kernel are others, and so is a line without an entry
    pairs = [Pair("scalar_decay_fwd", ("Read", *line), ("Write", *WEIGH)) for line in sorted((READ, WRITTEN))]
    assert races.unexplained([first], ()) == pairs
    assert races.unexplained([first], (replace(KNOWN[0], kernels=("hopper_segment_states",)),)) == pairs
    assert races.unexplained([first], (replace(KNOWN[0], reads=(READ,)),)) == [
        Pair("scalar_decay_fwd", ("Read", *WRITTEN), ("Write", *WEIGH))
    ]


def test_which_pairs_of_lines_a_run_reports_makes_no_difference():
    read, write, own = ("Read", *READ), ("Write", *WEIGH), ("Write", *STORE)
    (lines,) = KNOWN
    assert lines.explains(Pair("scalar_decay_fwd", read, write))
    assert lines.explains(Pair("scalar_decay_fwd", write, write))
    assert lines.explains(Pair("scalar_decay_fwd", write, read))
    # two reads race with nobody, and what is read there is not what may be written there
    assert not lines.explains(Pair("scalar_decay_fwd", read, read))
    assert not lines.explains(Pair("scalar_decay_fwd", ("Write", *READ), write))
    assert not lines.explains(Pair("scalar_decay_fwd", own, write))
    # an instruction that the compiler moved to a line without an access is one of its function's
    moved = ("Read", PRODUCTS, "mma_partition", "for i in range(chunks.count):")
    assert lines.explains(Pair("scalar_decay_fwd", moved, write))
    assert not lines.explains(Pair("scalar_decay_fwd", ("Write", *moved[1:]), write))
    assert not lines.explains(
        Pair("scalar_decay_fwd", ("Read", PRODUCTS, "score_partition", "for i in range(chunks.count):"), write)
    )
    assert not lines.explains(
        Pair("scalar_decay_fwd", ("Read", PRODUCTS, "mma_partition", "x = parts.load(layout)"), write)
    )


def test_which_partition_a_warp_runs_is_the_compilers():
    head, end = "def scalar_decay_fwd(", ("Write", PRODUCTS, "mma_partition", "phase ^= 1")
    read = ("Read", SWEEP, "scalar_decay_fwd", head)
    for write in (("Write", *read[1:]), end):
        assert races.is_dispatch(Pair("scalar_decay_fwd", read, write))
        assert races.is_dispatch(Pair("scalar_decay_fwd", write, read))
        # what is read elsewhere, in another kernel, and by a kernel that shares no work out is ours
        assert not races.is_dispatch(Pair("scalar_decay_fwd", ("Read", *READ), write))
        assert not races.is_dispatch(Pair("scalar_decay_bwd", read, write))
        assert not races.is_dispatch(
            Pair("conv_bwd", ("Read", "conv/triton/backward.py", "conv_bwd", "def conv_bwd("), write)
        )
    assert not races.is_dispatch(Pair("scalar_decay_fwd", read, ("Write", *STORE)))
    assert not races.is_dispatch(Pair("scalar_decay_fwd", ("Write", *read[1:]), end))


def test_a_race_without_places_is_not_explained():
    (found,) = findings(["========= Error: Race reported somewhere"])
    assert races.unexplained([found], KNOWN) != []


def test_the_table_is_of_lines_that_there_are():
    assert races.stale() == []
    assert races.stale(KNOWN) == []
    gone = (SWEEP, "_decay_partition", "publish_decays(gates)")
    assert races.stale((Lines(("scalar_decay_fwd",), "none", (READ,), (gone,)),)) == [gone]


def test_a_table_says_what_orders_lines(tmp_path):
    pair = Pair("scalar_decay_fwd", ("Read", *READ), ("Write", *WEIGH))
    good = races.entry(pair, "ring")
    path = tmp_path / "races.toml"
    path.write_text(f'[orders]\nring = "mbarriers"\n{good}')
    assert races.table(path) == (Lines(("scalar_decay_fwd",), "mbarriers", (READ,), (WEIGH,)),)
    row = good[good.index("reads = [\n") + 10 : good.index("]\nwrites")]
    for spoil, said in (
        (good.replace(row, row * 2), "expected lines of three texts, each once"),
        (good.replace('"mma_partition", ', ""), "expected lines of three texts, each once"),
        (races.entry(pair, "flag"), "order: expected one of ring; got flag"),
        (races.entry(Pair("scalar_decay_fwd", pair.first, pair.first), "ring"), "expected a write beside"),
        (good.replace("kernels", "of"), "expected kernels, order, reads and writes"),
    ):
        other = tmp_path / f"{abs(hash(spoil))}.toml"
        other.write_text(f'[orders]\nring = "mbarriers"\n{spoil}')
        with pytest.raises(ValueError, match=said):
            races.table(other)


def test_lines_of_the_first_warps_are_found():
    """Triton gives the instructions of a function that is compiled into the kernel itself their line, and its file."""
    first = line_of((SWEEP, "scalar_decay_fwd", "def scalar_decay_fwd("))
    of = places.place(SWEEP, first)[0], places.first_warps(SWEEP, first)
    assert of == ("scalar_decay_fwd", {SWEEP}), "the kernel's own first line: the compiler gives none"
    line = line_of(READ)
    said = f"""\
========= Error: Race reported between Write access at scalar_decay_fwd+0x22d0 in {at(SHARED)}
=========     and Read access at scalar_decay_fwd+0x6420 in forward.py:{line} [24 hazards]
========= Barrier error detected. Already initialized. Invalidate before reinitializing.
=========     at scalar_decay_fwd+0x5a70 in forward.py:{line}
"""
    race, barrier = findings(said.splitlines())
    assert [p.key() for p in race.places] == [("Write", *SHARED), ("Read", *READ)]
    assert (barrier.places[0].file, barrier.places[0].line) == (SWEEP, line)
    # what stands in a function of the same file is where it says, and so is another kernel's
    assert places.first_warps(DELTA, 150) == {DELTA}
    assert places.first_warps(SWEEP, line_of(WEIGH)) == {SWEEP}
    assert places.first_warps("", 0) == {""}


def test_places_are_found_in_cuda_sources():
    text = (sources.KERNELS / SPREAD).read_text().splitlines()
    line = next(n for n, x in enumerate(text, 1) if x.startswith("dense_many_blocks_forward("))
    assert places.place(SPREAD, line + 5)[0] == "dense_many_blocks_forward"
    common = "dense/cuda/many_blocks/common.cuh"
    text = (sources.KERNELS / common).read_text().splitlines()
    line = next(n for n, x in enumerate(text, 1) if "= clock();" in x)
    assert places.place(common, line) == ("publish", "if (lane == 0) times[turn & 1] = clock();")
    assert places.place("vectorized_elementwise_kernel.cuh", 3) == ("", "")


def elf(sections: dict[str, bytes]) -> bytes:
    """As much of a 64-bit ELF file as is read."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in sections)
    bodies, headers, at = b"", [], 64
    for name, body in [*sections.items(), ("", names)]:
        where = names.index(name.encode() + b"\0")
        headers.append(struct.pack("<IIQQQQIIQQ", where, 0, 0, 0, at, len(body), 0, 0, 0, 0))
        bodies, at = bodies + body, at + len(body)
    head = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack("<Q", at)
    head = head.ljust(58, b"\0") + struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    return head + bodies + b"".join(headers)


def instruction(does: int, register: int = 0, number: int = 0) -> bytes:
    return (does | register << 24 | number << 40).to_bytes(16, "little")


def test_a_list_of_barriers_is_put_right():
    nop, makes = 0x7918, 0x75B2
    # two that are listed at the NOP before, one of them predicated, one listed right, one whose instruction is missing
    text = [instruction(nop), instruction(nop), instruction(makes, 8, 0x1D9D0), instruction(nop)]
    text += [instruction(0x85B2, 9, 0x1D9D8), instruction(makes, 7, 0x40)]
    entries = [(0x10, 7, 0x1D9D0, 0, 0x3F), (0x30, 7, 0x1D9D8, 0, 0x3F), (0x50, 0xFF, 0x40, 0, 7)]
    # another kind stays, and so does what has no instruction
    entries += [(0x00, 7, 0x1D9D0, 10, 0x3F), (0x00, 7, 0x99, 0, 0x3F)]
    packed = b"".join(struct.pack("<IIIBBBB", a, r, n, kind, 1, u, 0) for a, r, n, kind, u in entries)
    info = struct.pack("<BBH", 3, 0x1B, 0xFF) + struct.pack("<BBH", 4, 0x39, len(packed)) + packed
    info += struct.pack("<BBHI", 4, 0x1C, 4, 0x50)
    made, moved = put_right(elf({".text.k": b"".join(text), ".nv.info.k": info, ".nv.info": b"\0" * 8}))
    assert moved == [("k", 0x10, 0x20), ("k", 0x30, 0x40)]
    entries[:2] = [(0x20, 0xFF, 0x1D9D0, 0, 8), (0x40, 0xFF, 0x1D9D8, 0, 9)]
    right = b"".join(struct.pack("<IIIBBBB", a, r, n, kind, 1, u, 0) for a, r, n, kind, u in entries)
    assert made == elf({".text.k": b"".join(text), ".nv.info.k": info.replace(packed, right), ".nv.info": b"\0" * 8})
    assert put_right(made) == (made, [])
    assert put_right(b"no cubin") == (b"no cubin", [])


def test_kernels_are_loaded_with_right_lists(monkeypatch):
    given = []
    load = lambda *arguments: given.append(arguments)  # noqa: E731 - compared below
    utils = SimpleNamespace(load_binary=load)
    monkeypatch.setattr("sanitize.barrier_tables.driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    monkeypatch.setattr("sanitize.barrier_tables.put_right", lambda x: (x.upper(), [("k", 1, 2)] if x == b"a" else []))
    with with_right_tables() as found:
        utils.load_binary("k", b"a", 7)
        utils.load_binary("other", b"b", 8)
    assert (given, found) == ([("k", b"A", 7), ("other", b"B", 8)], {"k": 1})
    assert utils.load_binary is load


@pytest.mark.slow
def test_the_list_of_a_packed_sweep_is_put_right(monkeypatch):
    """What synccheck took for errors: only the list changes, and every barrier is listed where it is made."""
    from gluon_compile import compile_launch, recorded
    from holdfast.kernels.matrix.scalar_decay.hopper import launch as scalar_launch
    from holdfast.kernels.matrix.state_passing.hopper import launch as state_launch
    from uniform_registers import disassembled

    (call,) = (c for c in CALLS if c.name.startswith("simple_gla hopper bfloat16 B1 T200 H2 K64 V64, packed"))
    with pretending(), monkeypatch.context() as patch:
        launches = recorded(patch, scalar_launch, state_launch)
        with planned(call.plan):
            call.run(torch.device("cpu"))
    _, states, _ = launches
    cubin = compile_launch(states).cubin
    made, moved = put_right(cubin)
    assert moved, "this assembler lists them right: barrier_tables.py has nothing to do any more"
    assert disassembled(made) == disassembled(cubin)
    assert put_right(made) == (made, [])
    instructions = disassembled(made).splitlines()
    for _, place, right in moved:
        assert any(f"/*{place:04x}*/" in x and " NOP" in x for x in instructions)
        assert any(f"/*{right:04x}*/" in x and "SYNCS.EXCH" in x for x in instructions)


def test_kernels_made_for_a_launch_a_step_are_told_from_those_written():
    assert {name_of_cuda(name.rpartition(".")[2]) for name in sources.MADE} == sources.MADE <= sources.kernels()
    assert name_of_cuda("dense_many_blocks_forward") in sources.kernels()


def test_every_call_has_a_name_of_its_own():
    assert len({call.name for call in CALLS}) == len(CALLS)


@pytest.mark.slow
def test_the_calls_launch_every_kernel_as_on_record():
    """The records of some are held against launches in test_recorded_launches.py too."""
    lines = recorded_launches.lines()
    of = {call.name: {line.split()[-3] for line in lines if line.startswith(f"{call.name}: ")} for call in CALLS}
    assert set().union(*of.values()) == sources.kernels()
    assert [name for name, kernels in of.items() if not kernels] == []
    assert lines == recorded_launches.LAUNCHES.read_text(encoding="utf-8").splitlines(), recorded_launches.REMEDY


# one of each kind of kernel that passes tiles between warps
BOUNDED = (
    "^(simple_gla hopper bfloat16 B2|simple_gla hopper.* K64 V64, (resident|segment_chunks=2)|gla hopper bfloat16 B2"
    "|gated_delta_rule hopper bfloat16 B2|mlstm hopper bfloat16 B1 T200 H2 Hq2 K64|intra_chunk hopper .*C128 K64 V128$"
    "|rotlru hopper bfloat16 B2|lstm fused bfloat16 B3)"
)


# those of which ptxas lists barriers wrongly
PACKED = "^(simple_gla|gated_delta_rule) hopper bfloat16 B1 T[27]00 .*packed"


def sanitized(folder: Path, tool: str, calls: str, least: int) -> dict[str, Any]:
    """What the tool says of calls, so many at least, all of which ran under it."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        pytest.skip("needs compute-sanitizer, which comes with CUDA's toolkit (none here)")
    tests = Path(__file__).parents[1]
    places = [str(tests.parent / "src"), str(tests), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "sanitize", "--out", str(folder), "--tools", tool, "--calls", calls]
    subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(places)}, capture_output=True, check=False, timeout=600
    )
    said = json.loads((folder / "summary.json").read_text())
    assert said["calls"] >= least
    assert [(tool["failed"], tool["not run"]) for tool in said["tools"].values()] == [({}, [])] * 2
    return said["tools"][tool]


@pytest.mark.gpu
@pytest.mark.slow
def test_racecheck_reports_no_pair_that_is_not_explained(tmp_path):
    pairs = sanitized(tmp_path, "racecheck", BOUNDED, 8)["unexplained"]
    assert not pairs, "\n".join(map(str, pairs))


@pytest.mark.gpu
@pytest.mark.slow
def test_synccheck_reports_nothing_of_packed_calls(tmp_path):
    said = sanitized(tmp_path, "synccheck", PACKED, 5)
    assert said["findings"] == []
    assert "scalar_decay_fwd" in said["tables put right"]
