"""The fused dense kernels on an NVIDIA GPU: as exact as a 16-bit step loop, every option, every size, repeatable."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import holdfast
from holdfast.kernels import select as planning
from holdfast.kernels.backend import Rejected
from holdfast.kernels.dense.cuda import launch
from holdfast.kernels.runtime.replay import replay
from holdfast.recurrences import RECURRENCES, Draw, Sizes, cell, oracle
from holdfast.recurrences.dense import recurrence
from parity import cast, leaves, relative_error, values_and_grads

pytestmark = pytest.mark.gpu
NAMES = ["elman", "lstm", "gru", "slstm"]
every_op = pytest.mark.parametrize("name", NAMES)
HALF = [torch.bfloat16, torch.float16]
# One block a head; a head over several; a head with weights in shared memory too; widths that are padded.
SHAPES = [
    {"B": 5, "T": 40, "H": 3, "D": 64},
    {"B": 3, "T": 16, "H": 1, "D": 128},
    {"B": 20, "T": 24, "H": 2, "D": 256},
    {"B": 3, "T": 12, "H": 1, "D": 1536},
    {"B": 3, "T": 9, "H": 2, "D": 20},
]


def example(name, dtype=torch.bfloat16, seed=0, **sizes):
    return RECURRENCES[name].example(Draw(seed, dtype, device="cuda"), Sizes(**sizes))


def run(name, arguments, backend="fused", **options):
    return getattr(holdfast, name)(**arguments, output_final_state=True, backend=backend, **options)


def smooth(name, outputs):
    """What sLSTM's final state stands for, h, c exp(m) and n exp(m), as h, c / n and log(n) + m; other cells' as it is.

    The gradient of m itself, a maximum, jumps where its sides are equal: there h rounded to 16 bits decides it.
    """
    h, final = outputs
    if name == "slstm":
        last, c, n, m = final
        final = torch.stack([last, c / n, n.log() + m])
    return h, final


def half_loop(which, dtype):
    """The step loop whose product is of 16-bit numbers, with float32 state: what 16-bit PyTorch would compute."""

    def call(a):
        states = list(a["initial_state"].unbind(0))
        x, R, b, outputs = a["x"], a["R"], a["b"], []
        for t in range(x.shape[1]):
            product = torch.einsum("ghij,bhj->gbhi", R, states[0].to(dtype)).float()
            gates = []
            for k, gate in enumerate(which.gates):
                value = b[k].float().expand_as(states[0])
                if gate in which.input:
                    value = value + x[:, t, which.input.index(gate)].float()
                if gate in which.recurrent:
                    value = value + product[which.recurrent.index(gate)]
                gates.append(value)
            states = list(which.step(states, gates))
            outputs.append(states[0].to(dtype))
        return torch.stack(outputs, 1), torch.stack(states)

    return call


def assert_as_exact(got, plain, right):
    errors = [(relative_error(x, y), relative_error(z, y)) for x, z, y in zip(got, plain, right, strict=True)]
    assert all(mine <= 2 * theirs + 1e-6 for mine, theirs in errors), errors


@every_op
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"D{s['D']}")
def test_errs_at_most_twice_as_much_as_a_half_precision_step_loop(name, dtype, shape):
    arguments = example(name, dtype, **shape)
    which = RECURRENCES[name].map(**arguments)[0].cell
    loop = half_loop(which, dtype)
    right = values_and_grads(lambda a: smooth(name, oracle(RECURRENCES[name], a)), cast(arguments, torch.float64))
    plain = values_and_grads(lambda a: smooth(name, loop(a)), arguments)
    got = values_and_grads(lambda a: smooth(name, run(name, a)), arguments)
    again = values_and_grads(lambda a: smooth(name, run(name, a)), arguments)
    assert_as_exact(got, plain, right)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


@every_op
@pytest.mark.parametrize("D", [64, 256])
def test_options(name, D):
    arguments = example(name, B=5, T=30, H=2, D=D) | {"reset": torch.rand(5, 30, device="cuda") < 0.1}
    for options in ({}, {"recurrent_grad_clip": 0.02}, {"cut_recurrent_grad": True}):
        exact = cast(arguments, torch.float64)
        right = values_and_grads(lambda a, o=options: smooth(name, oracle(RECURRENCES[name], a | o)), exact)
        got = values_and_grads(lambda a, o=options: smooth(name, run(name, a, **o)), arguments)
        assert [relative_error(x, y) <= 1e-2 for x, y in zip(got, right, strict=True)] == [True] * len(got)


@pytest.mark.parametrize("D", [64, 768])
@pytest.mark.parametrize("T", [31, 32, 33, 64])
def test_resets_of_as_many_steps_as_words_have_bits(T, D):
    """A row of resets is whole words of 32 steps: of 32 n steps the next row begins right behind the last bit."""
    arguments = example("gru", B=5, T=T, H=1, D=D) | {"reset": torch.rand(5, T, device="cuda") < 0.2}
    right = values_and_grads(lambda a: oracle(RECURRENCES["gru"], a), cast(arguments, torch.float64))
    got = values_and_grads(lambda a: run("gru", a), arguments)
    assert max(relative_error(x, y) for x, y in zip(got, right, strict=True)) <= 1e-2


@pytest.mark.parametrize("D", [64, 768])
@pytest.mark.parametrize("B", [1, 4, 9, 33])
@pytest.mark.parametrize("T", [1, 2, 33])
def test_sizes_at_the_edges(B, T, D):
    arguments = example("gru", B=B, T=T, H=1, D=D)
    right = values_and_grads(lambda a: oracle(RECURRENCES["gru"], a), cast(arguments, torch.float64))
    got = values_and_grads(lambda a: run("gru", a), arguments)
    assert max(relative_error(x, y) for x, y in zip(got, right, strict=True)) <= 1e-2


def test_a_head_that_does_not_fit_the_chip_is_read_from_the_cache_too():
    arguments = example("lstm", B=9, T=8, H=1, D=2688)
    right = values_and_grads(lambda a: oracle(RECURRENCES["lstm"], a), cast(arguments, torch.float64))
    got = values_and_grads(lambda a: run("lstm", a), arguments)
    assert max(relative_error(x, y) for x, y in zip(got, right, strict=True)) <= 1e-2


@every_op
@pytest.mark.parametrize("B", [61, 200])
def test_eight_sequences_a_block(name, B):
    """What a large batch of small heads takes in the forward pass; with them and with two the same is kept."""
    arguments = example(name, B=B, T=13, H=12, D=40)
    right = oracle(RECURRENCES[name], cast(arguments, torch.float64))
    for got, exact in zip(smooth(name, run(name, arguments)), smooth(name, right), strict=True):
        assert relative_error(got, exact) <= 5e-3
    few = {k: v if k in ("R", "b") else v[:, 7:9] if k == "initial_state" else v[7:9] for k, v in arguments.items()}
    assert relative_error(run(name, few)[0], run(name, arguments)[0][7:9]) <= 2e-3


@pytest.mark.parametrize("B", [12, 20, 36, 100])
def test_tiles_of_a_block(B):
    """Two that keep pace with one another's vectors, three, and more of which two are on their way."""
    arguments = example("lstm", B=B, T=20, H=1, D=1600)
    h, final = run("lstm", arguments)
    right = oracle(RECURRENCES["lstm"], cast(arguments, torch.float64))
    assert max(relative_error(x, y) for x, y in zip((h, final), right, strict=True)) <= 1e-2


@every_op
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "shape",
    [{"B": 20, "H": 3, "D": 64}, {"B": 3, "H": 2, "D": 20}, {"B": 9, "H": 1, "D": 128}],
    ids=lambda s: f"D{s['D']}",
)
def test_triton_errs_at_most_twice_as_much_as_a_half_precision_step_loop(name, dtype, shape):
    arguments = example(name, dtype, T=24, **shape)
    if (name, shape["D"]) == ("slstm", 128):
        # four states and four gates: more than an SM's shared memory
        with pytest.raises(ValueError, match="too large for a block's backward pass"):
            values_and_grads(lambda a: smooth(name, run(name, a, "triton")), arguments)
        return
    loop = half_loop(RECURRENCES[name].map(**arguments)[0].cell, dtype)
    right = values_and_grads(lambda a: smooth(name, oracle(RECURRENCES[name], a)), cast(arguments, torch.float64))
    plain = values_and_grads(lambda a: smooth(name, loop(a)), arguments)
    got = values_and_grads(lambda a: smooth(name, run(name, a, "triton")), arguments)
    assert_as_exact(got, plain, right)


@every_op
def test_triton_options(name):
    arguments = example(name, B=5, T=30, H=2, D=40) | {"reset": torch.rand(5, 30, device="cuda") < 0.1}
    for options in ({}, {"recurrent_grad_clip": 0.02}, {"cut_recurrent_grad": True}):
        exact = cast(arguments, torch.float64)
        right = values_and_grads(lambda a, o=options: smooth(name, oracle(RECURRENCES[name], a | o)), exact)
        got = values_and_grads(lambda a, o=options: smooth(name, run(name, a, "triton", **o)), arguments)
        assert [relative_error(x, y) <= 1e-2 for x, y in zip(got, right, strict=True)] == [True] * len(got)


@pytest.mark.parametrize("D", [64, 512])
def test_the_error_does_not_grow_over_a_thousand_steps(D):
    arguments = example("lstm", B=4, T=1024, H=1, D=D)
    h, _ = run("lstm", arguments)
    right, _ = oracle(RECURRENCES["lstm"], cast(arguments, torch.float64))
    errors = [relative_error(h[:, t : t + 128], right[:, t : t + 128]) for t in range(0, 1024, 128)]
    assert max(errors) <= 1.5 * min(errors)


@pytest.mark.parametrize("B", [2, 20, 200])
def test_what_memory_held_before_is_never_taken_for_what_blocks_exchange(B):
    """Steps past the first are marked by the kernels themselves; a length over which every mark comes from them."""
    arguments = example("lstm", B=B, T=300, H=1, D=256)
    for x in leaves(arguments):
        x.requires_grad_()

    def results():
        h, final = run("lstm", arguments)
        return [h, final, *torch.autograd.grad(h.float().square().sum() + final.sum(), leaves(arguments))]

    first = results()
    for value in (0.5, -3.0):
        # of the sizes of h and dx: what the next call is given
        old = [torch.full((B, 300, gates, 256), value, device="cuda", dtype=torch.bfloat16) for gates in (1, 4, 1, 4)]
        del old
        assert all(torch.equal(x, y) for x, y in zip(results(), first, strict=True))


@cell(states=("h", "c"), gates=("a", "b", "k"), input=("a", "k"), recurrent=("b", "a"))
def own(s, g):
    c = torch.sigmoid(g.a) * s.c + torch.tanh(g.k + s.h) * torch.sigmoid(g.b)
    return {"h": torch.nn.functional.softsign(c), "c": c}


@pytest.mark.parametrize("D", [48, 320])
def test_a_cell_of_ones_own(D):
    definition = recurrence(own)
    arguments = definition.example(Draw(0, torch.bfloat16, device="cuda"), Sizes(B=6, T=30, H=2, D=D))
    right = values_and_grads(lambda a: oracle(definition, a), cast(arguments, torch.float64))
    got = values_and_grads(lambda a: holdfast.rnn(own, **a, output_final_state=True, backend="fused"), arguments)
    assert max(relative_error(x, y) for x, y in zip(got, right, strict=True)) <= 1e-2


@pytest.mark.parametrize("D", [64, 256])
def test_left_out_arguments_and_a_second_backward(D):
    arguments = {k: v.requires_grad_() for k, v in example("lstm", B=3, T=12, H=2, D=D).items() if k in ("x", "R")}
    h, _ = run("lstm", arguments)
    first = torch.autograd.grad(h.float().square().sum(), list(arguments.values()), retain_graph=True)
    second = torch.autograd.grad(h.float().square().sum(), list(arguments.values()))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert not any(x.isnan().any() for x in first)


@pytest.mark.parametrize("D", [64, 256])
def test_what_one_backend_keeps_another_can_use(D):
    arguments = {k: v.requires_grad_() for k, v in example("gru", B=3, T=12, H=2, D=D).items()}
    found = {}
    for backend in ("fused", "loop", *(["triton"] if D <= 128 else [])):
        h, final = run("gru", arguments, backend=backend)
        found[backend] = [h, final, *torch.autograd.grad(h.float().sum() + final.sum(), list(arguments.values()))]
    for right, *others in zip(*found.values(), strict=True):
        assert all(relative_error(x, right) <= 1e-2 for x in others)


@pytest.mark.parametrize("D", [64, 256])
def test_a_captured_graph_replays(D):
    arguments = {k: v.requires_grad_() for k, v in example("lstm", B=3, T=12, H=2, D=D).items()}

    def step():
        h, final = run("lstm", arguments)
        return [h, *torch.autograd.grad(h.float().sum() + final.sum(), list(arguments.values()))]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        right = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, right, strict=True))


@every_op
def test_it_is_the_default_and_compiles_into_one_graph(name):
    arguments = {k: v.requires_grad_() for k, v in example(name, B=2, T=9, H=2, D=64).items()}
    op = getattr(holdfast, name)
    compiled = torch.compile(lambda **a: op(**a)[0], fullgraph=True)
    assert torch.equal(compiled(**arguments), run(name, arguments)[0])


@every_op
@pytest.mark.parametrize("lengths", [None, (7, 1, 30, 12)], ids=["a batch", "packed"])
def test_float32_and_packed_sequences_take_two_launches_a_step(name, lengths):
    sizes = {"B": 3, "T": 20} if lengths is None else {"B": 1, "T": sum(lengths)}
    arguments = example(name, torch.float32, H=2, D=72, **sizes)
    bounds = None
    if lengths is not None:
        bounds = torch.tensor((0, *lengths), device="cuda").cumsum(0)
        del arguments["initial_state"]
    more = {"reset": torch.rand(sizes["B"], sizes["T"], device="cuda") < 0.1, "recurrent_grad_clip": 0.05}
    exact = cast(arguments, torch.float64)
    right = values_and_grads(lambda a: smooth(name, oracle(RECURRENCES[name], a | more, bounds)), exact)
    got = values_and_grads(lambda a: smooth(name, run(name, a, "alternating", cu_seqlens=bounds, **more)), arguments)
    assert max(relative_error(x, y) for x, y in zip(got, right, strict=True)) <= 5e-6


@every_op
@pytest.mark.parametrize("D", [64, 256])
def test_packed_sequences_run_as_batches(name, D):
    lengths = (7, 1, 30, 12, 3)
    bounds = torch.tensor((0, *lengths), device="cuda").cumsum(0)
    arguments = example(name, B=1, T=sum(lengths), H=2, D=D)
    del arguments["initial_state"]
    exact = cast(arguments, torch.float64)
    right = values_and_grads(lambda a: smooth(name, oracle(RECURRENCES[name], a, bounds)), exact)
    got = values_and_grads(lambda a: smooth(name, run(name, a, cu_seqlens=bounds)), arguments)
    assert max(relative_error(x, y) for x, y in zip(got, right, strict=True)) <= 1e-2
    assert torch.equal(run(name, arguments, None, cu_seqlens=bounds)[0], run(name, arguments, cu_seqlens=bounds)[0])


@every_op
@pytest.mark.parametrize("backend", ["fused", "alternating"])
def test_offsets_of_packed_sequences_may_be_on_the_host(name, backend):
    lengths = (7, 1, 30, 12, 3)
    bounds = torch.tensor((0, *lengths), device="cuda").cumsum(0)
    arguments = example(name, B=1, T=sum(lengths), H=2, D=64)
    del arguments["initial_state"]
    right = values_and_grads(lambda a: smooth(name, run(name, a, backend, cu_seqlens=bounds)), arguments)
    there = bounds.int().cpu()
    got = values_and_grads(lambda a: smooth(name, run(name, a, backend, cu_seqlens=there)), arguments)
    assert all(torch.equal(x, y) for x, y in zip(got, right, strict=True))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("packed", [False, True])
def test_both_directions_of_a_module_side_by_side(kind, packed):
    theirs = getattr(torch.nn, kind)(24, 40, num_layers=2, bidirectional=True).double()
    ours = getattr(holdfast.nn, kind)(24, 40, num_layers=2, bidirectional=True)
    ours.load_state_dict(theirs.state_dict())
    ours.cuda()
    x = torch.randn(11, 3, 24)

    def run(module, x):
        given = pack_padded_sequence(x, [11, 4, 2]) if packed else x
        output, hidden = module(given)
        output = output.data if packed else output
        grads = torch.autograd.grad(output.sin().sum() + leaves(hidden)[-1].sum(), list(module.parameters()))
        return [y.detach().double().cpu() for y in (output, *leaves(hidden), *grads)]

    for got, right in zip(run(ours, x.cuda()), run(theirs, x.double()), strict=True):
        assert relative_error(got, right) <= 2e-5


def test_what_it_cannot_take_is_said_and_runs_elsewhere():
    arguments = example("lstm", torch.float32, B=2, T=5, H=1, D=16)
    with pytest.raises(Rejected, match="bfloat16 or float16"):
        run("lstm", arguments)
    assert run("lstm", arguments, backend=None)[0].shape == (2, 5, 1, 16)
    huge = {"x": torch.zeros(1, 1, 4, 1, 4096), "R": torch.zeros(4, 1, 4096, 4096)}
    with pytest.raises(Rejected, match="too large for the chip"):
        holdfast.lstm(**{k: v.cuda().bfloat16() for k, v in huge.items()}, backend="fused")
    assert holdfast.lstm(**{k: v.cuda().bfloat16() for k, v in huge.items()})[0].shape == (1, 1, 1, 4096)


def test_the_first_call_of_a_process_may_be_a_backward_pass():
    """Autograd's thread has no context then: the gradient here is an expanded scalar, which launches nothing."""
    code = """
import torch, holdfast
x = torch.randn(2, 5, 4, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
R = torch.randn(4, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
h, _ = holdfast.lstm(x, R, backend="fused")
dx, dR = torch.autograd.grad(h.sum(), [x, R])
assert dx.isfinite().all() and dR.isfinite().all()
"""
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_grid_that_was_stuck_is_reported_by_the_next_call():
    arguments = example("lstm", B=2, T=5, H=1, D=256)
    launch._failed(arguments["x"].device).fill_(1)
    with pytest.raises(RuntimeError, match="gave up waiting"):
        run("lstm", arguments)
    assert not run("lstm", arguments)[0].isnan().any()


@pytest.mark.parametrize(("H", "D"), [(2, 64), (2, 256), (1, 512)])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
def test_a_replay_equals_the_call(H, D, grad):
    """From the third call on what the second did runs again, on other tensors, bit for bit the same."""

    def results(arguments):
        given = leaves(arguments)
        for x in given:
            x.requires_grad_(grad)
        h, final = run("gru", arguments)
        return [h, final, *(torch.autograd.grad(h.float().square().sum() + final.sum(), given) if grad else ())]

    planning.forget()
    examples = [example("gru", seed=seed, B=3, T=9, H=H, D=D) for seed in range(5)]
    with replay.disabled():
        expected = [results(arguments) for arguments in examples]
    for arguments, right in zip(examples, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(results(arguments), right, strict=True))
    replays = [x for known in planning._CACHES for x in known.values() if isinstance(x, replay.Replay)]
    assert replays


def test_a_replayed_launch_reports_a_grid_that_was_stuck():
    arguments = example("lstm", B=2, T=5, H=1, D=256)
    for _ in range(3):
        run("lstm", arguments)
    launch._failed(arguments["x"].device).fill_(1)
    with pytest.raises(RuntimeError, match="gave up waiting"):
        run("lstm", arguments)


def test_a_new_batch_size_compiles_nothing():
    run("lstm", example("lstm", B=2, T=3, H=1, D=64))
    before = launch.nvrtc._library.cache_info().misses
    for B in (1, 5, 16, 200):
        run("lstm", example("lstm", B=B, T=4, H=12, D=64))
    assert launch.nvrtc._library.cache_info().misses == before
