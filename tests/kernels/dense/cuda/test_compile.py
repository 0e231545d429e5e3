"""The fused kernels compile for GPUs that are not here, without spilling registers to memory beyond a stated budget.

They compile in another process: NVRTC has been seen to crash on an operand that it should have refused.
"""

import json
import re
import subprocess
import sys

import pytest

from holdfast.kernels.dense.alternating import cell_step as step
from holdfast.kernels.dense.cuda.launch import source_of
from holdfast.kernels.runtime import nvrtc
from holdfast.planner import Device, Problem
from holdfast.planner.models.dense import cuda as dense_fused
from holdfast.recurrences.elman import elman
from holdfast.recurrences.gru import gru
from holdfast.recurrences.lstm import lstm
from holdfast.recurrences.slstm import slstm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(nvrtc.missing() is not None, reason=f"{nvrtc.missing()}"),
]
COMPILE = """
import json, sys
from holdfast.kernels.runtime import nvrtc
print(json.dumps([nvrtc.compile_source(source, sys.argv[1]).log for source in json.load(sys.stdin)]))
"""
CELLS = (
    (lstm, 12, 64, "bfloat16"),
    (slstm, 12, 64, "bfloat16"),
    (gru, 3, 24, "float16"),
    (elman, 1, 128, "float16"),
    (lstm, 1, 768, "bfloat16"),
    (gru, 1, 768, "float16"),
    (lstm, 1, 1024, "bfloat16"),
    (lstm, 1, 2048, "bfloat16"),
    (lstm, 1, 2688, "bfloat16"),
)
ARCHITECTURES = {"h200": "sm_90a", "a100": "sm_80"}
# Bytes that a thread may write to memory beside its registers. 2048 / 16 slices are more than an A100 has SMs.
BUDGET = {("h200", 1024): 64, ("h200", 2688): 96, ("a100", 768): 32}
TOO_LARGE = {("a100", 2048), ("a100", 2688)}


def problem(which, B, H, D):
    sizes = {"B": B, "T": 1024, "H": H, "D": D, "S": len(which.states), "G": len(which.gates)}
    sizes |= {"Gi": len(which.input), "Gr": len(which.recurrent)}
    return Problem.of(which.name, "dense", "bfloat16", sizes, {"needs_grad": True, f"cell={which.key}": True})


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request):
    """(device, {(cell, D, direction): what ptxas said}) of the first plan of every case."""
    sources = {}
    for which, H, D, dtype in CELLS:
        for direction in ("forward", "backward"):
            found = dense_fused.candidates(problem(which, 16, H, D), Device.named(request.param), direction)
            if found:
                plan = found[0].plan
                key = (which.name, D, direction)
                sources[key] = source_of(plan, which, direction, dtype, D, True, True)[0]
    logs = compile_all(list(sources.values()), ARCHITECTURES[request.param])
    return request.param, dict(zip(sources, logs, strict=True))


def compile_all(sources, architecture):
    """What ptxas said of each."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, architecture],
        input=json.dumps(sources),
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_planned_kernel_compiles_and_keeps_its_registers(compiled):
    device, logs = compiled
    for which, _, D, _ in CELLS:
        for direction in ("forward", "backward"):
            if (device, D) in TOO_LARGE:
                assert (which.name, D, direction) not in logs
                continue
            log = logs[which.name, D, direction]
            # what is indexed at run time lies in memory too: a stack without spills
            found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
            assert found
            for stack, spilled in found:
                assert max(int(stack), int(spilled)) <= BUDGET.get((device, D), 0), (
                    f"{which.name} {D} {direction}: {log}"
                )


def test_the_step_kernels_compile_for_older_architectures_too():
    sources = [
        step.source_of(which, name)
        for which in (gru, slstm)
        for name in ("dense_cell_step_forward", "dense_cell_step_backward")
    ]
    for log in compile_all(sources, "sm_75"):
        assert "0 bytes spill stores" in log


def test_the_source_does_not_depend_on_batch_length_or_heads():
    def source(B, H):
        plan = dense_fused.candidates(problem(lstm, B, H, 64), Device.named("h200"), "forward")[0].plan
        return source_of(plan, lstm, "forward", "bfloat16", 64, False, False)[0]

    assert len({source(B, H) for B in (1, 3, 16, 32) for H in (1, 12)}) == 1
