"""Calls under autograd that go straight to the ops behind them: the same results, and only where calls are alike."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast
from holdfast.kernels import select as planning
from holdfast.kernels.runtime.replay import replay
from holdfast.ops import registration


def _twice(x: Tensor, y: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    return x * 2 + (0 if y is None else y), x * factor


def _twice_backward(ctx, da, db):
    da, db = (torch.zeros(()) if d is None else d for d in (da, db))
    return 2 * da + ctx.factor * db, None if ctx.only else da, None


def _twice_save(ctx, given):
    ctx.only, ctx.factor = given[1] is None, given[2]


op = registration.define("test_fast_path", _twice, lambda x, y, factor: (torch.empty_like(x), torch.empty_like(x)))
twice = registration.differentiable(op, _twice_save, _twice_backward, 2)


class Counted:
    """A public op, and how often its own Python ran."""

    def __init__(self, function):
        self.runs = 0

        def run(*arguments, **named):
            self.runs += 1
            return function(*arguments, **named)

        self.call = replay.replayed(run)

    def __call__(self, *arguments, **named):
        return self.call(*arguments, **named)


def chain(x, y, factor=3.0, also=False):
    """What y gets goes through two ops."""
    a, b = twice(y, None, factor)
    c, _ = twice(x, a, 1.0)
    return c, b if also else None


@pytest.fixture(autouse=True)
def forget():
    yield
    planning.forget()


def grads(outputs, inputs):
    loss = sum((n + 1.5) * x.square().sum() for n, x in enumerate(outputs) if x is not None)
    return torch.autograd.grad(loss, inputs)


def drawn(*shape):
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("also", [False, True])
def test_fast_paths_equal_the_call_on_other_tensors(also):
    counted = Counted(chain)
    for _ in range(4):
        x, y = drawn(3, 4), drawn(3, 4)
        got, right = counted(x, y=y, also=also), chain(x, y, also=also)
        assert isinstance(got, tuple)
        for a, b in zip((*got, *grads(got, (x, y))), (*right, *grads(right, (x, y))), strict=True):
            assert a is b is None or torch.equal(a, b)
    assert counted.runs == 1


def test_several_shapes_are_remembered_beside_each_other():
    counted = Counted(chain)
    for _ in range(3):
        for size in (2, 3, 4):
            x, y = drawn(size), drawn(size)
            assert torch.equal(counted(x, y)[0], 2 * x + 2 * y)
    assert counted.runs == 3


class Tagged(torch.Tensor):
    pass


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:3],
        lambda x: x.double(),
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x.flatten(), x.flatten()])[1:21].view(4, 5),
        lambda x: x.detach(),
        lambda x: torch._neg_view(x),
        lambda x: x.detach().as_subclass(Tagged).requires_grad_(),
        lambda x: Parameter(x.detach()),
    ],
    ids=["shape", "dtype", "strides", "alignment", "no gradient", "negation", "subclass", "parameter"],
)
def test_what_differs_goes_the_whole_way(other):
    counted = Counted(lambda x: twice(x, None, 3.0))
    x = drawn(4, 5)
    for _ in range(3):
        counted(x)
    assert counted.runs == 1
    y = other(x)
    assert torch.equal(counted(y)[0], y * 2)
    assert counted.runs == 2


def test_numbers_names_and_places_decide_too():
    counted = Counted(chain)
    x, y = drawn(3), drawn(3)
    for _ in range(3):
        counted(x, y, also=True)
    assert torch.equal(counted(x, y, 4.0, also=True)[1], 4 * y)
    assert torch.equal(counted(x, y, factor=5.0, also=True)[1], 5 * y)
    assert torch.equal(counted(y=x, x=y, also=True)[1], 3 * x)
    assert torch.equal(counted(y=x, x=y)[0], 2 * y + 2 * x)
    assert counted.runs == 5


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, Seen, lambda: torch.autocast("cpu"), replay.disabled]
)
def test_another_context_goes_the_whole_way(context):
    counted = Counted(lambda x: twice(x, None, 3.0))
    x = drawn(3)
    for _ in range(3):
        assert counted(x)[0].requires_grad
    with context():
        counted(x)
    assert counted.runs == 2
    assert counted(x)[0].requires_grad
    assert counted.runs == 2


def test_what_makes_tensors_between_goes_the_whole_way():
    elsewhere = torch.randn(3)
    for function in (
        lambda x: twice(x * 1, None, 3.0),
        lambda x: twice(x, elsewhere, 3.0),
        lambda x: twice(x, None, 3.0)[0] + 1,
        lambda x: x * 2,
    ):
        counted = Counted(function)
        for n in range(4):
            counted(drawn(3))
            assert counted.runs == n + 1


def test_one_tensor_as_two_arguments():
    counted = Counted(chain)
    x, y = drawn(3), drawn(3)
    for _ in range(3):
        assert torch.equal(counted(x, x)[0], 4 * x)
        assert torch.equal(counted(x, y)[0], 2 * x + 2 * y)
        assert torch.equal(counted(y, x)[0], 2 * x + 2 * y)


@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule", "mlstm"])
def test_public_ops(name):
    """Their checks still refuse what is wrong, and their gradients are those of the whole way."""
    from holdfast.recurrences import RECURRENCES, Draw, Sizes
    from parity import leaves

    def results(arguments):
        given = [x.requires_grad_() for x in leaves(arguments)]
        o, _ = getattr(holdfast, name)(**arguments)
        return [o, *torch.autograd.grad(o.square().sum(), given)]

    examples = [
        RECURRENCES[name].example(Draw(seed, torch.float32, "cpu"), Sizes(B=2, T=9, H=2, K=4, V=4)) for seed in range(4)
    ]
    for example in examples:
        example.pop("initial_state")
    with replay.disabled():
        expected = [results(arguments) for arguments in examples]
    for arguments, right in zip(examples, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(results(arguments), right, strict=True))
    with pytest.raises(ValueError, match="v: expected shape"):
        getattr(holdfast, name)(**examples[0] | {"v": torch.randn(2, 8, 2, 4, requires_grad=True)})
