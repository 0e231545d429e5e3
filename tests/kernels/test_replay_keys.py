"""What a recorded call is known by: how its arguments are nested and named; and how many are remembered."""

import pytest
import torch

from holdfast.kernels.common import planning, replay


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch):
    monkeypatch.setattr(replay, "_PLAIN", set())
    replay.allow(torch.device("cpu"))
    yield
    planning.forget()


def known_of(call):
    (known,) = [x.cell_contents for x in call.__closure__ if isinstance(x.cell_contents, dict)]
    return known


def test_tuples_of_the_same_tensors_cut_elsewhere_are_another_call():
    call = replay.replayed(lambda first, second: torch.stack(first).sum(0) - (second[0] if second else 0))
    for _ in range(3):
        x, y = torch.randn(3), torch.randn(3)
        assert torch.equal(call((x,), (y,)), x - y)
        assert torch.equal(call((x, y), ()), x + y)


def test_tensors_of_other_names_are_another_call():
    call = replay.replayed(lambda given: given["a"] * 2 if "a" in given else given["b"] * 3)
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(call({"a": x}), x * 2)
        assert torch.equal(call({"b": x}), x * 3)
    names = replay.replayed(lambda **given: given["a"] * 2 if "a" in given else given["b"] * 3)
    for _ in range(3):
        assert torch.equal(names(a=x), x * 2)
        assert torch.equal(names(b=x), x * 3)


def test_a_list_is_no_other_call_than_a_tuple_of_the_same():
    call = replay.replayed(lambda parts: parts[0] - parts[1])
    for make in (list, tuple, list, tuple):
        x, y = torch.randn(3), torch.randn(3)
        assert torch.equal(call(make((x, y))), x - y)


def test_what_is_no_constant_is_never_recorded():
    class Odd:
        factor = 2.0

    odd, call = Odd(), replay.replayed(lambda x, odd: x * odd.factor)
    x = torch.randn(3)
    for factor in (2.0, 2.0, 2.0, 3.0):
        odd.factor = factor
        assert torch.equal(call(x, odd), x * factor)
    assert not known_of(call)


def test_as_many_calls_are_remembered_as_there_is_room_for():
    call, x = replay.replayed(lambda x, number: x), torch.randn(1)
    for number in range(4200):
        call(x, number)
    assert len(known_of(call)) <= 4097
    assert torch.equal(call(x, 0), x)


@pytest.mark.parametrize("above_autograd", [True, False])
def test_under_autocast_what_users_call_runs_and_what_lies_beneath_is_replayed(above_autograd):
    """A public op casts its arguments there; a recorded launch would not."""
    runs = []
    call = replay.replayed(lambda x: runs.append(x.dtype) or x * 2, above_autograd)
    for _ in range(4):
        call(torch.randn(3))
    assert len(runs) == 2
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            x = torch.randn(3)
            assert torch.equal(call(x), x * 2)
    assert len(runs) == (5 if above_autograd else 2)


def test_memory_is_laid_out_as_the_call_laid_it_out():
    def copied(x):
        out = torch.empty_like(x)
        return out.copy_(x), x.new_empty(2, 3).fill_(1.0), torch.empty_strided((2, 3), (1, 2)).fill_(2.0)

    call = replay.replayed(copied)
    for _ in range(4):
        x = torch.randn(4, 5).t()
        for got, right in zip(call(x), copied(x), strict=True):
            assert torch.equal(got, right)
            assert got.stride() == right.stride()
