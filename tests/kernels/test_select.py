"""From problems to plans: the order of backends, predicted and measured times, and what is remembered."""

import time

import pytest
import torch

from holdfast.kernels import select as planning
from holdfast.kernels.backend import Rejected, describe
from holdfast.kernels.select import decide, resolve
from holdfast.ops import dense, diagonal, matrix
from holdfast.planner import Candidate, Device, Plan, Problem, tables
from holdfast.planner.kernel_model import NothingFits
from holdfast.planner.movement import Prediction
from holdfast.planner.tables import Table, Timing
from holdfast.recurrences import RECURRENCES, Draw, Sizes

pytestmark = pytest.mark.usefixtures("no_table")

FORWARD = Problem("gla", "matrix", "float32", (("B", 1), ("T", 8)))
BOTH = Problem("gla", "matrix", "float32", (("B", 1), ("T", 8)), frozenset({"needs_grad"}))
H200 = Device.named("h200")


class Stub:
    """seconds: direction -> those of its candidates, None where no model says."""

    def __init__(self, name, forward=(None,), backward=(None,), reason=None):
        self.name, self.reason = name, reason
        self.seconds = {"forward": forward, "backward": backward}
        self.calls = 0

    def reject(self, problem, device):
        return self.reason

    def candidates(self, problem, device, direction):
        self.calls += 1
        return tuple(
            Candidate(plan(self.name, n), None if seconds is None else Prediction(seconds, 0))
            for n, seconds in enumerate(self.seconds[direction])
        )


def plan(name, n=0):
    return Plan(name, (("n", n),))


def chosen(backends, problem=FORWARD, name=None, direction="forward"):
    backend, found = resolve(tuple(backends), problem, H200, name, direction)
    assert backend.name == found.backend
    return found


def test_without_models_the_first_that_serves_runs():
    backends = Stub("hopper", reason="needs compute capability 9.0"), Stub("triton"), Stub("chunked")
    assert chosen(backends) == plan("triton")
    told = decide(backends, FORWARD, H200, None).passed_over
    assert told == {"hopper": "needs compute capability 9.0", "chunked": "triton comes first"}


def test_the_least_predicted_time_runs():
    backends = Stub("hopper", forward=(3e-3,)), Stub("triton", forward=(2e-3, 4e-3)), Stub("chunked")
    assert chosen(backends) == plan("triton")
    told = decide(backends, FORWARD, H200, None).passed_over
    assert told == {"hopper": "predicted 3 ms, triton 2 ms", "chunked": "triton comes first"}


def test_of_equals_the_first_runs_and_all_others_are_listed_after_it():
    backends = Stub("hopper", forward=(2e-3, 4e-3)), Stub("triton", forward=(2e-3, 3e-3)), Stub("chunked")
    assert chosen(backends) == plan("hopper")
    decision = decide(backends, FORWARD, H200, None)
    assert decision.passed_over["triton"] == "hopper comes first"
    found = [scored.candidate.plan for scored in decision.ranked["forward"]]
    assert found == [plan("hopper"), plan("triton"), plan("triton", 1), plan("hopper", 1), plan("chunked")]


def test_forgetting_empties_what_ops_remember():
    plans = planning.clearable_cache()
    plans["a call"] = "a plan"
    planning.forget()
    assert plans == {}


def test_what_is_remembered_begins_anew_where_it_is_full():
    """Lengths that change with every call would fill the memory."""
    plans = planning.clearable_cache()
    for n in range(4096):
        plans[n] = n
    plans[7] = "another"
    assert len(plans) == 4096
    plans["one more"] = "a plan"
    assert plans == {"one more": "a plan"}


def test_a_table_of_another_device_is_only_mentioned_where_it_has_the_call():
    """That of an H200 with 16 SMs, where 132 are."""
    other = Problem("gla", "matrix", "float32", (("B", 2), ("T", 8)))
    timings = {(other, "forward"): (Timing(plan("triton"), 1e-3),)}
    with tables.instead(Table("NVIDIA H200 MIG", 16, {}, timings)):
        backends = Stub("hopper"), Stub("triton")
        assert decide(backends, FORWARD, H200, None).ignored == ()
        (note,) = decide(backends, other, H200, None).ignored
        assert note == "the table of NVIDIA H200 MIG was measured with 16 SMs, this device has 132"
        assert chosen(backends, other) == plan("hopper")


def test_a_backend_without_a_model_keeps_its_place():
    assert chosen((Stub("hopper"), Stub("triton", forward=(1e-3,)))) == plan("hopper")


def test_one_backend_runs_both_passes():
    """What its forward pass saves means nothing to another, so the sum decides."""
    backends = Stub("hopper", (1e-3,), (5e-3,)), Stub("triton", (2e-3,), (3e-3,))
    assert chosen(backends) == plan("hopper")
    assert chosen(backends, BOTH, direction="forward") == plan("triton")
    assert chosen(backends, BOTH, direction="backward") == plan("triton")


def test_a_backend_none_of_whose_plans_fits_is_passed_over():
    backends = Stub("hopper", (1e-3,), ()), Stub("chunked")
    assert chosen(backends) == plan("hopper")
    assert chosen(backends, BOTH) == plan("chunked")
    assert decide(backends, BOTH, H200, None).passed_over == {"hopper": "no plan of its backward fits h200"}
    with pytest.raises(Rejected, match="'hopper' cannot run gla here: no plan of its backward fits h200"):
        resolve(backends, BOTH, H200, "hopper", "forward")
    with pytest.raises(ValueError, match="no backend can run gla on h200: hopper: no plan of its forward and backward"):
        resolve((Stub("hopper", (), ()),), BOTH, H200, None, "forward")


def test_why_none_of_its_plans_fits_is_what_its_model_says():
    class Tight(Stub):
        def candidates(self, problem, device, direction):
            return NothingFits.because(lambda: f"shared memory {direction}")

    said = "no plan of its forward and backward fits h200: shared memory forward"
    assert decide((Tight("hopper"), Stub("chunked")), BOTH, H200, None).passed_over == {"hopper": said}
    with pytest.raises(Rejected, match=f"'hopper' cannot run gla here: {said}"):
        resolve((Tight("hopper"),), BOTH, H200, "hopper", "forward")


def test_a_named_backend_runs_or_raises():
    backends = Stub("hopper", reason="needs compute capability 9.0"), Stub("triton", (1e-3,)), Stub("chunked")
    assert chosen(backends, name="chunked") == plan("chunked")
    assert decide(backends, FORWARD, H200, "chunked").passed_over["triton"] == "chunked is forced"
    with pytest.raises(Rejected, match="needs compute capability"):
        chosen(backends, name="hopper")


def measured(*entries, sms=132):
    """A table of (direction, plan, seconds)."""
    timings = {}
    for direction, what, seconds in entries:
        for problem in (FORWARD, BOTH):
            timings.setdefault((problem, direction), []).append(Timing(what, seconds))
    ordered = {key: tuple(sorted(found, key=lambda t: t.seconds)) for key, found in timings.items()}
    return Table("NVIDIA H200", sms, {"triton": "3.6.0"}, ordered)


def test_measured_times_win_over_predicted_ones():
    backends = Stub("hopper", (1e-3, 2e-3, 3e-3)), Stub("triton", (2e-3,))
    entries = ("forward", plan("hopper", 0), 5e-3), ("forward", plan("hopper", 1), 4e-3)
    with tables.instead(measured(*entries)):
        assert chosen(backends) == plan("hopper", 1)
        found = decide(backends, FORWARD, H200, None)
        assert found.chosen["forward"].measured == 4e-3
        assert found.passed_over == {"triton": "was not measured, and hopper was"}
    planning.forget()
    with tables.instead(measured(*entries, ("forward", plan("triton"), 3e-3))):
        assert chosen(backends) == plan("triton")
        assert decide(backends, FORWARD, H200, None).passed_over == {"hopper": "measured 4 ms, triton 3 ms"}


def test_a_call_measured_in_one_pass_alone_keeps_its_backend():
    backends = Stub("hopper", (1e-3,), (1e-3, 2e-3)), Stub("triton", (2e-3,), (2e-3,))
    with tables.instead(measured(("forward", plan("triton"), 1e-4), ("backward", plan("hopper", 1), 1e-4))):
        assert chosen(backends, BOTH, direction="forward") == plan("hopper")
        assert chosen(backends, BOTH, direction="backward") == plan("hopper", 1)


def test_a_measured_plan_that_nobody_offers_is_ignored_and_told():
    backends = (Stub("hopper", (1e-3,)),)
    with tables.instead(measured(("forward", plan("hopper", 7), 1e-5), ("forward", plan("cuda"), 1e-5))):
        assert chosen(backends) == plan("hopper", 0)
        assert decide(backends, FORWARD, H200, None).ignored == (
            "forward, measured hopper n=7: no candidate of this version",
            "forward, measured cuda n=0: its backend does not serve this call",
        )


def test_a_table_of_another_size_of_gpu_is_ignored_and_told():
    backends = (Stub("hopper", (1e-3, 2e-3)),)
    with tables.instead(measured(("forward", plan("hopper", 1), 1e-5), sms=16)):
        assert chosen(backends) == plan("hopper", 0)
        (note,) = decide(backends, FORWARD, H200, None).ignored
        assert note == "the table of NVIDIA H200 was measured with 16 SMs, this device has 132"


def test_a_call_is_planned_once():
    stub = Stub("triton", (1e-3,), (1e-3,))
    for _ in range(3):
        chosen((stub,), BOTH, direction="forward")
        chosen((stub,), BOTH, direction="backward")
    assert stub.calls == 2
    planning.forget()
    chosen((stub,), BOTH)
    assert stub.calls == 4


CALLS = {"gla": matrix, "rglru": diagonal, "lstm": dense}


@pytest.mark.parametrize("op", CALLS)
def test_a_warm_plan_takes_under_50_microseconds(op):
    """Of this process alone, the smallest of five means: the machine may do other work too."""
    recurrence, family = RECURRENCES[op], CALLS[op]
    call, _ = recurrence.map(**recurrence.example(Draw(0, torch.float32, "meta"), Sizes()))
    device = torch.device("cpu")

    def mean(runs):
        started = time.process_time()
        for _ in range(runs):
            resolve(family.BACKENDS, family.problem(op, call, None, True), describe(device), "", "forward")
        return (time.process_time() - started) / runs

    mean(1)
    assert min(mean(200) for _ in range(5)) < 50e-6
