"""The kernels of a layer's step, called as their backend is, against its PyTorch form in float64: interpreted and on a
GPU."""

from dataclasses import replace

import torch

from holdfast.kernels.layer_step.torch.backend import PyTorchLayerStep
from holdfast.kernels.layer_step.triton.backend import TritonLayerStep
from holdfast.ops.layer_step_checks import DRAWN, apart, states_of
from holdfast.planner import Plan
from holdfast.recurrences import Draw, Sizes
from parity import cast, relative_error


def ran(backend, plan, call):
    """y and the states afterwards, of states of its own."""
    call = apart(call)
    return [backend.run(plan, call), *states_of(call)]


SIZES = Sizes(B=2, H=4, Hq=2, K=24, V=20)


def checked(kind, dtype=torch.float32, device="cpu", columns=16, limit=1e-6, sizes=SIZES, **options):
    """In float32 within limit; with a narrower dtype, which only y has, as near as rounding leaves it."""
    call = DRAWN[kind](Draw(0, dtype, device), sizes, **options)
    exact = type(call)(*cast(list(call), torch.float64))
    right = ran(PyTorchLayerStep(), None, exact)
    got = ran(TritonLayerStep(), Plan("triton", (("columns", columns), ("warps", 4))), call)
    same = ran(PyTorchLayerStep(), None, call)
    assert got[0].dtype == dtype
    assert got[0].is_contiguous()
    rounding = {torch.float32: limit, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
    for n, (x, y, z) in enumerate(zip(got, right, same, strict=True)):
        bound = limit if n else rounding[dtype]
        assert x.dtype == z.dtype
        assert relative_error(x.double(), y.double()) <= bound, (kind, sizes, n, relative_error(x.double(), y.double()))
        assert relative_error(z.double(), y.double()) <= bound, (kind, sizes, n)
    print(kind, sizes, options, dtype)


def every(device="cpu", **more):
    for kind in DRAWN:
        checked(kind, device=device, **more)
        # whole blocks of columns, as of a model's widths
        checked(kind, torch.float16, device, sizes=replace(SIZES, B=1, V=32), **more)
        checked(kind, device=device, sizes=Sizes(B=5, H=3, Hq=1, K=34, V=33), **more)
        checked(kind, device=device, sizes=replace(SIZES, B=0), **more)
        # fewer cells than threads
        checked(kind, device=device, sizes=Sizes(H=2, K=2, V=3), **more)
    for kind in ("delta", "ssd"):
        checked(kind, device=device, spare=1, **more)
        checked(kind, device=device, taps=1, **more)
        checked(kind, device=device, taps=2, spare=2, **more)
    checked("delta", device=device, decay=False, gate=False, **more)
    checked("ssd", device=device, groups=4, **more)
    checked("mlstm", device=device, exponential=False, **more)
    checked("mlstm", device=device, exponential=False, normalize=False, cap=0.0, **more)
    checked("mlstm", device=device, cap=0.0, **more)


def interpreted():
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    every()
    print("all checked")


def modules():
    """The mixers' steps by these kernels, against their forward passes."""
    from holdfast.nn import GLA, MLSTM, RGLRU, DeltaNet, GatedDeltaNet, Mamba2, RetNet
    from holdfast.ops import layer_step
    from holdfast.planner import Device

    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    # the interpreter runs what a GPU would
    layer_step.describe = lambda device: Device.named("h200")
    torch.manual_seed(0)
    for mixer in (
        GatedDeltaNet(24, 2, num_v_heads=6, expand_v=0.75), DeltaNet(24, 2), Mamba2(24, 6, d_state=7, n_groups=3),
        GLA(24, 2), RetNet(24, 2), MLSTM(24, 2, input_gate_bias=0.0), MLSTM(24, 2, gating="sigmoid", normalize=False),
        RGLRU(24, 2),
    ):  # fmt: skip
        x = torch.randn(2, 12, 24)
        with torch.no_grad():
            whole, final = mixer(x)
            y, state = mixer(x[:, :4])
        outputs = [y, *(mixer.step(token, state) for token in x[:, 4:].split(1, 1))]
        found = [relative_error(torch.cat(outputs, 1), whole)]
        found += [relative_error(s.double(), t.double()) for s, t in zip(state, final, strict=True)]
        print(type(mixer).__name__, found)
        assert max(found) <= 2e-6
    print("all checked")
