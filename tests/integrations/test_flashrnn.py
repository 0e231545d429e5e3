"""flashrnn, held against the equations of its functions a step at a time, and against torch.nn.LSTM."""

import sys
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from holdfast.integrations import flashrnn as package
from holdfast.integrations.flashrnn import FlashRNNConfig, flashrnn

STATES = {"lstm": 2, "gru": 1, "elman": 1, "slstm": 4}
# gates of Wx, R and b
GATES = {"lstm": (4, 4, 4), "gru": (3, 3, 4), "elman": (1, 1, 1), "slstm": (4, 4, 4)}
# batch, tokens, heads and channels that the package's own tests have, those that a CPU soon runs
SIZES = [(2, 1, 64, 32), (2, 3, 4, 64), (8, 3, 2, 32), (16, 3, 1, 64), (2, 3, 16, 32)]


def lstm(wx, ry, b, states):
    i, f, z, o = (wx + ry + b).unbind(1)
    c = f.sigmoid() * states[1] + i.sigmoid() * z.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(wx, ry, b, states):
    """Gates of R: g, r, z; of b: g, r, z, n; of Wx: r, z, n."""
    r, z = (wx[:, j] + ry[:, j + 1] + b[j + 1] for j in (0, 1))
    candidate = torch.tanh(wx[:, 2] + b[3] + r.sigmoid() * (ry[:, 0] + b[0]))
    return (z.sigmoid() * states[0] + (1 - z.sigmoid()) * candidate,)


def elman(wx, ry, b, states):
    return (torch.tanh((wx + ry + b)[:, 0]),)


def slstm(wx, ry, b, states):
    i, f, z, o = (wx + ry + b).unbind(1)
    _, c, n, m = states
    kept = F.logsigmoid(f) + m
    m = torch.where(n == 0, i, torch.maximum(i, kept))
    # where n is 0, all that is kept is 0
    kept = torch.where(n == 0, m, kept)
    c = (kept - m).exp() * c + (i - m).exp() * z.tanh()
    n = torch.where(n == 0, torch.ones_like(n), (kept - m).exp() * n + (i - m).exp())
    return o.sigmoid() * c / n, c, n, m


def stepped(function, Wx, R, b, states=None):
    """States at all tokens [S, B, T, H, D] and after the last [S, B, 1, H, D], in float64."""
    Wx, R, b = Wx.double(), R.double(), b.double()
    batch, length, _, heads, width = Wx.shape
    now = Wx.new_zeros(STATES[function], batch, heads, width) if states is None else states[:, :, 0].double()
    now, found = tuple(now), []
    for t in range(length):
        ry = torch.einsum("bhp,ghdp->bghd", now[0], R)
        now = globals()[function](Wx[:, t], ry, b, now)
        found.append(torch.stack(now))
    last = torch.stack(now)[:, :, None]
    return torch.stack(found, 2) if found else Wx.new_zeros(STATES[function], batch, 0, heads, width), last


def drawn(function, batch, length, heads, width, dtype=torch.float32):
    """Wx, R and b as the package's tests draw them, and states that are not empty."""
    w, r, t = GATES[function]
    given = [
        torch.randn(batch, length, w, heads, width, dtype=torch.float64),
        torch.randn(r, heads, width, width, dtype=torch.float64) / width**0.5,
        torch.randn(t, heads, width, dtype=torch.float64),
        torch.randn(STATES[function], batch, 1, heads, width, dtype=torch.float64),
    ]
    if function == "slstm":
        given[3][2] = given[3][2].abs() + 1
    return [x.to(dtype).requires_grad_() for x in given]


def assert_close(found, right, tolerance=1e-5):
    torch.testing.assert_close(found.double(), right.double(), rtol=tolerance, atol=tolerance)


TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("function", STATES)
def test_outputs_and_gradients(function, sizes, dtype):
    """Of h alone, as the package's tests have it, from no states and from some."""
    *given, states = drawn(function, *sizes, dtype)
    for before in (None, states):
        found, last = flashrnn(*given, before, function=function, dtype=str(dtype)[6:])
        right, after = stepped(function, *given, before)
        assert (found[0].dtype, last.dtype) == (dtype, dtype)
        assert found.shape == right.shape
        assert_close(found[0], right[0], TOLERANCE[dtype])
        assert_close(last, after, TOLERANCE[dtype])
        mask, leaves = torch.randn(right[0].shape, dtype=torch.float64), [*given, *([] if before is None else [before])]
        grads = [torch.autograd.grad((mask * h.double()).sum(), leaves) for h in (found[0], right[0])]
        for got, wanted in zip(*grads, strict=True):
            # sums over the batch and time
            assert_close(got, wanted, 10 * TOLERANCE[dtype])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("function", STATES)
def test_all_states_and_their_gradients(function, given):
    *inputs, states = drawn(function, 3, 20, 2, 5, torch.float64)
    states = states if given else None
    found, last = flashrnn(*inputs, states, function)
    right, after = stepped(function, *inputs, states)
    assert len(found) == len(right)
    found = found.clone()
    assert_close(found, right, 1e-11)
    masks = [torch.randn_like(right), torch.randn_like(after)]
    leaves = [*inputs, *([states] if given else [])]
    grads = [
        torch.autograd.grad(sum((m * x).sum() for m, x in zip(masks, each, strict=True)), leaves)
        for each in ((found, last), (right, after))
    ]
    for got, wanted in zip(*grads, strict=True):
        assert_close(got, wanted, 1e-10)


def test_states_are_a_tensor_where_they_are_used_as_one():
    given = drawn("lstm", 2, 3, 1, 4)[:3]
    states, last = flashrnn(*given)
    h, c = states
    assert torch.equal(h, states[0])
    assert torch.equal(c, states[1])
    assert_close(states[:, :, -1:], last)
    assert torch.equal(states[0, :, -1], h[:, -1])
    assert torch.equal(torch.stack([h, c]), torch.clone(states))
    assert states.tensor() is states.tensor()
    assert states.dtype == torch.float32
    with pytest.raises(IndexError):
        states[2]


@pytest.mark.parametrize("recorded", [False, True])
def test_gradients_are_recorded_where_the_call_was(recorded):
    given = drawn("lstm", 2, 3, 1, 4)[:3]
    with torch.set_grad_enabled(recorded):
        states, _ = flashrnn(*given)
    with torch.set_grad_enabled(not recorded):
        c = states[1]
    assert c.requires_grad == recorded
    assert states[1].requires_grad == recorded


@pytest.mark.parametrize("function", STATES)
def test_a_sequence_in_two_parts_and_no_token_at_all(function):
    Wx, R, b, _ = drawn(function, 2, 6, 2, 4)
    whole, last = flashrnn(Wx, R, b, None, function)
    first, between = flashrnn(Wx[:, :2], R, b, None, function)
    second, after = flashrnn(Wx[:, 2:], R, b, between, function)
    assert_close(torch.cat([first[0], second[0]], 1), whole[0])
    assert_close(after, last)
    none, same = flashrnn(Wx[:, :0], R, b, between, function)
    assert torch.equal(same, between)
    assert none[:].shape == (STATES[function], 2, 0, 2, 4)


def test_torch_lstm():
    width, batch, length = 32, 8, 3
    layer, x = torch.nn.LSTM(width, width, batch_first=True), torch.randn(batch, length, width)
    Wx = (x @ layer.weight_ih_l0.T).view(batch, length, 4, 1, width)
    R, b = layer.weight_hh_l0.view(4, 1, width, width), (layer.bias_ih_l0 + layer.bias_hh_l0).view(4, 1, width)
    states, last = flashrnn(Wx, R, b, dtype="float32")
    right, (h, c) = layer(x)
    assert_close(states[0][:, :, 0], right)
    assert_close(last[:, :, 0, 0], torch.cat([h, c]))


def test_states_of_16_bits():
    Wx, R, b, states = (x.detach().bfloat16() for x in drawn("slstm", 2, 5, 2, 8))
    states[2] = states[2].float().clamp(min=1).bfloat16()
    found, last = flashrnn(Wx, R, b, states, "slstm")
    right, after = stepped("slstm", Wx, R, b, states)
    assert (found[0].dtype, found[1].dtype, last.dtype) == (torch.bfloat16,) * 3
    assert_close(found[:], right, 3e-2)
    assert_close(last, after, 3e-2)


LAYOUTS = {"input_shape": "TBGHD", "output_shape": "STBHD", "recurrent_shape": "HPGD", "bias_shape": "HDG"}


@pytest.mark.parametrize("function", STATES)
def test_layouts(function):
    Wx, R, b, states = drawn(function, 2, 3, 2, 4)
    config = FlashRNNConfig(function=function, num_heads=2, head_dim=4, dtype="float32", **LAYOUTS)
    moved = Wx.transpose(0, 1), R.permute(1, 3, 0, 2), b.permute(1, 2, 0), states.transpose(1, 2)
    found, last = flashrnn(*moved, config=config)
    right, after = flashrnn(Wx, R, b, states, function)
    assert torch.equal(found[0], right[0].transpose(0, 1))
    assert torch.equal(found[:], right[:].transpose(1, 2))
    assert torch.equal(last, after.transpose(1, 2))


def test_a_config_says_all():
    config = FlashRNNConfig(function="gru", hidden_dim=12, num_heads=3)
    assert (config.head_dim, config.num_gates_w, config.num_gates_r, config.num_gates_t) == (4, 3, 3, 4)
    assert (config.num_states, config.dtype_w, config.dtype_s) == (1, "bfloat16", "bfloat16")
    for given in (
        {"hidden_dim": 12},
        {"hidden_dim": 12, "num_heads": 0},
        {"head_dim": 12},
        {"head_dim": 12, "num_heads": 1},
    ):
        whole = FlashRNNConfig(**given)
        assert (whole.num_heads, whole.head_dim, whole.hidden_dim) == (1, 12, 12)
    Wx, R, b, _ = drawn("gru", 2, 3, 3, 4)
    # it casts what it is given, where the package's kernels in CUDA do
    found, _ = flashrnn(Wx, R, b, function="lstm", config=config)
    assert torch.equal(found, flashrnn(*(x.bfloat16() for x in (Wx, R, b)), function="gru")[0])
    config = FlashRNNConfig(function="gru", hidden_dim=12, num_heads=3, backend="vanilla")
    assert torch.equal(flashrnn(Wx, R, b, config=config)[0], flashrnn(Wx, R, b, function="gru")[0])


def test_an_empty_state_whose_m_is_high():
    """What is kept of its zeros is 0, and not inf 0."""
    Wx, R, b, _ = drawn("slstm", 2, 3, 1, 4)
    states = torch.zeros(4, 2, 1, 1, 4)
    states[3] = 1000
    found, _ = flashrnn(Wx, R, b, states, "slstm")
    assert_close(found[:], stepped("slstm", Wx, R, b, states)[0])


def test_initial_values():
    Wx, R, b, _ = drawn("slstm", 2, 3, 1, 4)
    options = {"function": "slstm", "head_dim": 4, "dtype": "float32"}
    for value, filled in ((1.0, [1, 1, 1, 1]), ([0.5, 2, 1, -1], [0.5, 2, 1, -1])):
        states = torch.tensor(filled).view(4, 1, 1, 1, 1).expand(4, 2, 1, 1, 4)
        found = flashrnn(Wx, R, b, config=FlashRNNConfig(**options, initial_val=value))
        assert_close(found[0][0], stepped("slstm", Wx, R, b, states)[0][0])


@pytest.mark.parametrize("function", ["lstm", "slstm"])
def test_the_gradient_through_R_is_cut(function):
    Wx, R, b, states = drawn(function, 2, 4, 1, 3, torch.float64)
    config = FlashRNNConfig(function=function, head_dim=3, dtype="float64", gradient_recurrent_cut=True)
    found, _ = flashrnn(Wx, R, b, states, config=config)
    now, right = tuple(states[:, :, 0]), []
    for t in range(4):
        now = globals()[function](Wx[:, t], torch.einsum("bhp,ghdp->bghd", now[0].detach(), R), b, now)
        right.append(torch.stack(now))
    right = torch.stack(right, 2)
    mask = torch.randn_like(right)
    assert_close(found[:], right, 1e-11)
    grads = [torch.autograd.grad((mask * x).sum(), (Wx, R, b)) for x in (found[:], right)]
    for got, wanted in zip(*grads, strict=True):
        assert_close(got, wanted, 1e-10)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bound):
        ctx.bound = bound
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx.clamp(-ctx.bound, ctx.bound), None


def test_the_gradient_through_R_is_clipped():
    Wx, R, b, states = drawn("lstm", 2, 4, 1, 3, torch.float64)
    options = {"head_dim": 3, "dtype": "float64"}
    config = FlashRNNConfig(**options, gradient_recurrent_clipval=0.05)
    found, _ = flashrnn(Wx, R, b, states, config=config)
    now, right = tuple(states[:, :, 0]), []
    for t in range(4):
        now = lstm(Wx[:, t], torch.einsum("bhp,ghdp->bghd", Clipped.apply(now[0], 0.05), R), b, now)
        right.append(now[0])
    right = torch.stack(right, 1)
    grads = [torch.autograd.grad((7 * x).sum(), (Wx, R, b), retain_graph=True) for x in (found[0], right)]
    for got, wanted in zip(*grads, strict=True):
        assert_close(got, wanted, 1e-10)
    unclipped = flashrnn(Wx, R, b, states, config=FlashRNNConfig(**options))[0][0]
    assert not torch.allclose(torch.autograd.grad((7 * unclipped).sum(), Wx)[0], grads[0][0])
    with pytest.raises(ValueError, match="gradient_recurrent_clipval: expected None for gradients of states beside h"):
        found[1]
    with torch.no_grad():
        found, _ = flashrnn(Wx, R, b, states, config=config)
    assert_close(found[1], stepped("lstm", Wx, R, b, states)[0][1], 1e-11)


def test_what_is_not_served():
    Wx, R, b, states = (x.detach() for x in drawn("lstm", 2, 3, 1, 4))
    small = torch.full((4, 2, 1, 1, 4), 0.5)
    empty = small.clone()
    empty[2] = 0
    for wrong, message in (
        ({"function": "mlstm"}, "function: expected one of 'lstm', 'gru', 'elman', 'slstm'; got 'mlstm'"),
        ({"backend": "cudnn"}, "backend: expected one of 'vanilla', .*; got 'cudnn'"),
        ({"dtype": "int8"}, "dtype: expected one of 'bfloat16', .*; got 'int8'"),
        ({"states": states[:1]}, r"states: expected shape \[states=2, B=2, 1=1, H=1, D=4\]; got \[1, 2, 1, 1, 4\]"),
        ({"states": states[:, :, 0]}, r"states: expected shape .*; got \[2, 2, 1, 4\]"),
        ({"function": "slstm", "states": empty}, r"states: expected c of slstm .*; got n = \[\], c = \[0.5\]"),
        ({"function": "slstm", "states": small}, r"states: expected c of slstm .*; got n = \[0.5\], c = \[\]"),
        ({"function": "gru"}, r"Wx: expected shape \[B, T, input_gates=3, H, D\]; got \[2, 3, 4, 1, 4\]"),
        ({"config": {"function": "lstm"}}, "config: expected a FlashRNNConfig of holdfast.integrations; got dict"),
        (
            {"config": FlashRNNConfig(head_dim=8, dtype="float32")},
            r"config: expected .* of Wx, \[1, 4\]; got num_heads",
        ),
        (
            {"config": FlashRNNConfig(head_dim=4, dtype="float32", initial_val=[1.0])},
            "initial_val: .* each of 2 states",
        ),
        ({"clip": 1.0}, "unexpected keyword argument 'clip'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            flashrnn(Wx, R, b, **wrong)
    with pytest.raises(TypeError, match="b: expected a tensor"):
        flashrnn(Wx, R, None)
    with pytest.raises(TypeError, match=r"R: expected torch\.float32, as the other inputs have; got torch\.float64"):
        flashrnn(Wx, R.double(), b)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"forward_clipval": 1.0}, "forward_clipval: expected None"),
        ({"constants": {"a": 1.0}}, "constants: expected none"),
        ({"function": "gru", "gradient_recurrent_clipval": 1.0}, "gradient_recurrent_clipval: .* function='gru'"),
        ({"input_shape": "BTHD"}, "input_shape: expected the letters BTGHD in some order; got 'BTHD'"),
        ({"output_shape": "BSTHD"}, "output_shape: expected S first; got 'BSTHD'"),
        ({"dtype_s": "int4"}, "dtype_s: expected one of 'bfloat16'"),
    ],
)
def test_configs_that_are_not_served(wrong, message):
    with pytest.raises(ValueError, match=message):
        FlashRNNConfig(head_dim=4, **wrong)


def test_in_the_package_s_place(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashrnn", package)
    found = import_module("flashrnn")
    assert (found.flashrnn, found.FlashRNNConfig) == (flashrnn, FlashRNNConfig)
