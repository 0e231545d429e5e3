"""The ops of the matrix family against the oracle, and against what must hold of any recurrence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

import holdfast
from holdfast.ops.matrix import _laid_out
from holdfast.recurrences import RECURRENCES, Draw, Sizes, oracle
from parity import assert_close, cast, leaves, op_and_oracle, relative_error, values_and_grads

NAMES = [name for name, recurrence in RECURRENCES.items() if recurrence.family == "matrix"]
BACKENDS = ["chunked", "reference"]
every_op = pytest.mark.parametrize("name", NAMES)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def example(name, dtype=torch.float32, seed=0, **sizes):
    arguments = RECURRENCES[name].example(Draw(seed, dtype), Sizes(**sizes))
    return {key: value for key, value in arguments.items() if value is not None}


def run(name, arguments, **options):
    return getattr(holdfast, name)(**arguments, output_final_state=True, **options)


@every_backend
@every_op
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_outputs_and_gradients_match_the_oracle(name, backend, dtype, limit):
    arguments = example(name, dtype, T=150, H=4, Hq=2)
    got, exact = op_and_oracle(getattr(holdfast, name), RECURRENCES[name], arguments, backend=backend)
    assert_close(got, exact, limit)


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_the_step_loop(name, dtype):
    arguments = example(name, dtype, T=150, H=4, Hq=2)
    got, exact = op_and_oracle(getattr(holdfast, name), RECURRENCES[name], arguments)
    output_dtype = leaves(arguments)[0].dtype

    def loop(a):
        # the step loop on the same half-precision inputs: float32 inside, half precision out
        o, state = oracle(RECURRENCES[name], a)
        return o.to(output_dtype), state

    plain = values_and_grads(loop, arguments)
    for mine, theirs, right in zip(got, plain, exact, strict=True):
        assert relative_error(mine, right) <= 2 * relative_error(theirs, right) + 1e-6


@every_op
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1100])
def test_any_length(name, length):
    arguments = example(name, torch.float64, T=length, H=2, K=4, V=3, B=1)
    got, exact = op_and_oracle(getattr(holdfast, name), RECURRENCES[name], arguments)
    assert_close(got, exact, 1e-9)


@every_backend
@every_op
def test_no_tokens_returns_the_initial_state(name, backend):
    arguments = example(name, T=0)
    o, state = run(name, arguments, backend=backend)
    assert o.shape[1] == 0
    for final, initial in zip(leaves(state), leaves(arguments["initial_state"]), strict=True):
        assert torch.equal(final, initial)
        assert final.data_ptr() != initial.data_ptr()


@every_op
def test_no_tokens_pass_the_gradient_of_the_final_state_on(name):
    initial = leaves(example(name, T=0)["initial_state"])
    got = values_and_grads(lambda a: run(name, a)[1], example(name, T=0))
    assert sum(1 for x in got if x.numel() and torch.any(x != 0)) >= 2 * len(initial)


@every_op
def test_no_initial_state_means_zeros(name):
    arguments = example(name, T=70)
    state = arguments.pop("initial_state")
    zeros = tree_map(torch.zeros_like, state)
    for x, y in zip(leaves(run(name, arguments)), leaves(run(name, arguments | {"initial_state": zeros})), strict=True):
        assert torch.equal(x, y)


def test_the_final_state_comes_only_when_asked_for():
    arguments = example("simple_gla")
    assert holdfast.simple_gla(**arguments)[1] is None


def split(arguments, recurrence, start, end):
    def cut(value, spec):
        axes = next((s.split() for s in spec.shapes if len(s.split()) == value.dim()), [])
        return value[:, start:end] if "T" in axes else value

    return {
        key: value if key == "initial_state" else cut(value, recurrence.arguments[key])
        for key, value in arguments.items()
    }


@every_op
@given(data=st.data())
def test_a_sequence_may_be_split_anywhere(name, data):
    length = data.draw(st.integers(2, 200))
    at = data.draw(st.integers(0, length))
    arguments = example(name, torch.float64, seed=length, T=length, K=4, V=3)
    recurrence = RECURRENCES[name]
    whole, final = run(name, arguments)
    first, state = run(name, split(arguments, recurrence, 0, at))
    rest = split(arguments, recurrence, at, length)
    rest["initial_state"] = state
    second, last = run(name, rest)
    assert_close([torch.cat([first, second], 1), *leaves(last)], [whole, *leaves(final)], 1e-10)


@every_backend
@every_op
def test_packed_sequences_equal_separate_calls(name, backend):
    # lengths in different buckets, empty ones first, last and between
    cu_seqlens = torch.tensor([0, 0, 5, 75, 75, 76, 150, 150], dtype=torch.int32)
    arguments = example(name, torch.float64, B=1, T=150, H=2, K=4, V=3)
    states = RECURRENCES[name].example(Draw(3, torch.float64), Sizes(B=7, H=2, K=4, V=3))["initial_state"]
    arguments["initial_state"] = states
    got, exact = op_and_oracle(
        getattr(holdfast, name), RECURRENCES[name], arguments, cu_seqlens=cu_seqlens, backend=backend
    )
    assert_close(got, exact, 1e-9)


@every_op
@given(at=st.integers(0, 98), seed=st.integers(0, 100))
def test_outputs_do_not_depend_on_later_tokens(name, at, seed):
    arguments = example(name, torch.float64, K=4, V=3)
    o, _ = run(name, arguments)
    changed = example(name, torch.float64, seed=seed + 1000, K=4, V=3)
    mixed = {}
    for key, value in arguments.items():
        mixed[key] = value
        if key != "initial_state" and value.dim() > 2:
            mixed[key] = torch.cat([value[:, : at + 1], changed[key][:, at + 1 :]], 1)
    assert torch.equal(run(name, mixed)[0][:, : at + 1], o[:, : at + 1])


@every_op
def test_grouped_heads_equal_repeated_heads(name):
    arguments = example(name, torch.float64, H=6, Hq=2)
    specs = {key: spec for key, spec in RECURRENCES[name].arguments.items() if not isinstance(spec, tuple)}
    axes = {key: spec.shapes[0].split() for key, spec in specs.items()}
    grouped = {key: n for key, found in axes.items() for n, axis in enumerate(found) if axis in ("Hq", "G")}
    assert len(grouped) >= 2
    repeated = {key: x.repeat_interleave(3, grouped[key]) if key in grouped else x for key, x in arguments.items()}
    for x, y in zip(leaves(run(name, arguments)), leaves(run(name, repeated)), strict=True):
        assert torch.equal(x, y)


@every_backend
@every_op
def test_gradcheck(name, backend):
    arguments = example(name, torch.float64, B=1, T=5, H=2, Hq=1, K=3, V=2)
    flat = [x.requires_grad_() for x in leaves(arguments)]

    def op(*values):
        rest = iter(values)
        return tuple(leaves(run(name, tree_map(lambda _: next(rest), arguments), backend=backend)))

    assert torch.autograd.gradcheck(op, flat)


@every_backend
@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule"])
@pytest.mark.parametrize("kind", ["strong", "mixed", "zero", "minus infinity"])
def test_decay_of_any_strength(name, backend, kind):
    arguments = example(name, T=150)
    g = arguments["g"]
    coin = torch.rand(g.shape, generator=torch.Generator().manual_seed(0)) < 0.2
    arguments["g"] = {
        "strong": torch.full_like(g, -50.0),
        "mixed": torch.where(coin, -50.0, g),
        "zero": torch.zeros_like(g),
        "minus infinity": torch.where(coin, -torch.inf, g),
    }[kind]
    got, exact = op_and_oracle(getattr(holdfast, name), RECURRENCES[name], arguments, backend=backend)
    if kind == "minus infinity":
        # d exp(g) at -inf is exp(-inf) * inf to the oracle; the op says 0
        got, exact = got[:2], exact[:2]
    assert_close(got, exact, 2e-5)


def test_a_decay_of_zero_has_a_gradient_of_zero():
    arguments = example("simple_gla")
    g = arguments["g"].masked_fill(torch.arange(100)[:, None] == 50, -torch.inf).requires_grad_()
    holdfast.simple_gla(**arguments | {"g": g})[0].sum().backward()
    assert torch.isfinite(g.grad).all()
    assert (g.grad[:, 50] == 0).all()


@pytest.mark.parametrize("i", [80.0, -80.0, None])
@pytest.mark.parametrize("f", [80.0, -80.0, None])
def test_mlstm_gates_of_eighty(i, f):
    arguments = example("mlstm", T=80)
    signs = torch.randn(arguments["i"].shape, generator=torch.Generator().manual_seed(0)).sign()
    arguments["i"] = signs * 80 if i is None else torch.full_like(arguments["i"], i)
    arguments["f"] = signs.flip(1) * 80 if f is None else torch.full_like(arguments["f"], f)
    got, exact = op_and_oracle(holdfast.mlstm, RECURRENCES["mlstm"], arguments)
    assert all(torch.isfinite(x).all() for x in got)
    loop, _ = op_and_oracle(holdfast.mlstm, RECURRENCES["mlstm"], arguments, backend="reference")
    for x, plain, y in zip(got, loop, exact, strict=True):
        # where n . q or a gradient cancels, no float32 computation is right to 2e-5; and a gradient of exp(-80) beside
        # others of 10 is 0 to the last bits of float32
        assert (x - y).norm() <= max(2e-5 * y.norm(), 2 * (plain - y).norm()) + 1e-7


def test_delta_rule_on_correlated_keys():
    # nearly parallel keys and full writes make the chunk's triangular system as hard as it gets
    arguments = example("gated_delta_rule", T=200, K=16)
    base = torch.nn.functional.normalize(torch.ones(16), dim=0)
    arguments["k"] = torch.nn.functional.normalize(base + 0.1 * arguments["k"], dim=-1)
    arguments["beta"] = torch.full_like(arguments["beta"], 0.99)
    arguments["g"] = arguments["g"] * 1e-3
    got, exact = op_and_oracle(holdfast.gated_delta_rule, RECURRENCES["gated_delta_rule"], arguments)
    assert_close(got, exact, 2e-5)


def test_sigmoid_mlstm_with_and_without_normaliser():
    for normalize in (True, False):
        arguments = example("mlstm", T=100) | {"gating": "sigmoid", "normalize": normalize}
        assert_close(*op_and_oracle(holdfast.mlstm, RECURRENCES["mlstm"], arguments), 2e-5)


def test_ssd_with_a_decay_a_state_channel():
    arguments = example("ssd", T=100, H=4, Hq=2)
    arguments["A"] = -Draw(5).gate(4, 16)
    arguments["D"] = Draw(6).normal(4, 24)
    arguments["dt_softplus"] = True
    assert_close(*op_and_oracle(holdfast.ssd, RECURRENCES["ssd"], arguments), 2e-5)


def test_constant_decay_may_be_given_a_head():
    arguments = example("simple_gla", torch.float64)
    g = Draw(4, torch.float64).log_decay(2)
    o, state = run("simple_gla", arguments | {"g": g})
    same, final = run("simple_gla", arguments | {"g": g.expand(2, 100, 2)})
    assert torch.equal(o, same)
    assert torch.equal(state, final)


@every_op
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(name, packed):
    options = {"cu_seqlens": torch.tensor([0, 3, 9])} if packed else {}
    arguments = example(name, B=1 if packed else 2, T=9, K=4, V=3)
    if packed:
        del arguments["initial_state"]
    call, _ = RECURRENCES[name].map(**arguments, **(options if name == "mlstm" else {}))
    call = cast(call, torch.float32)
    call = tree_map(lambda x: x.contiguous().requires_grad_() if isinstance(x, torch.Tensor) else x, call)
    # of several steps a token
    cu_seqlens = options["cu_seqlens"] * (call.v.shape[1] // 9) if packed else None
    torch.library.opcheck(torch.ops.holdfast.matrix_forward.default, (*call, cu_seqlens, name, True, ""))
    detached = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, call)
    o, state, norm = torch.ops.holdfast.matrix_forward(*detached, cu_seqlens, name, True, "")
    arguments = (torch.ones_like(o), torch.ones_like(state), *detached, cu_seqlens, name, "", o, norm)
    torch.library.opcheck(torch.ops.holdfast.matrix_backward.default, arguments)


@every_backend
@every_op
def test_ops_change_no_input_and_return_no_view_of_one(name, backend):
    call, _ = RECURRENCES[name].map(**example(name, T=9, K=4, V=3))
    inputs = leaves(list(call))
    before = [x.clone() for x in inputs]
    o, state, _ = torch.ops.holdfast.matrix_forward(*call, None, name, True, backend)
    grads = torch.ops.holdfast.matrix_backward(o, state, *call, None, name, backend)
    inputs += [o, state]
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=False))
    owned = [x.untyped_storage().data_ptr() for x in grads if x.numel()]
    assert not set(owned) & {x.untyped_storage().data_ptr() for x in inputs}
    assert len(set(owned)) == len(owned)


@every_op
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_as_one_graph(name, packed):
    options = {"cu_seqlens": torch.tensor([0, 3, 9])} if packed else {}
    arguments = example(name, B=1 if packed else 2, T=9, K=4, V=3)
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
        o, state = run(name, arguments)
    inputs = {key for key, spec in RECURRENCES[name].arguments.items() if getattr(spec, "dtype", "") == "input"}
    by_hand = {key: x.bfloat16() if key in inputs else x for key, x in arguments.items()}
    expected, final = run(name, by_hand)
    assert o.dtype == torch.bfloat16
    for x, y in zip([o, *leaves(state)], [expected, *leaves(final)], strict=True):
        assert torch.equal(x, y)


@every_op
def test_runs_repeat_bit_for_bit(name):
    first = values_and_grads(lambda a: run(name, a), example(name))
    second = values_and_grads(lambda a: run(name, a), example(name))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def in_memory(order):
    """The same [2, 3, 4] of tokens and heads, side by side in another order."""
    x = torch.arange(24.0).view(2, 3, 4)
    return {"by token": x, "by head": x.mT.contiguous().mT, "in part": torch.stack((x, x), -1)[..., 0]}[order]


@pytest.mark.parametrize("grad", ["by token", "by head", "in part"])
@pytest.mark.parametrize("of", ["by token", "by head", "in part"])
def test_gradients_lie_by_head_where_gates_do_and_are_contiguous_otherwise(of, grad):
    found = _laid_out(in_memory(grad), in_memory(of))
    assert torch.equal(found, in_memory("by token"))
    assert found.stride() == in_memory("by head" if of == "by head" else "by token").stride()


def test_gradients_of_a_vector_for_each_head_are_contiguous():
    x = torch.arange(24.0).view(1, 2, 3, 4)
    by_head = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not by_head.is_contiguous()
    assert torch.equal(_laid_out(by_head, by_head), x)
    assert _laid_out(by_head, by_head).is_contiguous()
