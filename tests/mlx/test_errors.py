"""Bad input is refused by name, with what was expected and what came, before anything is launched."""

import re

import mlx.core as mx
import numpy as np
import pytest

import holdfast.mlx as hm
from mlx_support.cases import SCANS

z = mx.zeros
B, L, H, K, V, G, D = 2, 5, 4, 3, 6, 2, 8


def gla(**changes):
    given = {"q": z((B, L, H, K)), "k": z((B, L, H, K)), "v": z((B, L, H, V)), "gates": z((B, L, H))}
    return lambda: hm.gla_scan(**(given | changes))


def ssd(**changes):
    given = {
        "u": z((B, L, H, V)),
        "delta": z((B, L, H)),
        "B": z((B, L, G, K)),
        "C": z((B, L, G, K)),
        "A_neg": z((H, K)),
    }
    return lambda: hm.ssd_scan(**(given | changes))


def rglru(**changes):
    return lambda: hm.rglru_scan(**({"a": z((B, L, D)), "x": z((B, L, D))} | changes))


def rotlru(**changes):
    pairs = {name: z((B, L, D // 2)) for name in ("a", "cs", "sn")}
    return lambda: hm.rotlru_scan(**(pairs | {"x": z((B, L, D))} | changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (rglru(x=z((B, L, D + 1))), "x: expected shape [B=2, L=5, D=8]; got [2, 5, 9]"),
        (rglru(a=z((B, D))), "a: expected shape [B, L, D]; got [2, 8]"),
        (rglru(initial_state=z((B, D, 1))), "initial_state: expected shape [2, 8]; got [2, 8, 1]"),
        (rglru(seg=0), "seg: expected at least 1; got 0"),
        (rglru(backend="vulkan"), "backend: expected one of metal, cuda, mlx, or None; got 'vulkan'"),
        (rglru(a=z((B, L, 0)), x=z((B, L, 0))), "a: expected D of at least 1; got shape [2, 5, 0]"),
        (rotlru(x=z((B, L, D + 1))), "x: expected 8 channels, two for each of a's 4; got 9"),
        (rotlru(cs=z((B, L, D))), "cs: expected shape [B=2, L=5, P=4]; got [2, 5, 8]"),
        (gla(k=z((B, L, H, K + 1))), "k: expected shape [B=2, L=5, H=4, K=3]; got [2, 5, 4, 4]"),
        (gla(v=z((B, L + 1, H, V))), "v: expected shape [B=2, L=5, H=4, V]; got [2, 6, 4, 6]"),
        (gla(gates=z((B, L, H, V))), "gates: expected shape [B=2, L=5, H=4, K=3]; got [2, 5, 4, 6]"),
        (gla(gates=z((B, L))), "gates: expected shape [B=2, L=5, H=4, K=3]; got [2, 5]"),
        (gla(initial_state=z((B, H, V, K))), "initial_state: expected shape [2, 4, 3, 6]; got [2, 4, 6, 3]"),
        (ssd(C=z((B, L, H, K))), "C: expected shape [B=2, L=5, G=2, N=3]; got [2, 5, 4, 3]"),
        (ssd(B=z((B, L, 3, K)), C=z((B, L, 3, K))), "B: expected a divisor of the number of heads = 4; got 3"),
        (ssd(A_neg=z((H,))), "A_neg: expected shape [H=4, N=3]; got [4]"),
        (ssd(delta=z((B, L, H, 1))), "delta: expected shape [B=2, L=5, H=4]; got [2, 5, 4, 1]"),
        (lambda: hm.gla_scan_chunked(z((1, 2, 1, 3)), z((1, 2, 1, 3)), z((1, 2, 1, 3)), z((1, 2, 1)), 0),
         "chunk_size: expected at least 1; got 0"),
        (lambda: hm.selective_scan_metal(z((1, 2, 3)), z((1, 2, 3)), z((1, 2, 4)), z((1, 2, 4)), z((4, 3))),
         "A_neg: expected shape [D=3, N=4]; got [4, 3]"),
        (lambda: hm.gla_scan_metal(z((1, 2, 1, 3)), z((1, 2, 1, 3)), z((1, 2, 1, 3)), z((1, 2, 1, 3))),
         "gates: expected shape [B=1, L=2, H=1]; got [1, 2, 1, 3]"),
        (lambda: hm.rglru_step(z((2, 3)), z((2, 3)), z((3, 2))), "state: expected shape [2, 3]; got [3, 2]"),
        (lambda: hm.check_segment_shape(33, 32, 64), "L: expected a multiple of seg = 32; got 33"),
        (lambda: hm.check_segment_shape(64, 32, 48, "D"),
         "D: expected a multiple of 32, the lanes of a simdgroup; got 48"),
    ],
)  # fmt: skip
def test_a_wrong_value(metal, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
    assert metal.launches == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (rglru(a=np.zeros((B, L, D), np.float32)), "a: expected an mlx array; got ndarray"),
        (rglru(x=z((B, L, D), mx.int32)), "x: expected float32, bfloat16 or float16; got int32"),
        (rglru(initial_state=z((B, D), mx.bfloat16)), "initial_state: expected float32; got bfloat16"),
        (rglru(initial_state=0.0), "initial_state: expected an mlx array; got float"),
        (rglru(seg=32.0), "seg: expected an int; got float"),
        (gla(gates=0.9), "gates: expected an mlx array; got float"),
    ],
)
def test_a_wrong_type(metal, call, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        call()
    assert metal.launches == []


def test_a_misspelt_argument_is_refused():
    with pytest.raises(TypeError, match="inital_state"):
        hm.rglru_scan(z((1, 2, 3)), z((1, 2, 3)), inital_state=z((1, 3)))


@pytest.mark.skipif(mx.metal.is_available(), reason="for machines without Metal; this one has it")
@pytest.mark.parametrize("name", SCANS)
def test_metal_is_not_replaced_in_silence(name):
    case = SCANS[name](B=1, L=2)
    with pytest.raises(ValueError, match="backend: 'metal' cannot run: mlx has no Metal device here"):
        case.scan(*case.inputs, backend="metal")
    assert hm.choose_path() == "mlx"
