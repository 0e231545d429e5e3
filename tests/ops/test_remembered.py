"""What is remembered of a call holds for calls that are the same to it, and for no others."""

import pytest
import torch

from holdfast.kernels import select as planning
from holdfast.ops import check, dense, diagonal
from holdfast.planner import Device
from holdfast.recurrences.definition import Argument, DenseCall, DiagonalCall
from holdfast.recurrences.gru import gru
from holdfast.recurrences.lstm import lstm


@pytest.fixture(autouse=True)
def forget():
    check._PASSED.clear()
    planning.forget()
    yield
    planning.forget()


def dense_call(cell=lstm, B=2, T=3, H=2, D=8, dtype=torch.float32, b=True, state=False, reset=False, **rest):
    x = torch.zeros(B, T, len(cell.input), H, D, dtype=dtype)
    R = torch.zeros(len(cell.gates), H, D, D, dtype=dtype)
    return DenseCall(
        cell, x, R, torch.zeros(len(cell.gates), H, D, dtype=dtype) if b else None,
        torch.zeros(len(cell.states), B, H, D) if state else None,
        torch.zeros(B, T, dtype=torch.bool) if reset else None, rest.get("clip"), rest.get("cut", False),
    )  # fmt: skip


OFFSETS = torch.tensor([0, 3])
DENSE = {
    "as it is": {},
    "cell": {"cell": gru},
    "batch": {"B": 3},
    "length": {"T": 4},
    "heads": {"H": 1},
    "width": {"D": 16},
    "dtype": {"dtype": torch.bfloat16},
    "reset": {"reset": True},
    "clip": {"clip": 1.0},
    "cut": {"cut": True},
    "packed": {"B": 1, "cu_seqlens": OFFSETS},
    "packed with a state": {"B": 1, "cu_seqlens": OFFSETS, "state": True},
    "gradient": {"grad": True},
    "direction": {"grad": True, "direction": "backward"},
    "backend": {"backend": "reference"},
}


def test_a_plan_of_a_dense_call_is_that_of_calls_which_pose_the_same_problem(monkeypatch):
    """Each is asked for after all others: none gets what was remembered of another."""
    asked = []

    def resolve(backends, problem, device, name, direction):
        asked.append((problem, device, name, direction))
        return asked[-1]

    monkeypatch.setattr(dense, "resolve", resolve)

    def select(cu_seqlens=None, grad=False, direction="forward", backend="", **call):
        made = dense_call(**call)
        problem = dense.problem(made.cell.name, made, cu_seqlens, grad)
        assert dense._select(made, cu_seqlens, grad, direction, backend) == (
            problem, Device.named("cpu"), backend, direction,
        )  # fmt: skip

    for _ in range(2):
        for changes in DENSE.values():
            select(**changes)
    assert len(asked) == len(DENSE)


def test_a_diagonal_problem_tells_traits_apart():
    x, narrow = torch.zeros(2, 3, 8, dtype=torch.bfloat16), torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    problem = lambda a, theta, cu_seqlens=None, grad=False: diagonal.problem(  # noqa: E731
        "op", DiagonalCall(a, x, theta, None, False), cu_seqlens, grad
    )
    assert problem(x, None).traits == frozenset()
    assert problem(x.float(), None).traits == {"wide_gate"}
    assert problem(narrow, narrow).traits == {"complex"}
    assert problem(narrow, narrow.float()).traits == {"complex", "wide_gate"}
    assert problem(x, None, OFFSETS, True).traits == {"varlen", "needs_grad"}
    assert dict(problem(x, None).sizes) == {"B": 2, "T": 3, "D": 8}


ARGUMENTS = {
    "x": Argument("input", "B T D"),
    "y": Argument("other", "B T D", required=False),
    "state": Argument("state", "sequences D", "state", required=False),
}
RIGHT = {"x": torch.zeros(2, 3, 4), "y": torch.zeros(2, 3, 4), "state": torch.zeros(2, 4)}
WRONG = {
    "a shape": {"y": torch.zeros(2, 3, 5)},
    "another shape": {"state": torch.zeros(3, 4)},
    "a dtype": {"y": torch.zeros(2, 3, 4, dtype=torch.float64)},
    "an integer": {"x": torch.zeros(2, 3, 4, dtype=torch.int32)},
    "a state's dtype": {"state": torch.zeros(2, 4, dtype=torch.bfloat16)},
    "a device": {"y": torch.zeros(2, 3, 4, device="meta")},
    "packing": {"cu_seqlens": torch.tensor([0, 3])},
    "sizes": {"sizes": {"D": 5}},
    "none given": {"x": None},
}


def checked(cu_seqlens=None, sizes=None, expected=ARGUMENTS, **changes):
    return check.check_arguments(expected, cu_seqlens, RIGHT | changes, sizes)


@pytest.mark.parametrize("what", WRONG)
def test_what_was_right_does_not_let_anything_wrong_pass(what):
    for _ in range(3):
        checked()
        checked(y=None)
        checked(sizes={"D": 4})
        with pytest.raises((TypeError, ValueError)):
            checked(**WRONG[what])


def test_what_is_right_for_one_op_is_not_for_another():
    stricter = ARGUMENTS | {"y": Argument("other", "B T E", required=True)}
    checked(y=None)
    with pytest.raises(TypeError, match="y: expected a tensor"):
        checked(expected=stricter, y=None)
    packed = {"x": torch.zeros(1, 3, 4), "y": None, "state": torch.zeros(2, 4)}
    checked(cu_seqlens=torch.tensor([0, 2, 3]), **packed)
    with pytest.raises(ValueError, match="state: expected shape"):
        checked(cu_seqlens=torch.tensor([0, 1, 2, 3]), **packed)
    with pytest.raises(TypeError, match=r"cu_seqlens: expected torch.int32 or torch.int64"):
        checked(cu_seqlens=torch.tensor([0.0, 2.0, 3.0]), **packed)


def test_a_call_under_autocast_is_cast_whatever_passed_before():
    assert checked()["x"].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        found = checked()
    assert [found[name].dtype for name in RIGHT] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert checked()["x"].dtype == torch.float32
