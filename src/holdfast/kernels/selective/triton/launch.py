"""Buffers and launches of the selective scan."""

import math
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.runtime.launch import launch
from holdfast.kernels.varlen import on_device
from holdfast.planner import Plan
from holdfast.recurrences.definition import SelectiveCall

from .backward import selective_bwd
from .chunk_grads import selective_group_grads
from .chunk_prepare import selective_prepare
from .forward import selective_fwd

# of the launches over all chunks: numbers of state that a program has at a time, and warps
BLOCK, WARPS = 16, 1
# what 32 bits hold of a tile's offsets, of 16 tokens
LONGEST_STEP = 2**26

Grads = tuple[Tensor | None, ...]


class Run:
    """One call on the current device, its tensors as kernels read them."""

    def __init__(self, plan: Plan, call: SelectiveCall, cu_seqlens: Tensor | None) -> None:
        self.plan, self.call = plan, call
        self.batch, self.length, self.channels = call.x.shape
        self.groups, self.numbers = call.B.shape[2:]
        self.bounds = on_device(cu_seqlens, self.length, call.x.device)
        self.sequences = self.batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        chunk, block = plan["chunk"], max(BLOCK, plan["block_n"])
        self.blocks = -(-self.channels // self.groups // plan["block_d"])
        self.chunks, self.padded = -(-self.length // chunk), -(-self.numbers // block) * block
        # as chunk_coords has them
        self.places = self.batch * self.chunks if cu_seqlens is None else self.length // chunk + self.sequences
        # the exponential of a product of it is a power of 2
        self.rate = self._wide(self.numbers, self.channels)
        torch.mul(call.A.t().float(), math.log2(math.e), out=self.rate)
        timed = {name: getattr(call, name) for name in ("x", "dt", "z", "B", "C")}
        self.timed = {name: None if x is None else _rows(x) for name, x in timed.items()}
        # of no token too: what is None is compiled away, and the kernels' loops are not
        self.B, self.C = self._wide(2, *self._laid_out()).unbind()
        if self.places:
            self._prepare()
        self.skip, self.bias = (None if x is None else _narrow(x.contiguous()) for x in (call.D, call.dt_bias))

    def _wide(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.call.x.device)

    def _laid_out(self) -> tuple[int, ...]:
        """Of B and C as kernels read them."""
        return self.places, self.groups, self.padded, self.plan["chunk"]

    def _over_chunks(self, kernel: Any, tensors: tuple[Tensor, ...], numbers: tuple[int, ...]) -> None:
        constants = {"CHUNK": self.plan["chunk"], "PADDED": self.padded, "BLOCK": BLOCK}
        sizes = (self.length, self.sequences, self.chunks, self.numbers)
        grid = (self.places, self.groups)
        launch(kernel, grid, (*tensors, self.bounds), (*sizes, *numbers), constants, WARPS)

    def _prepare(self) -> None:
        B, C = self.timed["B"], self.timed["C"]
        self._over_chunks(selective_prepare, (B, C, self.B, self.C), (*B.stride()[:3], *C.stride()[:3]))

    def _operands(self) -> tuple[Tensor | None, ...]:
        x, dt, z = (self.timed[name] for name in ("x", "dt", "z"))
        return x, dt, self.rate, self.B, self.C, self.skip, z, self.bias

    def _strides(self, *others: Tensor) -> tuple[int, ...]:
        tensors = (*(self.timed[name] for name in ("x", "dt", "z")), *others)
        return tuple(n for x in tensors for n in ((0, 0) if x is None else x.stride()[:2]))

    def _sizes(self) -> tuple[int, ...]:
        return self.length, self.channels, self.channels // self.groups, self.numbers

    def _grid(self) -> tuple[int, ...]:
        return (self.sequences * self.groups * self.blocks,)

    def _constants(self) -> dict[str, int]:
        plan = self.plan
        return {"CHUNK": plan["chunk"], "PADDED": self.padded, "BLOCK_D": plan["block_d"], "BLOCK_N": plan["block_n"]}

    def forward(self, y: Tensor, final: Tensor, entries: Tensor | None) -> None:
        """Fill y, final, which may be the call's initial state, and entries, where a backward pass reads them."""
        if not self.sequences:
            return
        initial, keep = self.call.initial_state, entries is not None
        room = entries if keep else self._wide(self.sequences, self.numbers, self.channels)
        tensors = (*self._operands(), y, None if initial is None else initial.contiguous(), final, room, self.bounds)
        constants: dict[str, Any] = {"SOFTPLUS": self.call.softplus, "KEEP": keep} | self._constants()
        numbers = (*self._sizes(), *self._strides())
        launch(selective_fwd, self._grid(), tensors, numbers, constants, self.plan["warps"])

    def backward(self, entries: Tensor | None, grad_y: Tensor | None, grad_final: Tensor | None) -> Grads:
        """Return the gradients of the call's tensors; entries: as `forward` left them, None for no sequences."""
        call, like = self.call, {"memory_format": torch.contiguous_format}
        dx, ddt, dz = (None if x is None else torch.empty_like(x, **like) for x in (call.x, call.dt, call.z))
        d_initial = self._wide(self.sequences, self.channels, self.numbers)
        dB, dC = (torch.empty_like(x, **like) for x in (call.B, call.C))
        parts = self._wide(2, self.blocks, *self._laid_out())
        carried, dA = (self._wide(self.sequences, self.numbers, self.channels) for _ in range(2))
        dD, dbias = (self._wide(self.sequences, self.channels) for _ in range(2))
        if grad_y is None:
            grad_y = call.x.new_zeros(self.channels).expand(call.x.shape)
        dy = _rows(grad_y)
        if self.sequences:
            into = (entries, dx, ddt, dz, d_initial, carried, dA, *parts.unbind(), dD, dbias)
            last = None if grad_final is None else grad_final.float().contiguous()
            size = math.prod(self._laid_out())
            numbers = (*self._sizes(), size, *self._strides(dy))
            constants: dict[str, Any] = {"SOFTPLUS": call.softplus} | self._constants()
            tensors = (*self._operands(), dy, last, *into, self.bounds)
            launch(selective_bwd, self._grid(), tensors, numbers, constants, self.plan["warps"])
        if self.places:
            self._over_chunks(
                selective_group_grads, (*parts.unbind(), dB, dC), (self.blocks, math.prod(self._laid_out()))
            )
        dA = dA.sum(0).t().to(call.A.dtype)
        dD, dbias = (
            None if given is None else part.sum(0).to(given.dtype)
            for part, given in ((dD, call.D), (dbias, call.dt_bias))
        )
        return dx, ddt, dA, dB, dC, dD, dz, dbias, d_initial


def _rows(x: Tensor) -> Tensor:
    """Return x with its last axis side by side and a step that tiles' offsets hold, in a dtype that kernels read."""
    x = _narrow(x)
    fits = x.stride(-1) == 1 and x.stride(1) < LONGEST_STEP
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _narrow(x: Tensor) -> Tensor:
    """Return x; in float32, which is what the arithmetic takes, where it is wider."""
    return x.float() if x.dtype == torch.float64 else x
