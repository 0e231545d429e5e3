"""What tells calls apart beside shapes: types of numbers, which arguments are one tensor, where tensors lie."""

from itertools import permutations

import pytest
import torch

import holdfast
from holdfast.kernels import select as planning
from holdfast.kernels.runtime.replay import replay
from holdfast.kernels.runtime.replay.refusals import refusals
from holdfast.ops import registration
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import leaves


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch):
    monkeypatch.setattr(replay, "_PLAIN", set())
    replay.allow(torch.device("cpu"))
    planning.forget()
    yield
    planning.forget()


class Counted:
    """A function, and how often it ran."""

    def __init__(self, function, **how):
        self.runs = 0

        def run(*arguments, **named):
            self.runs += 1
            return function(*arguments, **named)

        self.call = replay.replayed(run, **how)

    def __call__(self, *arguments, **named):
        return self.call(*arguments, **named)


def misaligned(*shape):
    return torch.randn(torch.Size(shape).numel() + 1)[1:].view(shape)


@pytest.mark.parametrize("make", [torch.randn, misaligned], ids=["by the guard", "by key"])
@pytest.mark.parametrize("order", list(permutations((1, 1.0, True))), ids=str)
def test_equal_numbers_of_other_types_are_other_calls(order, make):
    def of_type(x, number, numbers=()):
        return x.new_empty(3).fill_([int, float, bool].index(type(number)) + 10 * len(numbers))

    counted = Counted(of_type)
    for _ in range(4):
        for number in order:
            x = make(3)
            assert torch.equal(counted(x, number), of_type(x, number))
            assert torch.equal(counted(x, 2, (number,)), of_type(x, 2, (number,)))
    assert counted.runs == 2 * 2 * 3


def test_a_first_call_with_one_tensor_twice_keeps_no_other_from_being_replayed():
    counted = Counted(lambda x, y: x - 2 * y)
    x, y = torch.randn(3), torch.randn(3)
    for _ in range(4):
        assert torch.equal(counted(x, x), x - 2 * x)
    assert counted.runs == 2
    for _ in range(4):
        assert torch.equal(counted(x, y), x - 2 * y)
        assert torch.equal(counted(y, y), y - 2 * y)
    assert counted.runs == 4


def test_which_arguments_are_one_tensor_is_another_call():
    counted = Counted(lambda x, y, z: x.new_empty(3).fill_(float(x is y) + 2 * float(y is z) + 4 * float(x is z)))
    x, y, z = (torch.randn(3) for _ in range(3))
    for _ in range(4):
        for given, right in (((x, y, z), 0), ((x, x, z), 1), ((x, z, z), 2), ((z, x, z), 4), ((x, x, x), 7)):
            assert counted(*given)[0] == right
    assert counted.runs == 2 * 5


@pytest.mark.parametrize("first", ["one tensor twice", "misaligned"])
def test_a_first_call_with_a_gradient_keeps_no_other_from_the_fast_path(first):
    op = registration.define(f"test_first_{first[:3]}", _sum_of_two, lambda x, y: torch.empty_like(x))
    both = registration.differentiable(op, lambda *_: None, lambda ctx, d: (d, d), 2)
    counted = Counted(both)
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    odd = misaligned(3).requires_grad_()
    given = (x, x) if first == "one tensor twice" else (odd, y)
    assert torch.equal(counted(*given), given[0] + given[1])
    for _ in range(4):
        assert torch.equal(counted(x, y), x + y)
    assert counted.runs == 2
    assert not refusals()


def _sum_of_two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def _add_in_place(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(x)
    return x * 1


@pytest.mark.parametrize("by_op", [False, True])
def test_only_what_is_written_to_counts_as_written(by_op):
    """Recorded with views of one tensor, whose versions are one; replayed with tensors of their own."""
    run = _add_in_place
    if by_op:
        run = registration.define("test_written", run, lambda x, state: torch.empty_like(x), ("state",))
    counted = Counted(run, above_autograd=False, changes=True)
    for _ in range(2):
        both = torch.zeros(8)
        counted(both[:4], both[4:])
    for _ in range(3):
        x, state = torch.ones(4), torch.zeros(4)
        counted(x, state)
        assert torch.equal(state, x)
        assert x._version == 0
        assert state._version > 0
    assert counted.runs == 2


@pytest.mark.parametrize("shift", [0, 4, 8])
def test_a_step_on_overlapping_arguments_is_the_same_replayed(shift):
    """Recorded with tensors of their own, then with a state that overlaps the values by shift and less."""

    def token(memory):
        q, k = (torch.linspace(-1, 1, 32).view(1, 1, 2, 16) + n for n in range(2))
        v, state = memory[shift : shift + 32].view(1, 1, 2, 16), memory[16:].view(1, 2, 16, 16)
        return {"q": q, "k": k, "v": v}, state

    def apart():
        given, state = token(torch.randn(528))
        return given | {"v": given["v"].clone()}, state.clone()

    for _ in range(3):
        holdfast.step("linear_attention", *apart())
    for seed in range(3):
        memory = torch.randn(528, generator=torch.Generator().manual_seed(seed))
        other = memory.clone()
        with replay.disabled():
            right = holdfast.step("linear_attention", *token(other))
        assert torch.equal(holdfast.step("linear_attention", *token(memory)), right)
        assert torch.equal(memory, other)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", RECURRENCES)
def test_slices_of_one_storage_through_each_op(name, grad):
    """At other places of one tensor each time, some of which are no multiple of 8 or 16 bytes."""

    def results(arguments):
        given = [x.requires_grad_(grad) for x in leaves(arguments)]
        made = leaves(getattr(holdfast, name)(**arguments, output_final_state=True))
        loss = sum(x.square().sum() for x in made)
        return [*made, *(torch.autograd.grad(loss, given, allow_unused=True) if grad else ())]

    example = RECURRENCES[name].example(Draw(0, torch.float32, "cpu"), Sizes(B=2, T=3, H=2, K=4, V=4, D=8))
    whole = torch.randn(sum(x.numel() + 8 for x in leaves(example)) + 300)

    def sliced(start, odd):
        found = dict(example)
        for key, x in example.items():
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                start += -start % 4 + odd
                found[key] = whole[start : start + x.numel()].view(x.shape).copy_(x).detach()
                start += x.numel()
        return found

    for n in range(8):
        given = sliced(40 * n, n % 4 if n > 4 else 0)
        with replay.disabled():
            right = results(given)
        for x, y in zip(results(given), right, strict=True):
            assert x is y is None or torch.equal(x, y)


ELSEWHERE = torch.ones(1)


@pytest.mark.parametrize(
    ("reads", "why"),
    [
        (lambda x: x * x.sum().item(), "leaves the device"),
        (lambda x: x + torch.rand_like(x), "depends on values"),
        (lambda x: x + ELSEWHERE, "a tensor from elsewhere"),
        (lambda x: x.as_strided((2,), (1,), x.storage_offset()) * 2, "begins"),
    ],
)
def test_refusals_are_counted_by_name_and_reason(reads, why):
    def run(x):
        return reads(x)

    run.__name__ = "gla"
    call = replay.replayed(run)
    for _ in range(5):
        call(torch.randn(3))
    (((name, reason), count),) = refusals().items()
    assert (name, count) == ("gla", 1)
    assert why in reason
    for _ in range(5):
        call(torch.randn(1, 3).expand(3, 3) if "begins" in why else torch.randn(2, 3))
    assert refusals() == {("gla", reason): 2}
    assert f"replay   none of 2 signatures of gla: {reason}" in str(holdfast.explain("gla"))
    assert "replay" not in str(holdfast.explain("lstm"))
    planning.forget()
    assert not refusals()


def test_names_of_functions_and_of_the_ops_that_they_are_for():
    assert replay._name_of(holdfast.gla) == "gla"
    assert replay._name_of(torch.ops.holdfast.matrix_forward.default) == "matrix_forward"
    from holdfast.ops import matrix

    assert replay._name_of(matrix._forward) == "matrix_forward"


def test_why_calls_with_gradients_take_no_fast_path_is_counted():
    counted = Counted(lambda x: holdfast.gated_rms_norm(x * 1))
    for _ in range(3):
        counted(torch.randn(1, 5, 2, 4, requires_grad=True))
    assert counted.runs == 3
    assert {reason for _, reason in refusals()} == {"it makes tensors around the ops that record its gradient"}
