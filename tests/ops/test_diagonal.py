"""The ops of the diagonal family against the oracle, and against what must hold of any recurrence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.recurrences import RECURRENCES, Draw, Sizes, oracle
from parity import assert_close, cast, leaves, op_and_oracle, relative_error, values_and_grads

NAMES = ["rglru", "rotlru", "hgrn"]
BACKENDS = ["chunked", "reference"]
every_op = pytest.mark.parametrize("name", NAMES)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def example(name, dtype=torch.float32, seed=0, **sizes):
    return RECURRENCES[name].example(Draw(seed, dtype), Sizes(**sizes))


def run(name, arguments, **options):
    return getattr(holdfast, name)(**arguments, output_final_state=True, **options)


def parity(name, arguments, limit, **options):
    assert_close(*op_and_oracle(getattr(holdfast, name), RECURRENCES[name], arguments, **options), limit)


def over_time(arguments, change):
    return {key: value if key == "initial_state" else change(value) for key, value in arguments.items()}


def test_the_family_is_all_here():
    assert {name for name, recurrence in RECURRENCES.items() if recurrence.family == "diagonal"} == set(NAMES)


@every_backend
@every_op
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_outputs_and_gradients_match_the_oracle(name, backend, dtype, limit):
    parity(name, example(name, dtype, T=150), limit, backend=backend)


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow_gates", [False, True])
def test_half_precision_errs_at_most_twice_as_much_as_the_step_loop(name, dtype, narrow_gates):
    arguments = example(name, dtype, T=150)
    if narrow_gates:
        arguments = {key: x if key == "initial_state" else x.to(dtype) for key, x in arguments.items()}
    got, exact = op_and_oracle(getattr(holdfast, name), RECURRENCES[name], arguments)

    def loop(a):
        # the step loop on the same half-precision inputs: float32 inside, half precision out
        h, state = oracle(RECURRENCES[name], a)
        return h.to(dtype), state

    plain = values_and_grads(loop, arguments)
    for mine, theirs, right in zip(got, plain, exact, strict=True):
        assert relative_error(mine, right) <= 2 * relative_error(theirs, right) + 1e-6


@every_op
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 65, 1100])
def test_any_length(name, length):
    parity(name, example(name, torch.float64, T=length, D=6), 1e-9)


@every_backend
@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens_returns_the_initial_state(name, backend, dtype):
    arguments = example(name, dtype, T=0)
    h, state = run(name, arguments, backend=backend)
    assert h.shape == (2, 0, 16)
    assert h.dtype == dtype
    assert torch.equal(state, arguments["initial_state"])
    assert state.data_ptr() != arguments["initial_state"].data_ptr()


@every_backend
@every_op
def test_no_tokens_pass_the_gradient_of_the_final_state_on(name, backend):
    arguments = example(name, T=0)
    arguments["initial_state"].requires_grad_()
    grad = torch.randn(2, 16)
    run(name, arguments, backend=backend)[1].backward(grad)
    assert torch.equal(arguments["initial_state"].grad, grad)


@every_backend
@every_op
def test_no_initial_state_means_zeros(name, backend):
    arguments = example(name, T=70)
    state = arguments.pop("initial_state")
    with_zeros = arguments | {"initial_state": torch.zeros_like(state)}
    for x, y in zip(run(name, arguments, backend=backend), run(name, with_zeros, backend=backend), strict=True):
        assert torch.equal(x, y)


@every_op
def test_the_final_state_comes_only_when_asked_for(name):
    assert getattr(holdfast, name)(**example(name))[1] is None


@every_op
def test_the_final_state_is_the_last_output_in_memory_of_its_own(name):
    h, state = run(name, example(name))
    assert torch.equal(state, h[:, -1])
    kept = state.clone()
    h.zero_()
    assert torch.equal(state, kept)


@every_op
@given(data=st.data())
def test_a_sequence_may_be_split_anywhere(name, data):
    length = data.draw(st.integers(1, 200))
    at = data.draw(st.integers(0, length))
    arguments = example(name, torch.float64, seed=length, T=length, D=4)
    whole, final = run(name, arguments)
    first, state = run(name, over_time(arguments, lambda x: x[:, :at]))
    second, last = run(name, over_time(arguments, lambda x: x[:, at:]) | {"initial_state": state})
    assert_close([torch.cat([first, second], 1), last], [whole, final], 1e-12)


PACKED = torch.tensor([0, 0, 5, 75, 75, 76, 150, 150], dtype=torch.int32)  # empty ones first, last and between


@every_backend
@every_op
@pytest.mark.parametrize("initial", [True, False])
def test_packed_sequences_equal_separate_calls(name, backend, initial):
    arguments = example(name, torch.float64, B=1, T=150, D=6)
    del arguments["initial_state"]
    if initial:
        arguments["initial_state"] = Draw(3, torch.float64).state(7, 6)
    parity(name, arguments, 1e-9, cu_seqlens=PACKED, backend=backend)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences_in_narrower_types(name, dtype):
    arguments = example(name, dtype, B=1, T=150, D=6) | {"initial_state": Draw(3).state(7, 6)}
    packed = run(name, arguments, cu_seqlens=PACKED)
    exact = oracle(RECURRENCES[name], cast(arguments, torch.float64), PACKED)
    assert relative_error(packed[0].double(), exact[0]) <= (2e-5 if dtype == torch.float32 else 2.0**-8)
    assert relative_error(packed[1].double(), exact[1]) <= 2e-5


@every_backend
@every_op
def test_nothing_but_empty_sequences(name, backend):
    arguments = example(name, B=1, T=0) | {"initial_state": Draw(3).state(2, 16)}
    leaves_of = [x.requires_grad_() for x in arguments.values()]
    h, state = run(name, arguments, cu_seqlens=torch.tensor([0, 0, 0]), backend=backend)
    assert h.shape == (1, 0, 16)
    assert torch.equal(state, arguments["initial_state"])
    (h.sum() + state.sum()).backward()
    assert torch.equal(arguments["initial_state"].grad, torch.ones(2, 16))
    assert all(x.grad.shape == x.shape for x in leaves_of)


@every_op
@given(at=st.integers(0, 98), seed=st.integers(0, 100))
def test_outputs_do_not_depend_on_later_tokens(name, at, seed):
    arguments = example(name, D=4)
    changed = example(name, seed=seed + 1000, D=4)
    mixed = {
        key: value if key == "initial_state" else torch.cat([value[:, : at + 1], changed[key][:, at + 1 :]], 1)
        for key, value in arguments.items()
    }
    assert torch.equal(run(name, mixed)[0][:, : at + 1], run(name, arguments)[0][:, : at + 1])


@every_backend
@every_op
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(name, backend, packed):
    arguments = example(name, torch.float64, B=1, T=7, D=4)
    options = {"backend": backend}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 3, 3, 7])
        arguments["initial_state"] = Draw(3, torch.float64).state(3, 4)
    flat = [x.requires_grad_() for x in leaves(arguments)]
    assert torch.autograd.gradcheck(lambda *x: run(name, dict(zip(arguments, x, strict=True)), **options), flat)


GATES = {
    "zero": lambda a: torch.zeros_like(a),
    "negative": lambda a: -a,
    "signs mixed, some zero": lambda a: a * torch.randint(-1, 2, a.shape),
    "zero at the start": lambda a: a.index_fill(1, torch.tensor([0]), 0.0),
    "one": lambda a: torch.ones_like(a),
    "minus one": lambda a: -torch.ones_like(a),
    "tiny": lambda a: torch.full_like(a, 1e-30),
}


@every_backend
@pytest.mark.parametrize("name", ["rglru", "rotlru"])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_gates_of_any_sign_and_zero(name, backend, kind, dtype, limit):
    arguments = example(name, dtype, T=150)
    arguments["a"] = GATES[kind](arguments["a"])
    got, exact = op_and_oracle(getattr(holdfast, name), RECURRENCES[name], arguments, backend=backend)
    assert all(torch.isfinite(x).all() for x in got)
    assert_close(got, exact, limit)


@every_backend
@pytest.mark.parametrize("name", ["rglru", "rotlru"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_gates_beyond_one(name, backend, dtype, limit):
    arguments = example(name, dtype, T=40)
    arguments["a"] = (1 + arguments["a"]) * torch.randn(arguments["a"].shape).sign()
    parity(name, arguments, limit, backend=backend)


def test_a_zero_gate_forgets_exactly():
    arguments = example("rglru", T=100)
    arguments["a"][:, 37] = 0
    h, _ = run("rglru", arguments)
    assert torch.equal(h[:, 37], arguments["x"][:, 37])


@every_backend
@pytest.mark.parametrize("kind", ["strong", "mixed", "none", "minus infinity"])
def test_decay_of_any_strength(backend, kind):
    arguments = example("hgrn", T=150)
    coin = torch.rand(arguments["g"].shape) < 0.2
    arguments["g"] = {
        "strong": torch.full_like(coin, -50.0, dtype=torch.float32),
        "mixed": torch.where(coin, -50.0, arguments["g"]),
        "none": torch.zeros_like(arguments["g"]),
        "minus infinity": torch.where(coin, -torch.inf, arguments["g"]),
    }[kind]
    got, exact = op_and_oracle(holdfast.hgrn, RECURRENCES["hgrn"], arguments, backend=backend)
    assert all(torch.isfinite(x).all() for x in got)
    assert_close(got, exact, 2e-5)


def test_hgrn_is_rglru_of_the_exponential():
    arguments = example("hgrn", torch.float64)
    g = arguments.pop("g")
    for x, y in zip(run("hgrn", arguments | {"g": g}), run("rglru", arguments | {"a": g.exp()}), strict=True):
        assert torch.equal(x, y)


@every_backend
def test_no_rotation_is_rglru(backend):
    arguments = example("rotlru", torch.float64, T=60)
    theta = torch.zeros_like(arguments.pop("theta"))
    turned = run("rotlru", arguments | {"theta": theta}, backend=backend)
    arguments["a"] = arguments["a"].repeat_interleave(2, -1)
    assert_close(turned, run("rglru", arguments, backend=backend), 1e-14)


@every_backend
def test_half_a_turn_is_a_negative_gate(backend):
    arguments = example("rotlru", torch.float64, T=60)
    theta = torch.full_like(arguments.pop("theta"), torch.pi)
    turned = run("rotlru", arguments | {"theta": theta}, backend=backend)
    arguments["a"] = -arguments["a"].repeat_interleave(2, -1)
    assert_close(turned, run("rglru", arguments, backend=backend), 1e-13)


@every_backend
def test_rotation_without_input_keeps_the_length_of_every_pair(backend):
    arguments = example("rotlru", T=500)
    arguments |= {"a": torch.ones_like(arguments["a"]), "x": torch.zeros_like(arguments["x"])}
    h, _ = run("rotlru", arguments, backend=backend)
    length = h.unflatten(-1, (-1, 2)).norm(dim=-1)
    initial = arguments["initial_state"].unflatten(-1, (-1, 2)).norm(dim=-1)
    torch.testing.assert_close(length, initial[:, None].expand_as(length), rtol=3e-5, atol=0)


def test_rotation_of_a_long_sequence_adds_the_angles():
    length = 300
    theta = torch.full((1, length, 1), 0.1, dtype=torch.float64)
    x = torch.zeros(1, length, 2, dtype=torch.float64)
    start = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    h, _ = holdfast.rotlru(torch.ones_like(theta), theta, x, initial_state=start)
    angle = 0.1 * torch.arange(1, length + 1, dtype=torch.float64)
    assert_close([h[0]], [torch.stack([angle.cos(), angle.sin()], -1)], 1e-12)


@every_backend
@every_op
def test_inputs_that_are_not_contiguous(name, backend):
    arguments = example(name, torch.float64, T=20)
    strided = over_time(arguments, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    strided["x"] = strided["x"].flip(2).mT.contiguous().mT.flip(2)
    strided["initial_state"] = strided["initial_state"].T.contiguous().T
    for x, y in zip(
        values_and_grads(lambda a: run(name, a, backend=backend), strided),
        values_and_grads(lambda a: run(name, a, backend=backend), arguments),
        strict=True,
    ):
        assert torch.equal(x, y)


@every_op
def test_a_gate_shared_by_all_rows_gets_the_sum_of_their_gradients(name):
    arguments = example(name, torch.float64, B=3, T=20)
    key = "g" if name == "hgrn" else "a"
    shared = arguments[key][:1].clone().requires_grad_()
    each = arguments[key][:1].repeat(3, 1, 1).requires_grad_()
    run(name, arguments | {key: shared.expand(3, -1, -1)})[0].sum().backward()
    run(name, arguments | {key: each})[0].sum().backward()
    torch.testing.assert_close(shared.grad, each.grad.sum(0, keepdim=True))


@every_backend
@every_op
def test_only_the_final_state_or_only_the_output_is_used(name, backend):
    for used in (0, 1):
        arguments = example(name, torch.float64, T=30)
        got = values_and_grads(lambda a, i=used: run(name, a, backend=backend)[i], arguments)
        assert_close(got, values_and_grads(lambda a, i=used: oracle(RECURRENCES[name], a)[i], arguments), 1e-9)


@every_op
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name, packed, dtype):
    cu_seqlens = torch.tensor([0, 3, 3, 9]) if packed else None
    arguments = example(name, dtype, B=1 if packed else 2, T=9, D=4)
    if packed:
        arguments["initial_state"] = Draw(3).state(3, 4)
    call, _ = RECURRENCES[name].map(**arguments)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in call]
    leaf = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in detached]
    torch.library.opcheck(torch.ops.holdfast.diagonal_forward.default, (*leaf, cu_seqlens, name, True, ""))
    h, state, _ = torch.ops.holdfast.diagonal_forward(*detached, cu_seqlens, name, True, "")
    states = h if dtype == torch.float32 else None
    given_grads = (torch.ones_like(h), torch.ones_like(state), states, None)
    torch.library.opcheck(torch.ops.holdfast.diagonal_backward.default, (*given_grads, *detached, cu_seqlens, name, ""))


@every_op
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_as_one_graph(name, packed):
    options = {"cu_seqlens": torch.tensor([0, 3, 9])} if packed else {}
    arguments = example(name, B=1 if packed else 2, T=9, D=4)
    if packed:
        del arguments["initial_state"]
    torch._dynamo.reset()
    compiled = torch.compile(getattr(holdfast, name), fullgraph=True, backend="aot_eager")
    eager = values_and_grads(lambda a: run(name, a, **options), arguments)
    graph = values_and_grads(lambda a: compiled(**a, output_final_state=True, **options), arguments)
    assert_close(graph, eager, 1e-6)


@every_op
def test_autocast_casts_inputs_and_keeps_states_and_gates_wide(name):
    arguments = example(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h, state = run(name, arguments)
    expected, final = run(name, arguments | {"x": arguments["x"].bfloat16()})
    assert h.dtype == torch.bfloat16
    assert torch.equal(h, expected)
    assert torch.equal(state, final)


@every_op
def test_runs_repeat_bit_for_bit(name):
    first = values_and_grads(lambda a: run(name, a), example(name))
    second = values_and_grads(lambda a: run(name, a), example(name))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@every_op
def test_the_output_may_not_change_before_the_backward_pass(name):
    arguments = example(name)
    h, _ = run(name, arguments | {"x": arguments["x"].requires_grad_()})
    loss = h.sum()
    h.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
