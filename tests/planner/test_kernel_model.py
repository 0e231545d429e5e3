"""Kernels' plans as integer problems: what a model says of its optimum, of what binds, and of what does not fit."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.ops.explain import named_problem
from holdfast.planner import Candidate, Device, Grid, Problem
from holdfast.planner.constrint import Infeasible, maximum
from holdfast.planner.constrint.backtrack import Backtrack
from holdfast.planner.kernel_model import (
    Kernel,
    KernelModel,
    NothingFits,
    covering,
    planned,
    powers_of_two,
    why_nothing_fits,
)
from holdfast.planner.models.dense import triton as dense
from holdfast.planner.models.matrix import wide
from holdfast.planner.models.matrix.scalar_decay import hopper
from holdfast.planner.models.matrix.vector_decay import triton as vector_decay
from holdfast.planner.movement import Prediction
from planner.test_models import CASES, MATRIX, WIDE_CASES, offers

H200, RTX3090 = Device.named("h200"), Device.named("rtx3090")


def copying(device, most=64, widest=2**20):
    """A block copies rows of 8 columns a warp, in one stage or several."""
    model = KernelModel(device)
    rows = model.variable("rows", powers_of_two(16, most), "largest")
    stages = model.variable("stages", (2, 3, 4), "largest", greedy=True)
    tile = model.let("tile", rows * 1024)
    model.add(rows != 32, "no rows of 32")
    model.add(tile < widest, "bytes of a tile", "bytes")
    model.block(rows // 8, 128, stages * tile)
    return model


def kernel(seconds=lambda values: values["rows"] * 1e-6, **of_model):
    def candidate(problem, device, direction, values):
        grid = values.grid(7)
        return Candidate(values.plan("copy", "rows", "stages"), Prediction(seconds(values), 0), shared=grid.shared)

    return Kernel(lambda problem, device, direction: copying(device, **of_model), candidate)


def test_plans_are_assignments_in_the_order_of_their_time():
    found = planned(None, H200, "forward", kernel())
    assert [str(each.plan) for each in found] == ["copy rows=16 stages=4", "copy rows=64 stages=3"]
    assert [each.shared for each in found] == [4 * 16 * 1024, 3 * 64 * 1024]
    # of equals the first assignment; each plan once, of as many kernels as there are
    equal = planned(None, H200, "forward", kernel(lambda values: 1e-6), kernel())
    assert [each.plan["rows"] for each in equal] == [64, 16]
    assert len(planned(None, H200, "forward", kernel(), keep=1)) == 1


def test_a_report_tells_choices_limits_and_which_binds():
    _, found = planned(None, H200, "forward", kernel())
    report = found.report()
    assert report.chosen == (("rows", 64, "{16, 32, 64}"), ("stages", 3, "{2, 3, 4}, the first that fits"))
    assert ("tile", 65536, "rows * 1024") in report.named
    assert ("shared", 196608, "stages * tile") in report.named
    assert report.fitting == 2
    limits = {limit.label: limit for limit in report.limits}
    assert (limits["shared memory"].taken, limits["shared memory"].room) == (196608, 232448)
    assert (limits["shared memory"].slack, limits["shared memory"].unit) == (232448 - 196608, "bytes")
    assert limits["threads"].slack == 1024 - 32 * 8
    assert limits["no rows of 32"].slack is None
    # less than: the last that it may be
    assert limits["bytes of a tile"].room == 2**20 - 1
    assert [(limit.label, limit.stops) for limit in report.binding] == [
        ("no rows of 32", (("rows", 32, 0, 0),)),
        ("shared memory", (("stages", 4, 262144, 232448),)),
    ]


def test_a_limit_with_its_sides_turned_binds_alike():
    model = KernelModel(H200)
    rows = model.variable("rows", range(1, 9))
    model.add(rows <= 4, "rows")
    model.add(rows > 1, "more than one")
    report = model.report(next(model.assignments()))
    assert [(each.label, each.taken, each.room) for each in report.limits] == [("rows", 2, 4), ("more than one", 1, 1)]
    assert [(each.label, each.stops) for each in report.binding] == [("more than one", (("rows", 1, 1, 0),))]


def test_what_does_not_fit_is_told_with_its_numbers():
    found = planned(None, H200, "forward", kernel(most=16, widest=2**10))
    assert found == ()
    assert isinstance(found, NothingFits)
    assert why_nothing_fits(found) == "bytes of a tile 16,384 of 1,023 bytes"
    assert why_nothing_fits(()) == ""
    small = replace(H200, shared_per_block=30000)
    assert why_nothing_fits(planned(None, small, "forward", kernel())) == "shared memory 32,768 of 30,000 bytes"
    assert copying(H200).clash() == ""


def test_a_clash_of_several_names_the_others():
    problem = Problem.of("lstm", "dense", "bfloat16", {"B": 2, "T": 9, "H": 1, "D": 128, "S": 2, "G": 4, "Gr": 4}, {})
    found = dense.candidates(problem, RTX3090, "forward")
    assert why_nothing_fits(found) == (
        "shared memory 139,520 of 101,376 bytes (with channels of a head in one program)"
    )
    model = KernelModel(H200)
    rows = model.variable("rows", (16, 32))
    model.require(False, "packed sequences")
    model.add(maximum(rows, 17) <= 16, "rows")
    assert model.clash() in ("packed sequences", "rows")


def test_what_needs_no_variable_decides_too():
    model = KernelModel(H200)
    blocks = model.let("blocks", 133)
    model.require(True, "sequences of equal length")
    model.add(blocks <= H200.sms, "blocks at once")
    with pytest.raises(Infeasible, match="blocks <= 132"):
        model.solver.first()
    assert model.clash() == "blocks at once 133 of 132"


@pytest.mark.parametrize("device", [H200, RTX3090, replace(H200, threads_per_sm=384, shared_per_sm=100000)])
def test_a_block_fits_where_its_grid_does(device):
    """As Grid.fits counts registers, threads and shared memory."""
    fitting = 0
    for warps in (1, 2, 3, 4, 8, 12, 16, 17, 32, 33):
        for registers in (16, 24, 33, 64, 128, 168, 170, 240, 255, 256):
            for shared in (0, 1000, 50000, 98900, 99000, 101376, 101377, 232448, 232449):
                model = KernelModel(device)
                model.block(warps, registers, shared)
                found = list(model.assignments())
                grid = Grid(3, 32 * warps, registers, shared)
                assert bool(found) == grid.fits(device), grid
                if found:
                    fitting += 1
                    assert found[0].grid(3) == grid
                    assert model.at_once(warps, registers, shared).value({}) == grid.at_once(device)
    assert fitting > 100


def test_a_device_without_limits_has_no_blocks():
    with pytest.raises(ValueError, match="one whose limits are known; got 'cpu'"):
        KernelModel(Device.named("cpu")).block(4, 64, 0)


def test_powers_of_two():
    assert powers_of_two(1, 1) == [1]
    assert powers_of_two(16, 128) == [16, 32, 64, 128]
    assert powers_of_two(9, 100) == [16, 32, 64]
    assert [covering(size, 4) for size in (0, 1, 4, 5, 8, 9)] == [4, 4, 4, 8, 8, 16]


@pytest.mark.parametrize("name", ["h200", "rtx3090"])
def test_every_kernels_plan_is_an_assignment_that_keeps_all_limits(name):
    """And has no integer that its model does not say; those of slices of a state are cut before."""
    device, kernels = Device.named(name), set()
    # a token without a gradient is decoded
    for op, shape in [*CASES[::2], *WIDE_CASES[::5], ("simple_gla", MATRIX[-1])]:
        for _, direction, backend, found in offers(op, shape, device, grad=shape is not MATRIX[-1]):
            if backend.name in ("chunked", "reference", "loop", "alternating"):
                continue
            for each in (found[0], found[-1]) if found else ():
                kernels.add(backend.name)
                report = each.report()
                said = {name: value for name, value, _ in (*report.chosen, *report.named)}
                said |= {name: value for name, value in each.plan.values if name.endswith("_slices")}
                assert dict(each.plan.values).items() <= said.items(), (op, shape, direction, str(each.plan))
                assert all(limit.slack is None or limit.slack >= 0 for limit in report.limits), str(each.plan)
                assert report.fitting >= 1
    assert kernels == {"h200": {"hopper", "triton", "fused", "decode"}}.get(name, {"triton", "fused", "decode"})


def test_what_no_kernel_takes_for_wide_states_is_told_of_the_kernel():
    """Slices of a state hand on why none fits, and what those of a kernel that does are a solution of."""
    _, problem = named_problem("simple_gla", {"B": 1, "T": 64, "H": 2, "K": 64, "V": 128}, torch.bfloat16, True, False)
    tight, cut = replace(H200, shared_per_block=20000), wide.Cut(1, 2)
    none = wide.candidates(problem, tight, "forward", cut, hopper.candidates)
    assert why_nothing_fits(none).startswith("shared memory of sweep ")
    sliced = wide.candidates(problem, H200, "forward", cut, hopper.candidates)[0]
    assert sliced.plan["value_slices"] == 2
    assert ("columns", 64, "{64, 128}") in sliced.report().chosen


def test_the_page_shows_a_model_as_it_stands():
    page = (Path(__file__).parents[2] / "docs" / "planner" / "planning.md").read_text(encoding="utf-8")
    assert inspect.getsource(vector_decay.model).rstrip() in page


@pytest.mark.parametrize("name", ["h200", "rtx3090"])
def test_a_plan_takes_few_steps(name, monkeypatch):
    """Assignments of some variables that are checked: as many as a CPU core takes within some 15 ms.

    The dense backends plan before they say that they serve a call, which counts too.
    """
    steps, most, holds = [], {}, Backtrack.holds
    monkeypatch.setattr(Backtrack, "holds", lambda *given: steps.append(1) or holds(*given))
    for op, shape in [*CASES, *WIDE_CASES]:
        for _, direction, backend, _ in offers(op, shape, Device.named(name)):
            most[backend.name, direction] = max(most.get((backend.name, direction), 0), len(steps))
            steps.clear()
    assert max(most.values()) < 2000, most
