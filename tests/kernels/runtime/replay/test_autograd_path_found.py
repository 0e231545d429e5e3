"""Which calls have ops that others like them can go straight to: only those whose tensors are found again."""

import pytest
import torch

from holdfast.kernels.runtime.replay.autograd_path import find_fast_path, note_differentiable


def op(*given):
    """A stand-in for an op with a gradient: tells what it was given, and hands back one tensor."""
    first = given[0][0] if isinstance(given[0], tuple | list) else given[0]
    made = (first * 2,)
    note_differentiable(op, given, made)
    return made


def found(function, *arguments):
    outputs, path = find_fast_path(function, arguments, {})
    return outputs, path


def test_an_ops_own_arguments_and_what_it_made_are_found_again():
    outputs, path = found(lambda x, y: (op(op(x, 3)[0], y)[0], None), torch.ones(2), torch.ones(2))
    assert torch.equal(outputs[0], torch.full((2,), 4.0))
    x, y = torch.full((2,), 5.0), torch.zeros(2)
    made, nothing = path((x, y))
    assert torch.equal(made, x * 4)
    assert nothing is None


AROUND = "it makes tensors around the ops that record its gradient"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, y: op((x, y))[0], AROUND),
        (lambda x, y: op([x], y)[0], AROUND),
        (lambda x, y: op(x + 1, y)[0], AROUND),
        (lambda x, y: op(x, y)[0] + 1, AROUND),
        (lambda x, y: x * 2, "no op of Holdfast's records its gradient"),
    ],
    ids=["a tuple", "a list", "a new argument", "a new result", "no op"],
)
def test_other_calls_are_not_made_so(function, why):
    assert found(function, torch.ones(2), torch.ones(2))[1] == why


def test_a_call_within_a_call_is_left_alone():
    inner = []

    def outer(x):
        inner.append(find_fast_path(lambda x: op(x)[0], (x,), {}))
        return inner[-1][0]

    _, path = found(outer, torch.ones(2))
    assert inner[0][1] is None
    assert torch.equal(path((torch.full((2,), 3.0),)), torch.full((2,), 6.0))


def test_an_error_leaves_nothing_behind():
    def fails(x):
        raise ValueError("x: expected more")

    with pytest.raises(ValueError, match="expected more"):
        found(fails, torch.ones(2))
    assert found(lambda x: op(x)[0], torch.ones(2))[1] is not None
