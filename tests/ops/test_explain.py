"""explain says what would run, what it should cost, and why not otherwise."""

from types import SimpleNamespace

import pytest
import torch

import holdfast
from holdfast.kernels import select as planning
from holdfast.kernels.backend import describe
from holdfast.ops import matrix
from holdfast.ops.chunk_primitives import CHUNK_PRIMITIVES
from holdfast.ops.explain import AXES
from holdfast.planner import Candidate, Device, Grid, Plan, tables
from holdfast.recurrences import RECURRENCES, Sizes

pytestmark = pytest.mark.usefixtures("no_table")

SIZES = {"B": 4, "T": 4096, "H": 32, "K": 128, "V": 64}
OPS = [*RECURRENCES, *CHUNK_PRIMITIVES]


def sizes_of(op):
    known = AXES[RECURRENCES[op].family] if op in RECURRENCES else CHUNK_PRIMITIVES[op].sizes
    return {name: SIZES.get(name, 64) for name in known if name in "BTGHKVCD"}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["cpu", "h200", "a100", "rtx4090"])
def test_every_op_can_be_explained(op, device):
    told = holdfast.explain(op, sizes_of(op), "bfloat16", device)
    assert told.problem.dtype == "bfloat16"
    assert [each.direction for each in told.passes] == ["forward", "backward"]
    assert told.plan.backend not in told.passed_over
    assert f"runs     {told.plan}" in str(told)
    for each in told.passes:
        assert each.chosen.plan.backend == told.plan.backend
        assert each.floor.moved > 0
        assert (each.floor_seconds is None) == (device == "cpu")
        if each.chosen.candidate.moved and each.direction == "forward":
            # a kernel cannot move less than the call has; bfloat16 gates are counted as float32 in the floor
            assert each.chosen.candidate.moved > 0.9 * each.floor.moved


@pytest.mark.parametrize("op", RECURRENCES)
def test_the_slow_reference_is_listed_and_never_runs_by_itself(op):
    assert "reference" in holdfast.explain(op, sizes_of(op), "bfloat16", "h200").passed_over


def test_traits_are_those_of_the_call():
    told = holdfast.explain("mlstm", {"H": 4, "Hq": 2}, varlen=True, needs_grad=False)
    assert told.problem.traits == {"decay=scalar", "beta", "normalizer", "varlen"}
    assert told.problem["Hq"] == 2
    assert [each.direction for each in told.passes] == ["forward"]


@pytest.mark.parametrize("op", CHUNK_PRIMITIVES)
def test_chunk_primitives_have_the_sizes_of_other_examples(op):
    """Where none are given."""
    sizes, told = Sizes(), holdfast.explain(op)
    shared = [axis for axis in "BTHKV" if axis in CHUNK_PRIMITIVES[op].sizes]
    assert [told.problem[axis] for axis in shared] == [getattr(sizes, axis) for axis in shared]


def test_traits_of_the_chunk_primitives():
    told = holdfast.explain("inter_chunk_scan", {"K": 32, "Kg": 32, "r": 16}, varlen=True)
    assert told.problem.traits == {"decay=vector", "low_rank", "varlen", "needs_grad"}
    assert told.problem["r"] == 16
    assert holdfast.explain("intra_chunk", {"Hq": 1, "C": 128}).problem["C"] == 128


def test_a_forced_backend_says_so():
    told = holdfast.explain("gla", backend="reference")
    assert told.plan.backend == "reference"
    assert told.passed_over["chunked"] == "reference is forced"


class Kernel:
    """Two plans of known cost."""

    name = "kernel"

    def reject(self, problem, device):
        return None if device.kind == "cuda" else "needs an NVIDIA GPU"

    def candidates(self, problem, device, direction):
        grids = [Grid(128, 256, 168, 64 * 1024), Grid(64, 256, 168, 64 * 1024)]
        plans = [Plan("kernel", (("chunk", chunk),)) for chunk in (64, 32)]
        return tuple(Candidate.of(plan, device, grid, 2**30, 10**12) for plan, grid in zip(plans, grids, strict=True))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(matrix, "BACKENDS", (Kernel(), matrix.Reference()))


def test_costs_of_the_plan_and_of_those_it_beat(kernel):
    told = holdfast.explain("gla", SIZES, "bfloat16", "h200")
    forward = told.passes[0]
    chosen = forward.chosen
    assert (chosen.plan["chunk"], chosen.candidate.blocks, chosen.candidate.shared) == (64, 128, 64 * 1024)
    assert chosen.seconds == chosen.candidate.prediction.seconds > 0
    assert [other.plan.backend for other in forward.beaten] == ["kernel", "reference"]
    assert forward.beaten[0].seconds > chosen.seconds
    assert forward.beaten[1].seconds is None or forward.beaten[1].seconds > forward.beaten[0].seconds
    # q, k of 128, v and o of 64 columns, bfloat16, and a float32 decay a column of k
    assert forward.floor.moved == 4 * 4096 * 32 * (2 * (2 * 128 + 2 * 64) + 4 * 128)
    text = str(told)
    for words in ("1 GiB", "1 Top", "of 64 KiB shared, 168 registers a thread", "bound by", "x the floor"):
        assert words in text, words


def test_a_measured_plan_says_so(kernel):
    problem = holdfast.explain("gla", SIZES, "bfloat16", "h200").problem
    slow, gone = Plan("kernel", (("chunk", 32),)), Plan("kernel", (("chunk", 7),))
    timings = {
        (problem, direction): (tables.Timing(gone, 1e-4), tables.Timing(slow, 2e-4))
        for direction in ("forward", "backward")
    }
    planning.forget()
    with tables.instead(tables.Table("NVIDIA H200", 132, {}, timings)):
        told = holdfast.explain("gla", SIZES, "bfloat16", "h200")
        assert told.passes[0].chosen.plan == slow
        assert told.passes[0].chosen.seconds == 2e-4
        assert "measured 200 us" in str(told)
        assert "ignored  forward, measured kernel chunk=7: no candidate of this version" in str(told)
        assert told.passed_over["reference"] == "was not measured, and kernel was"


def test_a_table_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "_in_use", [])
    tables.path_of(Device.named("h200")).write_text("{")
    tables._read_once.cache_clear()
    with pytest.raises(tables.TableError, match=r"h200.json: not readable as JSON .*holdfast bench --tune"):
        holdfast.explain("gla", device="h200")
    tables._read_once.cache_clear()


def test_the_gpu_that_is_here(monkeypatch):
    """As its driver describes it: a slice of an H200, here."""
    card = SimpleNamespace(
        name="NVIDIA H200 MIG 1g.18gb",
        major=9,
        minor=0,
        multi_processor_count=16,
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=233472,
        shared_memory_per_block_optin=232448,
        max_threads_per_multi_processor=2048,
        L2_cache_size=2**23,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    described = holdfast.explain("gla", SIZES, "bfloat16", "cuda").device
    describe.cache_clear()
    assert (described.name, described.sms, described.l2_bytes) == (card.name, 16, 2**23)
    assert described.bandwidth == pytest.approx(Device.named("h200").bandwidth * 16 / 132)


def test_no_gpu_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device: expected a GPU here for 'cuda'.*got no GPU"):
        holdfast.explain("gla", device="cuda")


def test_a_rejection_is_passed_on(kernel):
    assert holdfast.explain("gla").passed_over["kernel"] == "needs an NVIDIA GPU"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "glue"}, "op: expected one of .*gla.*intra_chunk; got 'glue'"),
        ({"op": "gla", "sizes": {"Z": 3}}, "sizes: expected axes among .*; got 'Z'"),
        ({"op": "intra_chunk", "sizes": {"D": 3}}, "sizes: expected axes among B, T, H, Hq, K, V, C; got 'D'"),
        ({"op": "gla", "sizes": {"D": 3}}, "sizes: expected axes among B, T, H, Hq, K, V; got 'D'"),
        ({"op": "lstm", "sizes": {"D": 0}}, "sizes: expected D >= 1; got 0"),
        ({"op": "intra_chunk", "sizes": {"C": 0}}, "sizes: expected C >= 1; got 0"),
        ({"op": "intra_chunk", "varlen": True}, "varlen: intra_chunk takes no packed sequences"),
        ({"op": "inter_chunk_scan", "sizes": {"Kg": 3}}, "sizes: expected Kg, the decays a head, to be 1 or K = 16"),
        ({"op": "gla", "sizes": {"B": -1}}, "sizes: expected B >= 0; got -1"),
        ({"op": "gla", "dtype": "int32"}, "dtype: expected a floating-point dtype .*; got 'int32'"),
        ({"op": "gla", "device": "abacus"}, "device: expected one of .*; got 'abacus'"),
        ({"op": "gla", "backend": "fast"}, "backend: expected one of .*; got 'fast'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        holdfast.explain(**arguments)
