"""Small calls that launch every GPU kernel of Holdfast on Hopper, forward and backward.

A sanitizer slows a kernel 10 to 100 times, so sizes are the least that reach a kernel's branches: several chunks, a
ragged tail, heads that share queries, K other than V.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import holdfast
from holdfast import nn
from holdfast.kernels import select as planning
from holdfast.ops import step
from holdfast.ops.checks import draw_kda_layer, kda_layer_of
from holdfast.ops.delta_layer import delta_layer
from holdfast.ops.gated_gelu import gated_gelu
from holdfast.ops.gated_rms_norm import gated_rms_norm
from holdfast.ops.inter_chunk_scan import inter_chunk_scan
from holdfast.ops.intra_chunk import intra_chunk
from holdfast.ops.layer_step import LayerStep
from holdfast.ops.layer_step_checks import DRAWN, stepped
from holdfast.ops.lru_gates import lru_gates
from holdfast.ops.parity import values_and_grads
from holdfast.ops.pooled_step_checks import draw_pool, pooled
from holdfast.ops.rotary import rotary
from holdfast.ops.soft_cap import soft_cap
from holdfast.recurrences import RECURRENCES, Draw, Sizes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Call:
    """A call by name. run: of the device, all that it does. plan: numbers that the plans of its passes have to hold."""

    name: str
    run: Callable[[torch.device], None]
    plan: Mapping[str, int] = field(default_factory=dict)


class NoSuchPlan(RuntimeError):
    """No pass of a call has a plan with the numbers that it asks for."""


@contextmanager
def planned(plan: Mapping[str, int]) -> Iterator[None]:
    """Has every pass take its first plan with these numbers, if it has one. Raises NoSuchPlan where none has."""
    if not plan:
        yield
        return
    best, found, seen = planning._best, [], set()

    def preferred(offers: Any) -> Any:
        for offer in offers:
            values = dict(offer.candidate.plan.values)
            seen.add(str({name: values.get(name) for name in plan}))
            if all(values.get(name) == number for name, number in plan.items()):
                found.append(offer)
                return offer
        return best(offers)

    planning.forget()
    planning._best = preferred
    try:
        yield
    finally:
        planning._best = best
        planning.forget()
    if not found:
        raise NoSuchPlan(f"plan: expected one of {', '.join(sorted(seen))}; got {dict(plan)}")


def _of(
    op: str,
    backend: str | None,
    dtype: torch.dtype = BF16,
    packed: tuple[int, ...] | None = None,
    plan: Mapping[str, int] | None = None,
    grads: bool = True,
    without: tuple[str, ...] = (),
    changed: Mapping[str, Callable[[Tensor], Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    resets: bool = False,
    **sizes: int,
) -> Call:
    """The public op on its example: without some arguments, with others changed, and options of the op.

    packed: offsets of sequences along T. plan: see Call. grads: whether the backward pass runs too. resets: of a dense
    recurrence's state, at every seventh step of the last sequence.
    """
    what = {"without": without, "changed": tuple(changed or ()), "options": tuple(options or ()), "packed": packed}
    notes = [f"{name} {value}" for name, value in what.items() if value]
    notes += [f"{name}={value}" for name, value in (plan or {}).items()]
    notes += ["resets"] * resets + ["forward alone"] * (not grads)
    named = " ".join(f"{name}{size}" for name, size in sizes.items())
    name = ", ".join([f"{op} {backend or 'default'} {str(dtype).removeprefix('torch.')} {named}", *notes])

    def run(device: torch.device) -> None:
        arguments = dict(RECURRENCES[op].example(Draw(0, dtype, device), Sizes(**sizes)))
        given = dict(options or {})
        if packed is not None:
            given["cu_seqlens"] = torch.tensor(packed, dtype=torch.int32, device=device)
            count = len(packed) - 1
            arguments["initial_state"] = _restated(arguments["initial_state"], count, op)
        for each in without:
            del arguments[each]
        for each, change in (changed or {}).items():
            arguments[each] = change(arguments[each])
        if resets:
            given["reset"] = torch.zeros(sizes["B"], sizes["T"], dtype=torch.bool, device=device)
            given["reset"][-1, ::7] = True
        _run(lambda a: getattr(holdfast, op)(**a, **given, output_final_state=True, backend=backend), arguments, grads)

    return Call(name, run, plan or {})


def _restated(state: Any, count: int, op: str) -> Any:
    """States of one sequence for so many packed ones; a dense recurrence's lie along the second axis."""
    if isinstance(state, tuple):
        return tuple(_restated(x, count, op) for x in state)
    axis = 1 if RECURRENCES[op].family == "dense" else 0
    return torch.cat([state.narrow(axis, 0, 1)] * count, axis)


def _run(run: Callable[[Any], Any], arguments: Any, grads: bool) -> None:
    if grads:
        values_and_grads(run, arguments)
        return
    with torch.no_grad():
        run(arguments)


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


def _matrix() -> Iterator[Call]:
    """hopper, with a scalar decay or none."""
    of = "hopper"
    yield _of("simple_gla", of, B=2, T=130, H=4, Hq=2, K=64, V=64)
    yield _of("simple_gla", of, B=1, T=65, H=2, K=72, V=40, without=("initial_state",))
    yield _of("simple_gla", of, FP16, B=1, T=192, H=2, K=128, V=64)
    yield _of("simple_gla", of, B=1, T=130, H=2, K=64, V=128)
    yield _of("simple_gla", of, B=1, T=130, H=2, Hq=1, K=128, V=128)
    yield _of("simple_gla", of, B=1, T=1, H=2, K=64, V=64)
    yield _of("simple_gla", of, B=1, T=130, H=1, K=64, V=64, changed={"g": _to(BF16)})
    yield _of("simple_gla", of, B=1, T=200, H=2, K=64, V=64, packed=(0, 0, 1, 65, 200))
    yield _of("simple_gla", of, B=1, T=200, H=2, Hq=1, K=128, V=128, packed=(0, 70, 200))
    yield _of("simple_gla", of, B=1, T=130, H=2, K=64, V=256, grads=False)
    for K, V in ((64, 64), (128, 128), (128, 64), (64, 128)):
        yield _of("simple_gla", of, B=1, T=600, H=2, Hq=1, K=K, V=V, plan={"resident": 1}, grads=False)
    yield _of("linear_attention", of, B=1, T=600, H=1, K=64, V=64, plan={"resident": 1}, grads=False)
    yield _of("simple_gla", of, B=1, T=330, H=2, K=64, V=64, plan={"segment_chunks": 2})
    yield _of("simple_gla", of, B=1, T=330, H=2, Hq=1, K=128, V=128, plan={"segment_chunks": 3})
    yield _of("simple_gla", of, B=1, T=330, H=1, K=128, V=64, plan={"segment_chunks": 2}, without=("initial_state",))
    yield _of("simple_gla", of, B=1, T=2048, H=1, K=64, V=64, plan={"segment_chunks": 16})
    # in slices
    yield _of("simple_gla", of, B=1, T=130, H=2, Hq=1, K=192, V=192)
    yield _of("simple_gla", of, B=1, T=200, H=1, K=144, V=64, packed=(0, 70, 200))
    yield _of("linear_attention", of, B=1, T=330, H=1, K=64, V=128, plan={"segment_chunks": 2})
    yield _of("ssd", of, B=1, T=200, H=2, Hq=1, K=64, V=64)
    yield _of("ssd", of, B=1, T=330, H=2, K=128, V=64, plan={"segment_chunks": 2})
    yield _of("retnet", of, B=1, T=130, H=2, K=64, V=64)
    yield _of("mlstm", of, B=1, T=130, H=2, K=64, V=64, options={"gating": "sigmoid", "normalize": False})


def _vector() -> Iterator[Call]:
    """hopper, with a decay a key channel."""
    of = "hopper"
    yield _of("gla", of, B=2, T=130, H=2, Hq=1, K=64, V=64)
    yield _of("gla", of, B=1, T=200, H=2, K=128, V=128, without=("initial_state",))
    yield _of("gla", of, FP16, B=1, T=70, H=1, K=72, V=128)
    yield _of("gla", of, B=1, T=130, H=1, K=128, V=64, grads=False)
    yield _of("gla", of, B=1, T=200, H=2, K=64, V=64, packed=(0, 0, 1, 65, 200))
    yield _of("gla", of, B=1, T=200, H=1, K=128, V=128, packed=(0, 70, 200))
    yield _of("gla", of, B=1, T=130, H=1, K=192, V=192)
    yield _of("ssd", of, B=1, T=130, H=2, K=64, V=64, changed={"A": lambda A: A[:, None] * A.new_ones(64)})


def _delta() -> Iterator[Call]:
    """hopper, with the delta rule."""
    of = "hopper"
    yield _of("gated_delta_rule", of, B=2, T=130, H=4, Hq=2, K=64, V=64)
    yield _of("gated_delta_rule", of, B=1, T=192, H=2, K=128, V=128)
    yield _of("gated_delta_rule", of, FP16, B=1, T=70, H=2, K=128, V=40, without=("initial_state",))
    yield _of("delta_rule", of, B=1, T=130, H=2, K=64, V=128)
    yield _of("gated_delta_rule", of, B=1, T=330, H=2, K=64, V=64, plan={"segment_chunks": 2})
    yield _of("gated_delta_rule", of, B=1, T=330, H=2, Hq=1, K=128, V=128, plan={"segment_chunks": 3})
    yield _of("gated_delta_rule", of, B=1, T=200, H=2, K=64, V=64, packed=(0, 0, 1, 65, 200))
    yield _of("gated_delta_rule", of, B=1, T=700, H=1, K=64, V=64, packed=(0, 5, 400, 700), plan={"segment_chunks": 2})
    yield _of(
        "gated_delta_rule", of, B=1, T=700, H=2, Hq=1, K=128, V=128, packed=(0, 300, 700), plan={"segment_chunks": 3}
    )
    yield _of("gated_delta_rule", of, B=1, T=130, H=1, K=128, V=256)
    yield _of("gated_delta_rule", of, B=1, T=130, H=2, Hq=1, K=192, V=72)
    yield _of("gated_delta_rule", of, B=1, T=200, H=1, K=256, V=64, packed=(0, 70, 200))
    own = {"qk_l2norm": True, "beta_sigmoid": True}
    yield _of("gated_delta_rule", of, B=1, T=130, H=2, Hq=1, K=64, V=64, options=own)
    for dtype in (BF16, FP32):
        yield Call(f"delta inputs {dtype}", lambda device, dtype=dtype: _gated_inputs(device, dtype))
        yield Call(f"kda gate {dtype}", lambda device, dtype=dtype: _gated_decay(device, dtype))


def _gated_inputs(device: torch.device, dtype: torch.dtype) -> None:
    draw = Draw(0, dtype, device)
    arguments = RECURRENCES["gated_delta_rule"].example(draw, Sizes(B=2, T=70, H=4, Hq=2, K=48, V=32))
    arguments |= {"g": draw.normal(2, 70, 4), "A_log": draw.normal(4), "dt_bias": draw.normal(4)}
    own = {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True}
    _run(lambda a: holdfast.gated_delta_rule(**a, **own, output_final_state=True), arguments, True)


def _gated_decay(device: torch.device, dtype: torch.dtype) -> None:
    draw = Draw(0, dtype, device)
    arguments = RECURRENCES["kda"].example(draw, Sizes(B=2, T=70, H=4, Hq=2, K=40, V=32))
    arguments |= {"g": draw.normal(2, 70, 4, 40), "A_log": draw.normal(4), "dt_bias": draw.normal(4, 40)}
    for bound in (None, -5.0):
        _run(lambda a, bound=bound: holdfast.kda(**a, lower_bound=bound, output_final_state=True), arguments, True)


def _normalised() -> Iterator[Call]:
    """mLSTM, its gates and its normaliser."""
    for K, V in ((64, 64), (128, 128), (128, 64)):
        yield _of("mlstm", "hopper", B=1, T=200, H=2, Hq=1 if K > V else 2, K=K, V=V)
    yield _of("mlstm", "hopper", B=2, T=70, H=1, K=72, V=40, options={"gating": "sigmoid"})
    yield _of("mlstm", "hopper", B=1, T=1100, H=1, K=64, V=64, without=("initial_state",))
    yield _of("mlstm", "hopper", B=1, T=130, H=2, Hq=1, K=192, V=192)
    yield _of("mlstm", "triton", FP32, B=1, T=130, H=2, K=32, V=24)
    yield _of("mlstm", "triton", B=1, T=130, H=2, Hq=1, K=64, V=64, packed=(0, 0, 3, 130))
    yield _of("mlstm", "triton", FP32, B=1, T=200, H=1, K=32, V=32, plan={"segments": 2})


def _triton() -> Iterator[Call]:
    """triton, for every matrix recurrence."""
    of = "triton"
    for dtype in (BF16, FP32):
        yield _of("simple_gla", of, dtype, B=2, T=130, H=4, Hq=2, K=64, V=64, plan={"segments": 1})
        yield _of("simple_gla", of, dtype, B=1, T=300, H=2, K=24, V=40, plan={"segments": 2 if dtype == BF16 else 4})
        yield _of("simple_gla", of, dtype, B=1, T=200, H=2, K=32, V=32, packed=(0, 0, 1, 65, 200))
        yield _of("linear_attention", of, dtype, B=1, T=1, H=5, Hq=1, K=48, V=80)
        yield _of("gla", of, dtype, B=1, T=130, H=4, Hq=2, K=24, V=40)
        yield _of("gla", of, dtype, B=1, T=100, H=1, K=32, V=32, packed=(0, 0, 1, 65, 100))
        yield _of("gated_delta_rule", of, dtype, B=1, T=130, H=4, Hq=2, K=24, V=40)
        yield _of("gated_delta_rule", of, dtype, B=1, T=150, H=2, K=64, V=64, packed=(0, 0, 1, 65, 150))
        yield _of("kda", of, dtype, B=1, T=130, H=4, Hq=2, K=24, V=40)
        yield _of("kda", of, dtype, B=1, T=150, H=2, K=64, V=64, packed=(0, 0, 1, 65, 150))
    for name in ("gdn2", "comba", "rwkv7"):
        yield _of(name, of, BF16, B=1, T=130, H=4, Hq=2, K=24, V=40)
    yield _of("comba", of, FP32, B=1, T=100, H=2, K=32, V=32, packed=(0, 0, 1, 65, 100))
    yield _of("ssd", of, FP32, B=1, T=130, H=2, Hq=1, K=128, V=64)
    yield _of("delta_rule", of, FP32, B=1, T=100, H=1, K=128, V=128)
    yield _of("simple_gla", of, B=1, T=130, H=1, K=256, V=256)


def _decoding() -> Iterator[Call]:
    """decode, by the ops and by `step`."""
    for name in ("simple_gla", "gla", "gated_delta_rule", "ssd", "gdn2", "comba"):
        yield _of(name, "decode", B=2, T=1, H=4, Hq=2, K=64, V=40, grads=False)
    for name in ("simple_gla", "gla", "gated_delta_rule", "mlstm"):
        yield Call(f"step {name}", lambda device, name=name: _token(device, name))
    for keys_last in (False, True):
        yield Call(f"pooled_step {keys_last}", lambda device, keys_last=keys_last: _in_a_pool(device, keys_last))
        yield Call(
            f"pooled_step mlstm {keys_last}", lambda device, keys_last=keys_last: _in_a_pool(device, keys_last, "mlstm")
        )
    for name in ("hgrn", "rotlru"):
        yield Call(f"pooled_step {name}", lambda device, name=name: _in_a_pool(device, False, name))


def _token(device: torch.device, name: str) -> None:
    sizes = Sizes(B=2, T=1, H=4, Hq=2, K=24, V=20)
    arguments = dict(RECURRENCES[name].example(Draw(0, FP32, device), sizes))
    state = arguments.pop("initial_state")
    # from the third on what was recorded runs
    for _ in range(4):
        step(name, arguments, state)


def _in_a_pool(device: torch.device, keys_last: bool, op: str = "gated_delta_rule") -> None:
    a = draw_pool(Draw(0, BF16, device), Sizes(B=3, T=3, H=4, Hq=2, K=24, V=20), op)
    for _ in range(4):
        pooled(a, "decode", keys_last, op)


def _chunk_primitives() -> Iterator[Call]:
    """The chunk primitives, and the gated norm."""
    for chunk, backend, dtype, K, V, plan in (
        (64, "hopper", BF16, 64, 64, {"warps": 4}),
        (64, "hopper", FP16, 128, 128, {"warps": 8}),
        (64, "hopper", BF16, 64, 64, {"slots": 18}),
        (128, "hopper", BF16, 64, 128, {}),
        (256, "hopper", BF16, 128, 64, {}),
        (16, "triton", FP32, 16, 24, {}),
        (48, "triton", BF16, 64, 64, {}),
        (100, "triton", FP32, 64, 40, {}),
        (128, "triton", BF16, 128, 128, {}),
    ):
        for whole in (True, False):
            name = f"intra_chunk {backend} {dtype} C{chunk} K{K} V{V}{'' if whole else ', q, k and v alone'}"
            name = ", ".join([name, *(f"{each}={number}" for each, number in plan.items())])

            def run(device, chunk=chunk, backend=backend, dtype=dtype, K=K, V=V, whole=whole):
                _inside(device, dtype, chunk, backend, K, V, whole)

            yield Call(name, run, plan)
    for backend, dtype, rank, vector, packed in (
        ("hopper", BF16, 4, False, None),
        ("hopper", FP32, 16, True, None),
        ("hopper", BF16, 1, False, (0, 3, 3, 7)),
        ("triton", FP32, 0, False, None),
        ("triton", BF16, 0, True, (0, 3, 3, 7)),
        ("triton", FP32, 3, False, None),
        ("triton", BF16, 5, True, None),
    ):
        name = f"inter_chunk_scan {backend} {dtype} r{rank}{' vector' * vector}{f' packed {packed}' if packed else ''}"

        def run(device, backend=backend, dtype=dtype, rank=rank, vector=vector, packed=packed):
            _between(device, dtype, backend, rank, vector, packed)

        yield Call(name, run)
    for dtype, weight, gated, activation in (
        (BF16, (64,), True, "silu"),
        (FP32, (3, 40), True, "sigmoid"),
        (BF16, None, False, "silu"),
    ):

        def run(device, dtype=dtype, weight=weight, gated=gated, activation=activation):
            _norm(device, dtype, weight, gated, activation)

        yield Call(f"gated_rms_norm {dtype} weight {weight}, gate {gated and activation}", run)
    for dtype, D, W, packed in ((BF16, 96, 4, None), (FP32, 13, 2, None), (BF16, 64, 4, (0, 0, 1, 40, 200))):

        def run(device, dtype=dtype, D=D, W=W, packed=packed):
            _convolved(device, dtype, D, W, packed)

        yield Call(f"causal_conv1d {dtype} D{D} W{W}{f' packed {packed}' if packed else ''}", run)
    yield Call("causal_conv1d_update", _decoded)
    for dtype, gated, packed in ((BF16, True, None), (FP32, False, (0, 0, 1, 40, 200))):

        def run(device, dtype=dtype, gated=gated, packed=packed):
            _delta_layer(device, dtype, gated, packed)

        yield Call(f"delta_layer {dtype}{' gated' if gated else ''}{f' packed {packed}' if packed else ''}", run)
    yield Call("kda_layer", _kda_layer)
    for name, draw in DRAWN.items():
        yield Call(f"layer_step {name}", lambda device, draw=draw: _stepped(device, draw))


def _inside(device: torch.device, dtype: torch.dtype, chunk: int, backend: str, K: int, V: int, whole: bool) -> None:
    draw, T, H = Draw(0, dtype, device), 2 * chunk + chunk // 2 + 3, 2
    arguments = {"q": draw.normal(1, T, H, K), "k": draw.normal(1, T, H, K), "v": draw.normal(1, T, H, V), "g": None}
    if whole:
        arguments |= {
            "g": draw.log_decay(1, T, H),
            "states": draw.normal(1, 3, H, K, V),
            "gate": draw.normal(1, T, H, V),
        }
    _run(lambda a: intra_chunk(**a, chunk_size=chunk, backend=backend), arguments, True)


def _between(
    device: torch.device, dtype: torch.dtype, backend: str, rank: int, vector: bool, packed: tuple[int, ...] | None
) -> None:
    draw, G, H, K, V = Draw(0, dtype, device), 7, 2, 64, 64
    B = 1 if packed else 2
    decay = draw.log_decay(B, G, H, *([K] if vector else []))
    arguments = {"states": draw.normal(B, G, H, K, V), "decay": decay}
    if rank:
        arguments |= {name: draw.normal(B, G, H, K, rank, scale=K**-0.5) for name in "WY"}
    arguments["initial_state"] = draw.state(len(packed) - 1 if packed else B, H, K, V)
    given = {} if packed is None else {"cu_seqlens": torch.tensor(packed, device=device)}
    _run(lambda a: inter_chunk_scan(**a, **given, output_final_state=True, backend=backend), arguments, True)


def _norm(
    device: torch.device, dtype: torch.dtype, weight: tuple[int, ...] | None, gated: bool, activation: Any
) -> None:
    draw, D = Draw(0, dtype, device), 64 if weight is None else weight[-1]
    arguments = {"o": draw.normal(2, 33, 3, D)}
    if gated:
        arguments["gate"] = draw.normal(2, 33, 3, D)
    if weight is not None:
        arguments["weight"] = draw.normal(*weight)
    _run(
        lambda a: gated_rms_norm(**a, activation=activation, center=activation == "sigmoid", backend="triton"),
        arguments,
        True,
    )


def _convolved(device: torch.device, dtype: torch.dtype, D: int, W: int, packed: tuple[int, ...] | None) -> None:
    draw, B, N = Draw(0, dtype, device), 1 if packed else 2, len(packed) - 1 if packed else 2
    arguments = {"x": draw.normal(B, 200, D), "weight": draw.normal(D, W), "initial_state": draw.state(N, W - 1, D)}
    given = {} if packed is None else {"cu_seqlens": torch.tensor(packed, device=device)}
    options = {"activation": "silu", "output_final_state": True, "backend": "triton"}
    _run(lambda a: holdfast.causal_conv1d(**a, **given, **options), arguments | {"bias": draw.normal(D)}, True)


def _delta_layer(device: torch.device, dtype: torch.dtype, gated: bool, packed: tuple[int, ...] | None) -> None:
    """Heads of 24 channels of q and k, 2, and of 16 of v, 4."""
    draw, B, N = Draw(0, dtype, device), 1 if packed else 2, len(packed) - 1 if packed else 2
    arguments = {"packed": draw.normal(B, 200, 240 if gated else 176), "conv_weight": draw.normal(160, 4)}
    arguments |= {"norm_weight": draw.normal(16), "A_log": draw.normal(4), "dt_bias": draw.normal(4)}
    arguments |= {"initial_state": draw.state(N, 4, 24, 16), "tail": draw.state(N, 3, 160)}
    absent = {} if gated else {"A_log": None, "dt_bias": None}
    offsets = None if packed is None else torch.tensor(packed, device=device)
    given = {name: x for name, x in arguments.items() if name not in absent}

    def run(a):
        order = (a.get(name) for name in arguments)
        return delta_layer(*order, 2, 24, False, 1e-5, offsets, None)

    _run(run, given, True)


def _kda_layer(device: torch.device) -> None:
    _run(lambda a: kda_layer_of(a, "triton"), draw_kda_layer(Draw(0, BF16, device)), True)


def _decoded(device: torch.device) -> None:
    draw = Draw(0, BF16, device)
    x, state, weight = draw.normal(2, 3, 300), draw.state(2, 3, 300), draw.normal(300, 4)
    holdfast.causal_conv1d_update(x, state, weight, None, "silu", "triton")


def _layers() -> Iterator[Call]:
    """What stands around the recurrence in a layer, its parts in one projection."""
    for dtype in (BF16, FP32):
        yield Call(f"nn.Mamba2 {dtype}", lambda device, dtype=dtype: _mixed(nn.Mamba2(128, d_state=64), device, dtype))
        yield Call(f"nn.GLA {dtype}", lambda device, dtype=dtype: _mixed(nn.GLA(128, 2), device, dtype))


def _mixed(mixer: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(2, 130, 128).to(device, dtype)
    y, _ = mixer.to(device, dtype)(x)
    y.sum().backward()


def _stepped(device: torch.device, draw: Callable[..., LayerStep]) -> None:
    call = draw(Draw(0, BF16, device), Sizes(B=2, H=4, Hq=2, K=48, V=40))
    stepped(type(call), call._asdict(), "triton")


def _diagonal() -> Iterator[Call]:
    for backend, dtype, D in (("hopper", BF16, 128), ("hopper", FP16, 64), ("triton", BF16, 40), ("triton", FP32, 24)):
        for name, gates in (("rglru", ("a",)), ("hgrn", ("g",)), ("rotlru", ("a", "theta"))):
            yield _of(name, backend, dtype, B=2, T=150, D=D, changed={gate: _to(FP32) for gate in gates})
        yield _of("rglru", backend, dtype, B=1, T=200, D=D, packed=(0, 0, 1, 70, 200))
        yield _of("rotlru", backend, dtype, B=1, T=200, D=D, packed=(0, 0, 1, 70, 200))
    yield _of("hgrn", "hopper", B=2, T=128, D=128, changed={"g": _to(BF16)}, without=("initial_state",))
    yield _of("rglru", "triton", FP32, B=1, T=20000, D=16)
    yield _of("rotlru", "triton", FP32, B=1, T=20000, D=16)


def _selective() -> Iterator[Call]:
    for dtype, D, N in ((BF16, 130, 16), (FP16, 33, 5), (FP32, 64, 40)):
        yield _of("mamba1", "triton", dtype, B=2, T=100, D=D, N=N)
        yield _of("mamba1", "triton", dtype, B=1, T=200, D=D, N=N, packed=(0, 0, 1, 70, 200))
    yield _of("mamba1", "triton", FP32, B=2, T=33, D=40, without=("D", "z", "dt_bias", "initial_state"))


def _around() -> Iterator[Call]:
    """What mixers have done around their ops."""
    for dtype in (BF16, FP32):
        for width, placed in ((64, False), (20, True)):

            def run(device, dtype=dtype, width=width, placed=placed):
                _rotated(device, dtype, width, placed)

            yield Call(f"rotary {dtype} D{width}", run)
        yield Call(f"soft cap {dtype}", lambda device, d=dtype: _capped(device, d))
        for pairs in (False, True):
            yield Call(f"lru gates {dtype} pairs {pairs}", lambda device, d=dtype, p=pairs: _unit(device, d, p))


def _capped(device: torch.device, dtype: torch.dtype) -> None:
    _run(lambda a: soft_cap(a["x"], 15.0), {"x": Draw(0, dtype, device).normal(2, 700, 3)}, True)


def _rotated(device: torch.device, dtype: torch.dtype, width: int, placed: bool) -> None:
    draw = Draw(0, dtype, device)
    arguments = {"q": draw.normal(2, 70, 3, width), "k": draw.normal(2, 70, 2, width)}
    position = torch.arange(140, device=device).view(2, 70) if placed else None
    _run(lambda a: rotary(**a, position=position), arguments, True)


def _unit(device: torch.device, dtype: torch.dtype, pairs: bool) -> None:
    draw, numbers = Draw(0, dtype, device), 60 if pairs else 120
    arguments = {name: draw.normal(2, 70, 120) for name in ("u", "z")}
    arguments |= {"gates": draw.normal(2, 70, 3, 80), "bias": draw.normal(3, 80), "rate": draw.normal(numbers)}
    arguments |= {"phase": draw.normal(numbers)} if pairs else {}

    def run(a: dict[str, Tensor]) -> Any:
        decay, write, theta = lru_gates(strength=8.0, **{n: x for n, x in a.items() if n != "z"})
        return decay, gated_gelu(write, a["z"]), *(() if theta is None else (theta,))

    _run(run, arguments, True)


def _dense() -> Iterator[Call]:
    of = "fused"
    yield _of("lstm", of, B=3, T=33, H=2, D=40)
    yield _of("gru", of, FP16, B=5, T=32, H=1, D=64, resets=True)
    yield _of("elman", of, B=2, T=9, H=2, D=128, options={"recurrent_grad_clip": 0.5})
    yield _of("slstm", of, B=2, T=17, H=4, D=32, resets=True)
    yield _of("lstm", of, B=600, T=5, H=1, D=64)
    yield _of("lstm", of, B=1, T=40, H=2, D=64, packed=(0, 0, 3, 40), without=("initial_state",))
    yield _of("lstm", of, B=3, T=40, H=2, D=64, plan={"blocks": 4})
    yield _of("gru", of, B=9, T=37, H=1, D=256, resets=True)
    yield _of("slstm", of, B=2, T=35, H=1, D=512)
    yield _of("lstm", of, B=2, T=36, H=1, D=768)
    yield _of("lstm", "triton", B=3, T=17, H=2, D=32)
    yield _of("slstm", "triton", FP16, B=3, T=17, H=2, D=24, resets=True)
    yield _of("lstm", "alternating", FP32, B=3, T=9, H=2, D=24)
    yield _of("gru", "alternating", FP32, B=3, T=9, H=2, D=24, resets=True)


CALLS = (
    *_matrix(), *_vector(), *_delta(), *_normalised(), *_triton(), *_decoding(), *_chunk_primitives(), *_layers(),
    *_diagonal(), *_selective(), *_around(), *_dense(),
)  # fmt: skip
