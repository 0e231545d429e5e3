"""What a remembered plan is found by holds all that planning reads of a call: no call gets another's plan."""

import pytest
import torch

from holdfast.ops import dense, matrix
from holdfast.planner import Device
from holdfast.recurrences.definition import DenseCall, MatrixCall
from holdfast.recurrences.elman import elman
from holdfast.recurrences.lstm import lstm


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    """In place of a backend and a plan: what they are to be found for. No device is looked at."""
    for family in (matrix, dense):
        monkeypatch.setattr(family, "resolve", lambda *asked: (asked, None))
        monkeypatch.setattr(family, "describe", lambda device: Device.named("cpu"))
        family._SELECTED.clear()
    yield
    for family in (matrix, dense):
        family._SELECTED.clear()


def tensor(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def matrix_call(
    B=1,
    T=8,
    H=2,
    Hq=2,
    K=4,
    V=4,
    dtype=torch.float32,
    g=None,
    beta=False,
    floor=False,
    delta=False,
    erase=None,
    before=False,
):
    q, k, v = tensor(B, T, Hq, K, dtype=dtype), tensor(B, T, Hq, K, dtype=dtype), tensor(B, T, H, V, dtype=dtype)
    decay = {None: None, "scalar": tensor(B, T, H), "vector": tensor(B, T, H, K)}[g]
    strength, m = (tensor(B, T, H) if given else None for given in (beta, floor))
    e = None if erase is None else tensor(B, T, erase, K, dtype=dtype)
    return MatrixCall(q, k, v, decay, strength, m, e=e, delta=delta, erase_before_decay=before)


MATRIX = [
    *({axis: 6} for axis in ("B", "T", "H", "Hq", "K", "V")),
    {"dtype": torch.bfloat16},
    {"g": "scalar"},
    {"g": "vector"},
    {"beta": True},
    {"floor": True},
    {"delta": True},
    *({"delta": True, "erase": n} for n in (1, 2)),
    {"delta": True, "erase": 2, "before": True},
    *({"offsets": n} for n in (2, 3)),
    {"op": "retnet"},
    {"grad": True},
    {"direction": "backward"},
    {"backend": "chunked"},
]


def matrix_selection(op="gla", offsets=0, grad=False, direction="forward", backend="", **sizes):
    """(what was planned for, what that should be)."""
    call, cu_seqlens = matrix_call(**sizes), tensor(offsets, dtype=torch.int32) if offsets else None
    what = matrix.problem(op, call, cu_seqlens, grad)
    got, *_ = matrix._select(call, cu_seqlens, op, grad, direction, backend)
    return got, (matrix.BACKENDS, what, Device.named("cpu"), backend, direction)


def test_no_two_matrix_calls_that_are_planned_apart_share_a_plan():
    for _ in range(2):
        for changed in ({}, *MATRIX):
            got, right = matrix_selection(**changed)
            assert got == right, changed


@pytest.mark.parametrize("changed", MATRIX, ids=str)
def test_every_part_of_a_matrix_call_is_planned_for(changed):
    assert matrix_selection(**changed)[1] != matrix_selection()[1]


def test_calls_alike_are_planned_once(monkeypatch):
    planned = []
    monkeypatch.setattr(matrix, "resolve", lambda *asked: planned.append(asked) or (asked, None))
    for _ in range(3):
        matrix_selection()
    assert len(planned) == 1


DENSE = [
    *({axis: 6} for axis in ("B", "T", "H", "D")),
    {"dtype": torch.bfloat16},
    {"cell": lstm},
    {"reset": True},
    {"clip": 1.0},
    {"cut": True},
    {"packed": True},
    {"packed": True, "initial": True},
    {"grad": True},
    {"direction": "backward"},
    {"backend": "loop"},
]


def dense_selection(
    cell=elman, B=1, T=8, H=2, D=4, dtype=torch.float32, reset=False, clip=None, cut=False, packed=False,
    initial=False, grad=False, direction="forward", backend="",
):  # fmt: skip
    x, R = tensor(B, T, len(cell.input), H, D, dtype=dtype), tensor(len(cell.recurrent), H, D, D, dtype=dtype)
    state = tensor(len(cell.states), B, H, D) if initial else None
    call = DenseCall(cell, x, R, None, state, tensor(B, T, dtype=torch.bool) if reset else None, clip, cut)
    cu_seqlens = tensor(2, dtype=torch.int32) if packed else None
    what = dense.problem(cell.name, call, cu_seqlens, grad)
    got, _ = dense._select(call, cu_seqlens, grad, direction, backend)
    return got, (dense.BACKENDS, what, Device.named("cpu"), backend, direction)


def test_no_two_dense_calls_that_are_planned_apart_share_a_plan():
    for _ in range(2):
        for changed in ({}, *DENSE):
            got, right = dense_selection(**changed)
            assert got == right, changed


# by names: what stands for a cell holds an address, which each worker has another of
@pytest.mark.parametrize("changed", DENSE, ids="-".join)
def test_every_part_of_a_dense_call_is_planned_for(changed):
    assert dense_selection(**changed)[1] != dense_selection()[1]
