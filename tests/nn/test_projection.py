"""A projection's gradients under autocast: in their own dtype and unrounded, where PyTorch rounds them first."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdfast.kernels.runtime.replay.guard import autocast_dtype
from holdfast.nn import projection
from holdfast.nn.projection import Projection, _Product, _serves
from parity import relative_error

SIZES, WIDE = (2, 5, 24), 40


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """PyTorch has no product into another dtype on a CPU, where tensors pass for a GPU's here."""
    product = torch.mm

    def mm(x, y, out_dtype=None):
        return product(x, y) if out_dtype is None else product(x.to(out_dtype), y.to(out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(projection, "autocast_dtype", lambda _: autocast_dtype("cpu"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)


def made(device="cpu"):
    torch.manual_seed(0)
    layer = Projection(SIZES[-1], WIDE).to(device)
    x, dy = (torch.randn(*SIZES[:-1], n).to(device) for n in (SIZES[-1], WIDE))
    return layer, x.requires_grad_(), dy


def exact(layer, x, dy):
    """y, dx and dW of operands in bfloat16 and of sums in float64."""
    narrow, weight, dy = (t.detach().bfloat16().double() for t in (x, layer.weight, dy))
    return narrow @ weight.t(), dy @ weight, dy.flatten(0, -2).t() @ narrow.flatten(0, -2)


def run(layer, x, dy, how=lambda layer, x: layer(x)):
    with torch.autocast("cpu", torch.bfloat16):
        y = how(layer, x)
    return y, *torch.autograd.grad(y, (x, layer.weight), dy.to(y.dtype))


@pytest.mark.parametrize("narrow", [False, True])
def test_gradients_are_not_rounded(as_on_a_gpu, narrow):
    layer, x, dy = made()
    x = x.detach().bfloat16().requires_grad_() if narrow else x
    y, dx, dw = run(layer, x, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, x.dtype, torch.float32)
    right = exact(layer, x, dy)
    assert relative_error(y, right[0]) < 2**-8
    assert relative_error(dx, right[1]) < (2**-8 if narrow else 1e-6)
    assert relative_error(dw, right[2]) < 1e-6


def test_what_needs_no_gradient_gets_none(as_on_a_gpu):
    layer, x, dy = made()
    y = _Product.apply(x.detach(), layer.weight, torch.bfloat16)
    (dw,) = torch.autograd.grad(y, layer.weight, dy.bfloat16())
    assert torch.equal(dw, run(layer, x, dy)[2])
    layer.weight.requires_grad_(False)
    y = _Product.apply(x, layer.weight, torch.bfloat16)
    y.backward(dy.bfloat16())
    assert layer.weight.grad is None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(24,), (3, 24), (0, 5, 24), (2, 0, 24)])
def test_any_number_of_axes_and_of_tokens(as_on_a_gpu, shape):
    layer = made()[0]
    x = torch.randn(shape, requires_grad=True)
    dy = torch.randn(*shape[:-1], WIDE)
    if x.dim() == 1:
        x, dy = x.detach()[None].requires_grad_(), dy[None]
    y, dx, dw = run(layer, x, dy)
    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, layer.weight.shape)


def test_it_is_nn_linear_wherever_there_is_nothing_to_keep(as_on_a_gpu, monkeypatch):
    """Without autocast, gradients, plain tensors or a weight in float32, under torch.func, and compiled."""
    layer, x, _ = made()
    weight, half = layer.weight, torch.bfloat16
    assert _serves(x, weight, half)
    assert _serves(x.detach(), weight, half)
    assert not _serves(x.double(), weight, half)
    assert not _serves(x, nn.Parameter(weight.detach().bfloat16()), half)
    assert not _serves(x, nn.Parameter(weight.detach(), requires_grad=False), half)
    assert not _serves(x, weight * 1, half)
    assert not _serves(x.as_subclass(type("Other", (torch.Tensor,), {})), weight, half)
    with torch.no_grad():
        assert not _serves(x, weight, half)
    torch.func.vmap(lambda row: pytest.fail("served") if _serves(row, weight, half) else row)(x)
    monkeypatch.setattr(_Product, "apply", lambda *_: pytest.fail("served"))
    plain = nn.functional.linear(x, weight)
    assert torch.equal(layer(x), plain)
    with torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert torch.equal(layer(x), nn.functional.linear(x, weight))


def test_second_derivatives_are_refused(as_on_a_gpu):
    layer, x, dy = made()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    (dx,) = torch.autograd.grad(y, x, dy.bfloat16(), create_graph=True)
    with pytest.raises(NotImplementedError, match="one differentiation"):
        dx.sum().backward()


def test_hooks_see_it(as_on_a_gpu):
    layer, x, dy = made()
    seen = []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.weight.register_hook(lambda grad: seen.append(grad.dtype))
    run(layer, x, dy)
    assert seen == ["forward", torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    layer, x, dy = made("cuda")
    with torch.autocast("cuda", dtype):
        y, plain = layer(x), nn.functional.linear(x, layer.weight)
        again = checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(y, plain)
    ours = torch.autograd.grad(y, (x, layer.weight), dy.to(dtype))
    for one, same in zip(ours, torch.autograd.grad(again, (x, layer.weight), dy.to(dtype)), strict=True):
        assert torch.equal(one, same)
    operands = [t.detach().to(dtype).double() for t in (dy.flatten(0, -2), layer.weight, x.flatten(0, -2))]
    right = (operands[0] @ operands[1]).view(x.shape), operands[0].t() @ operands[2]
    rounded = torch.autograd.grad(plain, (x, layer.weight), dy.to(dtype))
    for one, theirs, good in zip(ours, rounded, right, strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one, good) < 1e-5 < relative_error(theirs, good)
