"""GLA's log decay as an op."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.ops.log_gate import log_gate
from parity import assert_close, relative_error, values_and_grads


def plain(x):
    return F.logsigmoid(x.to(torch.promote_types(x.dtype, torch.float32))) / 16


@pytest.mark.parametrize("shape", [(2, 7, 12), (1, 0, 3), (2, 1, 5)])
def test_it_is_pytorchs(shape):
    given = {"x": 8 * torch.randn(shape, dtype=torch.float64)}
    exact = values_and_grads(lambda a: plain(a["x"]), given)
    assert_close(values_and_grads(lambda a: log_gate(a["x"], 16), given), exact, 1e-14)


def test_far_from_zero_nothing_is_lost():
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4]], requires_grad=True)
    g = log_gate(x, 2.0)
    g.sum().backward()
    assert_close([g.detach(), x.grad], [torch.tensor([[-5e3, -50, 0, 0]]), torch.tensor([[0.5, 0.5, 0, 0]])], 1e-6)


def test_results_are_wide_and_gradients_as_x():
    x = torch.randn(2, 7, 12).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        g = log_gate(x, 16.0)
    assert g.dtype == torch.float32
    g.square().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    exact = values_and_grads(lambda a: plain(a["x"]).square(), {"x": x.detach().double()})
    assert relative_error(g.detach().double().square(), exact[0]) <= 1e-6


def test_opcheck():
    x = torch.randn(2, 3, 4).mT.requires_grad_()
    torch.library.opcheck(torch.ops.holdfast.log_gate.default, (x, 16.0))
    x = x.detach()
    torch.library.opcheck(torch.ops.holdfast.log_gate_backward.default, (torch.randn(2, 4, 3), x, 16.0))
