"""The time loop's parts: rows in time order, gates in columns, and what is kept for the backward pass."""

import pytest
import torch

import holdfast
from holdfast.kernels.dense import gate_layout as gates
from holdfast.kernels.dense.torch import pointwise
from holdfast.kernels.dense.torch.time_loop import Loop
from holdfast.kernels.dense.varlen_schedule import make_schedule
from holdfast.ops.dense import dense_backward, dense_forward
from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes, cell
from holdfast.recurrences.definition import DenseCall
from holdfast.recurrences.elman import elman
from holdfast.recurrences.gru import gru
from holdfast.recurrences.lstm import lstm
from holdfast.recurrences.slstm import slstm

CPU = torch.device("cpu")


def test_a_batch_has_as_many_rows_every_step():
    time = make_schedule(3, 4, None, CPU)
    assert time.sizes == [3, 3, 3, 3]
    x = torch.arange(12).view(3, 4)
    assert [row.tolist() for row in time.steps(x)] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    back = torch.full_like(x, -1)
    time.put(time.rows(x, 1, 3).flatten(0, 1), back, 1, 3)
    assert back.tolist() == [[-1, 1, 2, -1], [-1, 5, 6, -1], [-1, 9, 10, -1]]


def test_packed_sequences_run_longest_first_and_drop_out():
    time = make_schedule(1, 7, torch.tensor([0, 2, 2, 6, 7]), CPU)
    assert time.sizes == [3, 2, 1, 1]
    assert time.sequences.tolist() == [2, 0, 3, 1]
    x = 10 * torch.arange(7)[None]
    assert [row.tolist() for row in time.steps(x)] == [[20, 0, 60], [30, 10], [40], [50]]
    back = torch.full_like(x, -1)
    time.put(time.rows(x, 0, 2).flatten(0, 1), back, 0, 2)
    assert back.tolist() == [[0, 10, 20, 30, -1, -1, 60]]
    state = torch.arange(4.0)[None]
    assert torch.equal(time.leave(time.enter(state)), state)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 100])
def test_blocks_cover_every_step_once(rows):
    time = make_schedule(1, 7, torch.tensor([0, 2, 2, 6, 7]), CPU)
    spans = time.blocks(rows)
    assert [t for start, stop in spans for t in range(start, stop)] == [0, 1, 2, 3]
    assert all(stop - start == 1 or time.offsets[stop] - time.offsets[start] <= rows for start, stop in spans)


@pytest.mark.parametrize("bounds", [[1, 7], [0, 6], [0, 5, 3, 7]])
def test_wrong_offsets_are_refused(bounds):
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets"):
        make_schedule(1, 7, torch.tensor(bounds), CPU)


def test_columns_put_what_x_and_what_r_feed_next_to_each_other():
    layout = gates.arrange(gru)
    assert layout.column == {"n": 0, "r": 1, "z": 2, "m": 3}
    assert layout.recurrent == slice(1, 4)
    R = torch.randn(3, 2, 5, 5)
    assert torch.equal(layout.weight_grad(layout.weights(R, torch.float32)), R)
    assert gates.arrange(lstm).recurrent == slice(0, 4)


def test_what_needs_no_gradient_is_hoisted_out_of_the_backward_loop():
    backward = pointwise.backward(lstm, torch.float32, torch.device("cpu"))
    early, late = (" ".join(run.__code__.co_names) for run in (backward.prepare, backward.carry))
    assert early.count("f_sigmoid") == 3
    assert early.count("f_tanh") == 2
    assert late.count("f_sigmoid") == late.count("f_sigmoid_backward") == 3
    assert late.count("f_tanh") == late.count("f_tanh_backward") == 2


def saved(name, grad, T=12):
    arguments = RECURRENCES[name].example(Draw(0), Sizes(B=2, T=T, H=2, D=4))
    x, R, b, initial = (arguments[key] for key in ("x", "R", "b", "initial_state"))
    key = {"elman": elman, "lstm": lstm, "gru": gru, "slstm": slstm}[name].key
    return arguments, key, dense_forward(x, R, b, initial, None, None, None, False, key, grad, "loop")


@pytest.mark.parametrize("name", ["elman", "lstm", "gru", "slstm"])
def test_no_more_than_states_and_gates_is_saved(name):
    arguments, _, (_, final, states, pre) = saved(name, True)
    tokens = 2 * 12
    assert states.shape == (final.shape[0], tokens, 2, 4)
    assert pre.shape == (tokens, 2, arguments["b"].shape[0], 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        given = {k: v.requires_grad_() for k, v in arguments.items()}
        getattr(holdfast, name)(**given)
    allowed = states.numel() + pre.numel() + sum(given[k].numel() for k in ("R", "b", "initial_state"))
    assert sum(x.numel() for x in kept) == allowed


def test_inference_saves_nothing_and_gives_the_same():
    h, final = saved("slstm", True)[2][:2]
    plain, last, nothing, none = saved("slstm", False)[2]
    assert torch.equal(h, plain)
    assert torch.equal(final, last)
    assert nothing.numel() == none.numel() == 0


def test_a_backward_pass_without_what_it_needs_says_so():
    arguments, key, (h, _, states, pre) = saved("lstm", False)
    with pytest.raises(RuntimeError, match="grad=False"):
        dense_backward(h, None, arguments["R"], None, None, None, None, None, states, pre, 2, 12, None, False, key, "")


@pytest.mark.parametrize("which", [elman, lstm, gru, slstm], ids=lambda c: c.name)
@pytest.mark.parametrize("lengths", [None, (5, 0, 12, 1, 12)])
def test_gradients_do_not_depend_on_the_size_of_blocks(which, lengths):
    batch, length = (2, 12) if lengths is None else (1, sum(lengths))
    sequences = 2 if lengths is None else len(lengths)
    bounds = None if lengths is None else torch.tensor((0, *lengths)).cumsum(0)
    arguments = RECURRENCES[which.name].example(Draw(0, torch.float64), Sizes(B=batch, T=length, H=2, D=4))
    entry = RECURRENCES[which.name].example(Draw(1, torch.float64), Sizes(B=sequences, T=0, H=2, D=4))
    arguments |= {"initial_state": entry["initial_state"], "reset": torch.rand(batch, length) < 0.1}
    call = DenseCall(which, **arguments)

    def gradients(rows):
        plan = Plan("loop", (("rows", rows),))
        h, final, states, pre = Loop().forward(plan, call, bounds, True)
        return Loop().backward(plan, call, bounds, states, pre, h.cos(), final)

    whole = gradients(999)
    for rows in (1, 3, 8):
        for x, y in zip(gradients(rows), whole, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("backend", ["loop", "reference"])
def test_gradients_that_are_one_tensor_are_not_overwritten(heads, backend):
    # both states are the same tensor, and so are the gradients of both states and both gates
    @cell(states=("h", "c"), gates=("a", "b"))
    def shared(s, g):
        c = s.h + s.c + g.a + g.b
        return {"h": c, "c": c}

    x = torch.randn(2, 5, 2, heads, 3, dtype=torch.float64, requires_grad=True)
    R = (torch.randn(2, heads, 3, 3, dtype=torch.float64) / 4).requires_grad_()
    _, final = holdfast.rnn(shared, x, R, output_final_state=True, backend=backend)
    given = torch.randn_like(final)
    kept = given.clone()
    dx, dR = torch.autograd.grad(final, (x, R), given)
    assert torch.equal(given, kept)

    # by hand: h = c = s, s_t = 2 s + A s + (x_a + x_b), A the sum of both gates' R
    A = R.detach().sum(0)
    grads, states = [given.sum(0)], [torch.zeros(2, heads, 3, dtype=torch.float64)]
    for t in range(5):
        states.append(2 * states[-1] + torch.einsum("hij,bhj->bhi", A, states[-1]) + x[:, t].detach().sum(1))
    for _ in range(4):
        grads.append(2 * grads[-1] + torch.einsum("hij,bhi->bhj", A, grads[-1]))
    right = torch.stack(grads[::-1], 1)
    torch.testing.assert_close(final[0].detach(), states[-1], rtol=1e-10, atol=1e-12)
    for gate in range(2):
        torch.testing.assert_close(dx[:, :, gate], right, rtol=1e-10, atol=1e-12)
        exact = sum(torch.einsum("bhi,bhj->hij", right[:, t], states[t]) for t in range(5))
        torch.testing.assert_close(dR[gate], exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("H", "D", "rows"), [(1, 1, 65536), (2, 64, 512), (1, 128, 512), (4, 64, 256), (8, 512, 256)])
def test_rows_of_a_product(H, D, rows):
    problem = Problem.of("lstm", "dense", "float32", {"B": 2, "T": 5, "H": H, "D": D}, {})
    (candidate,) = Loop().candidates(problem, Device.named("cpu"), "forward")
    assert candidate.plan == Plan("loop", (("rows", rows),))
