"""Backends of one name: a problem has one variant at most, and the plan has the name of the kernels that run."""

import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from holdfast.kernels.matrix.delta_rule.hopper.backend import HopperDelta
from holdfast.kernels.matrix.delta_rule.triton import launch as triton_launch
from holdfast.kernels.matrix.delta_rule.triton.backend import TritonDelta
from holdfast.kernels.matrix.variants import BackendVariants
from holdfast.ops import matrix
from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from holdfast.recurrences.definition import MatrixCall

DEVICES = ("cpu", "h200", "h100", "a100", "a40", "rtx4090", "rtx3090")
H200 = Device.named("h200")
NAMED = [each for each in matrix.BACKENDS if isinstance(each, BackendVariants)]
# of a kernel's tiles, odd, wide in V or in K, and longer than a grid has room for
SIZES = [
    {"T": 4096, "K": 128, "V": 128},
    {"T": 77, "K": 33, "V": 17},
    {"T": 4096, "K": 64, "V": 256},
    {"T": 4096, "K": 256, "V": 512},
    {"T": 2**23, "K": 64, "V": 64},
]
DTYPES = ("bfloat16", "float16", "float32", "float64")


def serving(backend, problem, device):
    return [variant for variant in backend.variants if variant.reject(problem, device) is None]


def saving(problem, device):
    found = (pair for backend in NAMED for pair in backend.saving(problem))
    return [shape for variant, shape in found if variant.reject(problem, device) is None]


def trait_sets():
    """Those of every recurrence, and of those that none has yet."""
    flags = ("delta", "beta", "normalizer", "varlen", "needs_grad")
    for decay in ((), ("decay=scalar",), ("decay=vector",)):
        for there in itertools.product((False, True), repeat=len(flags)):
            yield frozenset((*decay, *itertools.compress(flags, there)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_problem_has_one_variant_of_a_name_at_most(sizes, dtype):
    shape = tuple(({"B": 2, "T": 1, "H": 4, "Hq": 2, "N": 3} | sizes).items())
    for traits in trait_sets():
        problem = Problem("any", "matrix", dtype, shape, traits)
        for device in map(Device.named, ("cpu", "h200", "a100")):
            for backend in NAMED:
                assert len(serving(backend, problem, device)) <= 1, (backend.name, sorted(traits))
            assert len(saving(problem, device)) <= 1, sorted(traits)


@pytest.mark.parametrize("op", [name for name, each in RECURRENCES.items() if each.family == "matrix"])
def test_a_recurrence_runs_by_the_variant_that_its_problem_has(op):
    for device, dtype, grad in itertools.product(map(Device.named, DEVICES), (torch.bfloat16, torch.float32), (0, 1)):
        arguments = RECURRENCES[op].example(Draw(0, dtype, "meta"), Sizes(B=2, T=64, H=4, Hq=4, K=64, V=64))
        call, _ = RECURRENCES[op].map(**arguments)
        problem = matrix.problem(op, call, None, bool(grad))
        for backend in NAMED:
            found = serving(backend, problem, device)
            assert bool(found) == (backend.reject(problem, device) is None)
            if found:
                assert backend.variant(problem, device) is found[0]
                plans = backend.candidates(problem, device, "forward")
                assert plans == found[0].candidates(problem, device, "forward")


def test_two_that_serve_a_problem_are_an_error():
    twice = BackendVariants(TritonDelta(), TritonDelta())
    with pytest.raises(ValueError, match="too many values"):
        twice.variant(wide_values(), H200)


def wide_values(V=256, **sizes):
    shape = {"B": 1, "T": 128, "H": 2, "Hq": 2, "K": 64, "V": V} | sizes
    return Problem.of("delta_rule", "matrix", "bfloat16", shape, {"delta": True, "beta": True, "needs_grad": True})


def test_gradients_by_triton_are_called_so():
    mine, tritons = (each.candidates(wide_values(), H200, "backward") for each in (HopperDelta(), TritonDelta()))
    assert mine == tritons
    assert {each.plan.backend for each in mine} == {"triton"}
    for problem, direction in (
        (wide_values(), "forward"),
        (wide_values(128), "backward"),
        (wide_values(K=256), "backward"),
    ):
        found = HopperDelta().candidates(problem, H200, direction)
        assert {each.plan.backend for each in found} == {"hopper"}, (problem, direction)


@pytest.mark.parametrize(("V", "ran"), [(256, "triton"), (128, "hopper")])
def test_a_plan_names_the_kernels_that_run(monkeypatch, V, ran):
    from holdfast.kernels.matrix.delta_rule.hopper import launch_backward

    runs = []
    for name, module in (("triton", triton_launch), ("hopper", launch_backward)):
        monkeypatch.setattr(module, "backward", lambda plan, *_, name=name: runs.append((name, plan)))
    v = torch.empty(1, 128, 2, V)
    q = torch.empty(1, 128, 2, 64)
    call = MatrixCall(q, q, v, None, torch.empty(1, 128, 2), delta=True)
    plan = HopperDelta().candidates(wide_values(V), H200, "backward")[0].plan
    HopperDelta().backward(plan, call, None, v, None)
    assert runs == [(ran, plan)]
    assert plan.backend == ran
    assert isinstance(plan, Plan)
