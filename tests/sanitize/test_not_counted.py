"""What the sanitizers report and is no fault: it is told apart, by its line."""

from pathlib import Path

import pytest

from sanitize import unseen
from sanitize.__main__ import report
from sanitize.calls import CALLS
from sanitize.test_sanitize import STORE, job, line_of, with_folders

__all__ = ["job"]
LOADED = (
    "matrix/scalar_decay/hopper/forward.py",
    "_load_partition",
    "tma_load(descs.k, [batch, token, head // heads.qk_group, 0], ready.index(stage), tiles.k.index(stage))",
)


@pytest.mark.parametrize(
    ("place", "address", "counts"),
    [(LOADED, "7f11ec2858c0", False), (LOADED, "7f11ec2858c8", True), (STORE, "7f11ec2858c0", True)],
)
def test_a_copy_by_tma_begins_at_a_multiple_of_16_bytes(job, tmp_path, place, address, counts):
    record = f"""\
@@ {CALLS[0].name}
========= Invalid __global__ read of size 24960 bytes
=========     at scalar_decay_fwd+0x3dd0 in {with_folders(place)}
=========     by thread (320,0,0) in block (0,1,0)
=========     Access to 0x{address} is misaligned
=========     and is inside the nearest allocation at 0x7f11ec285800 of size 49,920 bytes
=========
"""
    of = report(tmp_path, [0], [], [job("memcheck", record, [0], (0,))], ["memcheck"])["tools"]["memcheck"]
    assert (len(of["findings"]), len(of["aligned for TMA"])) == (counts, not counts)


def test_a_misaligned_access_without_a_place_counts(job, tmp_path):
    record = f"""\
@@ {CALLS[0].name}
========= Invalid __global__ read of size 24960 bytes
=========     by thread (320,0,0) in block (0,1,0)
=========     Access to 0x7f11ec2858c0 is misaligned
=========
"""
    of = report(tmp_path, [0], [], [job("memcheck", record, [0], (0,))], ["memcheck"])["tools"]["memcheck"]
    assert (len(of["findings"]), len(of["aligned for TMA"])) == (1, 0)


def test_reads_of_what_is_written_unseen_are_known_by_their_line(job, tmp_path):
    known, *_ = unseen.table()
    line = line_of((known.file, known.kernel, known.text))
    for at_line, counts in ((line, False), (line + 1, True)):
        record = f"""\
@@ {CALLS[0].name}
========= Uninitialized __global__ memory read of size 16 bytes
=========     at {known.kernel}+0x1d0 in /x/src/holdfast/kernels/{known.file}:{at_line}
=========     by thread (0,0,0) in block (8,0,0)
=========
"""
        of = report(tmp_path, [0], [], [job("initcheck", record, [0], (0,))], ["initcheck"])["tools"]["initcheck"]
        assert (len(of["findings"]), len(of["written, unseen"])) == (counts, not counts)
        # another tool says something else of it
        of = report(tmp_path, [0], [], [job("memcheck", record, [0], (0,))], ["memcheck"])["tools"]["memcheck"]
        assert (len(of["findings"]), len(of["written, unseen"])) == (1, 0)


def test_what_is_written_unseen_is_there():
    """Its lines, and the tests that show that they are written."""
    for each in unseen.table():
        assert line_of((each.file, each.kernel, each.text))
        assert each.written_by
        path, _, name = each.test.partition("::")
        assert f"\ndef {name}(" in (Path(__file__).parents[2] / path).read_text()
