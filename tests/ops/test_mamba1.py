"""mamba1 against the oracle, and against what must hold of any recurrence."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.kernels import select
from holdfast.ops import selective
from holdfast.ops.selective import selective_forward
from holdfast.recurrences import RECURRENCES, Draw, Sizes, oracle
from parity import assert_close, cast, leaves, op_and_oracle, relative_error, values_and_grads

MAMBA1 = RECURRENCES["mamba1"]
BACKENDS = ["chunked", "reference"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
OPTIONAL = ("D", "z", "dt_bias", "initial_state")


def example(dtype=torch.float32, seed=0, groups=None, packed=None, **sizes):
    """packed: offsets."""
    draw = Draw(seed, dtype)
    sizes = Sizes(**sizes | ({"B": 1, "T": packed[-1]} if packed else {}))
    arguments = MAMBA1.example(draw, sizes)
    if groups:
        arguments |= {name: draw.normal(sizes.B, sizes.T, groups, sizes.N) for name in "BC"}
    if packed:
        arguments["initial_state"] = draw.state(len(packed) - 1, sizes.D, sizes.N)
    return arguments


def parity(arguments, limit, softplus=False, cu_seqlens=None, **options):
    options |= {"cu_seqlens": cu_seqlens}
    run = partial(holdfast.mamba1, output_final_state=True, dt_softplus=softplus, **options)
    got = values_and_grads(lambda a: run(**a), arguments)
    right = values_and_grads(
        lambda a: oracle(MAMBA1, a | {"dt_softplus": softplus}, cu_seqlens), cast(arguments, torch.float64)
    )
    assert_close(got, right, limit)


@every_backend
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_outputs_and_gradients_match_the_oracle(backend, softplus, dtype, limit):
    parity(example(dtype, T=150), limit, softplus, backend=backend)


@every_backend
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_groups_of_channels_share_writes_and_reads(backend, groups):
    parity(example(torch.float64, T=20, groups=groups), 1e-9, backend=backend)


@every_backend
@pytest.mark.parametrize("given", [(), ("D",), ("z",), ("dt_bias",), ("initial_state",), ("D", "z")])
def test_what_may_be_left_out(backend, given):
    arguments = {name: x for name, x in example(torch.float64, T=20).items() if name not in OPTIONAL or name in given}
    parity(arguments, 1e-9, backend=backend)


@every_backend
@pytest.mark.parametrize("groups", [None, 2])
def test_packed_sequences(backend, groups):
    offsets = torch.tensor([0, 0, 3, 40, 41, 41, 60], dtype=torch.int32)
    arguments = example(torch.float64, packed=offsets.tolist(), groups=groups, D=6, N=3)
    parity(arguments, 1e-9, True, offsets, backend=backend)


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(0, 70), st.integers(1, 40), st.integers(1, 33))
def test_any_sizes(batch, length, channels, numbers):
    parity(example(torch.float64, B=batch, T=length, D=channels, N=numbers), 1e-9, True, backend="chunked")


@pytest.mark.parametrize("sizes", [{"T": 1100, "D": 2, "N": 1}, {"T": 40, "D": 300, "N": 30, "B": 3}])
def test_chunks_side_by_side_and_one_after_another(sizes):
    parity(example(torch.float64, **sizes), 1e-9, backend="chunked")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dt_dtype", [None, torch.float32])
def test_half_precision_errs_at_most_twice_as_much_as_the_step_loop(dtype, dt_dtype):
    arguments = example(dtype, T=150)
    arguments["dt"] = arguments["dt"].to(dt_dtype or dtype)
    got, exact = op_and_oracle(holdfast.mamba1, MAMBA1, arguments)
    plain = values_and_grads(lambda a: oracle(MAMBA1, a), arguments)
    for mine, theirs, right in zip(got, plain, exact, strict=True):
        assert relative_error(mine, right) <= 2 * relative_error(theirs, right) + 1e-6


@every_backend
@pytest.mark.parametrize("rate", [0.0, 1e2, 1e5])
def test_decay_of_any_strength(backend, rate):
    arguments = example(torch.float32, T=90)
    arguments["A"] = arguments["A"] * rate
    parity(arguments, 2e-5, backend=backend)


@every_backend
def test_a_step_of_size_0_leaves_the_state_alone(backend):
    arguments = example(torch.float64, T=12, D=4) | {"dt_bias": None}
    arguments["dt"] = torch.zeros_like(arguments["dt"])
    state = holdfast.mamba1(**arguments, output_final_state=True, backend=backend)[1]
    assert torch.equal(state, arguments["initial_state"])


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens_returns_the_initial_state(backend, dtype):
    arguments = example(dtype, T=0)
    y, state = holdfast.mamba1(**arguments, output_final_state=True, backend=backend)
    assert (y.shape, y.dtype) == ((2, 0, 16), dtype)
    assert torch.equal(state, arguments["initial_state"])
    assert state.data_ptr() != arguments["initial_state"].data_ptr()


@every_backend
@pytest.mark.parametrize("cut", [0, 1, 17, 40])
def test_two_calls_are_one(backend, cut):
    arguments, state, outputs = example(torch.float64, T=40), None, []
    whole = holdfast.mamba1(**arguments, output_final_state=True, backend=backend)
    state = arguments["initial_state"]
    for part in (slice(0, cut), slice(cut, 40)):
        timed = {name: arguments[name][:, part] for name in ("x", "dt", "B", "C", "z")}
        y, state = holdfast.mamba1(
            **arguments | timed | {"initial_state": state}, output_final_state=True, backend=backend
        )
        outputs.append(y)
    assert_close([torch.cat(outputs, 1), state], list(whole), 1e-12)


@pytest.mark.parametrize("used", [0, 1])
def test_gradients_of_the_output_alone_and_of_the_final_state_alone(used):
    arguments = example(torch.float64, T=30)
    got = values_and_grads(lambda a: holdfast.mamba1(**a, output_final_state=True)[used], arguments)
    assert_close(got, values_and_grads(lambda a: oracle(MAMBA1, a)[used], arguments), 1e-9)


@every_backend
def test_arguments_in_any_memory(backend):
    arguments = example(torch.float64, T=9, D=6, N=4)
    views = {
        name: x.mT.contiguous().mT if x.dim() > 1 else x.repeat_interleave(2)[::2] for name, x in arguments.items()
    }
    parity(views, 1e-9, backend=backend)


def test_the_state_is_none_unless_it_is_asked_for():
    assert holdfast.mamba1(**example(T=3))[1] is None


@pytest.mark.parametrize("packed", [None, [0, 2, 2, 9]])
@pytest.mark.parametrize("left_out", [(), OPTIONAL])
def test_opcheck(packed, left_out):
    arguments = example(torch.float64, T=9, D=4, N=3, packed=packed)
    for name in left_out:
        arguments[name] = None
    call, _ = MAMBA1.map(**arguments, dt_softplus=True)
    tensors = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in call]
    offsets = None if packed is None else torch.tensor(packed)
    torch.library.opcheck(torch.ops.holdfast.selective_forward.default, (*tensors, offsets, "mamba1", True, ""))


def test_compiles_as_one_graph():
    arguments = example(torch.float64, T=12)

    def run(a):
        y, state = holdfast.mamba1(**a, dt_softplus=True, output_final_state=True)
        return y.sin(), state * 2

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_close(values_and_grads(compiled, arguments), values_and_grads(run, arguments), 1e-12)


def test_autocast_casts_inputs_and_keeps_the_state_wide():
    arguments = example(T=12)
    exact = holdfast.mamba1(**arguments)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = holdfast.mamba1(**arguments, output_final_state=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert relative_error(y.double(), exact.double()) < 0.02


def test_a_second_derivative_is_refused():
    arguments = example(torch.float64, T=4)
    x = arguments["x"].requires_grad_()
    (first,) = torch.autograd.grad(holdfast.mamba1(**arguments)[0].sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="selective_forward: expected one differentiation"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_steps_in_place_are_a_sequence(dtype, backend):
    arguments = example(dtype, T=7)
    y, final = holdfast.mamba1(**arguments, dt_softplus=True, output_final_state=True)
    state = arguments.pop("initial_state").clone()
    place, outputs = state.data_ptr(), []
    for t in range(7):
        token = {name: x[:, t : t + 1] if name in ("x", "dt", "B", "C", "z") else x for name, x in arguments.items()}
        outputs.append(holdfast.step("mamba1", token | {"dt_softplus": True}, state, backend))
    assert state.data_ptr() == place
    limit = 1e-12 if dtype == torch.float64 else 2e-6
    assert_close([torch.cat(outputs, 1), state], [y, final], max(limit, 2.0**-8 if dtype == torch.bfloat16 else 0))


def test_a_step_is_planned_without_a_backward_pass(monkeypatch):
    asked = []

    def resolve(backends, problem, *rest):
        asked.append(problem)
        return select.resolve(backends, problem, *rest)

    monkeypatch.setattr(selective, "resolve", resolve)
    arguments = example(B=2, T=1, D=6, N=4)
    state = arguments.pop("initial_state")
    holdfast.step("mamba1", {name: x.requires_grad_() for name, x in arguments.items()}, state)
    assert [problem.needs_grad for problem in asked] == [False]


def test_steps_refuse_what_is_no_token_and_no_state():
    arguments = example(T=2)
    state = arguments.pop("initial_state")
    with pytest.raises(ValueError, match=r"arguments: expected one token \(T = 1\); got T = 2"):
        holdfast.step("mamba1", arguments, state)
    token = example(T=1)
    del token["initial_state"]
    with pytest.raises(ValueError, match="state: expected a contiguous tensor; got strides"):
        holdfast.step("mamba1", token, state.mT.contiguous().mT)
    with pytest.raises(TypeError, match="arguments: expected names that mamba1 takes; got 'scale'"):
        holdfast.step("mamba1", token | {"scale": 1.0}, state)


B, T, D, N = 2, 5, 6, 3
WRONG = {
    "x of the wrong rank": ({"x": torch.zeros(B, D)}, ValueError, r"x: expected shape \[B, T, D\]; got \[2, 6\]"),
    "no channels": ({"x": torch.zeros(B, T, 0)}, ValueError, r"x: expected D > 0 in \[B, T, D\]; got \[2, 5, 0\]"),
    "dt of a head": ({"dt": torch.zeros(B, T)}, ValueError, r"dt: expected shape \[B=2, T=5, D=6\]; got \[2, 5\]"),
    "dt of integers": (
        {"dt": torch.zeros(B, T, D, dtype=torch.int64)},
        TypeError,
        "dt: expected a floating-point dtype",
    ),
    "A of channels": ({"A": torch.zeros(D)}, ValueError, r"A: expected shape \[D=6, N\]; got \[6\]"),
    "A the other way round": ({"A": torch.zeros(N, D)}, ValueError, r"A: expected shape \[D=6, N\]; got \[3, 6\]"),
    "no numbers of state": ({"A": torch.zeros(D, 0)}, ValueError, r"A: expected N > 0 in \[D, N\]; got \[6, 0\]"),
    "B of another N": (
        {"B": torch.zeros(B, T, N + 1)},
        ValueError,
        r"B: expected shape \[B=2, T=5, G, N=3\] or \[B=2, T=5, N=3\]; got \[2, 5, 4\]",
    ),
    "groups that do not divide": (
        {"B": torch.zeros(B, T, 4, N)},
        ValueError,
        "B: expected G to divide D; got G = 4, D = 6",
    ),
    "C of other groups": (
        {"B": torch.zeros(B, T, 2, N), "C": torch.zeros(B, T, 3, N)},
        ValueError,
        r"C: expected shape \[B=2, T=5, G=2, N=3\] or .*; got \[2, 5, 3, 3\]",
    ),
    "C of another dtype": ({"C": torch.zeros(B, T, N).half()}, TypeError, "C: expected torch.float32, as the other"),
    "z of another dtype": ({"z": torch.zeros(B, T, D).half()}, TypeError, "z: expected torch.float32, as the other"),
    "a skip a token": ({"D": torch.zeros(T, D)}, ValueError, r"D: expected shape \[D=6\]; got \[5, 6\]"),
    "state of the other layout": (
        {"initial_state": torch.zeros(B, N, D)},
        ValueError,
        r"initial_state: expected shape \[sequences=2, D=6, N=3\]; got \[2, 3, 6\]",
    ),
    "state in half precision": (
        {"initial_state": torch.zeros(B, D, N).half()},
        TypeError,
        "initial_state: expected torch.float32; got torch.float16",
    ),
    "softplus in words": ({"dt_softplus": "yes"}, TypeError, "dt_softplus: expected a bool; got str"),
    "a state in words": ({"output_final_state": 1}, TypeError, "output_final_state: expected a bool; got int"),
    "a batch beside cu_seqlens": ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens: expected packed"),
    "unknown backend": (
        {"backend": "hopper"},
        ValueError,
        "backend: expected one of 'triton', 'chunked', 'reference' for mamba1; got 'hopper'",
    ),
    "a backend of a GPU": ({"backend": "triton"}, ValueError, "backend: 'triton' cannot run mamba1 here: it needs an"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_bad_input_is_named(mistake):
    change, error, message = WRONG[mistake]
    with pytest.raises(error, match=message):
        holdfast.mamba1(**example(B=B, T=T, D=D, N=N) | change)


def test_offsets_are_checked():
    arguments = example(packed=[0, 5], D=4)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets from 0 to T = 5; got 0 to 4"):
        holdfast.mamba1(**arguments, cu_seqlens=torch.tensor([0, 4]))


def test_results_are_in_memory_of_their_own():
    arguments = example(torch.float64, T=1, D=2, N=1)
    held = {x.data_ptr() for x in leaves(arguments)}
    y, final, _ = selective_forward(*MAMBA1.map(**arguments)[0], None, "mamba1", False, "")
    assert not held & {y.data_ptr(), final.data_ptr()}
