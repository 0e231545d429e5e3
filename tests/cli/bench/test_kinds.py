"""Cases that measure something else than the time of a sequence: error over the steps, host time, decoding."""

import pytest
import torch

from holdfast.cli.bench import page
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.chunk_primitives import intra_chunk_example
from holdfast.cli.bench.floor import floor_bytes, history_bytes, operations
from holdfast.cli.bench.measure import measure
from holdfast.cli.bench.peers import PEERS
from holdfast.cli.bench.record import Record
from holdfast.cli.bench.result import Result
from holdfast.cli.bench.step_errors import step_errors
from holdfast.cli.bench.subject import HoldfastRunner, Refused, Subject
from holdfast.cli.bench.table import said
from holdfast.cli.bench.workload import workload
from holdfast.recurrences import RECURRENCES

CPU = torch.device("cpu")
LSTM = Case("lstm", (("B", 1), ("T", 40), ("H", 1), ("D", 8)), "float32", "fwd", kind="error")
SIZES = {"B": 2, "T": 1, "H": 2, "K": 8, "V": 8, "D": 8, "N": 4}


def test_step_errors_by_hand():
    exact = torch.zeros(2, 3, 5, dtype=torch.float64)
    got = exact.clone()
    got[0, 1] = torch.tensor([-9.0, 1.0, 2.0, 3.0, 4.0])
    found = step_errors(got, exact, 3)
    # ten errors a step: 0 five times, then 1, 2, 3, 4, 9
    assert found == {"50": [0.0, 0.5, 0.0], "90": [0.0, pytest.approx(4.5), 0.0], "100": [0.0, 9.0, 0.0]}
    with pytest.raises(Refused, match="second axis has 3 entries, not the 4 steps"):
        step_errors(got, exact, 4)


def test_the_error_over_the_steps_is_measured_without_a_time(roof):
    row = measure(LSTM, HoldfastRunner("loop"), CPU, roof)
    assert (row.status, row.median_ms) == ("ok", None)
    assert {level: len(values) for level, values in row.step_errors.items()} == {"50": 40, "90": 40, "100": 40}
    assert all(0 <= a <= b <= c < 1e-5 for a, b, c in zip(*row.step_errors.values(), strict=True))
    assert "absolute error at the last step" in said(row)


def test_a_wrong_output_has_no_error_over_the_steps(roof):
    class Off:
        name = "off"

        def prepare(self, case, device):
            work = case.work
            return Subject(case.arguments(device), lambda a: work.exact(a, {}) * 1.01, lambda a: work.exact(a, {}))

    row = measure(LSTM, Off(), CPU, roof)
    assert (row.status, row.step_errors) == ("wrong", None)


def test_host_time_counts_calls_that_nothing_waits_for(roof):
    row = measure(Case("rglru", (("B", 1), ("T", 2), ("D", 4)), kind="host"), HoldfastRunner("chunked"), CPU, roof)
    assert row.status == "ok"
    assert row.method.startswith("host clock, blocks of 20 calls")
    assert 0 < row.low_ms <= row.median_ms <= row.high_ms
    assert (row.floor_ms, row.floor_ratio) == (None, None)


@pytest.mark.parametrize("op", RECURRENCES)
def test_every_op_decodes_a_step_and_its_state_is_checked(op, roof):
    case = Case(op, tuple((axis, SIZES[axis]) for axis in workload(op).required), "float32", "fwd", state=True)
    for backend in case.work.backends():
        row = measure(case, HoldfastRunner(backend.name), CPU, roof)
        assert row.status == "ok" or "GPU" in row.detail
    assert "with state" in str(case)


def test_a_wrong_final_state_is_wrong(roof):
    class Forgets:
        name = "forgets"

        def prepare(self, case, device):
            def call(a):
                output, state = case.work.exact(a, {})
                return output, torch.zeros_like(state)

            return Subject(case.arguments(device), call, lambda a: case.work.exact(a, {}))

    case = Case("gla", tuple((axis, SIZES[axis]) for axis in "BTHKV"), "float32", "fwd", state=True)
    row = measure(case, Forgets(), CPU, roof)
    assert row.status == "wrong"
    assert "of the final state" in row.detail


def test_a_state_goes_through_memory_twice():
    sizes = tuple((axis, SIZES[axis]) for axis in "BTHKV")
    without, state = Case("gla", sizes, "float32"), Case("gla", sizes, "float32", state=True)
    assert floor_bytes(state) - floor_bytes(without) == 2 * 4 * 2 * 2 * 8 * 8


def test_the_chunk_primitives_take_no_state():
    with pytest.raises(ValueError, match="takes no initial state here"):
        Case("inter_chunk_scan", (("B", 1), ("G", 2), ("H", 1), ("K", 4), ("V", 4)), state=True)


def test_keys_of_the_chunk_primitives_are_of_length_one():
    sizes = {"B": 2, "T": 64, "H": 4, "K": 64, "V": 8, "C": 16}
    drawn = intra_chunk_example(sizes, torch.float32, "cpu", 0, False)
    assert drawn["k"].norm(dim=-1).mean().item() == pytest.approx(1, abs=0.1)
    assert drawn["q"].norm(dim=-1).mean().item() == pytest.approx(8, abs=0.5)


def test_peers_that_are_not_set_up_to_decode_say_so(roof):
    case = Case("gla", tuple((axis, SIZES[axis]) for axis in "BTHKV"), "float32", "fwd", state=True)
    row = measure(case, next(peer for peer in PEERS if peer.name == "torch SDPA"), CPU, roof)
    assert (row.status, row.detail) == ("rejected", "is not set up here with a state that goes in and out")


def test_chunks_are_right_where_the_last_is_shorter(roof):
    sizes = (("B", 2), ("T", 40), ("H", 3), ("K", 8), ("V", 4), ("C", 16))
    row = measure(Case("intra_chunk", sizes, "float32", "fwd"), HoldfastRunner("chunked"), CPU, roof)
    assert (row.status, row.detail) == ("ok", "")


def test_the_states_of_the_chunk_primitives():
    """As many as the scan carries, and after each of its chunks."""
    sizes = {"B": 2, "G": 3, "T": 40, "H": 5, "K": 7, "V": 11, "C": 16}
    scan, chunks = workload("inter_chunk_scan"), workload("intra_chunk")
    assert scan.state_size(sizes) == chunks.state_size(sizes) == 2 * 5 * 7 * 11
    assert scan.state_steps(sizes) == 2 * 3 * 5 * 7 * 11
    # pairs of tokens of a chunk, or a state that is wider than it
    assert [chunks.state_steps(sizes | {"C": C}) for C in (16, 4)] == [2 * 40 * 5 * 16, 2 * 40 * 5 * 7]


@pytest.mark.parametrize(("axis", "size"), [("Kg", 8), ("r", 3)])
def test_the_scan_between_chunks_has_row_decays_and_erasing(axis, size, roof):
    sizes = (("B", 2), ("G", 6), ("H", 2), ("K", 8), ("V", 4), (axis, size))
    for passes in ("fwd", "fwd+bwd"):
        row = measure(Case("inter_chunk_scan", sizes, "float32", passes), HoldfastRunner("chunked"), CPU, roof)
        assert (row.status, row.detail) == ("ok", "")


def test_the_scan_may_be_of_one_chunk():
    case = Case("inter_chunk_scan", (("B", 2), ("G", 1), ("H", 2), ("K", 4), ("V", 4)))
    given = case.arguments(CPU)
    assert torch.equal(case.work.exact(given, {}), given["states"])


@pytest.mark.parametrize("op", ["rglru", "rotlru", "hgrn"])
def test_gates_may_be_as_narrow_as_the_inputs(op, roof):
    sizes = (("B", 1), ("T", 6), ("D", 4))
    wide, narrow = (Case(op, (*sizes, ("gate_bits", bits)), "bfloat16", "fwd+bwd") for bits in (32, 16))
    for case, expected in ((wide, torch.float32), (narrow, torch.bfloat16)):
        dtypes = {x.dtype for name, x in case.arguments(CPU).items() if name != "x"}
        assert dtypes == {expected}
        assert measure(case, HoldfastRunner("chunked"), CPU, roof).status == "ok"
    assert floor_bytes(narrow) < floor_bytes(wide)
    with pytest.raises(ValueError, match="expected gate_bits to be 16, x's dtype, or 32; got 8"):
        Case(op, (*sizes, ("gate_bits", 8))).arguments(CPU)


def test_history_and_operations_by_hand():
    sizes = (("B", 3), ("T", 5), ("H", 2), ("K", 8), ("V", 4))
    gla = Case("simple_gla", sizes, "bfloat16", "fwd")
    assert history_bytes(gla) == 4 * 5 * 3 * 2 * 8 * 4
    assert operations(gla) >= 4 * 3 * 5 * 2 * 8 * 4
    lstm = Case("lstm", (("B", 3), ("T", 5), ("H", 2), ("D", 8)), "bfloat16", "fwd")
    # h and c
    assert history_bytes(lstm) == 4 * 5 * 2 * 3 * 2 * 8
    assert operations(lstm) >= 2 * 4 * 3 * 5 * 2 * 8 * 8


def test_the_page_has_a_figure_of_the_error_and_a_table_of_host_times(roof):
    pytest.importorskip("matplotlib")
    host = Case("rglru", (("B", 1), ("T", 2), ("D", 4)), kind="host")
    rows: list[Result] = [measure(LSTM, HoldfastRunner("loop"), CPU, roof)]
    rows.append(measure(host, HoldfastRunner("chunked"), CPU, roof))
    text = page.page([Record("some", "", "", "", "", {"name": "x"}, {}, roof, tuple(rows))])
    assert text.count("<svg") == 1
    assert "holdfast loop, largest" in text
    assert "Host time a call" in text
    # neither has a place in the table of times
    assert "At a glance" not in text
