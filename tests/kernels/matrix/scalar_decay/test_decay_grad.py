"""The log decay's gradient where it is carried on from chunk to chunk, and its sums over all tokens.

What tokens share of its rounding is all that such a sum shows.
"""

import pytest
import torch

import holdfast
from holdfast.cli.bench.draw import DeviceDraw
from holdfast.planner.models.matrix.scalar_decay import hopper as model
from holdfast.recurrences import Sizes
from holdfast.recurrences.ssd import SSD
from kernels.matrix.scalar_decay.hopper import test_backend as test_hopper
from kernels.matrix.scalar_decay.hopper.test_backend import (
    assert_near,
    example,
    packed_example,
    passes,
    plans_of,
    three,
)
from parity import relative_error

on_cpu = test_hopper.on_cpu


def assert_forgotten(device):
    """An error of dg that hundreds of tokens share, because the sum over time carries it on, is all a sum shows."""
    call = example(B=1, T=600, H=2, K=64, V=64, g=-0.5, beta=True, device=device)
    got, _, exact = passes(call, segment_chunks=10)
    assert relative_error(got["dg"].double().sum(1), exact["dg"].sum(1)) <= 2e-2


def test_what_a_decay_has_forgotten_does_not_add_up_on_the_emulator(on_cpu):
    assert_forgotten("cpu")


@pytest.mark.gpu
def test_what_a_decay_has_forgotten_does_not_add_up():
    assert_forgotten("cuda")


@pytest.mark.parametrize("g", [-0.5, -0.1, "mild"])
def test_sums_of_the_decays_gradient_over_time_on_the_emulator(on_cpu, g):
    # of the sum that was carried on unsmoothed: 1.7e-2 to 2.3e-2 and 3e-3 to 3.7e-3
    torch.manual_seed(1)
    got, _, exact = passes(example(B=1, T=1100, H=4, K=64, V=64, g=g, beta=True))
    assert relative_error(got["dg"].double().sum(1), exact["dg"].sum(1)) <= 1e-2
    assert relative_error(got["dg"].double(), exact["dg"]) <= 2.5e-3


def assert_last_chunk(device, T, **of):
    """dg of a gradient through the final state alone, where the last chunk leaves e^-7 of the state before it."""
    call = example(B=1, T=T, H=4, beta=True, device=device, **of)
    call.g[:, -(T % model.CHUNK) :] = -7.0 / (T % model.CHUNK)
    draw = torch.Generator().manual_seed(1)
    grad_state = torch.randn(call.initial_state.shape, generator=draw).to(device)
    plans = [test_hopper.over(best.plan, save=2, segment_chunks=3) for best, *_ in plans_of(call)]
    got, _, exact = three(call, plans, (torch.zeros_like(call.v), grad_state))
    # as a difference of what the state after the chunk holds and what the chunk wrote: 0.04 to 0.8
    last = slice(-(T % model.CHUNK), None)
    assert relative_error(got["dg"][:, last].double(), exact["dg"][:, last]) <= 8e-3


@pytest.mark.parametrize(("T", "K", "V"), [(65, 64, 64), (130, 64, 128), (63, 128, 64), (260, 64, 64)])
def test_what_passes_the_last_chunk_on_the_emulator(on_cpu, T, K, V):
    assert_last_chunk("cpu", T, K=K, V=V)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "K", "V"), [(65, 128, 128), (130, 64, 128), (63, 128, 64), (260, 64, 64)])
def test_what_passes_the_last_chunk(T, K, V):
    assert_last_chunk("cuda", T, K=K, V=V)


def assert_carried(device, T, **of):
    """dg within 8e-3, where a chunk leaves a sixth of a state: most is carried on, and none of its rounding decays."""
    torch.manual_seed(1)
    call = example(B=1, T=T, device=device, **of)
    call = call._replace(g=call.g * (0.03 / call.g.abs().mean()))
    got, _, exact = passes(call, ends=of["state"], segment_chunks=-(-T // model.CHUNK))
    assert relative_error(got["dg"].double(), exact["dg"]) <= 8e-3


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("V", [64, 128])
def test_a_gradient_that_is_carried_on_between_kept_states_on_the_emulator(on_cpu, V, state):
    # 33 chunks, of which every 24th begins with a kept state; the first only if it is not 0
    assert_carried("cpu", 2100, H=2, K=64, V=V, state=state)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [4096, 131072])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 128), (64, 64)])
def test_a_gradient_that_is_carried_on_between_kept_states(K, V, T):
    assert_carried("cuda", T, H=4, K=K, V=V, state=False)


def test_kept_states_of_packed_sequences_on_the_emulator(on_cpu):
    call, offsets, cotangents = packed_example((0, 70, 1800), H=1, K=64, V=64)
    plans = [best.plan for best, *_ in plans_of(call, packed=True)]
    assert plans[1]["save"] < 1730 // model.CHUNK
    assert_near(*three(call, plans, cotangents, offsets))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize(("V", "Hq"), [(128, 32), (64, 1)])
def test_the_gradient_of_a_rate_that_all_tokens_share(V, Hq, backend):
    # the draw of the bench, in whose weakest decay a state every eighth chunk was too few: 3.5e-2
    sizes = Sizes(B=4, T=4096, H=32, K=128, V=V, Hq=Hq)
    drawn = SSD.example(DeviceDraw(0, torch.bfloat16, "cuda"), sizes)
    arguments = {name: drawn[name] for name in ("x", "dt", "A", "B", "C")}
    draw = torch.Generator("cuda").manual_seed(1)
    grad = torch.randn(arguments["x"].shape, generator=draw, device="cuda").to(torch.bfloat16)

    def gradient(which, wide):
        given = {name: x.double() if wide else x for name, x in arguments.items()}
        given["A"].requires_grad_()
        y, _ = holdfast.ssd(**given, backend=which)
        return torch.autograd.grad(y, given["A"], grad.to(y.dtype))[0]

    exact = gradient("chunked", True)
    assert relative_error(gradient(backend, False).double(), exact) <= 1.5e-2
