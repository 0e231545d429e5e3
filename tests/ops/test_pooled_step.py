"""A few tokens on a pool of states: the op, token by token, wherever the states are."""

import pytest
import torch

import holdfast
from holdfast.ops import pooled_step
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import relative_error

OPS = [
    name
    for name, recurrence in RECURRENCES.items()
    if recurrence.family == "matrix" and name not in ("mlstm", "gated_delta_product", "rwkv7")
]
SLOTS, SIZES = 7, Sizes(B=3, T=4, H=4, Hq=2, K=8, V=6)


def drawn(name, dtype=torch.float32, wide=torch.float32, seed=0):
    """Arguments of a few tokens, and a pool of states."""
    arguments = RECURRENCES[name].example(Draw(seed, dtype), SIZES)
    arguments.pop("initial_state", None)
    return arguments, Draw(seed + 1, torch.float32).normal(SLOTS, SIZES.H, SIZES.K, SIZES.V).to(wide)


def token(arguments, n):
    return {name: x[:, n : n + 1] if x.dim() >= 3 else x for name, x in arguments.items()}


def index(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def one_by_one(name, arguments, state, count=SIZES.T):
    """Outputs of the op's tokens, and the state after each, in float32."""
    outputs, states = [], []
    for n in range(count):
        o, state = getattr(holdfast, name)(
            **token(arguments, n), initial_state=state.float(), output_final_state=True, backend="reference"
        )
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), states


@pytest.mark.parametrize("name", OPS)
def test_tokens_are_those_of_the_op(name):
    arguments, pool = drawn(name)
    before = pool.clone()
    right, states = one_by_one(name, arguments, pool[[4, 0, 2]])
    o = pooled_step(name, arguments, pool, index(4, 0, 2))
    assert relative_error(o, right) <= 2e-7
    assert relative_error(pool[[4, 0, 2]], states[-1]) <= 2e-7
    assert torch.equal(pool[[1, 3, 5, 6]], before[[1, 3, 5, 6]])


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys_last", [False, True])
def test_several_tokens_are_several_steps(wide, keys_last):
    arguments, pool = drawn("gated_delta_rule", torch.bfloat16, wide)
    pool = pool.mT.contiguous() if keys_last else pool
    again, slots = pool.clone(), index(4, 0, 2)
    o = pooled_step("gated_delta_rule", arguments, pool, slots, keys_last=keys_last)
    steps = [pooled_step("gated_delta_rule", token(arguments, n), again, slots, keys_last=keys_last) for n in range(4)]
    assert torch.equal(o, torch.cat(steps, 1))
    assert torch.equal(pool, again)


@pytest.mark.parametrize("name", ["gla", "ssd"])
def test_rows_of_padding_touch_nothing(name):
    arguments, pool = drawn(name)
    if name == "ssd":
        arguments["D"] = torch.ones(SIZES.H)
    before = pool.clone()
    o = pooled_step(name, arguments, pool, index(-1, 3, SLOTS))
    assert not o[[0, 2]].any()
    assert o[1].any()
    same = [n for n in range(SLOTS) if n != 3]
    assert torch.equal(pool[same], before[same])
    assert not torch.equal(pool[3], before[3])


def test_a_state_after_each_token():
    arguments, pool = drawn("simple_gla")
    before, (_, states) = pool.clone(), one_by_one("simple_gla", arguments, pool[[0, 1, 2]])
    places = torch.full((3, 4), -1, dtype=torch.int32)
    places[0, 1], places[1, 3], places[2, 0] = 3, 4, 2
    pooled_step("simple_gla", arguments, pool, index(0, 1, 2), places)
    for sequence, n, slot in ((0, 1, 3), (1, 3, 4), (2, 0, 2)):
        assert torch.equal(pool[slot], states[n][sequence])
    assert torch.equal(pool[[0, 1, 5, 6]], before[[0, 1, 5, 6]])


def test_tokens_that_are_not_kept_leave_no_trace():
    arguments, pool = drawn("kda")
    before, (right, states) = pool.clone(), one_by_one("kda", arguments, pool[[0, 1, 2]])
    o = pooled_step("kda", arguments, pool, index(0, 1, 2), index(0, 5, 6), index(2, 0, 4))
    assert torch.equal(o, right)
    assert torch.equal(pool[0], states[1][0])
    assert torch.equal(pool[5], before[1])
    assert torch.equal(pool[6], states[3][2])
    assert torch.equal(pool[[1, 2, 3, 4]], before[[1, 2, 3, 4]])


def test_slots_farther_apart_than_a_state():
    arguments, pool = drawn("delta_rule")
    wider = torch.zeros(SLOTS, 2 * SIZES.H, SIZES.K, SIZES.V)
    wider[:, : SIZES.H] = pool
    o = pooled_step("delta_rule", arguments, wider[:, : SIZES.H], index(4, 0, 2))
    assert torch.equal(o, pooled_step("delta_rule", arguments, pool, index(4, 0, 2)))
    assert torch.equal(wider[:, : SIZES.H], pool)
    assert not wider[:, SIZES.H :].any()


def test_it_is_a_custom_op_that_says_what_it_changes():
    arguments, pool = drawn("gated_delta_rule")
    call, _ = RECURRENCES["gated_delta_rule"].map(**arguments)
    given = (*call[:5], call.e, pool, index(4, 0, 2), index(4, 0, 2), index(1, 2, 3), False, 0.5, True, False)
    torch.library.opcheck(torch.ops.holdfast.matrix_pool_step.default, (*given, "gated_delta_rule", "reference"))


def test_no_sequence_and_no_slot():
    arguments, pool = drawn("ssd")
    none = {name: x[:0] if x.dim() >= 3 else x for name, x in arguments.items()}
    assert pooled_step("ssd", none, pool, index()).shape == (0, SIZES.T, SIZES.H, SIZES.V)
    assert not pooled_step("gla", drawn("gla")[0], pool[:0], index(0, 1, 2)).any()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"op": "lstm"}, ValueError, "op: expected one of"),
        ({"op": "mlstm"}, TypeError, r"pool: expected the tensors \(C, n, m\) of mlstm; got Tensor"),
        ({"op": "rwkv7"}, ValueError, "several steps a token"),
        ({"pool": None}, TypeError, "pool: expected a tensor; got NoneType"),
        ({"pool": torch.zeros(7, 4, 6, 8)}, ValueError, r"pool: expected shape \[slots, 4, 8, 6\]; got \[7, 4, 6, 8\]"),
        ({"pool": torch.zeros(7, 4, 8, 6).double()}, TypeError, "pool: expected float32, bfloat16 or float16"),
        ({"pool": torch.zeros(7, 4, 6, 8).mT}, ValueError, "pool: expected states that are dense"),
        ({"slots": index(0, 1)}, ValueError, r"slots: expected shape \[3\]; got \[2\]"),
        ({"slots": index(0, 1, 2).long()}, TypeError, "slots: expected torch.int32; got torch.int64"),
        ({"next_slots": index(0)}, ValueError, r"next_slots: expected shape \[3\]"),
        ({"next_slots": index(0)[None]}, ValueError, r"next_slots: expected shape \[3, 4\]"),
        ({"accepted": index(0)}, ValueError, r"accepted: expected shape \[3\]"),
        (
            {"accepted": index(0, 1, 2), "next_slots": index(*range(4)).expand(3, 4)},
            ValueError,
            "accepted: expected None",
        ),
        ({"keys_last": 1}, TypeError, "keys_last"),
        ({"backend": "chunked"}, ValueError, "chunked"),
        ({"backend": "decode"}, ValueError, "'decode' cannot run gla here"),
    ],
)
def test_what_does_not_fit_is_said(change, error, said):
    op = change.get("op", "gla")
    arguments, pool = drawn(op)
    given = {"op": op, "arguments": arguments, "pool": pool, "slots": index(0, 1, 2)}
    with pytest.raises(error, match=said):
        pooled_step(**given | change)


def test_nine_tokens_are_too_many():
    arguments = RECURRENCES["gla"].example(Draw(0), Sizes(B=3, T=9, H=4, Hq=2, K=8, V=6))
    arguments.pop("initial_state")
    with pytest.raises(ValueError, match="expected 1 to 8 tokens; got T = 9"):
        pooled_step("gla", arguments, torch.zeros(7, 4, 8, 6), index(0, 1, 2))
