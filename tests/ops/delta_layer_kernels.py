"""The op between a delta layer's projections with its Triton kernels, against float64."""

from contextlib import contextmanager
from unittest.mock import patch

import torch

from holdfast.kernels.conv.triton.backend import TritonConv
from holdfast.kernels.norm.triton.backend import TritonGatedNorm
from holdfast.ops import delta_inputs, delta_layer
from kernels.conv.triton.parity import plan as conv_plan
from kernels.norm.triton.parity import plan as norm_plan
from ops.delta_layers import example, fused, values_and_grads
from parity import relative_error


@contextmanager
def on_triton():
    """Every kernel around the delta rule is Triton's, with plans that cut small calls into several tiles."""
    conv, norm = (TritonConv(), conv_plan()), (TritonGatedNorm(), norm_plan())
    with (
        patch.object(delta_layer, "select_conv", lambda *_: conv),
        patch.object(delta_layer, "select_norm", lambda *_: norm),
        patch.object(delta_inputs, "can_fuse", lambda *_: True),
    ):
        yield


def check(draws, **sizes):
    """At most twice the error of PyTorch's form in the same dtypes, over some draws.

    In one alone a short key, whose gradient is large, decides which of the two is nearer.
    """
    errors = {}
    for seed in range(draws):
        tensors, rest = example(**sizes, seed=seed)
        exact = values_and_grads(fused, tensors, rest, dtype=torch.float64)
        theirs = values_and_grads(fused, tensors, rest)
        with on_triton():
            got = values_and_grads(fused, tensors, rest)
        for name, x in exact.items():
            assert got[name].dtype == theirs[name].dtype, name
            pair = [relative_error(found[name].double(), x) for found in (got, theirs)]
            errors.setdefault(name, []).append(pair)
    for name, pairs in errors.items():
        mine, by_torch = torch.tensor(pairs).square().mean(0).sqrt().tolist()
        assert mine <= max(2 * by_torch, 1e-6), (sizes, name, mine, by_torch)


def uninitialised():
    """Memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)


def interpreted():
    """What the interpreter has time for."""
    uninitialised()
    check(12, dtype=torch.float32)
    print("all checked")


FURTHER = {
    "half": {"dtype": torch.float16, "K": 12, "V": 9, "Hq": 3, "H": 3, "W": 2, "rest": 13, "T": 26},
    "not gated": {"dtype": torch.float32, "gated": False, "state": False, "rest": 0},
    "packed": {"dtype": torch.float32, "lengths": (5, 1, 0, 27), "W": 3},
}


def further(which):
    """Odd sizes in half precision, a layer without gates, packed sequences."""
    uninitialised()
    check(3, **FURTHER[which])
    print("all checked")
