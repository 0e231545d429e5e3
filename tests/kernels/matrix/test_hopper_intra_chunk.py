"""intra_chunk in Gluon without a Hopper: right on the emulator, compiled without spilling, and what it refuses."""

import pytest
import torch

from holdfast.kernels.matrix.chunked_intra_chunk import ChunkedIntraChunk
from holdfast.kernels.matrix.hopper_intra_chunk import HopperIntraChunk
from holdfast.planner import Device, Plan, Problem
from holdfast.planner.models import intra_chunk_hopper

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux alone")

from gluon_compile import Recorded, compile_launch
from gluon_emulator import Emulated
from kernels.matrix import intra_chunk_parity
from parity import relative_error

CASES = [
    (torch.float16, 2, {"given": "g states gate", "length": 140, "chunk": 128, "keys": 64, "values": 64}),
    (
        torch.bfloat16,
        1,
        {"given": "g states gate", "length": 256, "chunk": 256, "keys": 128, "values": 128, "harsh": True},
    ),
    (torch.float16, 2, {"given": "", "length": 100, "chunk": 64, "keys": 64, "values": 128, "groups": 2}),
    (torch.float16, 1, {"given": "g", "length": 300, "chunk": 512, "keys": 128, "values": 64, "harsh": True}),
    (torch.float16, 2, {"given": "states gate", "length": 200, "chunk": 256, "keys": 64, "values": 64}),
]


@pytest.mark.parametrize(("case", "early"), [*((case, False) for case in CASES), (CASES[0], True)], ids=str)
def test_the_kernel_is_right_on_the_emulator(case, early, monkeypatch):
    from holdfast.kernels.matrix import hopper_intra_chunk_forward as kernels

    dtype, stages, shape = case
    monkeypatch.setattr(kernels, "forward", Emulated(kernels.forward, early))
    call = intra_chunk_parity.call(dtype, **shape)._replace(gate_activation="sigmoid" if early else "silu")
    wide = {name: x.double() for name in intra_chunk_parity.NAMES if (x := getattr(call, name)) is not None}
    right = ChunkedIntraChunk().forward(Plan("chunked", (("chunks", 4),)), call._replace(**wide))
    got = HopperIntraChunk().forward(intra_chunk_parity.hopper(stages), call)
    assert relative_error(got.double(), right) <= intra_chunk_parity.LIMITS[dtype] / 2


@pytest.mark.parametrize(
    ("chunk", "keys", "values", "stages"), [(64, 64, 64, 2), (256, 128, 128, 1), (128, 128, 64, 2)]
)
def test_the_kernel_compiles_without_spilling(chunk, keys, values, stages, monkeypatch):
    from holdfast.kernels.matrix import hopper_intra_chunk_forward as kernels

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, num_warps):
                names = [p.name for p in self.kernel.params if p.is_constexpr]
                given = dict(zip(self.kernel.arg_names, arguments, strict=True))
                raise Recorded(self.kernel, arguments, {name: given[name] for name in names}, num_warps)

            return launch

    monkeypatch.setattr(kernels, "forward", Recorder(kernels.forward))
    call = intra_chunk_parity.call(torch.float16, "g states gate", chunk, chunk, keys=keys, values=values)
    with pytest.raises(Recorded) as launch:
        HopperIntraChunk().forward(intra_chunk_parity.hopper(stages), call)
    made = compile_launch(launch.value)
    assert made.spilled == 0
    assert "C7517" not in made.notes
    assert int(made.notes.split("Used ")[1].split()[0]) <= intra_chunk_hopper.REGISTERS[values]
    # what the planner lays out in shared memory is what the compiler takes, but for how it aligns
    sizes = {"B": 1, "T": chunk, "H": 1, "Hq": 1, "K": keys, "V": values, "C": chunk}
    problem = Problem.of("intra_chunk", "matrix", "float16", sizes, {"states": True})
    planned = {
        candidate.plan: candidate.shared for candidate in intra_chunk_hopper.every(problem, Device.named("h200"))
    }
    assert made.shared <= planned[intra_chunk_parity.hopper(stages)] <= made.shared + 2048


def problem(dtype="float16", **sizes):
    sizes = {"B": 16, "T": 256, "H": 12, "Hq": 12, "K": 128, "V": 128, "C": 256} | sizes
    return Problem.of("intra_chunk", "matrix", dtype, sizes, {"states": True})


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (problem(), "a100", "it needs a GPU of compute capability 9.0 (H100, H200); the inputs are on {name}"),
        (problem("float32"), "h200", "it takes bfloat16 and float16; got float32"),
        (problem(C=32), "h200", "it takes chunks of 64, 128, 256, 512 steps; got 32"),
        (problem(K=96), "h200", "it takes K of 64 or 128; got 96"),
        (problem(V=256), "h200", "it takes V of 64 or 128; got 256"),
        (problem("bfloat16", C=512), "h200", None),
    ],
)
def test_reasons(given, device, reason):
    device = Device.named(device)
    assert HopperIntraChunk().reject(given, device) == (reason and reason.format(name=device.name))
