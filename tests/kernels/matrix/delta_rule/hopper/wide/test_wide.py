"""Walks of the delta rule on Hopper with wide keys: they compile and fit with no GPU, and are right on the emulator."""

from itertools import pairwise

import pytest
import torch

from holdfast.kernels.matrix.delta_rule.hopper.backend import HopperDelta
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.planner import Device, Plan, Problem
from holdfast.planner.models.matrix.delta_rule import hopper_wide as model
from kernels.lib.triton.group_sums_on_cpu import sums_by_torch
from kernels.matrix.delta_rule.triton.parity import example
from kernels.matrix.scalar_decay.triton.parity import moved
from parity import relative_error

pytest.importorskip("triton.experimental.gluon")

H200 = Device.named("h200")
SIZES = {"B": 4, "T": 4096, "H": 8, "Hq": 8, "K": 256, "V": 512}
GATED = {"delta": True, "beta": True, "decay=scalar": True, "needs_grad": True}
CHUNKED = Plan("chunked", (("chunk", 64), ("segment", 1024)))
# twice the rounding of an output: what products of rounded operands leave in float32 results
STEP = 2.0**-7


def problem(sizes=(), traits=()):
    return Problem.of("gated_delta_rule", "matrix", "bfloat16", SIZES | dict(sizes), GATED | dict(traits))


def plans():
    return [model.candidates(problem(), H200, direction)[0].plan for direction in ("forward", "backward")]


@pytest.mark.parametrize("sizes", [{}, {"K": 192, "V": 384}, {"K": 136, "V": 8, "Hq": 2}, {"T": 1}])
def test_it_serves_wide_keys_and_any_number_of_values(sizes):
    backend = HopperDelta()
    assert backend.reject(problem(sizes), H200) is None
    assert backend.reject(problem(sizes, {"varlen": True}), H200) is None
    for direction in ("forward", "backward"):
        assert backend.candidates(problem(sizes), H200, direction)
    assert "256 rows; got K = 264" in backend.reject(problem({"K": 264}), H200)


def passes(call, packed=None):
    from holdfast.kernels.matrix.delta_rule.hopper.wide.launch import WidePasses

    offsets = torch.tensor(packed, dtype=torch.int32) if packed else None
    return WidePasses.of(Plan("hopper", (("chunk", 64), ("prepare_warps", 4))), call, offsets)


def inverses(call, packed=None):
    """What triton/chunk_inverse.py leaves, which has tests of its own: M^-1 - I of each chunk, [B, T, H, 64]."""
    batch, length, heads, _ = call.v.shape
    k = call.k.double().repeat_interleave(heads // call.k.shape[2], 2)
    found = torch.full((batch, length, heads, 64), torch.nan, dtype=call.k.dtype)
    for first, end in pairwise(packed) if packed else [(0, length)]:
        for start in range(first, end, 64):
            part = slice(start, min(start + 64, end))
            total = 0 if call.g is None else call.g[:, part].double().cumsum(1).movedim(1, 2)
            keys = k[:, part].movedim(1, 2)
            lower = (keys @ keys.mT).tril(-1)
            if call.g is not None:
                lower *= (total[..., :, None] - total[..., None, :]).tril().exp()
            if call.beta is not None:
                lower *= call.beta[:, part].double().movedim(1, 2)[..., None]
            unit = torch.eye(lower.shape[-1], dtype=torch.float64)
            inverse = torch.linalg.inv(unit + lower) - unit
            found[:, part] = 0
            found[:, part, :, : inverse.shape[-1]] = inverse.movedim(2, 1).to(found.dtype)
    return found


@pytest.mark.parametrize("state", [True, False])
def test_no_token_hands_states_on(state):
    """TMA has no descriptor of no token."""
    call, backend = example(T=0, K=192, V=256, state=state), HopperDelta()
    forward, backward = plans()
    o, final = backend.forward(forward, call, None)
    assert o.shape == call.v.shape
    grads, grad_state = backend.backward(backward, call, None, torch.ones_like(call.v), torch.ones_like(final))
    assert [x.shape for x in grads[:3]] == [call.q.shape, call.k.shape, call.v.shape]
    if state:
        assert torch.equal(final, call.initial_state)
        assert torch.equal(grad_state, torch.ones_like(final))
    else:
        assert not final.any()
        assert grad_state is None


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs the walks on this machine: what they compute, in which order, and whom they wait for."""
    import gluon_partitions_emulator
    from holdfast.kernels.matrix.delta_rule.hopper.wide import launch as hopper_delta_wide_passes

    monkeypatch.setattr(hopper_delta_wide_passes, "launch", gluon_partitions_emulator.launch)
    sums_by_torch(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


CALLS = [
    ({"T": 130, "H": 2, "Hq": 1, "K": 192, "V": 72}, None),
    ({"T": 64, "H": 1, "Hq": 1, "K": 256, "V": 64, "g": None, "beta": None, "state": False}, None),
    ({"T": 150, "H": 1, "Hq": 1, "K": 136, "V": 64}, (0, 70, 70, 150)),
]


def drawn(of, packed):
    call = example(**of, dtype=torch.bfloat16, packed=packed)
    return call, moved(call, "cpu", torch.float64), torch.tensor(packed) if packed else None


@pytest.mark.parametrize(("of", "packed"), CALLS)
def test_outputs_are_right_on_the_emulator(on_cpu, of, packed):
    call, wide, offsets = drawn(of, packed)
    run = passes(call, packed)
    out = torch.empty_like(call.v)
    last = torch.empty(run.sequences, run.heads, call.k.shape[3], call.v.shape[3])
    run.forward(inverses(call, packed), out, last, None)
    exact, state = Chunked().forward(CHUNKED, wide, offsets)
    assert relative_error(out.double(), exact) <= STEP
    assert relative_error(last.double(), state) <= STEP


def tokens_of(call, part):
    """Some of its tokens."""
    given = {name: getattr(call, name) for name in ("q", "k", "v", "g", "beta")}
    return call._replace(**{name: x[:, part] for name, x in given.items() if x is not None})


def by_chunk(call, packed, of_part):
    """of_part of each chunk's tokens in each sequence: (slot, sequence, first token of the sequence, chunk's start)."""
    chunks = -(-call.v.shape[1] // 64)
    for n, (first, end) in enumerate(pairwise(packed) if packed else [(0, call.v.shape[1])]):
        for i, start in enumerate(range(first, end, 64)):
            of_part((first // 64 + n if packed else n * chunks) + i, n, first, start, end)


@pytest.mark.parametrize(("of", "packed"), CALLS)
def test_states_are_right_on_the_emulator(on_cpu, of, packed):
    from holdfast.kernels.matrix.delta_rule.triton.launch import Slots

    call, wide, _ = drawn(of, packed)
    run = passes(call, packed)
    slots = Slots.of(call.k, run.places, run.heads, call.k.shape[3], call.v.shape[3], 64)
    run.forward(inverses(call, packed), None, None, slots)

    def compare(slot, n, first, start, end):
        part = tokens_of(wide, slice(first, start))
        if wide.initial_state is not None:
            part = part._replace(initial_state=wide.initial_state[n : n + 1])
        _, state = Chunked().forward(CHUNKED, part, None)
        assert relative_error(slots.low[slot].double(), state[0].mT) <= STEP, (slot, start)

    by_chunk(call, packed, compare)


@pytest.mark.parametrize(("of", "packed"), CALLS)
def test_gradients_of_states_are_right_on_the_emulator(on_cpu, of, packed):
    from holdfast.kernels.matrix.delta_rule.triton.launch import Slots

    call, wide, _ = drawn(of, packed)
    run = passes(call, packed)
    draw = torch.Generator().manual_seed(3)
    do = torch.randn(call.v.shape, generator=draw).to(call.v)
    after = torch.randn(run.sequences, run.heads, call.k.shape[3], call.v.shape[3], generator=draw)
    slots = Slots.of(call.k, run.places, run.heads, call.k.shape[3], call.v.shape[3], 64)
    before = torch.empty_like(after)
    chunks = -(-call.v.shape[1] // 64)
    run.reverse(do, inverses(call, packed), after, before, slots, (0, chunks))

    def gradient(n, start, end):
        """Of the state that enters the tokens from start on."""
        part = tokens_of(wide, slice(start, end))
        state = after[n : n + 1].double()
        part = part._replace(initial_state=torch.zeros_like(state))
        return Chunked().backward(CHUNKED, part, None, do[:, start:end].double(), state)[1][0]

    def compare(slot, n, first, start, end):
        leaving = min(start + 64, end)
        exact = after[n].double() if leaving == end else gradient(n, leaving, end)
        assert relative_error(slots.low[slot].double(), exact.mT) <= STEP, (slot, start)
        if start == first:
            assert relative_error(before[n].double(), gradient(n, first, end)) <= STEP

    by_chunk(call, packed, compare)


@pytest.mark.slow
@pytest.mark.sizes("K", "V", "packed")
@pytest.mark.parametrize(("K", "V", "packed"), [(256, 512, None), (192, 384, None), (256, 128, (0, 70, 130))])
def test_walks_compile_and_fit(monkeypatch, K, V, packed):
    from gluon_compile import compile_launch, recorded
    from holdfast.kernels.matrix.delta_rule.hopper.wide import launch as hopper_delta_wide_passes
    from holdfast.kernels.matrix.delta_rule.triton.launch import Slots

    launches = recorded(monkeypatch, hopper_delta_wide_passes)
    call = example(T=130, H=2, Hq=1, K=K, V=V, dtype=torch.bfloat16, packed=packed)
    run = passes(call, packed)
    a, out = call.k.new_empty(1, 130, 2, 64), torch.empty_like(call.v)
    slots = Slots.of(call.k, run.places, run.heads, K, V, 64)
    run.forward(a, out, call.initial_state, None)
    run.forward(a, None, None, slots)
    run.reverse(out, a, call.initial_state, call.initial_state, slots, (0, 3))
    for launch, name in zip(launches, ("forward", "states", "reverse"), strict=True):
        made = compile_launch(launch)
        passes_of = model.model(problem({"K": K, "V": V}), H200, "forward" if name == "forward" else "backward")
        assert made.shared <= next(passes_of.assignments())[f"shared of {name}"]
        assert "wgmma.mma_async" in made.ptx
        assert "(C75" not in made.notes, "a product waits for the one before it"
        # a first state on its way into the kernel; in the loop next to nothing
        assert made.spilled <= 1600
        assert len(made.reloaded) <= 2
