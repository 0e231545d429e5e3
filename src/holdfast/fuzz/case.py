"""One set of values of a scenario: the op's arguments as a caller would have them, and what is right for them."""

from contextlib import nullcontext

import torch
from torch import Tensor

from .layout import is_writable, lay_out, one_of_all
from .rows import Rows
from .scenario import Scenario
from .source import Source
from .subjects import SUBJECTS, backends, bind, named, options

Tensors = dict[str, Tensor]
_VALUE_SETS = 64


def offsets(s: Scenario, device: torch.device) -> Tensor | None:
    """cu_seqlens as a caller would have them; "int32_cpu" stays on the CPU."""
    name, _, place = s.offsets.partition("_")
    return torch.tensor(s.cu, dtype=getattr(torch, name), device=place or device) if s.cu else None


class Fault(Exception):
    """What an op did wrong beside its numbers."""


class Case:
    """The n-th set of values of a scenario.

    tensors: the op's tensor arguments, on the device, laid out as drawn, leaves that need gradients as drawn.
    cu: offsets or None. kinds: of each argument, as in `source.Value`. before: the values in float64.
    writable: no layout in which elements share memory. is_ours_to_write: set where the check writes to arguments.
    """

    def __init__(self, s: Scenario, n: int = 0, device: torch.device | None = None, writable: bool = False) -> None:
        self.s, self.n = s, n
        self.device = torch.device(s.device) if device is None else device
        source = Source((s.seed * _VALUE_SETS + n) % 2**63)
        drawn = SUBJECTS[s.op].draw(s, source)
        self.kinds = {name: value.kind for name, value in drawn.items()}
        self.tensors: Tensors = {}
        for name, (kind, x) in drawn.items():
            x = self._typed(kind, x).to(self.device)
            layout = self._layout(s.layout, source)
            if writable and layout == "expanded":
                layout = "padded"
            self.tensors[name] = lay_out(x, layout, source).detach()
            assert not writable or is_writable(self.tensors[name])
        floats = [name for name, kind in self.kinds.items() if kind != "bool"]
        self.needing: list[str] = []
        if s.grads != "none":
            # the same ones for all sets of values
            which = Source(s.seed % 2**63)
            self.needing = [name for name in floats if s.needs == "all" or which.integer(2)]
            self.needing = self.needing or floats[:1]
        for name in self.needing:
            self.tensors[name].requires_grad_()
            if s.layout == "mixed" and source.integer(3) == 0:
                self.tensors[name] = torch.nn.Parameter(self.tensors[name].detach())
        self.cu = offsets(s, self.device)
        if s.cu and s.layout in ("stepped", "mixed"):
            self.cu = self.cu.repeat_interleave(2)[::2]
        self.before = {name: _exact(x) for name, x in self.tensors.items()}
        self.is_ours_to_write = False
        self._found: dict[tuple[int, int], Tensors] = {}
        self._settled: Tensors | None = None

    def _layout(self, layout: str, source: Source) -> str:
        layout = one_of_all(source) if layout == "mixed" else layout
        # Inductor reads the memory of a lazily negated tensor as it is, in any function: test_inductor.py
        return "plain" if layout == "negated" and "inductor" in self.s.options else layout

    def _typed(self, kind: str, x: Tensor) -> Tensor:
        s = self.s
        if kind == "bool":
            return x
        if kind == "input":
            x = x.to(s.torch_dtype)
            # under autocast the op itself casts, without loss
            return x.float() if s.mode == "autocast" else x
        return x.to(s.gate_dtype if kind == "gate" else s.wide)

    def run(self, backend: str | None = None) -> Tensors:
        """The op's results by name."""
        return named(self.s, bind(self.s, backend)(self.tensors, self.cu))

    def check_apart(self, results: Tensors) -> None:
        """Raises Fault where a result shares memory with an argument."""
        theirs = {x.untyped_storage().data_ptr(): name for name, x in self.tensors.items() if x.numel()}
        for name, x in results.items():
            if x.numel() and (owner := theirs.get(x.untyped_storage().data_ptr())):
                raise Fault(f"{name} shares memory with the argument {owner}")

    def check_unchanged(self) -> None:
        """Raises Fault where an argument's values are not what they were."""
        if self.is_ours_to_write:
            return
        for name, x in self.tensors.items():
            if not torch.equal(_exact(x), self.before[name]):
                raise Fault(f"the argument {name} was written to")

    def cotangents(self, results: Tensors, which: int) -> tuple[list[str], list[Tensor]]:
        """The results that have a gradient, and the which-th drawn gradient of each, in its dtype."""
        wanted = [name for name in results if self.s.grads == "both" or (name == "o") == (self.s.grads == "out")]
        names = [name for name in wanted or results if results[name].requires_grad]
        return names, [self.cotangent(name, results[name], which) for name in names]

    def cotangent(self, name: str, of: Tensor, which: int) -> Tensor:
        place = SUBJECTS[self.s.op].results.index(name)
        source = Source((self.s.seed * _VALUE_SETS + self.n + 7919 * (1 + place + 8 * which)) % 2**63)
        dtype = self.s.torch_dtype if name == "o" else self.s.wide
        x = source.normal(*of.shape).to(dtype)
        layout = self._layout("mixed" if self.s.layout == "mixed" else "plain", source)
        return lay_out(x.to(self.device), layout, source).to(of.dtype)

    def gradients(self, results: Tensors, which: int = 0, keep: bool = False) -> Tensors:
        """Gradients of the arguments that need one, by "d" and the argument's name. keep: retain the graph."""
        names, grads = self.cotangents(results, which)
        outputs = [results[name] for name in names]
        return self.pulled_back(outputs, grads, self.tensors, keep)

    def pulled_back(self, outputs: list[Tensor], grads: list[Tensor], inputs: Tensors, keep: bool = False) -> Tensors:
        leaves = [inputs[name] for name in self.needing]
        if not outputs:
            return {f"d{name}": torch.zeros_like(x) for name, x in zip(self.needing, leaves, strict=True)}
        found = torch.autograd.grad(
            outputs, leaves, grads, retain_graph=keep, allow_unused=True, materialize_grads=True
        )
        return {f"d{name}": x for name, x in zip(self.needing, found, strict=True)}

    def pytorch_paths(self) -> list[str]:
        """The op's backends in plain PyTorch, the one to compare with first."""
        first = SUBJECTS[self.s.op].pytorch
        return [first, "reference"] if "reference" in backends(self.s.op) else [first]

    def by_backend(self, backend: str, which: int = 0) -> Tensors:
        """What a backend makes of the same values, contiguous, in the same dtype."""
        fresh = Case(self.s, self.n, self.device)
        for name, x in self.before.items():
            like = fresh.tensors[name]
            fresh.tensors[name] = x.to(like.dtype).requires_grad_(like.requires_grad)
        s = self.s
        casts = torch.autocast(s.device, s.torch_dtype) if s.mode == "autocast" else nullcontext()
        with torch.enable_grad(), casts:
            results = fresh.run(backend)
        found = {name: x.detach() for name, x in results.items()}
        return found if s.grads == "none" else found | fresh.gradients(results, which)

    def exact(self, which: int = 0, draw: int = 0) -> Tensors:
        """What is right, in float64: results, and gradients for the which-th gradients of the results.

        draw: from 1 on, of arguments off by up to one rounding of their dtype, by other numbers in each draw; below 0
        likewise, but elements that are one number in memory are off by one number.
        """
        key = which, draw
        if key not in self._found:
            self._found[key] = self._settled if self._settled is not None else self._exactly(which, draw)
        return self._found[key]

    def _exactly(self, which: int, draw: int) -> Tensors:
        tensors = {name: self._off(name, x, draw) if draw else x.clone() for name, x in self.before.items()}
        for name in self.needing:
            tensors[name].requires_grad_()
        with torch.enable_grad():
            results = self.exact_results(tensors)
            found = {name: x.detach() for name, x in results.items()}
            if self.s.grads != "none":
                names, grads = self.cotangents(results, which)
                found |= self.pulled_back([results[name] for name in names], grads, tensors)
        return found

    @property
    def has_expanded(self) -> bool:
        """Whether elements of some argument are one number in memory."""
        return not all(is_writable(x) for x in self.tensors.values())

    def settle(self, right: Tensors) -> None:
        """Lets `exact` return what was computed elsewhere."""
        self._settled = right

    def exact_results(self, tensors: Tensors) -> Tensors:
        s = self.s
        rows = Rows(s.cu, s.B, s.T, self.device)
        found = SUBJECTS[s.op].exact(rows, **tensors, **options(s))
        names = SUBJECTS[s.op].results
        return dict(zip(names if s.final else names[:1], found if s.final else found[:1], strict=True))

    def _off(self, name: str, x: Tensor, draw: int) -> Tensor:
        if self.kinds[name] == "bool":
            return x
        dtype = self.s.torch_dtype if self.kinds[name] == "input" else self.tensors[name].dtype
        source = Source((self.s.seed + len(name) + ord(name[0]) + 7927 * abs(draw)) % 2**63)
        shape = x.shape
        if draw < 0:
            shape = [1 if not stride else n for n, stride in zip(shape, self.tensors[name].stride(), strict=True)]
        by = (2 * source.uniform(*shape) - 1).to(x.device, x.dtype)
        moved = x * (1 + torch.finfo(dtype).eps / 2 * by)
        return torch.where(x.isfinite(), moved, x)


def _exact(x: Tensor) -> Tensor:
    x = x.detach()
    return x.to(torch.float64, memory_format=torch.contiguous_format, copy=True) if x.is_floating_point() else x.clone()
