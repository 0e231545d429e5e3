"""Calls whose state is wider than a kernel's, in slices that it serves.

Columns of V are independent of one another in every matrix recurrence, so that V's slices are heads of their own that
share q and k, as the heads of a group do: v [B, T, H, V] is [B, T, H * slices, V / slices] of the same memory. Rows of
K are independent in the additive recurrences: a slice of K is a call, whose output adds to that of the one before.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import ranked
from holdfast.planner.models.matrix import wide as model
from holdfast.planner.models.matrix.wide import WHOLE, Cut
from holdfast.recurrences.definition import MatrixCall

from .variants import GradRoom, SavedShape, Variant, takes_room, uses_forward_output


class Wide:
    """A variant that also serves states in slices of those that it serves.

    One that has forward_rows serves slices of K too: it is its forward pass of a call a slice, whose outputs add up and
    whose final states are a list. What it saves for the backward pass is first what all slices share, then each one's.
    """

    def __init__(self, variant: Variant) -> None:
        self.variant, self.name, self.uses_forward_output = variant, variant.name, uses_forward_output(variant)
        self.takes_room = takes_room(variant)
        self._rows, self._groups_decays = hasattr(variant, "forward_rows"), getattr(variant, "groups_decays", False)

    def reject(self, problem: Problem, device: Device) -> str | None:
        reason = self.variant.reject(problem, device)
        if reason is None or any(self._serving(problem, device)):
            return None
        return reason

    def saved_shape(self, problem: Problem) -> SavedShape | None:
        return self.variant.saved_shape(problem)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        cuts = self._serving(problem, device)
        if not cuts:
            return self.variant.candidates(problem, device, direction)
        # what a pass saves of slices it would save in slices
        asked = replace(problem, traits=problem.traits - {"needs_grad"}) if direction == "forward" else problem
        offers = [model.candidates(asked, device, direction, cut, self.variant.candidates) for cut in cuts]
        if self.variant.reject(problem, device) is None:
            offers.insert(0, self.variant.candidates(problem, device, direction))
        elif self.variant.reject(asked, device) is None:
            offers.insert(0, self.variant.candidates(asked, device, direction))
        # where there is none, the first says why
        return ranked(chain(*offers)) or offers[0]

    def _serving(self, problem: Problem, device: Device) -> list[Cut]:
        if max(problem["K"], problem["V"]) <= model.WIDEST and self.variant.reject(problem, device) is None:
            return []
        return [
            cut
            for cut in model.cuts(problem, self._rows)
            if self.variant.reject(model.sliced(problem, cut), device) is None
        ]

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        cut = Cut.of(plan)
        if cut == WHOLE:
            return self.variant.forward(plan, call, cu_seqlens)
        parts = Slices(call, cut, self._groups_decays and call.g is not None and call.g.dim() == 4)
        if cut.key_slices == 1:
            o, final, *saved = self.variant.forward(plan, *parts.rows(), cu_seqlens)
        else:
            o, finals, *saved = self.variant.forward_rows(plan, parts.rows(), cu_seqlens)
            final = torch.cat(finals, 2)
        # of a normaliser, which all slices of V have alike
        saved = [x.unflatten(2, (-1, cut.value_slices))[:, :, :, 0].contiguous() for x in saved]
        return parts.output(o), parts.state(final), *saved

    def backward(
        self,
        plan: Plan,
        call: MatrixCall,
        cu_seqlens: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        o: Tensor | None = None,
        saved: Tensor | None = None,
        room: GradRoom = GradRoom(),  # noqa: B008
    ) -> tuple[list[Tensor | None], Tensor | None]:
        cut = Cut.of(plan)
        if cut == WHOLE:
            given = (o, saved) if self.uses_forward_output else ()
            return self._backward(plan, call, cu_seqlens, grad_o, grad_final, *given, room=room)
        if self.uses_forward_output and call.stabilizer is not None and saved is None:
            o, _, saved = self.forward(plan, call, cu_seqlens)
        parts = Slices(call, cut, self._groups_decays and call.g is not None and call.g.dim() == 4)
        grad_o, o = parts.values(grad_o), parts.values(o)
        found = []
        # a slice of K leaves a share of dv, and of slices of V dq and dk are sums
        inner = GradRoom(v=None if cut.key_slices > 1 or parts.spare else parts.values(room.v))
        for i, (part, grad) in enumerate(zip(parts.rows(), parts.grad_states(grad_final), strict=True)):
            given = ()
            if saved is not None:
                own = torch.stack([saved[0], saved[1 + i]])
                given = (o, _repeated(own, cut.value_slices))
            found.append(self._backward(plan, part, cu_seqlens, grad_o, grad, *given, room=inner))
        grads, grad_state = parts.added(found)
        is_written = grads[2] is inner.v
        grads = parts.gradients(grads)
        if is_written:
            grads[2] = room.v
        return grads, parts.grad_state(grad_state)

    def _backward(self, *given: Any, room: GradRoom) -> tuple[list[Tensor | None], Tensor | None]:
        """The variant's, with room if it takes some."""
        return self.variant.backward(*given, room=room) if self.takes_room else self.variant.backward(*given)


class Slices:
    """A call in slices, and what came of them as of the whole. H: the call's heads; n: V's slices."""

    def __init__(self, call: MatrixCall, cut: Cut, groups_decays: bool) -> None:
        self.call, self.cut, self.n, self.groups_decays = call, cut, cut.value_slices, groups_decays
        self.heads, self.width = call.v.shape[2:]
        self.part = cut.columns(self.width)
        self.spare = self.n * self.part - self.width

    def values(self, x: Tensor | None) -> Tensor | None:
        """[B, T, H, V] as [B, T, H * n, V / n], of the same memory where that is possible."""
        if x is None:
            return None
        whole = F.pad(x, (0, self.spare)) if self.spare else x
        return whole.unflatten(3, (self.n, self.part)).flatten(2, 3)

    def rows(self) -> list[MatrixCall]:
        """V's slices as heads, in a call for each slice of K."""
        call = self.call
        gates = [_repeated(x, self.n) for x in (call.beta, call.stabilizer)]
        g = call.g if self.groups_decays else _repeated(call.g, self.n)
        states = self._states(call.initial_state)
        whole = MatrixCall(call.q, call.k, self.values(call.v), g, *gates, states, *call[7:])
        return [
            whole._replace(
                q=whole.q[..., rows],
                k=whole.k[..., rows],
                g=whole.g[..., rows] if whole.g is not None and whole.g.dim() == 4 else whole.g,
                initial_state=None if whole.initial_state is None else whole.initial_state[:, :, rows],
            )
            for rows in self.cut.rows(whole.k.shape[3])
        ]

    def _states(self, state: Tensor | None, shared: bool = True) -> Tensor | None:
        """[N, H, K, V (+ 1)] as [N, H * n, K, V / n (+ 1)]. shared: whether all slices have the normaliser, or one."""
        if state is None:
            return None
        values = F.pad(state[..., : self.width], (0, self.spare)).unflatten(3, (self.n, self.part)).movedim(3, 2)
        normalizer = state[..., None, self.width :].movedim(3, 2).expand(*values.shape[:4], -1)
        if not shared and normalizer.shape[4]:
            normalizer = normalizer.clone()
            normalizer[:, :, 1:] = 0
        return torch.cat([values, normalizer], -1).flatten(1, 2)

    def grad_states(self, grad: Tensor | None) -> list[Tensor | None]:
        """Of the final states of each slice of K; of V's, the first one's normaliser is handed on."""
        rows = self.cut.rows(self.call.k.shape[3])
        whole = self._states(grad, shared=False)
        return [None if whole is None else whole[:, :, part] for part in rows]

    def output(self, o: Tensor) -> Tensor:
        return o.flatten(2, 3).unflatten(2, (self.heads, -1))[..., : self.width]

    def state(self, state: Tensor) -> Tensor:
        values, normalizer = self._apart(state)
        return torch.cat([values, normalizer[:, :, 0]], -1)

    def grad_state(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        values, normalizer = self._apart(grad)
        return torch.cat([values, normalizer.sum(2)], -1)

    def _apart(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H, K, V], and of each slice the normaliser's column, [N, H, n, K, 0 or 1]."""
        by_slice = state.unflatten(1, (self.heads, self.n))
        values = by_slice[..., : self.part].movedim(2, 3).flatten(3)[..., : self.width]
        return values, by_slice[..., self.part :]

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of (q, k, v, g, beta, stabilizer), and of e: gates are summed over V's slices, as q and k have been."""
        dq, dk, dv, *gates = grads[:6]
        summed = (None if x is None else x.unflatten(2, (self.heads, self.n)).sum(3) for x in gates)
        return [dq, dk, self.output(dv), *summed, *grads[6:]]

    def added(self, found: Sequence[tuple[Sequence[Tensor | None], Tensor | None]]) -> tuple[list[Any], Tensor | None]:
        """The gradients of K's slices as of one call."""
        if len(found) == 1:
            return found[0]
        dq, dk, dv, dg, dbeta, dm = zip(*(grads for grads, _ in found), strict=True)
        states = [state for _, state in found]
        by_row = self.call.g is not None and self.call.g.dim() == 4
        return [
            torch.cat(dq, -1),
            torch.cat(dk, -1),
            _sum(dv),
            torch.cat(dg, -1) if by_row else _sum(dg),
            _sum(dbeta),
            _sum(dm),
        ], None if states[0] is None else torch.cat(states, 2)


def _repeated(x: Tensor | None, times: int) -> Tensor | None:
    """[B, T, H, ...] with each head so many times in a row; dense, where views of one head have a stride of 0."""
    if x is None or times == 1:
        return x
    return x[:, :, :, None].expand(*x.shape[:3], times, *x.shape[3:]).flatten(2, 3).contiguous()


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """In float32, rounded once."""
    first, *rest = parts
    if first is None:
        return None
    total = first.float() if len(rest) > 1 else first
    for part in rest:
        total = total + part
    return total.to(first.dtype)
