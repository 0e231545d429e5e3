"""What doctor runs: every backend of every op on random arguments, with what is right of them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import Backend
from holdfast.recurrences import RECURRENCES, Draw, Recurrence, Sizes, oracle
from holdfast.recurrences.gla import GLA
from holdfast.recurrences.kda import KDA
from holdfast.recurrences.mlstm import MLSTM
from holdfast.recurrences.retnet import RETNET
from holdfast.recurrences.rglru import RGLRU
from holdfast.recurrences.rotlru import ROTLRU
from holdfast.recurrences.simple_gla import SIMPLE_GLA

from .causal_conv1d import BACKENDS as CONV_BACKENDS
from .causal_conv1d import causal_conv1d, causal_conv1d_update
from .delta_layer import delta_layer
from .families import backends_of, op_of
from .gated_gelu import gated_gelu
from .gated_rms_norm import BACKENDS as GATED_NORM_BACKENDS
from .gated_rms_norm import gated_rms_norm
from .gla_layer import gla_layer
from .inter_chunk_scan import BACKENDS as INTER_CHUNK_BACKENDS
from .inter_chunk_scan import inter_chunk_scan
from .intra_chunk import BACKENDS as INTRA_CHUNK_BACKENDS
from .intra_chunk import intra_chunk
from .kda_layer import kda_layer
from .layer_step import BACKENDS as LAYER_STEP_BACKENDS
from .layer_step import LayerStep
from .layer_step_checks import DRAWN, draw_delta, stepped
from .lru_gates import lru_gates
from .mlstm import mlstm
from .parity import cast, largest_error, leaves, relative_error, values_and_grads
from .pooled_diagonal import BACKENDS as DIAGONAL_POOL_BACKENDS
from .pooled_matrix import BACKENDS as POOL_BACKENDS
from .pooled_step_checks import POOLED, draw_pool, pooled
from .retnet import retnet
from .rglru import rglru
from .rotary import rotary
from .rotlru import rotlru
from .soft_cap import soft_cap

# relative to the float64 oracle; outputs and gradients in float32
LIMIT = 2e-5
# of backends that take half precision alone: four roundings of bfloat16
HALF_LIMIT = 4 * 2.0**-8
# of a single element, relative to itself and to what elements are: of errors that are alike and independent the largest
# of 10^5 is 4.4 times the root mean square; more where an element's own sum cancels
WORST = 8
# crosses a chunk boundary, with a ragged tail, grouped heads and K != V
SIZES = Sizes(B=2, T=70, H=4, Hq=2, K=16, V=8, D=16)
# of channels that are copied 16 bytes at a time, two of them a number
_WIDE = replace(SIZES, D=32)
# what decoding takes
_TOKEN = replace(SIZES, T=1)
_COMPOSED, _CHUNK = Sizes(B=2, T=64, H=4, K=16, V=8), 16


@dataclass(frozen=True)
class Attempt:
    """Arguments to run a backend on, what is right of them, and how near it has to come.

    grads: whether to check gradients too.
    """

    right: Callable[[Any], Any]
    on_cpu: dict[str, Any]
    arguments: dict[str, Any]
    limit: float
    grads: bool = True

    @cached_property
    def exact(self) -> list[Tensor]:
        return self.results(self.right, cast(self.on_cpu, torch.float64))

    def results(self, run: Callable[[Any], Any], arguments: dict[str, Any] | None = None) -> list[Tensor]:
        """Outputs of run, and gradients of its arguments, in float64 on the CPU."""
        arguments = self.arguments if arguments is None else arguments
        if self.grads:
            return values_and_grads(run, arguments)
        with torch.no_grad():
            return [x.double().cpu() for x in leaves(run(arguments))]

    def judge(self, got: list[Tensor]) -> tuple[float, str]:
        """The largest error of results in norm, and what is wrong with them, "" for nothing."""
        errors = [relative_error(x, y) for x, y in zip(got, self.exact, strict=True)]
        # max() may pass over a NaN
        error = next((e for e in errors if e != e), max(errors))
        if not error <= self.limit:
            which = errors.index(error)
            return error, f"relative error {error:.1e} of output or gradient {which}, limit {self.limit:.0e}"
        worst = [largest_error(x, y) for x, y in zip(got, self.exact, strict=True)]
        largest, limit = max(worst), WORST * self.limit
        if largest <= limit:
            return error, ""
        which = worst.index(largest)
        return error, f"relative error {largest:.1e} of one element of output or gradient {which}, limit {limit:.0e}"


Try = tuple[Attempt, Callable[[Any], Any]]


@dataclass(frozen=True)
class Check:
    """A backend of an op. tries: arguments, and what calls the backend with them; the first that it takes counts."""

    op: str
    backend: Backend
    tries: tuple[Try, ...]


def of_example(
    recurrence: Recurrence,
    seed: int,
    device: torch.device,
    sizes: Sizes,
    dtype: torch.dtype = torch.float32,
    grads: bool = True,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Attempt:
    """A recurrence's example, held against its oracle. options: of the op, which the oracle takes too."""
    on_cpu, arguments = (recurrence.example(Draw(seed, dtype, place), sizes) | options for place in ("cpu", device))
    return Attempt(partial(oracle, recurrence), on_cpu, arguments, limit_of(dtype), grads)


def of_draw(
    draw: Callable[[Draw], dict[str, Any]],
    right: Callable[[Any], Any],
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Attempt:
    """Arguments of an op that has no oracle, held against a PyTorch backend that its tests hold against an equation."""
    on_cpu, arguments = (draw(Draw(seed, dtype, place)) for place in ("cpu", device))
    return Attempt(right, on_cpu, arguments, limit_of(dtype))


def limit_of(dtype: torch.dtype) -> float:
    """Of the error in norm, for arguments of a dtype."""
    return LIMIT if dtype == torch.float32 else HALF_LIMIT


def named(recurrence: Recurrence, backend: str) -> Callable[[dict[str, Any]], Any]:
    """What calls a recurrence's op with one backend."""
    return lambda a: op_of(recurrence)(**a, output_final_state=True, backend=backend)


def every(device: torch.device, seed: int = 0) -> Iterator[Check]:
    """Every backend of every op: outputs and gradients in float32, or else in bfloat16, or else one token's outputs."""
    for recurrence in RECURRENCES.values():
        attempts = [
            of_example(recurrence, seed, device, SIZES),
            of_example(recurrence, seed, device, SIZES, torch.bfloat16),
            of_example(recurrence, seed, device, _WIDE, torch.bfloat16),
            of_example(recurrence, seed, device, _TOKEN, grads=False),
        ]
        for backend in backends_of(recurrence):
            yield Check(recurrence.name, backend, tuple((x, named(recurrence, backend.name)) for x in attempts))
    # the chunk primitives compose to simple_gla
    composed = of_example(SIMPLE_GLA, seed, device, _COMPOSED)
    low_rank = of_draw(draw_low_rank, partial(scan, backend="chunked"), seed, device)
    for backend in INTER_CHUNK_BACKENDS:
        tries = ((composed, partial(_compose, inter=backend.name)), (low_rank, partial(scan, backend=backend.name)))
        yield Check("inter_chunk_scan", backend, tries)
    tiled = of_draw(draw_chunks, partial(inside, backend="chunked"), seed, device, torch.bfloat16)
    whole = of_draw(draw_chunks, partial(inside, backend="chunked"), seed, device)
    for backend in INTRA_CHUNK_BACKENDS:
        run = partial(inside, backend=backend.name)
        yield Check(
            "intra_chunk", backend, ((composed, partial(_compose, intra=backend.name)), (whole, run), (tiled, run))
        )
    attempt = of_draw(draw_norm, partial(normalise, backend="pytorch"), seed, device)
    for backend in GATED_NORM_BACKENDS:
        yield Check("gated_rms_norm", backend, ((attempt, partial(normalise, backend=backend.name)),))
    attempt = of_draw(draw_conv, partial(convolve, backend="pytorch"), seed, device)
    for backend in CONV_BACKENDS:
        yield Check("causal_conv1d", backend, ((attempt, partial(convolve, backend=backend.name)),))
    for backend in LAYER_STEP_BACKENDS:
        yield Check("layer_step", backend, (_layer_step(draw_delta, backend.name, seed, device),))
    for op in POOLED:
        yield from _on_pool(op, device, seed)


def further(device: torch.device, seed: int = 0) -> Iterator[Check]:
    """Calls that reach the GPU kernels that `every` leaves out: wide heads, few of them, an op's options, the chunk
    primitives, and what mixers have done around an op.

    A device that has not the backend, or whose planner has another plan, runs what it has.
    """
    half, few = torch.bfloat16, Sizes(B=1, T=300, H=2, K=64, V=64)
    both = {"qk_l2norm": True, "beta_sigmoid": True}
    for op, backend, sizes, dtype, options in (
        ("simple_gla", "hopper", replace(few, T=2100, H=1), half, {}),
        ("simple_gla", "triton", few, torch.float32, {}),
        ("gated_delta_rule", "hopper", replace(few, T=700), half, both),
        # decays leave nothing of what a segment passes on
        ("delta_rule", "hopper", replace(few, T=700), half, {}),
        ("gated_delta_rule", "hopper", replace(few, K=192), half, {}),
        # on Hopper its kernels prepare the chunks and take the gradients, with one key or two
        ("kda", "triton", few, half, {}),
        ("gdn2", "triton", few, half, {}),
        # keys that read before the decay: one a head, and two steps a token
        ("comba", "triton", few, half, {}),
        ("rwkv7", "triton", few, half, {}),
        # g is what the gate takes
        ("kda", "triton", few, half, both | {"lower_bound": -5.0}),
        ("mlstm", "hopper", replace(few, K=192), half, {}),
        ("mlstm", "triton", few, torch.float32, {"gating": "sigmoid"}),
        # the state's unit m counts for what eps adds, and the first one for the first tokens
        ("mlstm", "triton", Sizes(B=2, T=5, H=4, Hq=2, K=16, V=8), torch.float32, {"eps": 0.5}),
        ("lstm", "fused", Sizes(B=2, T=35, H=1, D=512), half, {}),
    ):
        recurrence = RECURRENCES[op]
        attempt = of_example(recurrence, seed, device, sizes, dtype, options=options)
        yield from _checks(op, backends_of(recurrence), backend, attempt, named(recurrence, backend))
    attempt = of_example(SIMPLE_GLA, seed, device, replace(few, T=4096, H=8, K=128, V=128), half, grads=False)
    yield from _checks("simple_gla", backends_of(SIMPLE_GLA), "hopper", attempt, named(SIMPLE_GLA, "hopper"))
    low_rank = of_draw(draw_low_rank, partial(scan, backend="chunked"), seed, device)
    yield from _checks("inter_chunk_scan", INTER_CHUNK_BACKENDS, "triton", low_rank, partial(scan, backend="triton"))
    for backend, dtype, chunks in (
        ("hopper", half, {"C": 128}),
        ("hopper", half, {"B": 4, "G": 8, "H": 8}),
        ("triton", torch.float32, {"C": 100}),
        ("triton", torch.float32, {"C": 16, "K": 16, "V": 16}),
    ):
        attempt = of_draw(partial(draw_chunks, **chunks), partial(inside, backend="chunked"), seed, device, dtype)
        yield from _checks("intra_chunk", INTRA_CHUNK_BACKENDS, backend, attempt, partial(inside, backend=backend))
    for dtype in (torch.float32, half):
        # of dt_bias's gradient, a sum that cancels, bfloat16 leaves 1.6e-2 in some draws, and of this one 5e-3
        attempt = of_draw(draw_delta_layer, delta_layer_of, seed + 4, device, dtype)
        yield from _checks("causal_conv1d", CONV_BACKENDS, "triton", attempt, delta_layer_of)
    attempt = replace(of_draw(draw_conv, partial(decode, backend="pytorch"), seed, device), grads=False)
    yield from _checks("causal_conv1d", CONV_BACKENDS, "triton", attempt, partial(decode, backend="triton"))
    for draw in DRAWN.values():
        attempt, run = _layer_step(draw, "triton", seed, device)
        yield from _checks("layer_step", LAYER_STEP_BACKENDS, "triton", attempt, run)
    yield from _around(device, seed)


def _around(device: torch.device, seed: int) -> Iterator[Check]:
    """What a mixer has done around its op, composed with it."""
    for recurrence, draw, run in (
        (GLA, draw_gla_layer, gla_layer_of),
        (KDA, draw_kda_layer, kda_layer_of),
        (RETNET, draw_turned, turned),
        (MLSTM, partial(MLSTM.example, sizes=SIZES), capped),
        (RGLRU, draw_unit, unit),
        (ROTLRU, partial(draw_unit, pairs=True), unit),
    ):
        attempt = of_draw(draw, partial(run, backend="chunked"), seed, device)
        backends = backends_of(recurrence)
        yield from _checks(recurrence.name, backends, "triton", attempt, partial(run, backend="triton"))


def _checks(
    op: str, backends: tuple[Backend, ...], name: str, attempt: Attempt, run: Callable[[Any], Any]
) -> Iterator[Check]:
    """One check, of the backend of that name."""
    return (Check(op, backend, ((attempt, run),)) for backend in backends if backend.name == name)


def _layer_step(draw: Callable[..., LayerStep], backend: str, seed: int, device: torch.device) -> Try:
    """A mixer's token, which has no gradients."""
    kind = type(draw(Draw(seed), SIZES))
    attempt = of_draw(lambda d: draw(d, SIZES)._asdict(), partial(stepped, kind, backend="pytorch"), seed, device)
    return replace(attempt, grads=False), partial(stepped, kind, backend=backend)


def _on_pool(op: str, device: torch.device, seed: int) -> Iterator[Check]:
    """A few tokens of a recurrence on a pool of states, by every backend."""
    draw = partial(draw_pool, sizes=replace(SIZES, B=3, T=3), op=op)
    tokens = replace(of_draw(draw, partial(pooled, backend="reference", op=op), seed, device), grads=False)
    name = "pooled_step" if op == "gated_delta_rule" else f"pooled_step of {op}"
    for backend in DIAGONAL_POOL_BACKENDS if POOLED[op].family == "diagonal" else POOL_BACKENDS:
        yield Check(name, backend, ((tokens, partial(pooled, backend=backend.name, op=op)),))


def _compose(a: dict[str, Tensor], inter: str | None = None, intra: str | None = None) -> tuple[Tensor, Tensor]:
    k, v, g = (a[name].unflatten(1, (-1, _CHUNK)) for name in ("k", "v", "g"))
    total = g.sum(2)
    states = torch.einsum("bgchk,bgch,bgchv->bghkv", k, (total[:, :, None] - g.cumsum(2)).exp(), v)
    after, final = inter_chunk_scan(states, total, None, None, a["initial_state"], True, backend=inter)
    entering = torch.cat([a["initial_state"][:, None], after[:, :-1]], 1)
    return intra_chunk(a["q"], a["k"], a["v"], a["g"], entering, chunk_size=_CHUNK, backend=intra), final


def draw_low_rank(
    draw: Draw, B: int = 2, G: int = 5, H: int = 2, K: int = 64, V: int = 64, r: int = 4
) -> dict[str, Any]:
    """Arguments of `inter_chunk_scan` that erase r directions a chunk."""
    factors = {name: draw.normal(B, G, H, K, r, scale=K**-0.5) for name in "WY"}
    added = {"states": draw.normal(B, G, H, K, V), "decay": draw.log_decay(B, G, H)}
    return added | factors | {"initial_state": draw.state(B, H, K, V)}


def scan(a: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor | None]:
    return inter_chunk_scan(**a, output_final_state=True, backend=backend)


def draw_chunks(
    draw: Draw, B: int = 1, G: int = 3, C: int = 64, H: int = 2, K: int = 64, V: int = 64
) -> dict[str, Any]:
    """Arguments of `intra_chunk` for G chunks of C steps, the last one shorter."""
    T = G * C - C // 3
    tokens = {"q": draw.normal(B, T, H, K), "k": draw.normal(B, T, H, K, scale=K**-0.5), "v": draw.normal(B, T, H, V)}
    states = draw.normal(B, G, H, K, V, scale=K**-0.5)
    return tokens | {"g": draw.log_decay(B, T, H), "states": states, "gate": draw.normal(B, T, H, V), "chunk_size": C}


def inside(a: dict[str, Any], backend: str) -> Tensor:
    return intra_chunk(**a, backend=backend)


def draw_norm(draw: Draw) -> dict[str, Tensor]:
    """Arguments of `gated_rms_norm`."""
    B, T, H, D = SIZES.B, SIZES.T, SIZES.H, SIZES.D
    return {"o": draw.normal(B, T, H, D), "gate": draw.normal(B, T, H, D), "weight": draw.normal(H, D)}


def normalise(a: dict[str, Tensor], backend: str) -> Tensor:
    return gated_rms_norm(**a, backend=backend)


def draw_conv(draw: Draw, W: int = 4) -> dict[str, Tensor]:
    """Arguments of `causal_conv1d`."""
    B, T, D = SIZES.B, SIZES.T, SIZES.D
    drawn = {"x": draw.normal(B, T, D), "weight": draw.normal(D, W, scale=W**-0.5), "bias": draw.normal(D)}
    return drawn | {"initial_state": draw.state(B, W - 1, D)}


def convolve(a: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor | None]:
    return causal_conv1d(**a, activation="silu", output_final_state=True, backend=backend)


def draw_delta_layer(draw: Draw) -> dict[str, Tensor]:
    """Arguments of `delta_layer_of`: heads of 16 channels, 2 of q and k and 4 of v; 12 columns that nothing reads."""
    B, T, H, K = SIZES.B, SIZES.T, SIZES.H, SIZES.K
    keys, values = 2 * K, H * K
    channels = 2 * keys + values
    return {
        "packed": draw.normal(B, T, channels + values + 2 * H + 12),
        "conv_weight": draw.normal(channels, 4, scale=0.5),
        "norm_weight": draw.normal(K),
        "A_log": draw.normal(H),
        "dt_bias": draw.normal(H),
        "initial_state": draw.state(B, H, K, K),
        "tail": draw.state(B, 3, channels),
    }


def delta_layer_of(a: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """What stands between the projections of `nn.GatedDeltaNet`, by the backends of its parts that a call takes."""
    return delta_layer(*a.values(), 2, SIZES.K, False, 1e-5, None, None)


def draw_kda_layer(draw: Draw) -> dict[str, Tensor]:
    """Arguments of `kda_layer_of`: those of `draw_delta_layer`, and the gates' second projections."""
    H, K = SIZES.H, SIZES.K
    layer = draw_delta_layer(draw)
    packed, conv_weight, norm_weight, A_log, _, *states = layer.values()
    weights = {name: draw.normal(H * K, K, scale=K**-0.5) for name in ("decay_weight", "gate_weight")}
    weights |= {"gate_bias": draw.normal(H * K), "A_log": A_log, "dt_bias": draw.normal(H, K)}
    given = {"packed": packed, "conv_weight": conv_weight, "norm_weight": norm_weight} | weights
    return given | dict(zip(("initial_state", "tail"), states, strict=True))


def kda_layer_of(a: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """What stands between the projections of `nn.KDA`."""
    return kda_layer(*a.values(), 2, SIZES.K, -5.0, False, 1e-5, None, backend)


def draw_gla_layer(draw: Draw) -> dict[str, Tensor]:
    """Arguments of `gla_layer_of`: heads of 16 channels, a decay of rank 8."""
    B, T, H, K, rank = SIZES.B, SIZES.T, SIZES.H, SIZES.K, 8
    return {
        "packed": draw.normal(B, T, 4 * H * K + rank),
        "decay_weight": draw.normal(H * K, rank, scale=0.5),
        "decay_bias": draw.normal(H * K),
        "norm_weight": draw.normal(K),
        "initial_state": draw.state(B, H, K, K),
    }


def gla_layer_of(a: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor]:
    """What stands between the projections of `nn.GLA`."""
    return gla_layer(*a.values(), SIZES.H, 4.0, 1e-5, None, backend)


def decode(a: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor]:
    """A few tokens, and the state after them."""
    state = a["initial_state"].clone()
    return causal_conv1d_update(a["x"][:, :6], state, a["weight"], a["bias"], "silu", backend), state


def draw_turned(draw: Draw) -> dict[str, Tensor]:
    """Arguments of `retnet` before their rotation."""
    tokens = SIZES.B, SIZES.T, SIZES.H
    return {"q": draw.normal(*tokens, 16), "k": draw.normal(*tokens, 16, scale=0.25), "v": draw.normal(*tokens, 16)}


def turned(a: dict[str, Tensor], backend: str) -> Tensor:
    q, k = rotary(a["q"], a["k"])
    return retnet(q, k, a["v"], backend=backend)[0]


def capped(a: dict[str, Any], backend: str) -> Tensor:
    gates = {name: soft_cap(a[name], 1.5) for name in ("i", "f")}
    return mlstm(**a | gates, backend=backend)[0]


def draw_unit(draw: Draw, pairs: bool = False) -> dict[str, Tensor]:
    """Arguments of a linear recurrent unit: inputs, gates before their activation, and the branch beside it."""
    B, T, H, D = SIZES.B, SIZES.T, SIZES.H, SIZES.D
    numbers, columns = (H * D // 2 if pairs else H * D), 2 * D
    found = {name: draw.normal(B, T, H * D) for name in ("u", "z")}
    found |= {"gates": draw.normal(B, T, H, columns), "bias": draw.normal(H, columns), "rate": draw.normal(numbers)}
    return found | ({"phase": draw.normal(numbers)} if pairs else {})


def unit(a: dict[str, Tensor], backend: str) -> Tensor:
    phase = a.get("phase")
    decay, write, theta = lru_gates(a["u"], a["gates"], a["bias"], a["rate"], 1.0, phase)
    if theta is None:
        o, _ = rglru(decay, write, backend=backend)
    else:
        o, _ = rotlru(decay, theta, write, backend=backend)
    return gated_gelu(o, a["z"])
