"""What a recorded call is known by: how its arguments are nested and named; and how many are remembered."""

import pytest
import torch

import holdfast
from holdfast.kernels import select as planning
from holdfast.kernels.runtime.replay import replay


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
def test_under_autocast_what_it_casts_is_recorded_and_replayed(above_autograd):
    """Each dtype of autocast is another call, as public ops cast their arguments to it; so is none."""
    runs = []

    def run(x):
        runs.append(x.dtype)
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) * 2 if torch.is_autocast_enabled(kind) else x * 2

    call = replay.replayed(run, above_autograd)
    for _ in range(2):
        for dtype in (None, torch.bfloat16, torch.float16):
            for _ in range(4):
                x = torch.randn(3)
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    assert torch.equal(call(x), x.to(dtype or x.dtype) * 2)
    assert len(runs) == 6


def test_a_replay_under_autocast_turns_it_off_where_the_call_did():
    """Operations that autocast would cast, recorded where it was off: a product of float32, a softmax of bfloat16."""

    def run(x):
        with torch.autocast("cpu", enabled=False):
            return x @ x, torch.softmax(x.bfloat16(), -1)

    call = replay.replayed(run, above_autograd=False)
    for _ in range(4):
        x = torch.randn(4, 4)
        with torch.autocast("cpu", torch.bfloat16):
            for got, right in zip(call(x), run(x), strict=True):
                assert got.dtype == right.dtype
                assert torch.equal(got, right)


def test_calls_with_a_gradient_go_straight_in_the_dtype_of_their_own_autocast():
    x = {dtype: torch.randn(1, 5, 2, 4).to(dtype) for dtype in (torch.bfloat16, torch.float16)}
    for dtype in (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.bfloat16):
        for given in x.values():
            o = given.clone().requires_grad_()
            with torch.autocast("cpu", dtype):
                y = holdfast.gated_rms_norm(o)
            assert y.dtype == dtype
            y.sum().backward()
            assert o.grad.dtype == given.dtype


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
