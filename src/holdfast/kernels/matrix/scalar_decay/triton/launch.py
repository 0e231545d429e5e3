"""The passes of the single-pass kernel: which tensors take which roles, in what order, with what in between."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import varlen
from holdfast.kernels.lib.triton.group_sum import sum_over_groups
from holdfast.kernels.lib.triton.normalizer import normalizer_grad
from holdfast.kernels.matrix.state_passing.triton.segment_scan import segment_scan
from holdfast.kernels.matrix.state_passing.triton.segment_states import triton_segment_states
from holdfast.kernels.runtime.launch import launch
from holdfast.planner import Plan
from holdfast.planner.models.matrix.scalar_decay.triton import ADVANCE_COLUMNS, padded
from holdfast.recurrences.definition import MatrixCall

from .decay_grad import scalar_decay_dg
from .single_pass import EXACT, scalar_decay_single_pass


def _ceil(size: int, part: int) -> int:
    return -(-size // part)


def _tokenwise(x: Tensor) -> Tensor:
    """x itself if the kernels can read it, else a copy: the last axis dense, 64 tokens within 32 bits."""
    return x if x.stride(-1) == 1 and 64 * x.stride(1) < 2**31 else x.contiguous()


def _rows(x: Tensor | None) -> Tensor | None:
    if x is None or (x.dtype == torch.float32 and x.is_contiguous()):
        return x
    return x.to(torch.float32).contiguous()


# of a rounded operand, relative to its square, about
_VARIANCE = {dtype: (torch.finfo(dtype).eps / 4) ** 2 for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class Roles:
    """The tensors of a pass: out, or None, of q, k and v, `block` of v's columns a program.

    state: strides of the states, as Passes.by_value or by_key has them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    block: int
    state: dict[str, Any]


@dataclass(frozen=True)
class Weights:
    """What a pass multiplies with, [B, T, H] each or None. add: with the added column."""

    source: Tensor | None = None
    source_add: Tensor | None = None
    output: Tensor | None = None
    output_add: Tensor | None = None
    after: Tensor | None = None
    add: bool = False


@dataclass(frozen=True)
class States:
    """The state that enters a pass and the one that leaves it, or None."""

    first: Tensor | None = None
    last: Tensor | None = None


@dataclass(frozen=True)
class Sums:
    """What a pass finds beside its output, or None; the fields are scalar_decay_single_pass's arguments of these names.

    m, with norm: the stabiliser, if outputs are divided. keep: chunks from one saved state to the next.
    """

    x: Tensor | None = None
    keep: int = 1
    saved: Tensor | None = None
    rows: Tensor | None = None
    products: Tensor | None = None
    full: Tensor | None = None
    norm: Tensor | None = None
    m: Tensor | None = None


@dataclass(frozen=True)
class Passes:
    """A call as the kernels take it. segments: of each sequence; segment: steps of each."""

    plan: Plan
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    m: Tensor | None
    state: Tensor | None
    scale: float
    eps: float
    cu_seqlens: Tensor | None
    sequences: int
    segments: int
    segment: int

    @staticmethod
    def of(plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> "Passes":
        """Raises ValueError for offsets that do not rise from 0 to T; while a CUDA graph is captured they go unread."""
        batch, length = call.v.shape[:2]
        cu_seqlens = varlen.on_device(cu_seqlens, length, call.v.device)
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        segments = plan["segments"]
        unit = plan["chunk"]
        segment = _ceil(_ceil(length, segments), unit) * unit
        q, k, v = (_tokenwise(x) for x in call[:3])
        state = None if call.initial_state is None else call.initial_state.contiguous()
        rows = (_rows(call.g), _rows(call.beta), _rows(call.stabilizer))
        return Passes(
            plan, q, k, v, *rows, state, call.scale, call.eps, cu_seqlens, sequences, segments, max(segment, 1)
        )

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    @property
    def tokens(self) -> int:
        return self.v.shape[0] * self.v.shape[1]

    def state_shape(self) -> tuple[int, int, int, int]:
        return self.sequences, self.heads, self.k.shape[3], self.v.shape[3] + (self.m is not None)

    def per_token(self, *lead: int) -> Tensor:
        """Uninitialised float32 [*lead, B, T, H]."""
        return self.v.new_empty(*lead, *self.v.shape[:3], dtype=torch.float32)

    def by_value(self) -> dict[str, Any]:
        """How a pass whose output has v's columns addresses the state [N, H, K, V (+ 1)]."""
        _, _, rows, columns = self.state_shape()
        return {"state_size": rows * columns, "state_k": columns, "state_v": 1, "state_add": self.v.shape[3]}

    def by_key(self) -> dict[str, Any]:
        """The same where the output has k's columns."""
        return self.by_value() | {"state_k": 1, "state_v": self.state_shape()[3]}

    def launch_pass(
        self, roles: "Roles", weights: "Weights", states: "States", sums: "Sums", reverse: bool = False
    ) -> None:
        """Launch scalar_decay_single_pass."""
        q, k, v, x = roles.q, roles.k, roles.v, sums.x
        width, columns, block = q.shape[3], v.shape[3], roles.block
        strides = [y.stride()[:3] if y is not None else (0, 0, 0) for y in (q, k, v, x)]
        tensors = (
            q, k, v, roles.out, x,
            self.g, weights.source, weights.source_add, weights.output, weights.output_add, weights.after, sums.m,
            states.first, states.last, sums.saved, sums.rows, sums.products, sums.full, sums.norm, self.cu_seqlens,
        )  # fmt: skip
        numbers = (
            self.v.shape[1], self.heads, self.segment, self.scale, self.eps, self.tokens,
            0 if sums.saved is None else sums.saved.stride(1), 0 if sums.products is None else sums.products.stride(0),
            *(number for y in strides for number in y), *roles.state.values(),
        )  # fmt: skip
        constants = {
            "QK_GROUP": self.heads // q.shape[2],
            "VX_GROUP": self.heads // v.shape[2],
            "WIDTH": width,
            "COLUMNS": columns,
            "BLOCK_K": padded(width),
            "BLOCK_V": block,
            "CHUNK": self.plan["chunk"],
            "SEGMENTS": self.segments,
            "KEEP": sums.keep,
            "STAGES": self.plan["stages"],
            "REVERSE": reverse,
            "ADD": weights.add,
        }
        blocks = (_ceil(columns, block) * self.heads * self.sequences * self.segments,)
        launch(scalar_decay_single_pass, blocks, tensors, numbers, constants, self.plan["warps"])

    def decay_gradient(
        self, read: Tensor, written: Tensor, products: Tensor, out: Tensor, grad_m: Tensor | None
    ) -> None:
        """The log decay's gradient from what the sweeps left of it, and m's part of the final state."""
        tensors = (self.g, read, written, products, out, grad_m, self.cu_seqlens)
        numbers = (self.v.shape[1], self.heads, self.segment, self.tokens, products.stride(0))
        constants = {
            "SPLITS": read.shape[0],
            "CHUNK": self.plan["chunk"],
            "SEGMENTS": self.segments,
            "KEEP": self.plan["keep"],
            "BLOCK": self.plan["key_columns"],
            "VARIANCE": _VARIANCE[self.v.dtype],
            "EXACT": self.v.dtype == torch.float32,
        }
        # packed sequences may be many and short
        windows = 8
        if self.cu_seqlens is None:
            windows = _ceil(self.segment, self.plan["keep"] * self.plan["chunk"])
        # one warp: scans of 64 numbers, and a second would only be waited for
        launch(scalar_decay_dg, (self.sequences * self.segments, self.heads, windows), tensors, numbers, constants, 1)

    def initial_states(
        self,
        k: Tensor,
        v: Tensor,
        source: Tensor | None,
        source_add: Tensor | None,
        first: Tensor | None,
        last: Tensor | None,
        reverse: bool,
    ) -> Tensor:
        """The state that enters each segment, [B * segments, H, K, V (+ 1)], and in last the one that leaves the last.

        k, v: the tensors written beside v's columns and beside k's.
        """
        state = self.by_key()
        shape = (self.sequences * self.segments, *self.state_shape()[1:])
        states = self.v.new_empty(shape, dtype=torch.float32)
        decay = None if self.g is None else self.v.new_empty(shape[:2], dtype=torch.float32)
        width, columns, block = k.shape[3], v.shape[3], min(ADVANCE_COLUMNS, padded(v.shape[3]))
        tensors = (k, v, self.g, source, source_add, states, decay)
        numbers = (
            self.v.shape[1], self.heads, self.segment, self.scale, *k.stride()[:3], *v.stride()[:3], *state.values(),
        )  # fmt: skip
        constants = {
            "K_GROUP": self.heads // k.shape[2],
            "V_GROUP": self.heads // v.shape[2],
            "WIDTH": width,
            "COLUMNS": columns,
            "BLOCK_K": padded(width),
            "BLOCK_V": block,
            "CHUNK": self.plan["chunk"],
            "SEGMENTS": self.segments,
            "STAGES": self.plan["stages"],
            "REVERSE": reverse,
            "ADD": self.m is not None,
            # a normaliser may cancel to 1e-5 of its terms, which float32 sums of log decays leave
            "WIDE": self.v.dtype == torch.float32 or self.m is not None,
            "PRECISION": "ieee" if max(width, columns) <= EXACT.value else "tf32x3",
        }
        blocks = (_ceil(columns, block) * self.heads * shape[0],)
        launch(triton_segment_states, blocks, tensors, numbers, constants, 4)
        cells = state["state_size"]
        constants = {"SEGMENTS": self.segments, "REVERSE": reverse, "BLOCK": 512}
        blocks = (self.sequences * self.heads, _ceil(cells, 512))
        launch(segment_scan, blocks, (states, decay, first, last), (self.heads, cells), constants, 4)
        return states


def forward(plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] in v's dtype and the final state [N, H, K, V (+ 1)] in float32."""
    run = Passes.of(plan, call, cu_seqlens)
    out = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    final = call.v.new_empty(run.state_shape(), dtype=torch.float32)
    if final.numel() == 0:
        return out, final
    norm = None if run.m is None else run.per_token()
    first, last = run.state, final
    if run.segments > 1:
        first, last = run.initial_states(run.v, run.k, run.beta, run.beta, run.state, final, reverse=False), None
    roles = Roles(run.q, run.k, run.v, out, plan["columns"], run.by_value())
    run.launch_pass(roles, Weights(source=run.beta), States(first, last), Sums(norm=norm, m=run.m))
    return out, final


def backward(
    plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of (q, k, v, g, beta, stabilizer), None where the input is, and of the initial state if it is given."""
    if call.stabilizer is not None and call.g is None:
        # the final state's part of m's gradient is found with the log decay's
        grads, grad_state = backward(
            plan, call._replace(g=torch.zeros_like(call.stabilizer)), cu_seqlens, grad_o, grad_final
        )
        return [*grads[:3], None, *grads[4:]], grad_state
    run = Passes.of(plan, call, cu_seqlens)
    grad_state = None if run.state is None else torch.empty_like(run.state)
    grads = {
        name: torch.empty_like(x, memory_format=torch.contiguous_format)
        for name in ("q", "k", "v", "g", "beta", "stabilizer")
        if (x := getattr(call, name)) is not None
    }
    if run.sequences == 0:
        return [grads.get(name) for name in MatrixCall._fields[:6]], grad_state
    do = _tokenwise(torch.zeros_like(call.v) if grad_o is None else grad_o)
    grad_final = None if grad_final is None else grad_final.contiguous()
    normalize = run.m is not None
    keys, values = plan["key_columns"], plan["value_columns"]
    splits = _ceil(call.k.shape[3], keys)

    first = run.state
    if run.segments > 1:
        first = run.initial_states(run.v, run.k, run.beta, run.beta, run.state, None, reverse=False)
    weight = add = None
    if normalize:
        weight, add, dm = _normalizer(run, do, first, values)
        grads["stabilizer"].copy_(dm)

    # the forward sweep: dq, and the states that the reverse sweep takes up the log decay's gradient at
    keep, chunk = plan["keep"], plan["chunk"]
    read = saved = products = written = None
    if run.g is not None:
        read, written = run.per_token(splits, 3), run.per_token(splits)
        slots = run.tokens // (keep * chunk) + 2 * run.sequences * run.segments + 1
        products = call.v.new_empty(splits, slots * run.heads * keys, dtype=torch.float32)
        saved = call.v.new_empty(
            slots,
            run.heads,
            call.k.shape[3] * (call.v.shape[3] + normalize),
            dtype=torch.float32 if call.v.shape[1] <= chunk else None,
        )
    per_head = (*call.v.shape[:3], call.k.shape[3])
    grouped = run.heads != call.q.shape[2]
    dq, dk = (call.q.new_empty(per_head) if grouped else grads[name] for name in ("q", "k"))
    run.launch_pass(
        Roles(do, run.v, run.k, dq, keys, run.by_key()),
        Weights(source=run.beta, source_add=run.beta, output=weight, output_add=add, add=normalize),
        States(first),
        Sums(x=None if read is None else run.q, keep=keep, saved=saved, rows=read),
    )

    last_grad, end = grad_state, grad_final
    if run.segments > 1:
        end, last_grad = run.initial_states(do, run.q, weight, add, grad_final, grad_state, reverse=True), None
    dbeta = None if run.beta is None else run.per_token(splits)
    x = None if read is None and dbeta is None else run.k
    run.launch_pass(
        Roles(run.v, do, run.q, dk, keys, run.by_key()),
        Weights(source=weight, source_add=add, after=run.beta, add=normalize),
        States(end, last_grad),
        Sums(x=x, keep=keep, saved=saved, rows=written, products=products, full=dbeta),
        reverse=True,
    )
    run.launch_pass(
        Roles(run.k, run.q, do, grads["v"], values, run.by_value()),
        Weights(source=weight, after=run.beta),
        States(end),
        Sums(),
        reverse=True,
    )
    if written is not None:
        # the final state is in units of the last m
        grad_m = grads["stabilizer"] if normalize and grad_final is not None else None
        run.decay_gradient(read, written, products, grads["g"], grad_m)
    if dbeta is not None:
        grads["beta"].copy_(dbeta[0] if splits == 1 else dbeta.sum(0))
    if grouped:
        sum_over_groups(dq, dk, grads["q"], grads["k"])
    return [grads.get(name) for name in MatrixCall._fields[:6]], grad_state


def _normalizer(run: Passes, do: Tensor, first: Tensor | None, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """1 / what outputs are divided by, and the gradients of scale n . q and of m, [B, T, H] each."""
    splits = _ceil(run.v.shape[3], block)
    norm, across = run.per_token(), run.per_token(splits)
    roles = Roles(run.q, run.k, run.v, None, block, run.by_value())
    run.launch_pass(roles, Weights(source=run.beta), States(first), Sums(x=do, rows=across, norm=norm, m=run.m))
    weight, add, dm = run.per_token(), run.per_token(), run.per_token()
    count = norm.numel()
    if count:
        tensors, numbers = (norm, run.m, across, weight, add, dm), (run.eps, count)
        launch(normalizer_grad, (_ceil(count, 1024),), tensors, numbers, {"SPLITS": splits, "BLOCK": 1024}, 4)
    return weight, add, dm
