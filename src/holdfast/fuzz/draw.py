"""Draws scenarios: the n-th of a seed is always the same."""

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from holdfast.recurrences import DELTA_RULES

from .modules import MODULES
from .scenario import Scenario
from .subjects import SUBJECTS, backends

_OPS = {
    "simple_gla": 12, "gla": 9, "ssd": 9, "mlstm": 13, "delta_rule": 7, "gated_delta_rule": 11, "kda": 5,
    "gdn2": 3, "comba": 3, "gated_delta_product": 3, "rwkv7": 3,
    "linear_attention": 5, "retnet": 3, "lightning": 3, "rglru": 5, "rotlru": 5, "hgrn": 4, "lstm": 5, "gru": 4,
    "elman": 4, "slstm": 4, "rnn": 4, "gated_rms_norm": 3, "inter_chunk_scan": 5, "intra_chunk": 5,
    "causal_conv1d": 3, "mamba1": 6,
}  # fmt: skip
_MODES = {
    "plain": 20, "repeat": 14, "lengths": 4, "retain_graph": 6, "checkpoint": 6, "hooks": 5, "threads": 6, "stream": 5,
    "graph": 6, "compile": 2, "autocast": 8, "default_dtype": 6, "inplace": 5, "poison": 7, "step": 4, "jvp": 2,
    "inference": 4, "twice": 2, "misuse": 3,
}  # fmt: skip
_CUDA_ONLY = ("stream", "graph")
# few widths, so that few kernels are compiled; the odd ones are nobody's favourites
_WIDTHS = {
    (64, 64): 10, (128, 128): 10, (128, 64): 5, (64, 128): 4, (32, 32): 4, (16, 16): 4, (48, 80): 4, (24, 40): 4,
    (13, 7): 2, (8, 8): 2, (1, 1): 1, (96, 96): 2, (256, 256): 2, (128, 256): 2, (80, 160): 1, (16, 64): 2,
}  # fmt: skip
_SMALL_WIDTHS = {(16, 16): 4, (8, 8): 3, (13, 7): 2, (24, 8): 2, (1, 1): 1}
_CHANNELS = {64: 6, 128: 6, 32: 4, 16: 3, 96: 1, 24: 2, 2: 1, 50: 1, 256: 2, 512: 1}
# of mamba1, beside those channels
_STATES = {16: 8, 1: 1, 4: 2, 17: 1, 64: 2}
_DENSE_CHANNELS = {64: 6, 128: 4, 32: 4, 16: 3, 24: 2, 13: 1, 96: 1, 256: 2}
_NEAR = (0, 1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 191, 200, 255, 256, 257, 300)
_FAR = (511, 512, 513, 700, 1023, 1024, 1025, 1100)
_FARTHEST = (2500, 4097)
_STRENGTHS = {"mild": 8, "strong": 4, "inf": 3, "mixed": 4, "weak": 2, "zero": 1}
_LAYOUTS = {
    "plain": 8, "mixed": 8, "offset": 3, "padded": 1, "inner": 1, "transposed": 2, "reversed": 1, "stepped": 1,
    "every_other": 1, "negated": 1, "expanded": 2,
}  # fmt: skip
_OFFSETS = {"int32": 6, "int64": 6, "int32_cpu": 1, "int64_cpu": 1}
# more than a grid's second axis takes
_MANY = (300, 70_000)
_STEPS = (1, 2, 3, 17, 33)
# the other one takes a C++ compiler on a CPU
_COMPILERS = {"cuda": "inductor", "cpu": "aot_eager"}
# steps of a sequence for `reference`, a step loop that takes a minute for a thousand of them and their gradients
_STEP_LOOP = 130
# elements of state over all steps that a float64 loop, which keeps each state, may have
_MOST = {"cuda": 150_000_000, "cpu": 1_500_000}


class _Dice(random.Random):
    def of(self, weights: dict[Any, int]) -> Any:
        return self.choices(list(weights), list(weights.values()))[0]

    def happens(self, share: float) -> bool:
        return self.random() < share

    def some(self, **shares: float) -> list[str]:
        return [word for word, share in shares.items() if self.happens(share)]


def draw(seed: int, index: int, device: str) -> Scenario:
    """The scenario number `index` of a seed, for device "cpu" or "cuda"."""
    dice = _Dice(f"{seed}/{index}/{device}")
    if dice.happens(0.025):
        return _module(dice, device)
    weights = dict(_MODES)
    if device != "cuda":
        weights = {mode: weight for mode, weight in weights.items() if mode not in _CUDA_ONLY}
    op, mode = dice.of(_OPS), dice.of(weights)
    family = SUBJECTS[op].family
    if mode == "step" and family not in ("matrix", "selective"):
        mode = "repeat"
    dtypes = {"bfloat16": 9, "float16": 4, "float32": 6, "float64": 1}
    dtype = dice.of({name: dtypes[name] for name in ("bfloat16", "float16")} if mode == "autocast" else dtypes)
    s = Scenario(op, device, dice.getrandbits(40), mode, dtype=dtype, backend=_backend(dice, op, device, dtype))
    s = replace(
        s,
        gates=dice.of({"float32": 18, "same": 18, "bfloat16": 3, "float16": 1, "float64": 1}),
        strength=dice.of(_STRENGTHS),
        keys=dice.of({"unit": 5, "model": 4, "raw": 1}),
        values=dice.of({"normal": 8, "large": 1, "small": 1, "sparse": 1}),
        layout=dice.of(_LAYOUTS),
        state=dice.happens(0.55),
        final=dice.happens(0.75),
        grads=dice.of({"both": 10, "out": 4, "state": 2, "none": 3}),
        needs=dice.of({"all": 5, "some": 2}),
    )
    found = _options(dice, op) + ([_COMPILERS[device]] if mode == "compile" else [])
    s = replace(s, options=tuple(found))
    s = _fitting(dice, _sized(dice, s, family), family)
    return _limited(_short(s) if s.backend == "reference" else s, family)


def _module(dice: _Dice, device: str) -> Scenario:
    mode = dice.of({"compile": 3, "lengths": 2, "step": 2})
    s = Scenario(
        op=dice.choice(list(MODULES)),
        device=device,
        seed=dice.getrandbits(40),
        mode=mode,
        options=(_COMPILERS[device],) if mode == "compile" else (),
        B=dice.choice((1, 2, 3)),
        T=dice.choice((2, 8, 16, 33, 64)),
        D=64,
        state=dice.happens(0.25),
    )
    return _packed(dice, s, "module") if mode != "step" and dice.happens(0.3) else s


def _backend(dice: _Dice, op: str, device: str, dtype: str) -> str:
    pytorch = SUBJECTS[op].pytorch
    rest = [name for name in backends(op) if name not in (pytorch, "reference", "decode")]
    if device != "cuda":
        has_reference = "reference" in backends(op)
        return dice.of({"default": 3, pytorch: 5} | ({"reference": 2} if has_reference else {}))
    weights = {"default": 10, pytorch: 2, "decode": 0, "reference": 0} | dict.fromkeys(rest, 6)
    weights |= {name: 1 for name in ("decode", "reference") if name in backends(op)}
    weights |= {name: 9 for name in ("hopper", "fused") if name in weights}
    if dtype in ("float32", "float64"):
        weights |= {name: 0 for name in ("hopper", "fused") if name in weights}
    if dtype == "float64":
        weights |= {name: 0 for name in ("triton", "alternating", "decode") if name in weights}
    return dice.of(weights)


def _options(dice: _Dice, op: str) -> list[str]:
    family = SUBJECTS[op].family
    scaled = dice.some(scale=0.2)
    if op == "simple_gla":
        return scaled + dice.of({"g": 7, "g1": 2, "": 1}).split()
    if op == "lightning":
        return scaled + dice.some(layer=0.5)
    if op == "ssd":
        return dice.some(AN=0.3, z=0.5, dt_bias=0.4, softplus=0.5) + dice.of({"D": 3, "DP": 2, "": 3}).split()
    if op == "mamba1":
        return dice.some(z=0.6, dt_bias=0.5, softplus=0.6, D=0.5, flat=0.4)
    if op == "rwkv7":
        return scaled
    if op in ("gdn2", "comba"):
        found = scaled + dice.some(l2=0.4)
        return found + (_kda_gate(dice) if op == "gdn2" else dice.some(beta=0.8))
    if op in DELTA_RULES:
        found = scaled + dice.some(l2=0.4, sig=0.4)
        if "sig" in found:
            found += dice.some(neg=0.3)
        if op == "gated_delta_rule":
            found += dice.of({"A_log": 2, "A_log dt_bias": 2, "g1": 1, "": 6}).split()
        if op == "gated_delta_product":
            found += dice.of({"A_log": 1, "A_log dt_bias": 1, "": 6}).split() + dice.some(three=0.3)
        return found + _kda_gate(dice) if op == "kda" else found
    if op == "mlstm":
        return scaled + dice.some(eps=0.1) + dice.of({"": 6, "sigmoid": 3, "sigmoid unnormalized": 2}).split()
    if family == "dense":
        found = dice.some(b=0.7, reset=0.3, relu=0.3 if op == "elman" else 0.0)
        return found + dice.of({"": 5, "clip": 1, "cut": 1}).split()
    if op == "gated_rms_norm":
        return dice.some(gate=0.7, activation=0.3, center=0.3) + dice.of({"": 1, "w1": 2, "w2": 2}).split()
    if op == "causal_conv1d":
        return dice.some(b=0.5, silu=0.7) + dice.of({"": 6, "taps1": 1, "taps2": 1, "taps3": 1, "taps7": 1}).split()
    if op == "inter_chunk_scan":
        return dice.some(vector=0.4, low=0.4)
    if op == "intra_chunk":
        return scaled + dice.some(g=0.7, states=0.7, gate=0.5, opened=0.3)
    return scaled if op in ("linear_attention", "retnet", "gla") else []


def _kda_gate(dice: _Dice) -> list[str]:
    return dice.of({"A_log": 1, "A_log dt_bias": 2, "A_log dt_bias bound": 2, "bound": 1, "": 5}).split()


def _length(dice: _Dice, device: str) -> int:
    if device != "cuda":
        return dice.choice([n for n in _NEAR if n <= 70])
    return dice.choice(dice.of({_NEAR: 83, _FAR: 14, _FARTHEST: 1}))


def _sized(dice: _Dice, s: Scenario, family: str) -> Scenario:
    on_cuda = s.device == "cuda"
    heads = dice.choice((1, 1, 2, 2, 3, 4, 5, 8) if on_cuda else (1, 2, 3, 4))
    s = replace(s, B=dice.choice((1, 1, 2, 3, 5)), T=_length(dice, s.device), H=heads)
    K, V = dice.of(_WIDTHS if on_cuda else _SMALL_WIDTHS)
    if family in ("matrix", "inter", "intra"):
        s = replace(s, K=K, V=V)
    if family in ("matrix", "intra"):
        s = replace(s, Hq=dice.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    if family in ("diagonal", "conv"):
        s = replace(s, D=dice.of(_CHANNELS), H=0)
    if family == "selective":
        D = dice.of(_CHANNELS)
        groups = 1 if "flat" in s.options else dice.choice([n for n in (1, 1, 2, 3) if D % n == 0])
        s = replace(s, D=D, K=dice.of(_STATES), Hq=groups, H=0)
    if family in ("dense", "norm"):
        s = replace(s, D=dice.of(_DENSE_CHANNELS))
    if family == "dense" and s.D > 128:
        s = replace(s, H=min(s.H, 2))
    if family == "inter":
        s = replace(s, T=s.T % 66, rank=dice.choice((4, 16, 64)) if "low" in s.options else 0)
    if family == "intra":
        s = replace(s, chunk=dice.choice((16, 32, 64, 64, 128, 20)))
    if family not in ("intra", "norm") and dice.happens(0.25):
        return _packed(dice, s, family)
    if on_cuda and dice.happens(0.015):
        s = replace(s, B=dice.choice(_MANY), T=dice.choice((1, 2, 17)), H=min(s.H, 1))
        return replace(s, Hq=min(s.Hq, 1), K=min(s.K, 16), V=min(s.V, 16), D=min(s.D, 16), chunk=min(s.chunk, 16))
    return replace(s, B=0) if dice.happens(0.01) else s


def _packed(dice: _Dice, s: Scenario, family: str) -> Scenario:
    most = 30 if family == "inter" or s.device != "cuda" else 300
    lengths = [dice.choice([0, 1, 1, *(n for n in _NEAR if n <= most)]) for _ in range(dice.randint(1, 7))]
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)
    return replace(s, B=1, T=cu[-1], cu=tuple(cu), offsets=dice.of(_OFFSETS))


def _fitting(dice: _Dice, s: Scenario, family: str) -> Scenario:
    """What the drawn parts allow each other."""
    has_state = family not in ("intra", "norm")
    if not has_state:
        s = replace(s, state=False, final=False)
    if s.grads == "state" and not s.final:
        s = replace(s, grads="out")
    if family in ("matrix", "diagonal") and s.op in DELTA_RULES and s.keys == "raw":
        s = replace(s, keys="raw" if "l2" in s.options else "model")
    if s.mode in ("inference", "step"):
        s = replace(s, grads="none")
    if s.mode in ("retain_graph", "checkpoint", "hooks", "inplace", "twice") and s.grads == "none":
        s = replace(s, grads="both" if s.final else "out")
    if s.mode in ("graph", "inplace") and s.layout == "expanded":
        s = replace(s, layout="offset")
    if s.mode == "step":
        s = replace(s, cu=(), B=s.B if not s.cu else 2, T=dice.choice(_STEPS), state=True, final=True)
    if s.mode == "inference" and family == "matrix" and dice.happens(0.5):
        s = replace(s, cu=(), T=1)
    if s.backend == "decode":
        s = replace(s, cu=(), T=1, grads="none", mode=s.mode if s.mode in ("step", "graph", "repeat") else "inference")
    if s.dtype == "float16" and s.values == "large" and s.keys == "raw":
        s = replace(s, keys="model")
    return s


def _short(s: Scenario) -> Scenario:
    """Sequences for a step loop. Nothing is drawn again, so that the scenarios of other backends stay as they are."""
    if not s.cu:
        return replace(s, T=s.T % _STEP_LOOP)
    cu = tuple(accumulate(((end - start) % _STEP_LOOP for start, end in pairwise(s.cu)), initial=0))
    return replace(s, T=cu[-1], cu=cu)


def _limited(s: Scenario, family: str) -> Scenario:
    """Fewer heads or steps where a float64 loop would keep too much."""
    width = s.K * (s.V or s.D) if s.K else s.D * (8 if family == "dense" else 1)
    while s.sequences * max(s.H, 1) * max(s.T, 1) * width > _MOST[s.device] and (s.B > 1 or s.H > 1):
        s = replace(s, B=s.B * 3 // 4) if s.B > 1 else replace(s, H=s.H // 2, Hq=1 if s.Hq else 0)
    return s
