"""Model FLOPs by hand, beside those that PyTorch counts, and the peak that they are held against."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from holdfast.cli.config import FLASHRNN_165M, MIXERS, LanguageModelConfig
from holdfast.cli.flops import flops_per_token, peak_rate
from holdfast.cli.language_model import LanguageModel, next_token_loss
from holdfast.planner.device import Device

# of width 32 with 2 heads: weights of a mixer that a token is multiplied with, and multiply-adds with its state
# fmt: off
BY_HAND = {
    # q, k, v, z and out; decays by 16 channels; keys of 8, values of 16
    "gla": (32 * (16 + 16 + 32 + 32 + 16) + 16 * 16 + 32 * 32, 2 * 2 * 8 * 16),
    # values twice as wide
    "retnet": (32 * (32 + 32 + 64 + 64) + 64 * 32, 2 * 2 * 16 * 32),
    # u and z of 64, B and C of 128, two steps, to 16 rows rounded up; a convolution of 4
    "mamba2": (32 * (64 + 64 + 128 + 128 + 16) + 4 * (64 + 256) + 64 * 32, 2 * 2 * 128 * 32),
    # as gla, with two gates a head, rounded up; the normaliser is a column
    "mlstm": (32 * (16 + 16 + 32 + 32 + 16) + 32 * 32, 2 * 2 * 8 * 17),
    # q, two of k, of v (twice as wide) and of write strengths, gate and decay, rounded up; out, a convolution of 4
    "gated-deltaproduct": (
        32 * (32 + 64 + 128 + 64 + 4 + 2 + 10) + 64 * 32 + 4 * (32 + 64 + 128),
        5 * 2 * 16 * 32,
    ),
    # q, k, v, decay and gate at 16 channels, two write strengths, rounded up; both gates, out, a convolution of 4
    "kda": (32 * (3 * 32 + 2 * 16 + 2 + 14) + 2 * 16 * 32 + 32 * 32 + 4 * 3 * 32, 3 * 2 * 16 * 16),
    # r, k, v and out; decay, rate and gate at 32 channels; two writes, what the first one writes is read before
    "rwkv7": (4 * 32 * 32 + 3 * 2 * 32 * 32, 4 * 2 * 16 * 16),
    "lstm": (4 * 32 * 32 + 4 * 2 * 16 * 16, 0),
    "slstm": (4 * 32 * 32 + 4 * 2 * 16 * 16 + 32 * 32, 0),
    "gru": (3 * 32 * 32 + 3 * 2 * 16 * 16, 0),
    "elman": (32 * 32 + 2 * 16 * 16, 0),
    # of 24 tokens a token sees 12.5 on average, in two products
    "attention": (4 * 32 * 32, 2 * 32 * 12.5),
}
# fmt: on


@pytest.mark.parametrize("mixer", BY_HAND)
def test_a_model_by_hand(mixer):
    weights, state = BY_HAND[mixer]
    mlp, vocabulary = 3 * 32 * 96, 40 * 32
    for tie in (True, False):
        model = LanguageModel(mixer, 3, 32, 2, 40, tie)
        # the embedding is looked up; the head is a product, whoever's weights it has
        assert flops_per_token(model, 24) == 6 * (3 * (weights + state + mlp) + vocabulary)


def test_delta_rules_read_the_state_twice():
    one, other = (LanguageModel("deltanet", 1, 32, 2), LanguageModel("gated-deltanet", 1, 32, 2))
    for model, state in ((one, 3 * 2 * 16 * 16), (other, 3 * 2 * 16 * 32)):
        mixer = model.blocks[0].mixer
        products = [mixer.in_proj.weight, mixer.conv.weight, mixer.out_proj.weight]
        expected = sum(x.numel() for x in products) + state + 3 * 32 * 96 + 256 * 32
        assert flops_per_token(model, 9) == 6 * expected


@pytest.mark.parametrize("tie", [True, False])
def test_as_many_products_as_pytorch_counts(tie):
    """Of both passes; of attention's own two, without the mask, PyTorch's count is made apart."""
    model, tokens = LanguageModel("attention", 2, 32, 2, 40, tie), torch.randint(40, (3, 9))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        next_token_loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
    products = counted.get_flop_counts()["Global"]
    batched = sum(count for op, count in products.items() if "bmm" in str(op))
    attention = 6 * 2 * 32 * (8 + 1) * 3 * 8
    assert sum(products.values()) - batched == flops_per_token(model, 8) * 3 * 8 - attention
    # all pairs of tokens, of which the mask leaves (T + 1) / 2T; recomputed in no pass
    assert batched * 9 / 16 == attention


def test_a_model_of_the_flashrnn_paper_is_near_six_flops_a_weight():
    config = LanguageModelConfig().changed(FLASHRNN_165M)
    for mixer in MIXERS:
        with torch.device("meta"):
            model = LanguageModel(mixer, config.layers, config.width, config.heads, config.vocabulary, config.tie)
        weights = sum(x.numel() for x in model.parameters()) - model.embedding.weight.numel()
        assert 0.99 < flops_per_token(model, config.length) / (6 * weights) < 1.15, mixer


def test_the_peak_is_the_vendors_or_unknown(monkeypatch):
    h200 = Device.named("h200")
    gpu = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    cuda = torch.device("cuda", 0)
    assert (peak_rate(cuda, "bfloat16"), peak_rate(cuda, "float32")) == (h200.tensor_rate, h200.fp32_rate)
    assert peak_rate(torch.device("cpu"), "bfloat16") is None
    with monkeypatch.context() as patched:
        # TF32
        patched.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        assert (peak_rate(cuda, "bfloat16"), peak_rate(cuda, "float32")) == (h200.tensor_rate, None)
    for name, sms in (
        ("NVIDIA H200 MIG 1g.18gb", 16),
        ("NVIDIA H100 NVL", 132),
        ("NVIDIA RTX A4000", 48),
        ("GPU", 132),
    ):
        gpu.name, gpu.multi_processor_count = name, sms
        assert peak_rate(cuda, "bfloat16") is None
