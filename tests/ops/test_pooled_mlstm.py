"""A few tokens of mLSTM on a pool of states: C, n and m go to a slot together, and are those of the op."""

import pytest
import torch

import holdfast
from holdfast.ops import pooled_step, step
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import relative_error

SLOTS, SIZES = 7, Sizes(B=3, T=4, H=4, Hq=2, K=8, V=6)
GATINGS = [{}, {"gating": "sigmoid"}, {"gating": "sigmoid", "normalize": False}]
# of C, n and m
SHAPES = ((SIZES.H, SIZES.K, SIZES.V), (SIZES.H, SIZES.K), (SIZES.H,))


def drawn(dtype=torch.float32, wide=torch.float32, seed=0, options=None):
    """Arguments of a few tokens, and pools of C, n and m."""
    arguments = RECURRENCES["mlstm"].example(Draw(seed, dtype), SIZES) | (options or {})
    arguments.pop("initial_state")
    C, n, m = (Draw(seed + 1, torch.float32).normal(SLOTS, *shape) for shape in SHAPES)
    return arguments, (C.to(wide), n.to(wide), m)


def token(arguments, n):
    return {name: x[:, n : n + 1] if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def index(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def at(pool, places):
    return tuple(x[places] for x in pool)


def copied(pool):
    return tuple(x.clone() for x in pool)


def equal(pool, other):
    return all(torch.equal(x, y) for x, y in zip(pool, other, strict=True))


def one_by_one(arguments, state):
    """Outputs of the op's tokens, and the state after each."""
    outputs, states = [], []
    for n in range(SIZES.T):
        o, state = holdfast.mlstm(
            **token(arguments, n), initial_state=state, output_final_state=True, backend="reference"
        )
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), states


@pytest.mark.parametrize("options", GATINGS, ids=str)
def test_tokens_are_those_of_the_op(options):
    arguments, pool = drawn(options=options)
    before, read = copied(pool), [4, 0, 2]
    right, states = one_by_one(arguments, at(pool, read))
    o = pooled_step("mlstm", arguments, pool, index(*read))
    assert relative_error(o, right) <= 2e-7
    for x, y in zip(at(pool, read), states[-1], strict=True):
        assert relative_error(x, y) <= 2e-7
    assert equal(at(pool, [1, 3, 5, 6]), at(before, [1, 3, 5, 6]))
    # without a normaliser n and m are handed on
    assert torch.equal(pool[1], before[1]) == ("normalize" in options)
    assert torch.equal(pool[2], before[2]) == ("gating" in options)


@pytest.mark.parametrize("options", GATINGS, ids=str)
def test_they_are_those_of_step(options):
    arguments, pool = drawn(options=options)
    state = at(pool, [4, 0, 2])
    right = torch.cat([step("mlstm", token(arguments, n), state) for n in range(SIZES.T)], 1)
    o = pooled_step("mlstm", arguments, pool, index(4, 0, 2))
    assert relative_error(o, right) <= 2e-6
    for x, y in zip(at(pool, [4, 0, 2]), state, strict=True):
        assert relative_error(x, y) <= 2e-6


def test_float64_is_the_oracle():
    arguments, pool = drawn(torch.float64)
    pool = tuple(x.double() for x in pool)
    right, states = one_by_one(arguments, at(pool, [4, 0, 2]))
    o = pooled_step("mlstm", arguments, pool, index(4, 0, 2))
    assert o.dtype == torch.float64
    assert relative_error(o, right) <= 1e-15
    for x, y in zip(at(pool, [4, 0, 2]), states[-1], strict=True):
        assert relative_error(x, y) <= 1e-15


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys_last", [False, True])
def test_several_tokens_are_several_steps(wide, keys_last):
    arguments, pool = drawn(torch.bfloat16, wide)
    pool = (pool[0].mT.contiguous(), *pool[1:]) if keys_last else pool
    again, slots = copied(pool), index(4, 0, 2)
    o = pooled_step("mlstm", arguments, pool, slots, keys_last=keys_last)
    steps = [pooled_step("mlstm", token(arguments, n), again, slots, keys_last=keys_last) for n in range(4)]
    assert torch.equal(o, torch.cat(steps, 1))
    assert equal(pool, again)


def test_keys_last_is_another_place_for_the_same():
    arguments, pool = drawn()
    other = (pool[0].mT.contiguous(), *copied(pool[1:]))
    o = pooled_step("mlstm", arguments, pool, index(4, 0, 2))
    assert torch.equal(o, pooled_step("mlstm", arguments, other, index(4, 0, 2), keys_last=True))
    assert equal(pool, (other[0].mT, *other[1:]))


@pytest.mark.parametrize("options", GATINGS, ids=str)
def test_rows_of_padding_touch_nothing(options):
    arguments, pool = drawn(options=options)
    before = copied(pool)
    o = pooled_step("mlstm", arguments, pool, index(-1, 3, SLOTS), index(1, 5, 2))
    assert not o[[0, 2]].any()
    assert o[1].any()
    same = [n for n in range(SLOTS) if n != 5]
    assert equal(at(pool, same), at(before, same))
    assert not any(torch.equal(x[5], y[5]) for x, y in zip(pool, before, strict=True))


def test_a_state_after_each_token():
    arguments, pool = drawn()
    before, (_, states) = copied(pool), one_by_one(arguments, at(pool, [0, 1, 2]))
    places = torch.full((3, 4), -1, dtype=torch.int32)
    places[0, 1], places[1, 3], places[2, 0] = 3, 4, 2
    pooled_step("mlstm", arguments, pool, index(0, 1, 2), places)
    for sequence, n, slot in ((0, 1, 3), (1, 3, 4), (2, 0, 2)):
        assert equal(at(pool, slot), at(states[n], sequence))
    assert equal(at(pool, [0, 1, 5, 6]), at(before, [0, 1, 5, 6]))


def test_tokens_that_are_not_kept_leave_no_trace():
    arguments, pool = drawn()
    before, (right, states) = copied(pool), one_by_one(arguments, at(pool, [0, 1, 2]))
    o = pooled_step("mlstm", arguments, pool, index(0, 1, 2), index(0, 5, 6), index(2, 0, 4))
    assert torch.equal(o, right)
    assert equal(at(pool, 0), at(states[1], 0))
    assert equal(at(pool, 5), at(before, 1))
    assert equal(at(pool, 6), at(states[3], 2))
    assert equal(at(pool, [1, 2, 3, 4]), at(before, [1, 2, 3, 4]))


def test_slots_farther_apart_than_a_state():
    arguments, pool = drawn()
    wider = tuple(torch.cat([x, torch.zeros_like(x)], 1) for x in pool)
    views = tuple(x[:, : SIZES.H] for x in wider)
    o = pooled_step("mlstm", arguments, views, index(4, 0, 2))
    assert torch.equal(o, pooled_step("mlstm", arguments, pool, index(4, 0, 2)))
    assert equal(views, pool)
    assert not any(x[:, SIZES.H :].any() for x in wider)


def test_n_may_be_wider_than_C():
    arguments, pool = drawn(torch.bfloat16, torch.bfloat16)
    pool = (pool[0], pool[1].float(), pool[2])
    again = copied(pool)
    o = pooled_step("mlstm", arguments, pool, index(4, 0, 2))
    steps = [pooled_step("mlstm", token(arguments, n), again, index(4, 0, 2)) for n in range(4)]
    assert torch.equal(o, torch.cat(steps, 1))
    assert equal(pool, again)


def test_it_is_a_custom_op_that_says_what_it_changes():
    arguments, pool = drawn()
    given = (*(arguments[name] for name in "qkvif"), *pool, index(4, 0, 2), index(4, 0, 2), index(1, 2, 3))
    options = (False, 0.5, 1e-6, True, True, "reference")
    torch.library.opcheck(torch.ops.holdfast.mlstm_pool_step.default, (*given, *options))


def test_no_sequence_and_no_slot():
    arguments, pool = drawn()
    none = {name: x[:0] for name, x in arguments.items()}
    assert pooled_step("mlstm", none, pool, index()).shape == (0, SIZES.T, SIZES.H, SIZES.V)
    assert not pooled_step("mlstm", arguments, at(pool, slice(0)), index(0, 1, 2)).any()


@pytest.mark.parametrize(
    ("place", "x", "error", "said"),
    [
        (None, None, TypeError, r"pool: expected the tensors \(C, n, m\) of mlstm; got NoneType"),
        (None, torch.zeros(3, 4), TypeError, r"pool: expected the tensors \(C, n, m\) of mlstm; got Tensor"),
        (0, None, TypeError, r"pool\[0\]: expected a tensor; got NoneType"),
        (0, torch.zeros(7, 4, 6, 8), ValueError, r"pool\[0\]: expected shape \[slots, 4, 8, 6\]; got \[7, 4, 6, 8\]"),
        (1, torch.zeros(6, 4, 8), ValueError, r"pool\[1\]: expected shape \[7, 4, 8\]; got \[6, 4, 8\]"),
        (
            1,
            torch.zeros(7, 4, 8).int(),
            TypeError,
            r"pool\[1\]: expected float32, bfloat16 or float16; got",
        ),
        (1, torch.zeros(7, 8, 4).mT, ValueError, r"pool\[1\]: expected states that are dense; got strides"),
        (2, torch.zeros(7, 4, 1), ValueError, r"pool\[2\]: expected shape \[7, 4\]; got \[7, 4, 1\]"),
        (2, torch.zeros(7, 4).half(), TypeError, r"pool\[2\]: expected float32 beside inputs of torch.float32"),
        (2, torch.zeros(7, 4).double(), TypeError, r"pool\[2\]: expected float32 .*; got torch.float64"),
    ],
)
def test_a_pool_that_does_not_fit_is_said(place, x, error, said):
    arguments, pool = drawn()
    pool = x if place is None else tuple(x if n == place else y for n, y in enumerate(pool))
    with pytest.raises(error, match=said):
        pooled_step("mlstm", arguments, pool, index(0, 1, 2))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"gating": "softmax"}, ValueError, "gating: expected 'exp' or 'sigmoid'"),
        ({"normalize": False}, ValueError, "normalize: expected True with gating='exp'"),
        ({"cu_seqlens": index(0, 4)}, TypeError, "arguments: expected names that mlstm takes; got 'cu_seqlens'"),
        ({"eps": -1.0}, ValueError, "eps"),
    ],
)
def test_options_that_the_op_refuses(options, error, said):
    arguments, pool = drawn()
    with pytest.raises(error, match=said):
        pooled_step("mlstm", arguments | options, pool, index(0, 1, 2))
