"""The short convolution against torch's, and its tail."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.nn.short_convolution import ShortConvolution
from parity import assert_close, relative_error, values_and_grads


def make(width=4, bias=True, dtype=torch.float64):
    return ShortConvolution(6, width, bias).to(dtype)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("length", [1, 2, 20])
def test_equals_a_padded_depthwise_convolution(width, bias, length):
    conv = make(width, bias)

    def by_torch(a):
        padded = F.pad(a["x"].mT, (width - 1, 0))
        return F.silu(F.conv1d(padded, a["weight"][:, None], a.get("bias"), groups=6)).mT

    def mine(a):
        parameters = {key: value for key, value in a.items() if key != "x"}
        return torch.func.functional_call(conv, parameters, (a["x"],))[0]

    arguments = {"x": torch.randn(3, length, 6, dtype=torch.float64), **dict(conv.named_parameters())}
    assert_close(values_and_grads(mine, arguments), values_and_grads(by_torch, arguments), 1e-12)


def test_the_tail_holds_the_last_inputs():
    conv, x = make(), torch.randn(2, 7, 6, dtype=torch.float64)
    assert torch.equal(conv(x)[1], x[:, 4:])
    _, tail = conv(x[:, :2])
    assert torch.equal(tail, torch.cat([torch.zeros(2, 1, 6), x[:, :2]], 1))
    assert torch.equal(conv(x[:, 2:3], tail)[1], x[:, :3])
    assert torch.equal(conv(x[:, :0], tail)[1], tail)


def test_a_tail_owns_its_memory():
    _, tail = make()(torch.randn(2, 500, 6, dtype=torch.float64))
    assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()


def test_a_tail_survives_bfloat16():
    conv, x = make(dtype=torch.bfloat16), torch.randn(2, 12, 6).bfloat16()
    whole, _ = conv(x)
    first, tail = conv(x[:, :5])
    assert tail.dtype == torch.float32
    second, _ = conv(x[:, 5:], tail)
    assert torch.equal(torch.cat([first, second], 1), whole)


@pytest.mark.parametrize("lengths", [(5, 1, 0, 2, 9), (1,), (0, 1), (0,), (3, 0)])
def test_packed_sequences_equal_separate_calls(lengths):
    conv = make()
    sequences = len(lengths)

    def packed(a):
        return conv(a["x"], a["tail"], torch.tensor((0, *lengths)).cumsum(0))

    def separate(a):
        parts = enumerate(a["x"].split(lengths, 1))
        outputs = [conv(part, a["tail"][n : n + 1]) for n, part in parts]
        return torch.cat([y for y, _ in outputs], 1), torch.cat([tail for _, tail in outputs])

    arguments = {
        "x": torch.randn(1, sum(lengths), 6, dtype=torch.float64),
        "tail": torch.randn(sequences, 3, 6, dtype=torch.float64),
    }
    assert_close(values_and_grads(packed, arguments), values_and_grads(separate, arguments), 1e-12)


def test_decoding_agrees_in_half_precision():
    conv, x = make(dtype=torch.bfloat16), torch.randn(2, 9, 6).bfloat16()
    whole, _ = conv(x)
    tail, outputs = None, []
    for token in x.split(1, 1):
        y, tail = conv(token, tail)
        outputs.append(y)
    assert relative_error(torch.cat(outputs, 1).double(), whole.double()) <= 2**-7


@pytest.mark.parametrize(("channels", "width", "name"), [(0, 4, "channels"), (6, 0, "width"), (6, 2.0, "width")])
def test_sizes_are_positive_integers(channels, width, name):
    with pytest.raises(ValueError, match=f"{name}: expected a positive integer; got"):
        ShortConvolution(channels, width)
