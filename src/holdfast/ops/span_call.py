"""A call of an op as a span of a longer sequence: its summary, and its outputs from the state before it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.recurrences import DELTA_RULES, RECURRENCES
from holdfast.recurrences.definition import Recurrence
from holdfast.recurrences.summary import Summary, merge

from .families import op_of


@dataclass(frozen=True, slots=True)
class SpanCall:
    """An op's arguments for one span of tokens, without the state before it.

    tensors: the op's tensor arguments that are not None. options: its other arguments, and None for a tensor that the
    op has no default for.
    """

    recurrence: Recurrence
    tensors: dict[str, Tensor]
    options: dict[str, Any]

    @classmethod
    def of(cls, recurrence: Recurrence, tensors: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> "SpanCall":
        """tensors: checked, by name, all but initial_state. options: those that were given."""
        parameters = parameters_of(recurrence.name)
        missing = {n: None for n, x in tensors.items() if x is None and parameters[n].default is Parameter.empty}
        return cls(recurrence, {n: x for n, x in tensors.items() if x is not None}, {**options, **missing})

    @property
    def op(self) -> Callable[..., tuple[Tensor, Any]]:
        return op_of(self.recurrence)

    @property
    def name(self) -> str:
        return self.recurrence.name

    @property
    def lead(self) -> Tensor:
        """The argument that carries batch, length, device and dtype: [B, T, ...]."""
        return self.tensors[next(iter(self.recurrence.arguments))]

    @property
    def dtype(self) -> torch.dtype:
        """Of states and summaries."""
        return torch.promote_types(self.lead.dtype, torch.float32)

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors.values())

    def with_wide_parameters(self) -> "SpanCall":
        """With arguments that have no axis of tokens in float32 or wider: each span adds to their gradients, and sums
        that are rounded to half precision span by span would be off by as many roundings."""
        timed = TIMED[self.name]
        return replace(
            self,
            tensors={
                n: x if x.dim() in timed.get(n, ()) or not x.is_floating_point() else x.to(self.dtype)
                for n, x in self.tensors.items()
            },
        )

    def cut(self, start: int, end: int) -> "SpanCall":
        """The tokens from start to end of it."""
        return self.over_time(lambda x: x[:, start:end])

    def rows(self, start: int, end: int) -> "SpanCall":
        """The sequences from start to end of its batch."""
        return self.over_time(lambda x: x[start:end])

    def fold(self, spans: int) -> "SpanCall":
        """Its spans of equal length, [B, spans * T, ...], as sequences of a batch: [B * spans, T, ...]."""
        return self.over_time(lambda x: x.unflatten(1, (spans, x.shape[1] // spans)).flatten(0, 1))

    def over_time(self, change: Callable[[Tensor], Tensor]) -> "SpanCall":
        """With what change makes of each argument [B, T, ...] that has an axis of tokens."""
        timed = TIMED[self.name]
        changed = {n: change(x) if x.dim() in timed.get(n, ()) else x for n, x in self.tensors.items()}
        return replace(self, tensors=changed)

    def merge(self, earlier: Summary, later: Summary) -> Summary:
        return merge(earlier, later)

    def outputs(
        self, state: Summary | None, cu_seqlens: Tensor | None, final: bool = True
    ) -> tuple[Tensor, Summary | None]:
        """The op's output, and the state behind it if it is asked for. state: the one before it; None for the op's own
        default. cu_seqlens: of the sequences packed in it, one row of state each."""
        given = None if state is None else self.public(state)
        o, after = self.op(
            **self.tensors, **self.options, initial_state=given, output_final_state=final, cu_seqlens=cu_seqlens
        )
        return o, self.private(after) if final else None

    def summary(self) -> Summary:
        """What it adds to a state and how it carries one through; its B sequences are the rows."""
        if self.recurrence.family == "diagonal":
            return self._diagonal()
        return self._mlstm() if self.name == "mlstm" else self._matrix()

    def start(self, rows: int) -> Summary:
        """The state before a first token, by the op's default."""
        like, dtype = self.lead, self.dtype
        if self.recurrence.family == "diagonal":
            return Summary(like.new_zeros(rows, like.shape[2], dtype=dtype))
        keys, values = (self.tensors[name] for name in (("B", "x") if self.name == "ssd" else ("k", "v")))
        heads, columns = values.shape[-2], values.shape[-1] + int(self._normalizes)
        added = like.new_zeros(rows, heads, keys.shape[-1], columns, dtype=dtype)
        return Summary(added, unit=added.new_zeros(added.shape[:2]) if self._is_stabilized else None)

    @property
    def _is_stabilized(self) -> bool:
        return self.name == "mlstm" and self.options["gating"] == "exp"

    @property
    def _normalizes(self) -> bool:
        return self.name == "mlstm" and self.options["normalize"]

    def private(self, state: Any) -> Summary:
        """The op's state as a Summary."""
        if self.name != "mlstm":
            return Summary(state)
        C, n, m = state
        added = torch.cat([C, n[..., None]], -1) if self._normalizes else C
        return Summary(added, unit=m if self._is_stabilized else None)

    def public(self, state: Summary) -> Any:
        """A Summary as the op's state. What mlstm has no use for, m with sigmoid gates and n without normalisation, is
        zeros."""
        if self.name != "mlstm":
            return state.added
        C, n = (state.added[..., :-1], state.added[..., -1]) if self._normalizes else (state.added, None)
        n = C.new_zeros(C.shape[:3]) if n is None else n
        return C, n, C.new_zeros(C.shape[:2]) if state.unit is None else state.unit

    def _final(self, given: Any, **instead: Tensor) -> Any:
        # an output's gate and skip do not reach the state
        kept = {n: x for n, x in self.tensors.items() if self.name != "ssd" or n not in ("D", "z")}
        return self.op(**kept | instead, **self.options, initial_state=given, output_final_state=True)[1]

    def _mapped(self) -> Any:
        options = {n: x for n, x in self.options.items() if n != "backend"}
        return self.recurrence.map(**self.tensors, **options)[0]

    def _matrix(self) -> Summary:
        added = self._final(None)
        if self.name in DELTA_RULES:
            return Summary(added, self._transition(added))
        g = self._mapped().g
        if g is None:
            return Summary(added, added.new_ones(added.shape[:2]))
        return Summary(added, g.sum(1, dtype=self.dtype).exp())

    def _transition(self, added: Tensor) -> Tensor:
        """What the steps multiply a state with [N, H, K, K], (a_T (I - b_T k_T k_T^T)) ... and so on to the first:
        the rule itself, from the identity and with nothing to write."""
        width = added.shape[2]
        identity = torch.eye(width, dtype=added.dtype, device=added.device)
        v = self.tensors["v"]
        nothing = v.new_zeros(*v.shape[:-1], width)
        # gdn2's write gate has a number for each of v
        instead = dict.fromkeys(("v", "w") if self.name == "gdn2" else ("v",), nothing)
        return self._final(identity.expand(*added.shape[:2], -1, -1).contiguous(), **instead)

    def _mlstm(self) -> Summary:
        carry = F.logsigmoid(self.tensors["f"].to(self.dtype)).sum(1)
        if not self._is_stabilized:
            return self.private(self._final(None))._replace(carry=carry.exp())
        # a unit of 1, which the op starts from, could leave what is written below the smallest float
        start = self.start(self.lead.shape[0])
        empty = start._replace(unit=torch.full_like(start.unit, -torch.inf))
        return self.private(self._final(self.public(empty)))._replace(carry=carry)

    def _diagonal(self) -> Summary:
        added = self._final(None)
        if self.name == "hgrn":
            return Summary(added, self.tensors["g"].sum(1, dtype=self.dtype).exp())
        # the scan itself of nothing, from 1: gates may be negative or 0, which have no logarithm
        one = torch.ones_like(added)
        if self.name == "rotlru":
            one[:, 1::2] = 0
        carry = self._final(one, x=torch.zeros_like(self.tensors["x"]))
        return Summary(added, carry.unflatten(-1, (-1, 2)) if self.name == "rotlru" else carry)


@cache
def parameters_of(name: str) -> Mapping[str, Parameter]:
    """Of the public op of a recurrence."""
    return signature(op_of(RECURRENCES[name])).parameters


def _timed(recurrence: Recurrence) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(len(shape.split()) for shape in argument.shapes if shape.split()[1:2] == ["T"])
        for name, argument in recurrence.arguments.items()
        if not isinstance(argument, tuple)
    }


LINEAR = {name: recurrence for name, recurrence in RECURRENCES.items() if recurrence.family in ("matrix", "diagonal")}
# of each tensor argument that may have an axis of tokens, its second: how many axes it then has
TIMED = {name: _timed(recurrence) for name, recurrence in LINEAR.items()}
