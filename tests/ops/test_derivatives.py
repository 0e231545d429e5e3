"""Derivatives beyond one gradient: refused with a clear error by every op, never zero and never in part."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

import holdfast
from every_call import CALLS, FUSED, PARTS
from fused_on_cpu import fused_on_cpu
from holdfast.kernels import select as planning
from holdfast.kernels.runtime.replay import replay
from holdfast.nn import GLA, LSTM, Mamba2, RotLRU
from parity import leaves

every_call = pytest.mark.parametrize("name", CALLS)
REFUSED = r"^\w+: expected tensors without tangents.*forward-mode"


# arguments, by number, that PyTorch's own operations take to the outputs: D and z beside a rate a channel, and states
# that come back
BESIDE = {"ssd with a rate a channel": (5, 6)}
BESIDE |= {"mlstm, sigmoid": (5,), "mlstm, sigmoid, not normalised": (4, 5)}


def flat_call(name, dtype=torch.float32, device="cpu"):
    """(a function of tensors, tensors)."""
    call = (CALLS | PARTS)[name]
    arguments = call.arguments(dtype, device=device)
    reset = arguments.pop("reset", None)
    flat, structure = tree_flatten(arguments)

    def run(*tensors):
        given = tree_unflatten(tensors, structure)
        return tuple(leaves(call(given if reset is None else given | {"reset": reset})))

    return run, tuple(flat)


def dual(run, tensors, at):
    with forward_ad.dual_level():
        given = [forward_ad.make_dual(x, torch.ones_like(x)) if n == at else x for n, x in enumerate(tensors)]
        return [forward_ad.unpack_dual(x).tangent for x in run(*given)]


FORWARD = {
    "jvp": lambda run, given: torch.func.jvp(run, given, given),
    "jacfwd": lambda run, given: torch.func.jacfwd(run)(*given),
    "linearize": lambda run, given: torch.func.linearize(run, *given),
    "jvp of vmap": lambda run, given: torch.func.jvp(torch.vmap(run), *[tuple(x[None] for x in given)] * 2),
    "jacobian": lambda run, given: torch.autograd.functional.jacobian(
        run, given, strategy="forward-mode", vectorize=True
    ),
}


@pytest.mark.parametrize("way", FORWARD)
@every_call
def test_forward_mode_is_refused(name, way):
    run, given = flat_call(name)
    with pytest.raises(NotImplementedError, match=REFUSED):
        FORWARD[way](run, given)


def check_dual(name, device="cpu", times=1):
    """Of each argument alone, with gradients and without, also once calls without tangents have been replayed."""
    run, given = flat_call(name, device=device)
    for needs in (False, True):
        given = [x.detach().requires_grad_(needs) for x in given]
        for _ in range(times):
            run(*given)
        for at in range(len(given)):
            if at not in BESIDE.get(name, ()):
                with pytest.raises(NotImplementedError, match=REFUSED):
                    dual(run, given, at)


@every_call
def test_a_tangent_of_any_argument_is_refused(name):
    check_dual(name)


@pytest.mark.parametrize("name", FUSED)
def test_a_tangent_is_refused_where_a_kernel_prepares_inputs(name):
    with fused_on_cpu():
        check_dual(name)


@pytest.mark.gpu
@every_call
def test_a_tangent_is_refused_on_a_gpu(name):
    check_dual(name, "cuda", times=4)


@pytest.mark.parametrize("name", BESIDE)
def test_what_the_op_has_no_part_in_has_its_tangent(name):
    run, given = flat_call(name, torch.float64)
    for at in BESIDE[name]:
        found = dual(run, given, at)
        step = [x + 1e-6 * (n == at) for n, x in enumerate(given)]
        for tangent, x, y in zip(found, run(*step), run(*given), strict=True):
            change = (x - y) / 1e-6
            tangent = torch.zeros_like(change) if tangent is None else tangent
            torch.testing.assert_close(tangent, change, atol=1e-4, rtol=1e-4)


def test_a_step_refuses_tangents():
    for name in ("simple_gla", "mlstm"):
        arguments = {key: x[:, :1] for key, x in CALLS[name].arguments(torch.float32).items() if key != "initial_state"}
        state = CALLS[name].arguments(torch.float32)["initial_state"]
        with forward_ad.dual_level():
            token = arguments | {"v": forward_ad.make_dual(arguments["v"], arguments["v"])}
            with pytest.raises(NotImplementedError, match=REFUSED):
                holdfast.step(name, token, state)


@pytest.mark.parametrize("module", [lambda: GLA(8, 2), lambda: Mamba2(8, 2), lambda: RotLRU(8, 2), lambda: LSTM(8, 8)])
def test_modules_refuse_tangents(module):
    module, x = module(), torch.randn(2, 5, 8)
    with pytest.raises(NotImplementedError, match=REFUSED):
        torch.func.jvp(lambda x: module(x)[0], (x,), (x,))
    with pytest.raises(NotImplementedError, match=REFUSED), torch.no_grad():
        dual(lambda x: module(x)[:1], [x], 0)


def test_a_level_without_tangents_changes_nothing():
    for name in ("simple_gla", "rglru", "lstm", "gated_rms_norm"):
        run, given = flat_call(name)
        with forward_ad.dual_level():
            made = run(*given)
        assert all(torch.equal(x, y) for x, y in zip(made, run(*given), strict=True))


def test_replays_stop_at_a_tangent(monkeypatch):
    """What was recorded knows nothing of tangents."""
    monkeypatch.setattr(replay, "_PLAIN", set())
    replay.allow(torch.device("cpu"))
    runs = []
    counted = replay.replayed(lambda x: (runs.append(1), x * 2)[1])
    x = torch.randn(3)
    for _ in range(4):
        counted(x)
    assert len(runs) == 2
    (tangent,) = dual(lambda x: (counted(x),), [x], 0)
    planning.forget()
    assert tangent.tolist() == [2, 2, 2]


REVERSE = {
    "grad": lambda run, given: torch.func.grad(lambda *x: run(*x)[0].sum())(*given),
    "vjp": lambda run, given: torch.func.vjp(run, *given),
    "jacrev": lambda run, given: torch.func.jacrev(run)(*given),
    "hessian": lambda run, given: torch.func.hessian(lambda *x: run(*x)[0].sum())(*given),
}


@pytest.mark.parametrize("way", REVERSE)
@every_call
def test_transforms_that_differentiate_are_refused(name, way):
    run, given = flat_call(name)
    with pytest.raises(NotImplementedError, match=r"^\w+: expected (a call outside of|tensors without tang)"):
        REVERSE[way](run, given)


@every_call
def test_vmap_is_a_call_for_each(name):
    run, given = flat_call(name)
    other = tuple(x + 0.1 for x in given)
    got = torch.vmap(run)(*(torch.stack(pair) for pair in zip(given, other, strict=True)))
    for x, *right in zip(got, run(*given), run(*other), strict=True):
        torch.testing.assert_close(x, torch.stack(right))


@every_call
def test_a_second_differentiation_is_refused(name):
    """By every argument that the gradient depends on, also where there is another way to it."""
    run, given = flat_call(name, torch.float64)
    given = [x.requires_grad_() for x in given]
    for at, x in enumerate(given):
        if at not in BESIDE.get(name, ()):
            loss = sum(y.square().sum() for y in run(*given)) + x.pow(3).sum()
            first = torch.autograd.grad(loss, given, create_graph=True, allow_unused=True)
            for got, right in zip(first, torch.autograd.grad(loss, given, allow_unused=True), strict=True):
                torch.testing.assert_close(got, right)
            with pytest.raises(NotImplementedError, match=r"^\w+: expected one differentiation"):
                torch.autograd.grad(sum(g.sum() for g in first if g is not None and g.requires_grad), x)


@every_call
def test_a_product_with_a_jacobian_by_two_backward_passes_is_refused(name):
    run, given = flat_call(name, torch.float64)
    with pytest.raises(NotImplementedError, match=r"^\w+: expected one differentiation"):
        torch.autograd.functional.jvp(run, given, given)


def test_a_graph_of_gradients_goes_with_checkpoints():
    run, given = flat_call("gated_delta_rule with all options")
    given = [x.requires_grad_() for x in given]
    first = torch.autograd.grad(run(*given)[0].sum(), given, create_graph=True, allow_unused=True)
    o, _ = checkpoint(run, *given, use_reentrant=False)
    again = torch.autograd.grad(o.sum(), given, create_graph=True, allow_unused=True)
    for got, right in zip(again, first, strict=True):
        assert got is right is None or torch.equal(got, right)
