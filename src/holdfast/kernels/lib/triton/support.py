"""Where Triton kernels can run."""

from importlib.util import find_spec

from holdfast.planner import Device, Problem

DTYPES = ("float32", "bfloat16", "float16")


def refusal(problem: Problem, device: Device) -> str | None:
    """Why no Triton kernel can serve the problem on the device, in words; None where one may."""
    if device.kind != "cuda":
        return f"it needs an NVIDIA GPU; the inputs are on {device.kind}"
    if device.capability is not None and device.capability < (8, 0):
        major, minor = device.capability
        return f"it needs compute capability 8.0; {device.name} has {major}.{minor}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if problem.dtype not in DTYPES:
        return f"it takes {', '.join(DTYPES)}; got {problem.dtype}"
    return None
