"""KDA's kernels, called as their backend is, against the step loop in float64: interpreted and on a GPU."""

import json
from unittest.mock import patch

import torch
import torch.nn.functional as F

from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.kernels.matrix.torch.reference import Reference
from holdfast.kernels.matrix.vector_decay.triton.delta.backend import TritonKDA
from holdfast.kernels.matrix.wide import Wide
from holdfast.ops import matrix
from holdfast.planner import Device
from kernels.matrix.scalar_decay.triton.parity import layouts_and_neighbours
from kernels.matrix.vector_decay.triton.parity import LIMITS, plan
from kernels.matrix.vector_decay.triton.parity import errors as errors_of
from kernels.matrix.vector_decay.triton.parity import example as additive_example


def example(keys="random", erase_heads=None, **which):
    """As vector decay's, with keys of length 1.

    keys: "random", or "alike": a common direction four times the noise. erase_heads: of another key that erases.
    """
    call = additive_example(**which)
    k = call.k.float()
    if keys == "alike":
        k = F.normalize(k, dim=-1) + 4 * F.normalize(k[:, :1], dim=-1)
    k = F.normalize(k, dim=-1)
    if erase_heads is not None:
        gate = torch.rand(*k.shape[:2], erase_heads, k.shape[3], generator=torch.Generator().manual_seed(3))
        e = (gate * k.repeat_interleave(erase_heads // k.shape[2], 2)).to(call.k.dtype)
        call = call._replace(e=e, beta=None)
    return call._replace(k=k.to(call.k.dtype), delta=True)


def errors(call, plans, packed=None, device="cpu", exact=Reference, ends=True):
    """As vector decay's."""
    return errors_of(call, plans, packed, device, exact, ends, TritonKDA())


def check(label, call, which, packed=None, limit=None, **options):
    found = errors(call, (which, which), packed, **options)
    limit = limit or LIMITS[call.v.dtype]
    assert all(mine <= limit for mine, _ in found.values()), (label, str(which), found)
    print(label, {name: f"{mine:.0e}" for name, (mine, _) in found.items()})


def on_gpu(which: dict, packed, ends: bool) -> None:
    """Prints `errors` of an example with the planner's plans, in a process of its own."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    call, device = example(packed=packed, **which), describe(torch.device("cuda", 0))
    problem = matrix.problem("kda", call, torch.tensor([0, 1]) if packed else None, True)
    plans = tuple(TritonKDA().candidates(problem, device, way)[0].plan for way in ("forward", "backward"))
    print(json.dumps(errors(call, plans, packed, device="cuda", exact=Chunked, ends=ends)))


def wide_values():
    """V of 272, in slices that share q, k and the decays."""
    call, kernels, device = example(T=20, K=24, V=272, H=2, erase_heads=2), Wide(TritonKDA()), Device.named("a100")
    problem = matrix.problem("kda", call, None, True)
    plans = [kernels.candidates(problem, device, way)[0].plan for way in ("forward", "backward")]
    found = errors_of(call, plans, kernels=kernels)
    print("wide values", plans[0].values, {name: f"{mine:.0e}" for name, (mine, _) in found.items()})
    assert all(mine <= LIMITS[torch.float32] for mine, _ in found.values()), found


def with_hoppers_kernels():
    """Those of vector decay emulated between Triton's interpreted ones, as an H200 launches them."""
    import gluon_partitions_emulator
    from holdfast.kernels.matrix.vector_decay import additive
    from holdfast.kernels.matrix.vector_decay.hopper import launch as gradients
    from holdfast.kernels.matrix.vector_decay.hopper.delta import launch as prepared

    launched = []

    def launch(kernel, *given, **how):
        launched.append(kernel.fn.__name__)
        gluon_partitions_emulator.launch(kernel, *given, **how)

    h200 = Device.named("h200")
    with (
        patch.object(additive, "describe", lambda _: h200),
        patch.object(gradients, "launch", launch),
        patch.object(prepared, "launch", launch),
    ):
        check("Hopper's", example(T=70, H=2, K=40, V=24, dtype=torch.float16), plan())
        packed = (0, 0, 66, 80)
        call = example(T=80, K=64, V=64, dtype=torch.float16, packed=packed, g="resets")
        check("Hopper's, packed", call, plan(), packed=packed)
        check("Hopper's, an erase key", example(T=70, H=2, erase_heads=2, K=40, V=24, dtype=torch.float16), plan())
    assert sorted(set(launched)) == ["gla_bwd_grads", "kda_chunk_prepare"], launched


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check("split columns, a ragged tail", example(K=24), plan(columns=16))
    check("no strength, no states", example(K=24, beta=False, state=False, T=20), plan(), ends=False)
    check("grouped, widths of no tile", example(H=2, T=17, K=20, V=24), plan())
    check("packed", example(T=80, K=24, packed=(0, 0, 66, 80)), plan(), packed=(0, 0, 66, 80))
    check("resets", example(K=24, g="resets"), plan())
    check("channels", example(K=24, g="channels"), plan())
    check("decays of fifty", example(K=24, T=20, g="strong", state=False), plan(), ends=False)
    check("keys alike, hardly any decay", example(K=24, T=130, keys="alike", g="weak"), plan(), limit=1e-4)
    check("an erase key of as many heads", example(K=24, erase_heads=1), plan())
    check("an erase key of more heads, packed", example(T=80, H=2, erase_heads=2, K=24, packed=(0, 0, 66, 80)), plan(),
          packed=(0, 0, 66, 80))  # fmt: skip
    check("half precision", example(K=24, dtype=torch.float16), plan(), limit=2 * LIMITS[torch.float16])
    layouts_and_neighbours(example(T=90, K=24, V=24), plan(), TritonKDA(), (0, 20, 50, 90))
    check("small heads", example(T=40, K=8, V=16, dtype=torch.float16), plan())
    wide_values()
    with_hoppers_kernels()
    check("one token", example(T=1), plan())
    check("no token", example(T=0), plan())
