"""Summaries of spans: they merge in any order, carry gradients, and stand for the tokens whatever the gates are."""

from itertools import pairwise

import pytest
import torch

import holdfast
from holdfast.ops.span_call import TIMED
from holdfast.parallel import Summary, merge, outputs, state_of, summary
from holdfast.parallel.calls import bind
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parallel_support.op_cases import leaves, tensors, weights

LINEAR = [name for name, recurrence in RECURRENCES.items() if recurrence.family in ("matrix", "diagonal")]
CUTS = (0, 7, 7, 12, 20)


def arguments_of(name):
    arguments = RECURRENCES[name].example(Draw(1, torch.float64), Sizes(2, 20, H=4, K=3, V=5, D=6, Hq=2))
    for x in leaves(arguments).values():
        x.requires_grad_()
    return arguments


def cut(name, arguments, start, end):
    timed = TIMED[name]
    found = {key: x[:, start:end] if key in timed and x.dim() in timed[key] else x for key, x in arguments.items()}
    return found | {"initial_state": None}


def spans(name, arguments):
    return [summary(name, **cut(name, arguments, start, end)) for start, end in pairwise(CUTS)]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("order", ["from the left", "from the right", "in pairs"])
def test_spans_merge_in_any_order(name, order):
    arguments = arguments_of(name)
    start = bind(name, (), arguments).initial_state
    a, b, c, d = spans(name, arguments)
    whole = {
        "from the left": lambda: merge(merge(merge(merge(start, a), b), c), d),
        "from the right": lambda: merge(start, merge(a, merge(b, merge(c, d)))),
        "in pairs": lambda: merge(start, merge(merge(a, b), merge(c, d))),
    }[order]()
    _, expected = getattr(holdfast, name)(**arguments, output_final_state=True)
    found = state_of(name, whole, **arguments)
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)

    inputs = list(leaves(arguments).values())
    both = [sum((x[n] * weights(x[n], 4)).sum() for x in pairs) for n in (0, 1)]
    found, expected = (torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True) for loss in both)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", LINEAR)
def test_outputs_of_a_span_from_the_state_before_it(name):
    arguments = arguments_of(name)
    op = getattr(holdfast, name)
    state = merge(bind(op, (), arguments).initial_state, summary(op, **cut(name, arguments, 0, 7)))
    o, after = outputs(op, state, **cut(name, arguments, 7, 20))
    expected, final = op(**arguments, output_final_state=True)
    torch.testing.assert_close(o, expected[:, 7:], rtol=0, atol=1e-12)
    for x, y in zip(tensors(state_of(op, after, **arguments)), tensors(final), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LINEAR)
def test_a_span_without_tokens_changes_nothing(name):
    arguments = arguments_of(name)
    nothing, something = (summary(name, **cut(name, arguments, 3, end)) for end in (3, 9))
    for found in (merge(nothing, something), merge(something, nothing)):
        for x, y in zip(found, something, strict=True):
            if x is not None:
                assert torch.equal(x, y)
    both = merge(nothing, nothing)
    assert all(torch.equal(x, y) for x, y in zip(both, nothing, strict=True) if x is not None)


@pytest.mark.parametrize("level", [-600.0, 0.0, 600.0])
def test_mlstm_keeps_what_float32_cannot_hold(level):
    """Input gates whose exponential is 0 or infinite in float32, and forget gates to match: stabilised, all is well."""
    draw = Draw(2, torch.float32)
    arguments = RECURRENCES["mlstm"].example(draw, Sizes(1, 16, H=2, K=3, V=5))
    arguments["i"] = arguments["i"] + level
    arguments["f"] = arguments["f"] - 40
    # so that of the first span something is left in the units of the second
    arguments["i"][:, :8] += 8 * 40
    wide = {key: tuple(y.double() for y in x) if key == "initial_state" else x.double() for key, x in arguments.items()}
    start = bind("mlstm", (), arguments).initial_state
    first, second = (summary("mlstm", **cut("mlstm", arguments, a, b)) for a, b in ((0, 8), (8, 16)))
    _, (C, n, m) = holdfast.mlstm(**wide, output_final_state=True)
    for whole in (merge(merge(start, first), second), merge(start, merge(first, second))):
        found = state_of("mlstm", whole, **arguments)
        # in units of the exact one
        share = (found[2].double() - m).exp()
        torch.testing.assert_close(found[2].double(), m, rtol=1e-6, atol=1e-3)
        torch.testing.assert_close(found[0] * share[..., None, None], C, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[1] * share[..., None], n, rtol=1e-3, atol=1e-3)
    # it is not all rounded away
    assert (C.abs().amax((2, 3)) > 0.1).all()


def test_a_decay_of_zero_and_negative_gates_are_carried():
    draw = Draw(4, torch.float64)
    g = draw.log_decay(1, 6, 2)
    g[0, 3, 0] = -torch.inf
    q, k, v = draw.normal(1, 6, 2, 3), draw.normal(1, 6, 2, 3), draw.normal(1, 6, 2, 4)
    found = summary(holdfast.simple_gla, q, k, v, g)
    assert found.carry[0, 0] == 0
    torch.testing.assert_close(found.carry[0, 1], g[0, :, 1].sum().exp())
    a = torch.tensor([[[-0.5, 2.0, 0.0], [0.5, -3.0, 1.0]]], dtype=torch.float64, requires_grad=True)
    carry = summary(holdfast.rglru, a, torch.ones_like(a)).carry
    torch.testing.assert_close(carry, a.prod(1))
    carry.sum().backward()
    torch.testing.assert_close(a.grad, a.detach().flip(1))


@pytest.mark.parametrize(
    ("op", "says"),
    [
        ("lstm", "op: expected a recurrence that is linear in its state; lstm .* its time cannot be cut"),
        (holdfast.rnn, "op: .* rnn takes its state through a nonlinear function"),
        ("intra_chunk", "op: expected an op of the matrix or diagonal family; got 'intra_chunk'"),
    ],
)
def test_ops_without_a_summary_are_refused(op, says):
    with pytest.raises(ValueError, match=says):
        summary(op)


def test_misuse_is_named():
    draw = Draw(0)
    x, a, state = draw.normal(1, 4, 3), draw.normal(1, 4, 3), draw.state(1, 3)
    with pytest.raises(TypeError, match="op: expected an op of Holdfast or its name; got int"):
        summary(3)
    with pytest.raises(ValueError, match="rglru: expected a call without initial_state"):
        summary("rglru", a, x, initial_state=state)
    with pytest.raises(ValueError, match="initial_state: expected None"):
        outputs("rglru", Summary(state), a, x, initial_state=state)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'xx'"):
        summary("rglru", a, x, xx=x)
    one = summary("rglru", a, x)
    with pytest.raises(ValueError, match="later: expected the summary of a span; got a state"):
        merge(one, Summary(state))
    with pytest.raises(ValueError, match=r"later: expected added \[1, 3\]; got \[2, 3\]"):
        merge(one, summary("rglru", a.expand(2, -1, -1), x.expand(2, -1, -1)))


@pytest.mark.parametrize("name", ["lstm", "gru", "elman", "slstm", "rnn"])
def test_dense_ops_over_ranks_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: .* its time cannot be cut. Spread its batch over the ranks"):
        getattr(holdfast.parallel, name)(None, group=None)
