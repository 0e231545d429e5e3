"""A few tokens of a diagonal recurrence on a pool of states: the op, token by token, wherever the states are."""

import pytest
import torch

import holdfast
from holdfast.ops import pooled_step
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import relative_error

OPS = [name for name, recurrence in RECURRENCES.items() if recurrence.family == "diagonal"]
SLOTS, SIZES = 7, Sizes(B=3, T=4, D=10)


def drawn(name, dtype=torch.float32, wide=torch.float32):
    """Arguments of a few tokens, and a pool of states."""
    arguments = RECURRENCES[name].example(Draw(0, dtype), SIZES)
    arguments.pop("initial_state")
    return arguments, Draw(1, torch.float32).normal(SLOTS, SIZES.D).to(wide)


def token(arguments, n):
    return {name: x[:, n : n + 1] for name, x in arguments.items()}


def index(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def one_by_one(name, arguments, state):
    """Outputs of the op's tokens, and the state after each."""
    outputs, states = [], []
    for n in range(SIZES.T):
        h, state = getattr(holdfast, name)(
            **token(arguments, n), initial_state=state, output_final_state=True, backend="reference"
        )
        outputs.append(h)
        states.append(state)
    return torch.cat(outputs, 1), states


def test_every_diagonal_recurrence_is_there():
    assert set(OPS) == {"rglru", "hgrn", "rotlru"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_tokens_are_those_of_the_op(name, dtype):
    arguments, pool = drawn(name, dtype, dtype)
    before = pool.clone()
    right, states = one_by_one(name, arguments, pool[[4, 0, 2]])
    h = pooled_step(name, arguments, pool, index(4, 0, 2))
    assert h.dtype == dtype
    assert torch.equal(h, right)
    assert torch.equal(pool[[4, 0, 2]], states[-1])
    assert torch.equal(pool[[1, 3, 5, 6]], before[[1, 3, 5, 6]])


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_several_tokens_are_several_steps(name, wide):
    arguments, pool = drawn(name, torch.bfloat16, wide)
    again, exact, slots = pool.clone(), pool.float(), index(4, 0, 2)
    h = pooled_step(name, arguments, pool, slots)
    steps = [pooled_step(name, token(arguments, n), again, slots) for n in range(4)]
    assert torch.equal(h, torch.cat(steps, 1))
    assert torch.equal(pool, again)
    # rounded after each token, where it is not float32
    pooled_step(name, arguments, exact, slots)
    assert relative_error(pool.float(), exact) <= 2.0**-7
    assert torch.equal(pool.float(), exact) == (wide == torch.float32)


def test_rows_of_padding_touch_nothing():
    arguments, pool = drawn("rglru")
    before = pool.clone()
    h = pooled_step("rglru", arguments, pool, index(-1, 3, SLOTS))
    assert not h[[0, 2]].any()
    assert h[1].any()
    same = [n for n in range(SLOTS) if n != 3]
    assert torch.equal(pool[same], before[same])
    assert not torch.equal(pool[3], before[3])


def test_a_state_after_each_token():
    arguments, pool = drawn("hgrn")
    before, (_, states) = pool.clone(), one_by_one("hgrn", arguments, pool[[0, 1, 2]])
    places = torch.full((3, 4), -1, dtype=torch.int32)
    places[0, 1], places[1, 3], places[2, 0] = 3, 4, 2
    pooled_step("hgrn", arguments, pool, index(0, 1, 2), places)
    for sequence, n, slot in ((0, 1, 3), (1, 3, 4), (2, 0, 2)):
        assert torch.equal(pool[slot], states[n][sequence])
    assert torch.equal(pool[[0, 1, 5, 6]], before[[0, 1, 5, 6]])


def test_tokens_that_are_not_kept_leave_no_trace():
    arguments, pool = drawn("rotlru")
    before, (right, states) = pool.clone(), one_by_one("rotlru", arguments, pool[[0, 1, 2]])
    h = pooled_step("rotlru", arguments, pool, index(0, 1, 2), index(0, 5, 6), index(2, 0, 4))
    assert torch.equal(h, right)
    assert torch.equal(pool[0], states[1][0])
    assert torch.equal(pool[5], before[1])
    assert torch.equal(pool[6], states[3][2])
    assert torch.equal(pool[[1, 2, 3, 4]], before[[1, 2, 3, 4]])


def test_slots_farther_apart_than_a_state():
    arguments, pool = drawn("hgrn")
    wider = torch.cat([pool, torch.zeros_like(pool)], 1)
    h = pooled_step("hgrn", arguments, wider[:, : SIZES.D], index(4, 0, 2))
    assert torch.equal(h, pooled_step("hgrn", arguments, pool, index(4, 0, 2)))
    assert torch.equal(wider[:, : SIZES.D], pool)
    assert not wider[:, SIZES.D :].any()


@pytest.mark.parametrize("name", OPS)
def test_it_is_a_custom_op_that_says_what_it_changes(name):
    arguments, pool = drawn(name)
    call, _ = RECURRENCES[name].map(**arguments)
    given = (*call[:3], pool, index(4, 0, 2), index(4, 0, 2), index(1, 2, 3), call.log, name, "reference")
    torch.library.opcheck(torch.ops.holdfast.diagonal_pool_step.default, given)


def test_no_sequence_and_no_slot():
    arguments, pool = drawn("rglru")
    none = {name: x[:0] for name, x in arguments.items()}
    assert pooled_step("rglru", none, pool, index()).shape == (0, SIZES.T, SIZES.D)
    assert not pooled_step("rglru", arguments, pool[:0], index(0, 1, 2)).any()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"pool": (torch.zeros(7, 10),)}, TypeError, "pool: expected a tensor; got tuple"),
        ({"pool": torch.zeros(7, 1, 10)}, ValueError, r"pool: expected shape \[slots, 10\]; got \[7, 1, 10\]"),
        ({"pool": torch.zeros(7, 10).double()}, TypeError, "pool: expected float32, bfloat16 or float16; got"),
        ({"pool": torch.zeros(10, 7).T}, ValueError, "pool: expected states that are dense; got strides"),
        ({"slots": index(0, 1)}, ValueError, r"slots: expected shape \[3\]; got \[2\]"),
        ({"keys_last": True}, ValueError, "keys_last: expected False for 'hgrn', whose state"),
        ({"backend": "decode"}, ValueError, "'decode' cannot run hgrn here"),
        ({"backend": "chunked"}, ValueError, "chunked"),
    ],
)
def test_what_does_not_fit_is_said(change, error, said):
    arguments, pool = drawn("hgrn")
    given = {"op": "hgrn", "arguments": arguments, "pool": pool, "slots": index(0, 1, 2)}
    with pytest.raises(error, match=said):
        pooled_step(**given | change)


def test_nine_tokens_are_too_many():
    arguments = RECURRENCES["rglru"].example(Draw(0), Sizes(B=3, T=9, D=4))
    arguments.pop("initial_state")
    with pytest.raises(ValueError, match="expected 1 to 8 tokens; got T = 9"):
        pooled_step("rglru", arguments, torch.zeros(7, 4), index(0, 1, 2))
