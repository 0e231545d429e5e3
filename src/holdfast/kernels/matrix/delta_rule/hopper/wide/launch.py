"""The delta rule's passes on Hopper with wide keys: states and outputs by kernel.py, all else by Triton's kernels."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.matrix.args import TOKENS, dtype_or_none
from holdfast.kernels.matrix.delta_rule.triton.launch import DeltaPasses, Slots
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import aligned, for_tma, tiles
from holdfast.planner.models.matrix.delta_rule.hopper_wide import STAGES, WIDEST

from .kernel import COLUMNS, delta_rule_wide_states


@dataclass(frozen=True)
class WidePasses(DeltaPasses):
    """A call as the kernels take it."""

    shares_memory: ClassVar[bool] = False

    @staticmethod
    def read(x: Tensor) -> Tensor:
        return for_tma(x)

    def forward(self, a: Tensor, out: Tensor | None, last: Tensor | None, slots: Slots | None) -> None:
        """Launch the kernel forward in time; the arguments are those of DeltaPasses.forward."""
        q = None if out is None else self.q
        self._launch(q, self.v, a, out, aligned(self.state), last, slots, (0, -(-self.v.shape[1] // TOKENS)), False)

    def reverse(
        self, do: Tensor, a: Tensor, first: Tensor | None, last: Tensor | None, slots: Slots, window: tuple[int, int]
    ) -> None:
        """Launch the kernel backward in time; the arguments are those of DeltaPasses.reverse."""
        self._launch(self.q, do, a, None, aligned(first), last, slots, window, True)

    def _launch(
        self,
        q: Tensor | None,
        v: Tensor,
        a: Tensor,
        out: Tensor | None,
        start: Tensor | None,
        end: Tensor | None,
        slots: Slots | None,
        window: tuple[int, int],
        back: bool,
    ) -> None:
        """Launch `delta_rule_wide_states`. window: its first chunk, and how many; all, if sequences are packed."""
        keys, values, columns = self.k.shape[3], v.shape[3], COLUMNS.value
        strides = (
            (0, 0, 0) if self.g is None else self.g.stride(),
            (0, 0, 0) if self.beta is None else self.beta.stride(),
        )
        arguments = (
            tiles(self.k, [1, TOKENS, 1, WIDEST], TILE_LAYOUT),
            None if q is None else tiles(q, [1, TOKENS, 1, WIDEST], TILE_LAYOUT),
            tiles(v, [1, TOKENS, 1, columns], TILE_LAYOUT),
            tiles(a, [1, TOKENS, 1, TOKENS], TILE_LAYOUT),
            None if out is None else tiles(out, [1, TOKENS, 1, columns], TILE_LAYOUT),
            None if slots is None else tiles(slots.low, [1, 1, columns, WIDEST], TILE_LAYOUT),
            self.g,
            self.beta,
            start,
            end,
            self.cu_seqlens,
            None if self.cu_seqlens is None else out,
            v.shape[1],
            self.heads,
            self.heads // self.k.shape[2],
            *strides[0],
            *strides[1],
            *window,
            self.scale,
        )
        constants = {"KEYS": keys, "VALUES": values, "BACK": back, "STAGES": STAGES}
        optional = (q, out, slots, self.g, self.beta, start, end)
        types = (v.dtype, *(x is None for x in optional), dtype_or_none(self.cu_seqlens))
        launch(
            delta_rule_wide_states,
            (self.sequences * self.heads, -(-values // columns), 1),
            arguments,
            constants,
            4,
            types,
        )
