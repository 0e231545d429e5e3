"""The checks of an op's arguments by themselves, of definitions that no op has, or none has first."""

import pytest
import torch
from torch import Tensor

from holdfast.ops.check import check_arguments, check_is_local, is_dense
from holdfast.recurrences.definition import Argument

ROWS = Argument("one row, or one a head", ("D", "H D"), "float", required=False)
TOKENS = Argument("tokens", "B T H D")


def check(expected, given, sizes=None):
    return check_arguments(expected, None, {"x": None} | given, sizes)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((), r"x: expected shape \[A, B\]; got \[\]"), ((0, 3, 1), r"x: expected C > 0 in \[C, D, E\]; got \[0, 3, 1\]")],
)
def test_of_several_shapes_the_first_is_named(shape, message):
    shapes = ("A B", "C D") if shape == () else ("C D E", "C D")
    with pytest.raises(ValueError, match=message):
        check({"x": Argument("either", shapes)}, {"x": torch.zeros(shape)})
    with pytest.raises(TypeError, match=rf"x: expected a tensor \[{', '.join(shapes[0].split())}\]; got None"):
        check({"x": Argument("either", shapes)}, {"x": None})


def test_what_may_have_several_shapes_is_held_against_the_others():
    """Wherever it comes among them: it, and not what came after it, is wrong."""
    expected = {"x": Argument("first", "B T"), "w": ROWS, "y": TOKENS}
    given = {"x": torch.zeros(2, 3), "w": torch.zeros(4, 6), "y": torch.zeros(2, 3, 4, 5)}
    with pytest.raises(ValueError, match=r"w: expected shape \[D=5\] or \[H=4, D=5\]; got \[4, 6\]"):
        check(expected, given)
    assert check(expected, given | {"w": torch.zeros(4, 5)})["w"].shape == (4, 5)
    assert check(expected, given | {"w": torch.zeros(5)})["w"].shape == (5,)


def test_halves_follow_once_the_whole_is_known():
    expected = {"x": Argument("first", "B T"), "half": Argument("pairs", "B T D/2"), "y": Argument("all", "B T D")}
    given = {"x": torch.zeros(2, 3), "half": torch.zeros(2, 3, 4), "y": torch.zeros(2, 3, 8)}
    assert list(check(expected, given)) == list(expected)
    turned = {name: expected[name] for name in ("x", "y", "half")}
    with pytest.raises(ValueError, match=r"half: expected shape \[B=2, T=3, D/2=4\]; got \[2, 3, 5\]"):
        check(turned, {name: given[name] for name in turned} | {"half": torch.zeros(2, 3, 5)})


class Named(Tensor):
    """As a user's own subclass."""


def test_a_subclass_that_is_no_dtensor_is_local():
    check_is_local("x", torch.zeros(2).as_subclass(Named))
    sharded = torch.zeros(2).as_subclass(Named)
    sharded.device_mesh, sharded.placements = torch.zeros(2), ()
    with pytest.raises(TypeError, match=r"x: expected a local tensor; got a DTensor over \(2,\) ranks"):
        check_is_local("x", sharded)


def test_what_is_dense():
    assert is_dense(torch.zeros(2))
    assert not is_dense(torch.zeros(2).to_sparse())
    assert not any(map(is_dense, (None, [1.0], 2.0)))
