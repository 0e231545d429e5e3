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
from holdfast.planner import Device, Plan
from holdfast.recurrences.example import Draw, Sizes
from holdfast.recurrences.rwkv7 import RWKV7
from kernels.matrix.scalar_decay.triton.parity import layouts_and_neighbours
from kernels.matrix.vector_decay.triton.parity import LIMITS
from kernels.matrix.vector_decay.triton.parity import errors as errors_of
from kernels.matrix.vector_decay.triton.parity import example as additive_example
from kernels.matrix.vector_decay.triton.parity import plan as additive_plan


def example(keys="random", erase_heads=None, before=False, by_head=False, **which):
    """As vector decay's, with keys of length 1.

    keys: "random", or "alike": a common direction four times the noise. erase_heads: of another key that erases.
    before: it reads before the decay. by_head: a decay, the first channel's, and a strength a head beside it.
    """
    call = additive_example(**which)
    k = call.k.float()
    if keys == "alike":
        k = F.normalize(k, dim=-1) + 4 * F.normalize(k[:, :1], dim=-1)
    k = F.normalize(k, dim=-1)
    if erase_heads is not None:
        gate = torch.rand(*k.shape[:2], erase_heads, k.shape[3], generator=torch.Generator().manual_seed(3))
        e = (gate * k.repeat_interleave(erase_heads // k.shape[2], 2)).to(call.k.dtype)
        call = call._replace(e=e, erase_before_decay=before, **({"g": call.g[..., 0]} if by_head else {"beta": None}))
    return call._replace(k=k.to(call.k.dtype), delta=True)


def plan(saves=True, **values):
    """As vector decay's. saves: whether the backward pass has what the forward pass found of all chunks."""
    found = additive_plan(**values)
    return Plan(found.backend, (*found.values, ("saves", int(saves))))


def rwkv7():
    """A call of two steps a token, as the op makes it, after decays of fifty a channel in four."""
    arguments = RWKV7.example(Draw(seed=1), Sizes(B=1, T=40, H=2, K=20, V=24, Hq=1))
    arguments["w"][..., ::4] = -50.0
    return RWKV7.map(**{name: x.float() for name, x in arguments.items()}, scale=0.5)[0]


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
        call = example(T=70, H=2, **BEFORE | {"K": 40, "V": 24}, by_head=True, dtype=torch.float16)
        check("Hopper's, before a decay a head", call, plan())
        call = example(T=70, **BEFORE | {"K": 40, "V": 24}, g="strong", dtype=torch.float16)
        check("Hopper's, before decays of fifty", call, plan())
    assert sorted(set(launched)) == ["gla_bwd_grads", "kda_chunk_prepare"], launched


# an erase key that reads the state before the decay, of as many heads as the write key
BEFORE = {"erase_heads": 1, "before": True, "K": 24}


def before_decay():
    """Erase keys that read the state before the decay."""
    packed = (0, 0, 66, 80)
    call = example(T=80, H=2, **BEFORE | {"K": 20, "V": 24}, g="resets", packed=packed)
    check("grouped, packed, resets, widths of no tile", call, plan(), packed=packed)
    call = example(H=2, **BEFORE, by_head=True, g="strong")
    check("a decay a head, fifty", call, plan(columns=16, saves=False))
    check("two steps a token", rwkv7(), plan())
    check("no token", example(T=0, **BEFORE, by_head=True), plan())


def before_decay_at_length():
    """As `before_decay`, what takes longer."""
    check("three chunks", example(T=130, **BEFORE), plan(columns=16))
    packed = (0, 0, 66, 80)
    call = example(T=80, H=2, **BEFORE | {"erase_heads": 2, "K": 72}, packed=packed)
    check("more heads, two pieces of keys", call, plan(), packed=packed)
    for g in ("strong", "channels", "weak"):
        check(g, example(**BEFORE, g=g), plan())
    check("half precision", example(**BEFORE, dtype=torch.float16), plan(), limit=2 * LIMITS[torch.float16])
    check("a decay a head", example(**BEFORE, by_head=True, state=False), plan(), ends=False)
    check("a decay a head, after it", example(**BEFORE | {"before": False}, by_head=True), plan())
    check("a decay a head, packed", example(T=80, **BEFORE, by_head=True, packed=packed), plan(), packed=packed)
    rounded = example(**BEFORE, by_head=True, decays=torch.bfloat16)
    check("a decay a head in bfloat16", rounded, plan(), limit=4e-3)
    print("all checked")


def said_to_be_kept(call, packed=None):
    """What a graph is told of the tensor that the forward pass saves is what comes."""
    cu_seqlens = torch.tensor(packed) if packed else None
    *_, kept = TritonKDA().forward(plan(), call, cu_seqlens)
    said = TritonKDA().saved_shape(matrix.problem("kda", call, cu_seqlens, True))
    assert said == (tuple(kept.shape), kept.dtype), (said, kept.shape, kept.dtype)


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
    said_to_be_kept(example(B=2, T=40, H=2, K=24))
    said_to_be_kept(example(T=40, K=8, V=16, dtype=torch.float16))
    said_to_be_kept(example(T=80, K=24, packed=(0, 0, 66, 80)), (0, 0, 66, 80))
    wide_values()
    with_hoppers_kernels()
    check("one token", example(T=1), plan())
    check("no token", example(T=0), plan())
