"""A delta rule with an erase key beside its write key: the family's PyTorch backends against a loop of its own."""

from itertools import pairwise

import pytest
import torch

from holdfast.kernels.matrix.delta_rule.hopper.backend import HopperDelta
from holdfast.kernels.matrix.delta_rule.triton.backend import TritonDelta
from holdfast.kernels.matrix.vector_decay.triton.delta.backend import TritonKDA
from holdfast.ops import matrix
from holdfast.planner import Device, Problem
from holdfast.planner.floors import floor
from holdfast.recurrences.definition import MatrixCall
from parity import assert_close

BACKENDS = ("chunked", "reference")
DECAYS = ("none", "scalar", "vector")
TRITON = next(backend for backend in matrix.BACKENDS if backend.name == "triton")
every_call = pytest.mark.parametrize("before", [False, True], ids=["after decay", "before decay"])


def draw(decay="vector", before=False, T=70, B=2, H=4, Hq=2, He=4, K=5, V=6, states=None, strength=1.0, dtype=None):
    """A call whose keys are of length 1 at most, so that no product of steps grows."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def unit(*shape):
        x = normal(*shape)
        return x / x.norm(dim=-1, keepdim=True)

    g = None
    if decay != "none":
        g = strength * torch.nn.functional.logsigmoid(normal(B, T, H, *((K,) if decay == "vector" else ())) + 1)
    q, k, v, e = normal(B, T, Hq, K), unit(B, T, Hq, K), normal(B, T, H, V), 0.8 * unit(B, T, He, K)
    beta, state = normal(B, T, H).sigmoid(), normal(B if states is None else states, H, K, V)
    call = MatrixCall(q, k, v, g, beta, None, state, e, 0.3, delta=True, erase_before_decay=before)
    return call if dtype is None else call._replace(**{n: getattr(call, n).to(dtype) for n in ("q", "k", "v", "e")})


def loop(call):
    """S' = a S;  S = S' + b k (v - S^T e)^T of the state before or after decay, a head and a token at a time."""
    outputs, finals = [], []
    batch, length, heads, _ = call.v.shape
    for n in range(batch):
        by_head, states = [], []
        for head in range(heads):
            q, k, e = (x[n, :, head * x.shape[2] // heads] for x in (call.q, call.k, call.e))
            S, rows = call.initial_state[n, head], []
            for t in range(length):
                found = e[t] @ S
                if call.g is not None:
                    a = call.g[n, t, head].exp()
                    S = a * S if a.dim() == 0 else a[:, None] * S
                if not call.erase_before_decay:
                    found = e[t] @ S
                S = S + call.beta[n, t, head] * torch.outer(k[t], call.v[n, t, head] - found)
                rows.append(call.scale * (q[t] @ S))
            by_head.append(torch.stack(rows) if rows else call.v[n, :, head])
            states.append(S)
        outputs.append(torch.stack(by_head, 1))
        finals.append(torch.stack(states))
    return torch.stack(outputs), torch.stack(finals)


def results(run, call):
    """Output, final state and the gradients of all tensors."""
    leaves = {n: x.detach().requires_grad_() for n, x in call._asdict().items() if isinstance(x, torch.Tensor)}
    o, final = run(call._replace(**leaves))
    loss = (o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)).sum() + final.sin().sum()
    return [o.detach(), final.detach(), *torch.autograd.grad(loss, leaves.values())]


def op(call, backend, cu_seqlens=None):
    grad = call.e.requires_grad
    return matrix.matrix_forward(*call, cu_seqlens, "kda", grad, backend)[:2]


@every_call
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("He", [1, 2, 4])
def test_equals_a_loop_of_its_own(backend, decay, before, He):
    call = draw(decay, before, He=He)
    assert_close(results(lambda given: op(given, backend), call), results(loop, call), 1e-9)


@every_call
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [0, 1, 2, 63, 64, 65, 200])
def test_at_every_length(decay, before, T):
    call = draw(decay, before, T=T, B=1, H=2, He=1)
    for backend in BACKENDS:
        assert_close(op(call, backend), loop(call), 1e-9)


@every_call
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
def test_packed_sequences_equal_each_by_itself(backend, decay, before):
    bounds = (0, 0, 3, 68, 69, 140)
    call = draw(decay, before, T=bounds[-1], B=1, states=len(bounds) - 1)

    def apart(given):
        tokens = {n: x for n, x in given._asdict().items() if isinstance(x, torch.Tensor) and n != "initial_state"}
        parts = [
            loop(
                given._replace(**{n: x[:, a:b] for n, x in tokens.items()}, initial_state=given.initial_state[i, None])
            )
            for i, (a, b) in enumerate(pairwise(bounds))
        ]
        return tuple(torch.cat(each, axis) for each, axis in zip(zip(*parts, strict=True), (1, 0), strict=True))

    got = results(lambda given: op(given, backend, torch.tensor(bounds)), call)
    assert_close(got, results(apart, call), 1e-9)


@every_call
@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("strength", [1e-3, 30.0, 1e4])
def test_decays_of_any_strength_in_float32(decay, before, strength):
    call = draw(decay, before, strength=strength)
    narrow = call._replace(**{n: x.float() for n, x in call._asdict().items() if isinstance(x, torch.Tensor)})
    got = results(lambda given: op(given, "chunked"), narrow)
    assert all(torch.isfinite(x).all() for x in got)
    # below 1e-30 float32 has fewer digits, or 0
    for x, right in zip(got, results(loop, call), strict=True):
        assert (x.double() - right).norm() <= 1e-4 * right.norm() + 1e-30


@every_call
def test_a_decay_of_zero_forgets(before):
    """With a log decay of -inf at one token nothing before it is read after it, but for the erase key's own read."""
    call = draw("vector", before)
    g = call.g.clone()
    g[:, 30] = -torch.inf
    call = call._replace(g=g)
    for backend in BACKENDS:
        assert_close(op(call, backend), loop(call), 1e-9)


def test_an_erase_key_that_is_the_write_key_is_the_delta_rule():
    call = draw(Hq=4)
    call = call._replace(e=call.k)
    for backend in BACKENDS:
        right = matrix.matrix_forward(*call._replace(e=None), None, "kda", False, backend)[:2]
        assert_close(op(call, backend), right, 1e-12)


@every_call
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 20, 70])])
def test_the_custom_ops_hold_their_contract(before, cu_seqlens):
    call = draw("scalar", before, B=1, states=None if cu_seqlens is None else 2)
    leaves = {n: x.requires_grad_() for n, x in call._asdict().items() if isinstance(x, torch.Tensor)}
    call = call._replace(**leaves)
    torch.library.opcheck(torch.ops.holdfast.matrix_forward.default, (*call, cu_seqlens, "kda", True, ""))
    o, state, _ = torch.ops.holdfast.matrix_forward(*call, cu_seqlens, "kda", True, "")
    arguments = (o.detach(), state.detach(), *(x.detach() if isinstance(x, torch.Tensor) else x for x in call))
    torch.library.opcheck(torch.ops.holdfast.matrix_backward.default, (*arguments, cu_seqlens, "kda", ""))


@every_call
def test_a_step_in_place(before):
    call = draw("vector", before, T=1)
    right, final = loop(call)
    held = call.initial_state.clone()
    o = matrix.matrix_step(*call._replace(initial_state=held), "kda", "")
    assert_close([o, held], [right, final], 1e-12)


def test_kernels_without_such_an_erase_key_refuse_it():
    sizes = {"B": 1, "T": 512, "H": 8, "Hq": 8, "K": 64, "V": 64, "He": 8}
    h200 = Device.named("h200")
    for backend in (HopperDelta(), TritonDelta()):
        traits = dict.fromkeys(("delta", "beta", "decay=scalar"), True)
        problem = Problem.of("kda", "matrix", "bfloat16", sizes, traits)
        assert "erase key" not in (backend.reject(problem, h200) or "")
        problem = Problem.of("kda", "matrix", "bfloat16", sizes, traits | {"erase_key": True})
        assert "erase key" in backend.reject(problem, h200)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_one_kernel_serves_an_erase_key_beside_a_decay(decay, before):
    sizes = {"B": 1, "T": 512, "H": 8, "Hq": 8, "K": 64, "V": 64, "He": 8}
    traits = {"delta": True, "erase_key": True, "erase_before_decay": before, f"decay={decay}": decay != "none"}
    problem, h200 = Problem.of("kda", "matrix", "bfloat16", sizes, traits), Device.named("h200")
    serving = [variant for variant in TRITON.variants if variant.reject(problem, h200) is None]
    assert [type(each.variant) for each in serving] == ([] if decay == "none" else [TritonKDA])
    if decay == "none":
        assert "it takes a log decay" in TRITON.reject(problem, h200)


def test_an_erase_key_is_read_once_too():
    sizes = {"B": 2, "T": 10, "H": 4, "Hq": 4, "K": 8, "V": 8, "He": 2}
    one, other = (Problem.of("x", "matrix", "bfloat16", sizes, {"delta": True, "erase_key": has}) for has in (0, 1))
    assert floor(other, "forward").moved - floor(one, "forward").moved == 2 * 2 * 10 * 2 * 8
