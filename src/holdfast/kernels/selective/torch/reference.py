"""The plain step loop: slow, right, and able to run every call on every device."""

import torch
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.varlen import sequence_bounds
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.definition import SelectiveCall
from holdfast.recurrences.oracle_selective import selective_steps

Grads = tuple[Tensor | None, ...]
# those of a call's tensors that have an axis of tokens
_TIMED = ("x", "dt", "B", "C", "z")


class Reference:
    """Runs the family's oracle, packed sequences one by one; its backward pass differentiates a whole sequence."""

    name = "reference"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(Plan(self.name)),)

    def forward(
        self, plan: Plan, call: SelectiveCall, cu_seqlens: Tensor | None, entries: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return y [B, T, D] in x's dtype, and the final state [sequences, D, N]; entries are left as they are."""
        y, final = torch.empty_like(call.x, memory_format=torch.contiguous_format), _state(call, cu_seqlens)
        for rows, steps in _pieces(cu_seqlens, call.x):
            y[:, steps], final[rows] = selective_steps(_cut(call, rows, steps))
        return y, final

    def backward(
        self,
        plan: Plan,
        call: SelectiveCall,
        cu_seqlens: Tensor | None,
        entries: Tensor | None,
        grad_y: Tensor | None,
        grad_final: Tensor | None,
    ) -> Grads:
        """Return the gradients of the call's tensors, None for one that was not given; entries are not used."""
        state = _state(call, cu_seqlens)
        call = call._replace(initial_state=state)
        names = [name for name, x in call._asdict().items() if isinstance(x, Tensor)]
        grads = {name: torch.zeros_like(getattr(call, name), memory_format=torch.contiguous_format) for name in names}
        # sums over sequences, rounded once
        wide = {name: torch.zeros_like(grads[name], dtype=state.dtype) for name in names if name not in _TIMED}
        if grad_final is not None:
            wide["initial_state"] += grad_final
        for rows, steps in _pieces(cu_seqlens, call.x):
            piece = _cut(call, rows, steps)
            grad_o = None if grad_y is None else grad_y[:, steps]

            def run(*given: Tensor, piece: SelectiveCall = piece) -> tuple[Tensor, Tensor]:
                return selective_steps(piece._replace(**dict(zip(names, given, strict=True))))

            # parameters in the dtype of the sums
            leaves = [x if name in _TIMED else x.to(state.dtype) for name in names for x in (getattr(piece, name),)]
            given = [grad_o, wide["initial_state"][rows]]
            for name, found in zip(names, vjp(run, leaves, given), strict=True):
                if name in _TIMED:
                    grads[name][:, steps] = found
                elif name == "initial_state":
                    wide[name][rows] = found
                else:
                    wide[name] += found
        found = grads | {name: x.to(grads[name].dtype) for name, x in wide.items()}
        return tuple(found.get(name) for name in SelectiveCall._fields[:9])


def _state(call: SelectiveCall, cu_seqlens: Tensor | None) -> Tensor:
    """Make the initial state, a tensor of its own, float32 or wider."""
    if call.initial_state is not None:
        return call.initial_state.clone(memory_format=torch.contiguous_format)
    sequences = call.x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return call.x.new_zeros(sequences, *call.A.shape, dtype=torch.promote_types(call.x.dtype, torch.float32))


def _pieces(cu_seqlens: Tensor | None, x: Tensor) -> list[tuple[slice, slice]]:
    """Return (sequences, steps) of each run of the loop that has any steps."""
    if cu_seqlens is None:
        return [(slice(None), slice(0, x.shape[1]))] if x.shape[1] else []
    bounds = sequence_bounds(cu_seqlens, x.shape[1])
    return [
        (slice(n, n + 1), slice(bounds[n], bounds[n + 1])) for n in range(len(bounds) - 1) if bounds[n + 1] > bounds[n]
    ]


def _cut(call: SelectiveCall, rows: slice, steps: slice) -> SelectiveCall:
    cut = {name: x[:, steps] for name in _TIMED if (x := getattr(call, name)) is not None}
    state = None if call.initial_state is None else call.initial_state[rows]
    return call._replace(**cut, initial_state=state)
