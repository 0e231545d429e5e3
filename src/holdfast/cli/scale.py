"""A layer over several GPUs: what each way of sharing it should cost, by the planner's models and the links' rates."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from holdfast import ops, parallel
from holdfast.ops.explain import explain
from holdfast.parallel.sections import routes
from holdfast.planner.layouts import WEIGHT, Layout, Link, activation_bytes, gradient_bytes, state_bytes, weight_bytes
from holdfast.recurrences import DELTA_RULES, RECURRENCES, Draw, Sizes

# of the op's time, in context parallelism: for the summary and for the outputs; a delta rule's carry is a matrix more
CP_TIMES = 2
CP_TIMES_DELTA = 3


@dataclass(frozen=True)
class Layer:
    """An op between its projections, and a SwiGLU of 8/3 of the width behind.

    sizes: with Hq. Projections from and to width channels: of the matrix family q, k, v, a gate and out; of the
    diagonal one the input, a branch and out, and two gates of D x D; of the dense one the gates, beside R.
    """

    op: str
    sizes: Sizes
    dtype: str
    device: str
    width: int

    @property
    def family(self) -> str:
        return RECURRENCES[self.op].family

    @property
    def tokens(self) -> int:
        return self.sizes.B * self.sizes.T

    @property
    def weights(self) -> int:
        s, d = self.sizes, self.width
        if self.family == "matrix":
            mixer = 2 * d * s.Hq * s.K + 3 * d * s.H * s.V
        elif self.family == "diagonal":
            mixer = 3 * d * s.D + 2 * s.D * s.D
        else:
            # R has as many rows a head as x has numbers
            mixer = self.gates * s.H * s.D * (d + s.D)
        return mixer + 8 * d * d

    @property
    def gates(self) -> int:
        """Of the dense family, numbers that x has for each channel of a token."""
        x = RECURRENCES[self.op].example(Draw(device="meta"), replace(self.sizes, B=1, T=1))["x"]
        return x.numel() // (self.sizes.H * self.sizes.D)

    def seconds(self, op_times: int = 1, weights: int | None = None) -> float | None:
        """Of both passes; None where the device's rates are not known. weights: that a token is multiplied with."""
        named = {axis: getattr(self.sizes, axis) for axis in ("B", "T", *self.heads)}
        named |= {axis: getattr(self.sizes, axis) for axis in ("K", "V") if self.family == "matrix"}
        found = explain(self.op, named, self.dtype, self.device)
        passes = [each.chosen.seconds for each in found.passes]
        rates = {"bfloat16": found.device.reached_tensor_rate, "float32": found.device.fp32_rate}
        rate = rates.get("bfloat16" if self.dtype == "float16" else self.dtype)
        if rate is None or None in passes:
            return None
        # two operations a weight and token forwards, four backwards
        products = 6 * (self.weights if weights is None else weights) * self.tokens / rate
        return op_times * sum(filter(None, passes)) + products

    @property
    def heads(self) -> tuple[str, ...]:
        """The axes that tensor parallelism cuts."""
        return {"matrix": ("H", "Hq"), "diagonal": ("D",), "dense": ("H",)}[self.family]

    def cut(self, ranks: int, *axes: str) -> "Layer":
        """Of one rank, which has that part of each of the axes, rounded up."""
        parts = {axis: -(-getattr(self.sizes, axis) // ranks) for axis in axes}
        return replace(self, sizes=replace(self.sizes, **parts))


def layer_around(op: str, sizes: Mapping[str, int], dtype: str, device: str, width: int | None) -> Layer:
    """Sizes as `explain` takes them. Raises ValueError for an op without a layer."""
    if op not in RECURRENCES:
        raise ValueError(f"--ranks: expected a recurrence, which a layer is around; got {op}")
    if RECURRENCES[op].family == "selective":
        raise ValueError(f"--ranks: expected a recurrence that several ranks share; got {op}, which none do yet")
    given = Sizes(**sizes)
    given = replace(given, Hq=given.query_heads)
    family = RECURRENCES[op].family
    channels = given.D if family == "diagonal" else given.H * (given.V if family == "matrix" else given.D)
    return Layer(op, given, dtype, device, width or channels)


def message_bytes(op: str, sizes: Sizes, dtype: str) -> int:
    """What a rank tells of its tokens in context parallelism: the summary of a span, whatever its length."""
    span = RECURRENCES[op].example(Draw(dtype=getattr(torch, dtype)), replace(sizes, B=1, T=1))
    span.pop("initial_state", None)
    found = parallel.summary(getattr(ops, op), **span)
    return sizes.B * sum(x.numel() * x.element_size() for x in found if x is not None)


def rows_exchanged(sections: parallel.Sections, rank: int, ranks: int) -> int:
    """Rows of a packed weight that a rank sends in both passes of tensor parallelism: those that others need, and the
    gradients of those that it has from others."""
    route = routes(sections, sum(sections.widths), ranks)
    others = [other for other in range(ranks) if other != rank]
    return sum(route.rows(rank, other) + route.rows(other, rank) for other in others)


def packed_bytes(layer: Layer, ranks: int) -> int:
    """Of the weights that enter the mixer and the MLP, of the rank that sends the most."""
    s, hidden = layer.sizes, 8 * layer.width // 3 // ranks * ranks
    if layer.family == "matrix":
        mixer = parallel.Sections((s.Hq * s.K, s.Hq * s.K, s.H * s.V, s.H * s.V), (s.Hq, s.Hq, s.H, s.H))
    elif layer.family == "diagonal":
        mixer = parallel.Sections((s.D, s.D), (s.D, s.D))
    else:
        gates = layer.gates
        mixer = parallel.Sections(gates * (s.H * s.D,), gates * (s.H,))
    mlp = parallel.Sections((hidden, hidden), (hidden, hidden))
    sent = [sum(rows_exchanged(packed, rank, ranks) for packed in (mixer, mlp)) for rank in range(ranks)]
    return max(sent) * layer.width * WEIGHT


def layouts(layer: Layer, ranks: int) -> tuple[list[Layout], dict[str, str]]:
    """A layer by itself and shared in each way that fits; and of the other ways, why they do not."""
    s, weights = layer.sizes, layer.weights
    found, refused = [Layout("one GPU", f"B {s.B}, T {s.T}", layer.seconds())], {}
    if layer.family == "dense":
        refused["cp"] = "the time of a nonlinear recurrence cannot be cut"
    else:
        part = layer.cut(ranks, "T")
        waits = state_bytes(message_bytes(layer.op, s, layer.dtype), ranks)
        seconds = part.seconds(CP_TIMES_DELTA if layer.op in DELTA_RULES else CP_TIMES)
        found.append(Layout("cp", f"T {part.sizes.T}", seconds, waits, gradient_bytes(weights, ranks)))
    if odd := [axis for axis in layer.heads if getattr(s, axis) % ranks]:
        refused["tp"] = f"{odd[0]} = {getattr(s, odd[0])} is no multiple of {ranks}"
    else:
        part = layer.cut(ranks, *layer.heads)
        waits = activation_bytes(layer.tokens, layer.width, getattr(torch, layer.dtype).itemsize, ranks)
        waits += packed_bytes(layer, ranks)
        share = f"{layer.heads[0]} {getattr(part.sizes, layer.heads[0])}"
        found.append(Layout("tp", share, part.seconds(1, weights // ranks), waits))
    if s.B % ranks:
        refused["fsdp and ddp"] = f"B = {s.B} is no multiple of {ranks}"
    else:
        part = layer.cut(ranks, "B")
        for name, count in (("fsdp", weight_bytes), ("ddp", gradient_bytes)):
            found.append(Layout(name, f"B {part.sizes.B}", part.seconds(), 0.0, count(weights, ranks)))
    return found, refused


def told(layer: Layer, ranks: int, link_name: str) -> str:
    """Lines of text. Raises ValueError for a link that the device does not have."""
    link = Link.between(link_name, explain(layer.op, {}, layer.dtype, layer.device).device)
    found, refused = layouts(layer, ranks)
    alone = found[0].on(link)
    rows = [("over", "has", "computes", "waits for", "sends meanwhile", "layer", "of one GPU")]
    for each in found:
        whole = each.on(link)
        times = [f"{x * 1e3:.3f} ms" if x is not None else "unknown" for x in (each.seconds, whole)]
        sent = [f"{x / 2**20:.2f} MiB" if x else "" for x in (each.waits, each.meanwhile)]
        rows.append(
            (each.name, each.share, times[0], *sent, times[1], f"{whole / alone:.3f}" if whole and alone else "")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    around = f"a layer of width {layer.width} with {layer.weights:,} weights, both passes; a rank's bytes"
    lines = [f"  {ranks} ranks by {link.name}, {link.bandwidth / 1e9:.0f} GB/s each way: {around}"]
    for name, share, *numbers in rows:
        shown = map(str.rjust, numbers, widths[2:])
        lines.append(" ".join(["   ", name.ljust(widths[0]), share.ljust(widths[1]), *shown]).rstrip())
    return "\n".join([*lines, *(f"    not {name}: {reason}" for name, reason in refused.items())])
