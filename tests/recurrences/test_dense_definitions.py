"""Each built-in cell against somebody else's: torch.nn, and for sLSTM the equations without a stabiliser."""

import pytest
import torch

from holdfast.recurrences import RECURRENCES, Draw, Sizes, oracle

DENSE = [name for name, recurrence in RECURRENCES.items() if recurrence.family == "dense"]


def test_the_family_is_all_here():
    assert DENSE == ["elman", "lstm", "gru", "slstm"]


def torch_layer(name, arguments, **options):
    """torch.nn's layer with the arguments' R and b, its input projection the identity."""
    R, b = arguments["R"], arguments["b"]
    gates, width = R.shape[0], R.shape[2]
    kind = {"elman": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[name]
    layer = kind(gates * width, width, batch_first=True, dtype=R.dtype, **options)
    state = {
        "weight_ih_l0": torch.eye(gates * width, dtype=R.dtype),
        "weight_hh_l0": R.flatten(0, 2),
        "bias_ih_l0": b[:gates].flatten() if name != "gru" else b[:3].flatten(),
        "bias_hh_l0": torch.zeros(gates * width, dtype=R.dtype),
    }
    if name == "gru":
        state["bias_hh_l0"][2 * width :] = b[3].flatten()
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize(
    ("name", "options"), [("elman", {}), ("elman", {"nonlinearity": "relu"}), ("lstm", {}), ("gru", {})]
)
def test_the_definition_is_torch_nns(name, options):
    arguments = RECURRENCES[name].example(Draw(3, torch.float64), Sizes(B=3, T=20, H=1, D=6))
    h, final = oracle(RECURRENCES[name], arguments | options)
    initial = arguments["initial_state"][:, :, 0]
    hx = tuple(s[None] for s in initial) if name == "lstm" else initial
    output, last = torch_layer(name, arguments, **options)(arguments["x"].flatten(2), hx)
    last = torch.cat(last) if name == "lstm" else last
    torch.testing.assert_close(h[:, :, 0], output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final[:, :, 0], last, rtol=1e-12, atol=1e-12)


def unstabilised_slstm(x, R, b):
    """h [B, T, H, D] by the equations of the paper before it introduces m."""
    batch, length, _, heads, width = x.shape
    h = c = n = x.new_zeros(batch, heads, width)
    outputs = []
    for t in range(length):
        i, f, z, o = (x[:, t] + torch.einsum("ghij,bhj->bghi", R, h) + b).unbind(1)
        c = torch.sigmoid(f) * c + torch.exp(i) * torch.tanh(z)
        n = torch.sigmoid(f) * n + torch.exp(i)
        h = torch.sigmoid(o) * c / n
        outputs.append(h)
    return torch.stack(outputs, 1), c, n


@pytest.mark.parametrize("scale", [1.0, 80.0])
def test_slstm_is_the_equation_without_stabiliser(scale):
    arguments = RECURRENCES["slstm"].example(Draw(4, torch.float64), Sizes(B=2, T=30, H=2, D=5))
    x, R, b = arguments["x"].sign() * scale, arguments["R"], arguments["b"]
    given = [x.clone().requires_grad_(), R.clone().requires_grad_(), b.clone().requires_grad_()]
    h, final = oracle(RECURRENCES["slstm"], dict(zip(("x", "R", "b"), given, strict=True)))
    exact, c, n = unstabilised_slstm(*given)
    assert h.isfinite().all()
    torch.testing.assert_close(h, exact, rtol=1e-9, atol=1e-12)
    # the states hold c and n divided by exp(m)
    _, scaled_c, scaled_n, m = final
    torch.testing.assert_close(scaled_c * m.exp(), c, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(scaled_n * m.exp(), n, rtol=1e-9, atol=1e-12)
    weight = torch.randn_like(h)
    for got, right in zip(
        torch.autograd.grad((h * weight).sum(), given),
        torch.autograd.grad((exact * weight).sum(), given),
        strict=True,
    ):
        assert got.isfinite().all()
        torch.testing.assert_close(got, right, rtol=1e-8, atol=1e-10)


def test_clipping_in_a_case_done_by_hand():
    # h1 = 3 h0, h2 = 3 h1 with relu: dh2/dh1 = 3, clipped to 2; dh1/dh0 = 3 * 2, clipped to 2
    x, R = torch.zeros(1, 2, 1, 1, 1, dtype=torch.float64), torch.full((1, 1, 1, 1), 3.0, dtype=torch.float64)
    arguments = {"x": x, "R": R, "initial_state": torch.ones(1, 1, 1, 1, dtype=torch.float64), "nonlinearity": "relu"}
    for key in ("x", "R", "initial_state"):
        arguments[key].requires_grad_()
    h, _ = oracle(RECURRENCES["elman"], arguments | {"recurrent_grad_clip": 2.0})
    h[0, 1].sum().backward()
    assert arguments["initial_state"].grad.item() == 2.0
    assert arguments["x"].grad.flatten().tolist() == [2.0, 1.0]
    assert R.grad.item() == 2.0 * 1 + 1 * 3
