"""causal_conv1d's kernels without a GPU: right in the interpreter, and compiled for GPUs that are not here."""

import re

import pytest
import torch

from holdfast.kernels.conv.triton.backend import REDUCED_ROWS, WARPS, TritonConv, _rows
from holdfast.planner import Device, Problem
from holdfast.planner.models.conv import triton as model

pytest.importorskip("triton")
from holdfast.kernels.conv.triton.backward import conv_bwd, conv_sums
from holdfast.kernels.conv.triton.forward import conv_fwd
from holdfast.kernels.conv.triton.update import conv_update
from interpreted import interpret
from triton_compile import TARGETS, compile_for, over_targets


def test_interpreted():
    assert "all checked" in interpret("kernels.conv.triton.parity", "interpreted", seconds=300)


def test_no_sequence_sees_another():
    assert "none leaks" in interpret("kernels.conv.triton.parity", "apart", seconds=300)


def problem(dtype="bfloat16", traits=("bias",), **sizes):
    sizes = {"B": 8, "T": 2048, "D": 2304, "W": 4} | sizes
    return Problem.of("causal_conv1d", "conv", dtype, sizes, dict.fromkeys(traits, True))


# of a layer: 6 heads of 128, or 4 of 192
HEADS = {"H": 12, "K": 128}, {"H": 8, "K": 192, "D": 3072}
# of 8 bytes or 16: of each token that is read ahead, and of what is written
LOADS, STORES = (re.compile(rf"{way}\.global\.v[24]\.b32") for way in ("ld", "st"))
STATES = ("initial", "final", "dfinal", "dinitial", "parts")


def given(kernel, dtype, more, absent=()):
    """Arguments of a kernel by name: pointers of x's dtype, weights in float32."""
    narrow = dict.fromkeys(("x", "y", "dy", "dk", "dv", "dx"), dtype)
    wide = dict.fromkeys(("weight", "bias", *STATES, "dweight", "dbias", "state"), torch.float32)
    made = narrow | wide | {"bounds": torch.int32} | dict.fromkeys(absent) | more
    return {name: made.get(name, 4096) for name in kernel.arg_names}


@pytest.mark.sizes("whole", "dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("whole", "capability"), over_targets(True, False))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_compiles_for_gpus_that_are_not_here(direction, whole, dtype, capability):
    """whole: packed, with states and a bias; otherwise what a layer in training takes."""
    made, steps = compiled(
        direction, dtype, capability, ("dk", "dv") if whole else ("dk", "dv", *STATES[:4], "bias", "bounds")
    )
    if not whole:
        assert made.stack == 0
    assert len(LOADS.findall(made.ptx)) >= steps


def compiled(direction, dtype, capability, absent, **heads):
    """The kernel with the best plan for an H200, and the tokens that it reads ahead. heads: sizes of a layer's."""
    kernel = conv_fwd if direction == "forward" else conv_bwd
    what = problem(str(dtype).removeprefix("torch."), ("heads",) if heads else (), **heads)
    chosen = model.candidates(what, Device.named("h200"), direction)[0].plan
    constants = {name.upper(): number for name, number in chosen.values if name != "warps"} | {"SILU": True, "W": 4}
    constants |= {"K": heads.get("K", 0)}
    made = compile_for(kernel, capability, given(kernel, dtype, constants, absent), num_warps=chosen["warps"])
    return made, chosen["steps"]


@pytest.mark.sizes("heads", "dtype")
@pytest.mark.parametrize(("heads", "capability"), over_targets(*HEADS), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_layers_compiles_for_gpus_that_are_not_here(direction, dtype, heads, capability):
    made, steps = compiled(direction, dtype, capability, (*STATES[:4], "bias", "bounds"), **heads)
    assert made.stack == 0
    assert len(LOADS.findall(made.ptx)) >= steps
    # y and the gradient of x, part of a packed tensor, are written as they are read
    assert STORES.search(made.ptx)


@pytest.mark.parametrize("capability", TARGETS)
def test_the_small_kernels_compile(capability):
    constants = {"W": 4, "BLOCK": model.REDUCED, "ROWS": REDUCED_ROWS}
    assert compile_for(conv_sums, capability, given(conv_sums, None, constants), num_warps=WARPS).stack == 0
    for slots, is_each in ((None, False), (torch.int32, False), (torch.int32, True)):
        constants = {"SILU": True, "W": 4, "BLOCK": 256, "EACH": is_each}
        arguments = given(conv_update, torch.bfloat16, constants)
        arguments |= {"read": slots, "write": slots, "accepted": None if is_each else slots}
        assert compile_for(conv_update, capability, arguments, num_warps=WARPS).stack == 0


@pytest.mark.parametrize("device", ["h200", "a100", "rtx3090"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("D", "W"), [(1, 1), (64, 4), (8192, 16)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_shape_has_a_plan(device, dtype, D, W, direction):
    for sizes in ({"T": 0}, {"T": 1}, {"T": 4095}, {"B": 1, "T": 4095, "N": 7}):
        what = problem(dtype, ("varlen",) if "N" in sizes else (), D=D, W=W, **sizes)
        assert TritonConv().reject(what, Device.named(device)) is None
        assert model.candidates(what, Device.named(device), direction)


def test_what_it_cannot_serve_is_said():
    assert "16 taps at most; got 17" in TritonConv().reject(problem(W=17), Device.named("h200"))
    assert "channels at most" in TritonConv().reject(problem(D=2**20 + 1), Device.named("h200"))
    assert "float64" in TritonConv().reject(problem("float64"), Device.named("h200"))
    assert "NVIDIA GPU" in TritonConv().reject(problem(), Device.named("cpu"))


@pytest.mark.parametrize(
    ("strides", "is_copied"),
    [
        ((2**30, 24, 1), False),
        # tokens so far apart that offsets inside a tile pass 32 bits, and channels that are not side by side
        ((8, model.MOST_CHANNELS, 1), True),
        ((8, model.MOST_CHANNELS - 1, 1), False),
        ((1024, 8, 2), True),
    ],
)
def test_views_are_read_where_they_lie_if_offsets_fit(strides, is_copied):
    x = torch.empty_strided((2, 3, 8), strides, device="meta")
    assert (_rows(x) is not x) == is_copied
    assert _rows(x).stride(2) == 1
