"""Bad input is named before anything runs: the argument, what was expected, what came."""

import pytest
import torch

import holdfast
from holdfast.ops import check


def qkv(**changes):
    arguments = {name: torch.randn(2, 5, 4, 8) for name in ("q", "k", "v")}
    return arguments | {"g": -torch.rand(2, 5, 4)} | changes


def state(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.randn(5, 4, 8)}, ValueError, r"q: expected shape \[B, T, Hq, K\]; got \[5, 4, 8\]"),
        ({"q": torch.tensor(1.0)}, ValueError, r"q: expected shape \[B, T, Hq, K\]; got \[\]"),
        ({"q": [1, 2]}, TypeError, r"q: expected a tensor; got list"),
        ({"v": None}, TypeError, r"v: expected a tensor \[B, T, H, V\]; got None"),
        ({"k": torch.randn(2, 5, 4, 7)}, ValueError, r"k: expected shape \[B=2, T=5, Hq=4, K=8\]; got \[2, 5, 4, 7\]"),
        ({"k": torch.randn(2, 5, 2, 8)}, ValueError, r"k: expected shape .*Hq=4.*; got \[2, 5, 2, 8\]"),
        ({"v": torch.randn(2, 6, 4, 8)}, ValueError, r"v: expected shape \[B=2, T=5, H, V\]; got \[2, 6, 4, 8\]"),
        ({"v": torch.randn(2, 5, 6, 8)}, ValueError, r"v: expected Hq to divide H; got Hq = 4, H = 6"),
        ({"v": torch.randn(2, 5, 0, 8)}, ValueError, r"v: expected H > 0"),
        ({"q": torch.randn(2, 5, 0, 8)}, ValueError, r"q: expected Hq > 0"),
        ({"q": torch.randn(2, 5, 4, 0)}, ValueError, r"q: expected K > 0"),
        ({"g": -torch.rand(2, 5)}, ValueError, r"g: expected shape \[B=2, T=5, H=4\] or \[H=4\]; got \[2, 5\]"),
        (
            {"g": torch.ones(2, 5, 4, dtype=torch.int64)},
            TypeError,
            r"g: expected a floating-point dtype; got torch.int64",
        ),
        ({"v": torch.randn(2, 5, 4, 8).double()}, TypeError, r"v: expected torch.float32, as the other inputs"),
        ({"q": torch.ones(2, 5, 4, 8, dtype=torch.int32)}, TypeError, r"q: expected .*; got torch.int32"),
        (
            {"initial_state": state(2, 4, 8, 7)},
            ValueError,
            r"initial_state: expected shape \[sequences=2, H=4, K=8, V=8\]",
        ),
        (
            {"initial_state": state(3, 4, 8, 8)},
            ValueError,
            r"initial_state: expected shape \[sequences=2.*got \[3, 4, 8, 8\]",
        ),
        (
            {"initial_state": state(2, 4, 8, 8, dtype=torch.bfloat16)},
            TypeError,
            r"initial_state: expected torch.float32; got torch.bfloat16",
        ),
        ({"v": torch.randn(2, 5, 4, 8, device="meta")}, ValueError, r"v: expected device cpu.*; got meta"),
        (
            {"backend": "fast"},
            ValueError,
            r"backend: expected one of 'hopper', 'decode', 'triton', 'chunked', 'reference' for simple_gla; got 'fast'",
        ),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"cu_seqlens: expected packed inputs with B = 1; got B = 2"),
        ({"cu_seqlens": [0, 5]}, TypeError, r"cu_seqlens: expected a tensor; got list"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, r"cu_seqlens: expected torch.int32 or torch.int64"),
        ({"cu_seqlens": torch.tensor([[0, 5]])}, ValueError, r"cu_seqlens: expected shape \[sequences \+ 1\]"),
    ],
)
def test_bad_argument(changes, error, message):
    with pytest.raises(error, match=message):
        holdfast.simple_gla(**qkv(**changes))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 4, 12], r"cu_seqlens: expected offsets from 0 to T = 5; got 0 to 12"),
        ([0, 3], r"cu_seqlens: expected offsets from 0 to T = 5; got 0 to 3"),
        ([1, 5], r"cu_seqlens: expected offsets from 0 to T = 5; got 1 to 5"),
        ([0, 4, 3, 5], r"cu_seqlens: expected offsets that do not decrease; got 4 then 3 at 2"),
    ],
)
def test_bad_offsets(offsets, message):
    packed = {name: x[:1] for name, x in qkv().items()}
    with pytest.raises(ValueError, match=message):
        holdfast.simple_gla(**packed, cu_seqlens=torch.tensor(offsets))
    gate = packed.pop("g")
    with pytest.raises(ValueError, match=message):
        holdfast.mlstm(**packed, i=gate, f=gate, cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gating": "tanh"}, ValueError, r"gating: expected 'exp' or 'sigmoid'; got 'tanh'"),
        ({"normalize": False}, ValueError, r"normalize: expected True with gating='exp'"),
        ({"initial_state": state(2, 4, 8, 8)}, TypeError, r"initial_state: expected a tuple of 3 tensors; got Tensor"),
        (
            {"initial_state": (state(2, 4, 8, 8), state(2, 4, 7), state(2, 4))},
            ValueError,
            r"initial_state\[1\]: expected shape \[sequences=2, H=4, K=8\]; got \[2, 4, 7\]",
        ),
        ({"i": None}, TypeError, r"i: expected a tensor \[B, T, H\]; got None"),
    ],
)
def test_bad_mlstm_argument(changes, error, message):
    arguments = {name: torch.randn(2, 5, 4, 8) for name in ("q", "k", "v")}
    arguments |= {name: torch.randn(2, 5, 4) for name in ("i", "f")}
    with pytest.raises(error, match=message):
        holdfast.mlstm(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"B": torch.randn(2, 5, 3, 16)}, r"B: expected G to divide H; got G = 3, H = 4"),
        ({"A": -torch.rand(5)}, r"A: expected shape \[H=4\] or \[H=4, N=16\]; got \[5\]"),
        ({"A": -torch.rand(4, 9)}, r"A: expected shape \[H=4\] or \[H=4, N=16\]; got \[4, 9\]"),
        ({"C": torch.randn(2, 5, 2, 8)}, r"C: expected shape \[B=2, T=5, G=2, N=16\]; got \[2, 5, 2, 8\]"),
        ({"D": torch.randn(4, 7)}, r"D: expected shape \[H=4\] or \[H=4, P=8\]; got \[4, 7\]"),
    ],
)
def test_bad_ssd_argument(changes, message):
    arguments = {
        "x": torch.randn(2, 5, 4, 8),
        "dt": torch.rand(2, 5, 4),
        "A": -torch.rand(4),
        "B": torch.randn(2, 5, 2, 16),
        "C": torch.randn(2, 5, 2, 16),
    }
    with pytest.raises(ValueError, match=message):
        holdfast.ssd(**arguments | changes)


def test_lightning_names_a_layer_that_is_not_there():
    q, k, v = (torch.randn(1, 3, 2, 4) for _ in range(3))
    with pytest.raises(ValueError, match=r"layer: expected 0 <= layer < num_layers = 2; got 2"):
        holdfast.lightning(q, k, v, layer=2, num_layers=2)


def test_what_has_passed_is_not_read_while_dynamo_traces(monkeypatch):
    """It would take apart all that is remembered: after a thousand calls a graph took 20 s."""

    class Untouched(dict):
        def __contains__(self, key):
            raise AssertionError("read")

    monkeypatch.setattr(check, "_PASSED", Untouched())
    run = torch.compile(lambda given: holdfast.simple_gla(**given)[0], fullgraph=True, backend="eager")
    assert run(qkv()).shape == (2, 5, 4, 8)
    with pytest.raises(AssertionError, match="read"):
        holdfast.simple_gla(**qkv())
