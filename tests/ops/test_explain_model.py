"""The integer problem of a plan in words: choices, names, limits below one another, and which of them binds."""

import pytest

from holdfast.ops.explain import explain
from holdfast.ops.explain_model import WIDTH, told
from holdfast.planner.report import Limit, Report

LIMITS = (
    Limit("sequences of equal length", "", "1 == 1", None, None),
    Limit("shapes", "", "(rows, stages) in {(64, 3)}", None, None, (("rows", 32, 0, 0), ("rows", 128, 0, 0))),
    Limit("threads", "", "32 * warps <= 1024", 256, 1024),
    Limit("shared memory", "bytes", "shared <= 232448", 196608, 232448, (("stages", 4, 262144, 232448),)),
)


def test_a_model_in_words():
    chosen, named = (("rows", 64, "{16, 64}"),), (("resident", 1, "1"), ("shared", 196608, "3072 * rows"))
    assert told(Report(chosen, named, LIMITS, 12)) == [
        "    chooses  rows = 64 of {16, 64}",
        "             the fastest of 12 that fit",
        "    where    resident = 1",
        "             shared = 196,608 = 3072 * rows",
        "    within   sequences of equal length",
        "             shapes: (rows, stages) in {(64, 3)}",
        "             threads           256 of   1,024          768 to spare",
        "             shared memory 196,608 of 232,448 bytes 35,840 to spare",
        "    binds    shapes: no other value next to that of rows",
        "             shared memory: stages = 4 would take 262,144 of 232,448",
    ]


def test_what_has_no_choice_no_limit_and_nothing_that_binds():
    assert told(Report((), (), (), 1)) == [
        "    chooses  the only assignment that fits",
        "    binds    no limit: the values next to the chosen ones fit too",
    ]


def test_long_lines_are_continued():
    text = " + ".join(["16 * rows * columns"] * 9)
    lines = told(Report((), (("shared", 4096, text),), (), 1))
    assert all(len(line) <= WIDTH for line in lines)
    where = [line for line in lines if "rows" in line]
    assert len(where) == 3
    assert where[0].startswith("    where    shared = 4,096 = 16 * rows")
    assert all(line.startswith(" " * 15) for line in where[1:])
    assert " ".join(line.strip() for line in where) == f"where    shared = 4,096 = {text}"


@pytest.mark.parametrize(("device", "binds"), [("h200", "shared memory of adjoint: adjoint_stages = 3"), ("a100", "")])
def test_explain_prints_the_model_of_each_pass(device, binds):
    sizes = {"B": 4, "T": 4096, "H": 32, "K": 128, "V": 128}
    text = str(explain("simple_gla", sizes, "bfloat16", device))
    for word in ("chooses", "where", "within", "binds", "beat"):
        assert sum(line.startswith(f"    {word} ") for line in text.splitlines()) == 2, word
    assert binds in text
    # of a backend that is no kernel there is none
    assert "chooses" not in str(explain("simple_gla", sizes, "float64", device))
