"""What the registered fakes say of results' strides is what the kernels return, of arguments in any memory.

Compiled graphs read a result with the strides that its op's fake gave, from an aligned place.
"""

import inspect
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from every_call import CALLS, FUSED, PARTS
from fused_on_cpu import fused_on_cpu
from holdfast.fuzz.layout import LAYOUTS, lay_out
from holdfast.fuzz.source import Source
from holdfast.ops.registration import define
from holdfast.recurrences import Sizes
from parity import leaves

# more than one of everything; one sequence and one head, whose strides say nothing; no time
SIZES = {
    "some": Sizes(B=2, T=5, H=2, K=4, V=3, D=4),
    "one": Sizes(B=1, T=5, H=1, K=4, V=3, D=4),
    "none": Sizes(B=2, T=0, H=2, K=4, V=3, D=4),
}


OPS = {f"{op}_{way}" for op in ("matrix", "diagonal", "dense", "intra_chunk", "inter_chunk", "gated_norm", "conv")
       for way in ("forward", "backward")}  # fmt: skip
OPS |= {"ssd_forward", "ssd_backward"}
OPS |= {f"{op}{way}" for op in ("rotary", "lru_gates", "gated_gelu", "soft_cap") for way in ("", "_backward")}
OPS |= {f"{op}{way}" for op in ("delta_inputs", "kda_gate", "mlstm_gates") for way in ("", "_backward")}


class Compared(TorchDispatchMode):
    """Runs every op of Holdfast's on fakes too. seen: names; wrong: what was said and what came."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.namespace == "holdfast":
            self.seen.add(op._schema.name.removeprefix("holdfast::"))
            with FakeTensorMode() as mode:
                said = op(*tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, args))
            for n, (fake, x) in enumerate(zip(tree_leaves(said), tree_leaves(out), strict=True)):
                if described(fake) != described(x):
                    self.wrong.append(f"{op}, output {n}: said {described(fake)}, came {described(x)}")
                if x.numel() and x.storage_offset() * x.element_size() % 16:
                    self.wrong.append(f"{op}, output {n}: begins at element {x.storage_offset()}")
        return out


def described(x: Tensor) -> tuple:
    """Strides of axes that have more than one place."""
    strides = [stride if size > 1 and x.numel() else None for size, stride in zip(x.shape, x.stride(), strict=True)]
    return tuple(x.shape), tuple(strides), x.dtype, x.device.type


def both_passes(call, layout, sizes, dtype, device="cpu", offsets=None) -> Compared:
    """layout: of arguments and of the results' gradients, of all results and of the first alone. offsets: of packed
    sequences."""
    source, drawn = Source(0), call.arguments(dtype, 0, sizes, device)
    if offsets is not None:
        sequences = call.arguments(dtype, 0, replace(sizes, B=len(offsets) - 1), device)
        drawn["initial_state"] = sequences["initial_state"]
    packed = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets, device=device)}

    def laid(x):
        return lay_out(x.detach(), layout, source).requires_grad_(x.is_floating_point())

    given = {n: tuple(map(laid, x)) if isinstance(x, tuple) else laid(x) for n, x in drawn.items()}
    with Compared() as compared:
        made = [x for x in leaves(call(given, **packed)) if x.requires_grad]
        used = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
        for results in (made, made[:1]):
            grads = [lay_out(torch.randn_like(x), layout, source) for x in results]
            torch.autograd.grad(results, used, grads, retain_graph=True, allow_unused=True)
    return compared


EVERY = [(layout, sizes, torch.bfloat16) for layout in LAYOUTS for sizes in SIZES]
EVERY += [("plain", "some", torch.float32), ("reversed", "some", torch.float32)]
FAST = [("reversed", "some", torch.bfloat16), ("transposed", "none", torch.bfloat16)]


@pytest.mark.parametrize(
    ("layout", "sizes", "dtype"), [pytest.param(*x, marks=() if x in FAST else pytest.mark.slow) for x in EVERY]
)
def test_fakes_say_what_comes(layout, sizes, dtype):
    seen, wrong = set(), []
    for name, call in (CALLS | PARTS).items():
        for around in (nullcontext, fused_on_cpu) if name in FUSED else (nullcontext,):
            with around():
                found = both_passes(call, layout, SIZES[sizes], dtype)
            seen |= found.seen
            wrong += [f"{name}: {each}" for each in found.wrong]
    assert wrong == []
    assert seen >= OPS


@pytest.mark.parametrize("name", ["gla", "ssd", "hgrn", "lstm", "inter_chunk_scan", "causal_conv1d"])
def test_fakes_say_what_comes_of_packed_sequences(name):
    """As many states as sequences; one call of each op that has any."""
    found = both_passes(CALLS[name], "plain", replace(SIZES["some"], B=1), torch.bfloat16, offsets=(0, 2, 2, 5))
    assert found.wrong == []
    assert len(found.seen) == 2


# one of what each op goes through
LEAST = ["simple_gla", "lstm", "rotlru", "mamba1", "ssd", "ssd with a rate a channel", "causal_conv1d"]
LEAST += ["gated_delta_rule with all options", "kda with all options", "mlstm", "mlstm, sigmoid, not normalised"]
LEAST += ["gated_rms_norm", "intra_chunk", "inter_chunk_scan"]


@pytest.mark.parametrize("name", LEAST)
def test_fakes_say_what_comes_of_the_least(name):
    """No state is given or asked for, nor anything else that can be left out; without a gradient, and with one."""
    call = CALLS[name]
    needed = {key for key, x in inspect.signature(call.op).parameters.items() if x.default is x.empty}
    given = {key: x for key, x in call.arguments(torch.float32, sizes=SIZES["some"]).items() if key in needed}
    for around in (nullcontext, fused_on_cpu) if name in FUSED else (nullcontext,):
        with around(), Compared() as compared:
            call.op(**given, **call.options)
            used = [x.requires_grad_() for x in tree_leaves(given) if x.is_floating_point()]
            (made, *_) = leaves(call.op(**given, **call.options))
            torch.autograd.grad(made.sum(), used, allow_unused=True)
        assert compared.wrong == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "transposed", "reversed", "expanded"])
def test_fakes_say_what_comes_of_a_gpu(layout):
    """Of each op's default backend."""
    seen, wrong = set(), []
    for name, call in (CALLS | PARTS).items():
        found = both_passes(call, layout, Sizes(B=2, T=70, H=2, K=64, V=64, D=64), torch.bfloat16, "cuda")
        seen |= found.seen
        wrong += [f"{name}: {each}" for each in found.wrong]
    assert wrong == []
    assert seen >= OPS


def test_results_that_are_parts_of_a_buffer_begin_at_multiples_of_16_bytes():
    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        buffer = torch.stack([x, 2 * x])
        return buffer[0], buffer[1]

    op = define("parts_of_a_buffer", parts, lambda x: (torch.empty_like(x), torch.empty_like(x)))
    x = torch.arange(5.0)
    assert parts(x)[1].storage_offset() == 5
    for found, expected in zip(op(x), (x, 2 * x), strict=True):
        assert found.storage_offset() == 0
        assert found.equal(expected)
