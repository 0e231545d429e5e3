"""Which calls the kernels around the recurrences take, told of tensors of a GPU that need not be here."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.ops import gla_layer, mlstm_gates, rotary, soft_cap
from holdfast.ops.mlstm_gates import can_fuse


@pytest.fixture
def gpu(monkeypatch):
    """Asks _serves of a GPU of a capability, by CUDA's build of PyTorch with Triton unless told otherwise."""

    def of(capability, cuda="12.8", triton=True):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(mlstm_gates, "find_spec", lambda name: object() if triton and name == "triton" else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        return mlstm_gates._serves(0)

    return of


def there(dtype=torch.bfloat16, shape=(2, 5, 4), is_cuda=True):
    return SimpleNamespace(
        is_cuda=is_cuda, dtype=dtype, shape=shape, device=SimpleNamespace(index=0), dim=lambda: len(shape)
    )


def test_gpus_that_serve(gpu):
    assert [gpu(capability) for capability in ((7, 5), (8, 0), (8, 6), (9, 0))] == [False, True, True, True]
    assert not gpu((9, 0), cuda=None)
    assert not gpu((9, 0), triton=False)


def test_calls_that_are_fused(monkeypatch):
    monkeypatch.setattr(mlstm_gates, "_serves", lambda index: index == 0)
    x, wide = there(), torch.float32
    assert can_fuse(x, x, wide)
    assert can_fuse(there(shape=(65535, 1, 1)), x, wide)
    assert not can_fuse(there(shape=(65536, 1, 1)), x, wide)
    assert not can_fuse(there(is_cuda=False), x, wide)
    assert not can_fuse(x, x, torch.float64)
    assert not can_fuse(x, there(torch.float64), wide)
    assert not can_fuse(there(torch.float64), x, wide)


def test_what_parts_of_layers_ask_beside(monkeypatch):
    """One dtype of queries and keys, a tensor with an axis, and rows that a block of the decay's kernel holds."""
    monkeypatch.setattr(mlstm_gates, "_serves", lambda index: True)
    x = there()
    assert rotary._fuses(x, x)
    assert not rotary._fuses(x, there(torch.float16))
    assert soft_cap._fuses(x)
    assert not soft_cap._fuses(there(shape=()))
    kinds = [type(gla_layer._gate_of(there(shape=(2, 5, gla_layer.WIDEST + more)))).__name__ for more in (0, 1)]
    assert kinds == ["TritonLogGate", "PyTorchLogGate"]
