"""mamba_ssm's RMSNormGated and rmsnorm_fn, held against its equation in float64."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.integrations.mamba_ssm import RMSNormGated, rmsnorm_fn

D = 12


def right(x, weight, z, eps, group, before):
    x = x.double()
    if z is not None and not before:
        x = x * F.silu(z.double())
    parts = x.unflatten(-1, (-1, group))
    y = (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight.double()
    return y * F.silu(z.double()) if z is not None and before else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_norm(group, before, gated, dtype):
    norm = RMSNormGated(D, eps=0.1, group_size=group, norm_before_gate=before)
    norm.weight.data = torch.randn(D)
    shape = (2, 3, 5, D)
    x = torch.randn(shape).to(dtype).requires_grad_()
    z = torch.randn(shape).to(dtype).requires_grad_() if gated else None
    y, expected = norm(x, z), right(x, norm.weight, z, 0.1, group or D, before)
    assert y.dtype == dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    leaves = [x, norm.weight, *([z] if gated else [])]
    grads = [torch.autograd.grad(each.double().sin().sum(), leaves) for each in (y, expected)]
    if dtype == torch.float32:
        torch.testing.assert_close(grads[0], grads[1], **tolerance)


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("before", [False, True])
def test_norm_as_a_function(group, before):
    x, weight, z = (torch.randn(*shape, D).requires_grad_() for shape in ((2, 3), (), (2, 3)))
    found = rmsnorm_fn(x, weight, None, z, 0.1, group, before)
    expected = right(x, weight, z, 0.1, group or D, before)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(each.double().sin().sum(), (x, weight, z)) for each in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        rmsnorm_fn(x, weight, None).double(), right(x, weight, None, 1e-6, D, True), rtol=1e-5, atol=1e-5
    )


def test_what_the_function_does_not_serve():
    x, weight = torch.randn(2, D), torch.randn(D)
    with pytest.raises(ValueError, match="bias: expected None, as no op adds one between the norm and the gate"):
        rmsnorm_fn(x, weight, torch.zeros(D))
    with pytest.raises(ValueError, match=r"weight: expected shape \[D\]; got \[1, 12\]"):
        rmsnorm_fn(x, weight[None], None)
    with pytest.raises(TypeError, match="norm_before_gate: expected a bool"):
        rmsnorm_fn(x, weight, None, norm_before_gate=0)


def test_of_one_row_and_of_none():
    norm = RMSNormGated(D)
    x = torch.randn(D)
    torch.testing.assert_close(norm(x).double(), right(x, norm.weight, None, 1e-5, D, True), rtol=1e-5, atol=1e-5)
    assert norm(torch.randn(0, D)).shape == (0, D)


def test_a_gate_of_another_dtype():
    norm, x, z = RMSNormGated(D), torch.randn(3, D).bfloat16(), torch.randn(3, D)
    y = norm(x, z)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, norm(x.float(), z).bfloat16())


def test_parameters_are_those_of_mamba_ssm():
    norm = RMSNormGated(D, device="meta", dtype=torch.bfloat16)
    assert {name: (x.shape, x.dtype) for name, x in norm.state_dict().items()} == {"weight": ((D,), torch.bfloat16)}
    norm = RMSNormGated(D)
    norm.weight.data.zero_()
    norm.reset_parameters()
    assert (norm.weight == 1).all()
    assert norm.bias is None


def test_what_is_not_served():
    with pytest.raises(ValueError, match="group_size: expected a divisor of 12; got 5"):
        RMSNormGated(D, group_size=5)
    with pytest.raises(TypeError, match="norm_before_gate: expected a bool"):
        RMSNormGated(D, norm_before_gate=1)
    norm, x = RMSNormGated(D), torch.randn(2, D)
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 12\]; got \[2, 11\]"):
        norm(x[:, 1:])
    with pytest.raises(ValueError, match=r"z: expected x's shape \[2, 12\]; got \[1, 12\]"):
        norm(x, x[:1])
    with pytest.raises(TypeError, match=r"z: expected a tensor of a floating-point dtype; got torch\.int64"):
        norm(x, x.long())
    with pytest.raises(TypeError, match="x: expected a tensor of a floating-point dtype; got NoneType"):
        norm(None)
