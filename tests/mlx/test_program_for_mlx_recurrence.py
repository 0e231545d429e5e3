"""A program written for mlx-recurrence 0.3.0 runs here after changing its imports alone."""

import inspect
from pathlib import Path

import mlx.core as mx
import pytest

import holdfast.mlx as hm
from mlx_support import oracle

PROGRAM = Path(oracle.__file__).with_name("written_for_mlx_recurrence.py")

# names and parameters of the package's public functions, from its documentation; `=` marks one with a default
SIGNATURES = {
    "ssd_scan": "u delta B C A_neg seg=",
    "ssd_scan_with_state": "u delta B C A_neg seg=",
    "ssd_scan_reference": "u delta B C A_neg",
    "gla_scan": "q k v gates seg=",
    "gla_scan_with_state": "q k v gates seg=",
    "gla_scan_reference": "q k v gates",
    "rglru_scan": "a x seg=",
    "rglru_scan_with_state": "a x seg=",
    "rglru_scan_reference": "a x",
    "rotlru_scan": "a cs sn x seg=",
    "rotlru_scan_with_state": "a cs sn x seg=",
    "rotlru_scan_reference": "a cs sn x",
    "selective_scan_metal": "u delta B_in C_in A_neg",
    "selective_scan_chunked": "u delta B_in C_in A_neg chunk_size=",
    "gla_scan_metal": "q k v gates",
    "gla_scan_chunked": "q k v gates chunk_size=",
    "get_or_build_kernel": "name input_names output_names source header=",
    "check_segment_shape": "L seg lane_dim lane_name=",
    "parity_check": "kernel_fn reference_fn inputs arg_names grad_argnums w_out= y_tol= grad_rtol= label= verbose=",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_begin_as_its_own(name):
    parameters = list(inspect.signature(getattr(hm, name)).parameters.values())
    words = [p.name + ("" if p.default is p.empty else "=") for p in parameters]
    asked = SIGNATURES[name].split()
    assert words[: len(asked)] == asked
    # what is added has a default
    assert all(word.endswith("=") for word in words[len(asked) :])


def test_defaults_are_its_own():
    assert hm.DEFAULT_SEG == 32
    for name, asked in SIGNATURES.items():
        parameters = inspect.signature(getattr(hm, name)).parameters
        if "seg=" in asked:
            assert parameters["seg"].default == 32
        if "chunk_size=" in asked:
            assert parameters["chunk_size"].default == 32


@pytest.mark.parametrize("path", ["metal", "mlx"])
def test_the_program_runs(request, path):
    if path == "metal":
        request.getfixturevalue("metal")
    text = PROGRAM.read_text()
    assert text.count("mlx_recurrence") == text.count("from mlx_recurrence") == 3
    space = {"__name__": "program"}
    exec(compile(text.replace("from mlx_recurrence", "from holdfast.mlx"), str(PROGRAM), "exec"), space)
    found = space["main"]()
    assert found["ssd parity"] is True
    assert found["gla parity"] is True
    assert found["gla report"] == ["grad_gates", "grad_k", "grad_q", "grad_v", "y"]
    assert found["ssd"].shape == (2, 64, 2, 32)
    assert found["ssd state"].shape == (2, 2, 32, 16)
    assert found["gla state"].shape == (2, 2, 32, 32)
    assert found["rglru state"].shape == found["rotlru state"].shape == (2, 32)
    same = {"old gla": "gla", "chunked gla": "gla", "rotlru": "rotlru reference", "selective": "selective chunked"}
    for name, other in same.items():
        assert mx.allclose(found[name], found[other], rtol=1e-4, atol=1e-4)
    assert mx.allclose(found["older gla"], 2 * found["gla"], rtol=1e-4, atol=1e-4)
    assert mx.abs(found["rglru from its module"]).max().item() < 1e-5
    assert mx.array_equal(found["rglru"][:, -1], found["rglru state"])
    assert mx.abs(found["theta"]).max().item() > 0
    assert found["losses"][-1] < 0.8 * found["losses"][0]
