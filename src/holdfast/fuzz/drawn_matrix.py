"""Random arguments of the matrix recurrences."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .scenario import Scenario
from .source import Source, Value

Values = dict[str, Value]


def _keys(s: Scenario, source: Source) -> Tensor:
    x = source.normal(s.B, s.T, s.Hq, s.K)
    if s.keys == "unit":
        return F.normalize(x, dim=-1)
    return x if s.keys == "raw" else x * s.K**-0.5


def _qkv(s: Scenario, source: Source) -> Values:
    half = s.dtype == "float16"
    return {
        "q": Value("input", source.normal(s.B, s.T, s.Hq, s.K)),
        "k": Value("input", _keys(s, source)),
        "v": Value("input", source.sized(s.values, half, s.B, s.T, s.H, s.V)),
    } | _state(s, source)


def _state(s: Scenario, source: Source, name: str = "initial_state") -> Values:
    if not s.state:
        return {}
    size = 8.0 if s.values == "large" else 1.0
    return {name: Value("state", source.normal(s.sequences, s.H, s.K, s.V) * size)}


def linear_attention(s: Scenario, source: Source) -> Values:
    return _qkv(s, source)


def simple_gla(s: Scenario, source: Source) -> Values:
    found = _qkv(s, source)
    if "g" in s.options:
        found["g"] = Value("gate", source.log_decay(s.strength, s.B, s.T, s.H))
    if "g1" in s.options:
        found["g"] = Value("gate", source.log_decay(s.strength, s.H))
    return found


def gla(s: Scenario, source: Source) -> Values:
    return _qkv(s, source) | {"g": Value("gate", source.log_decay(s.strength, s.B, s.T, s.H, s.K))}


def ssd(s: Scenario, source: Source) -> Values:
    B, T, H = s.B, s.T, s.H
    rate = {"strong": 16.0, "inf": 1e4, "mixed": 100.0, "weak": 1e-3, "zero": 0.0}.get(s.strength, 1.0)
    dt = source.normal(B, T, H)
    dt = dt - 1 if "softplus" in s.options else dt.sigmoid()
    if s.strength == "mixed":
        dt = torch.where(source.uniform(B, T, H) < 0.2, -40.0 if "softplus" in s.options else 0.0, dt)
    found = {
        "x": Value("input", source.sized(s.values, s.dtype == "float16", B, T, H, s.V)),
        "dt": Value("gate", dt),
        "A": Value("gate", -rate * source.uniform(*((H, s.K) if "AN" in s.options else (H,)))),
        "B": Value("input", _keys(s, source)),
        "C": Value("input", source.normal(B, T, s.Hq, s.K) * s.K**-0.5),
    }
    if "D" in s.options or "DP" in s.options:
        found["D"] = Value("gate", source.normal(*((H, s.V) if "DP" in s.options else (H,))))
    if "z" in s.options:
        found["z"] = Value("input", source.normal(B, T, H, s.V) * (8 if s.strength == "strong" else 1))
    if "dt_bias" in s.options:
        found["dt_bias"] = Value("gate", source.uniform(H))
    return found | _state(s, source)


def _beta(s: Scenario, source: Source) -> Value:
    shape = s.B, s.T, s.H
    if "sig" in s.options:
        return Value("gate", source.normal(*shape) * (10 if s.strength in ("strong", "mixed") else 1))
    kind = source.choose(("sigmoid", "sigmoid", "ones", "bits", "zeros", "twice"))
    opened = source.normal(*shape).sigmoid()
    if kind == "bits":
        opened = (opened > 0.5).float()
    if kind in ("ones", "zeros"):
        opened = torch.full(shape, float(kind == "ones"))
    return Value("gate", 2 * opened if kind == "twice" and (s.keys == "unit" or "l2" in s.options) else opened)


def delta_rule(s: Scenario, source: Source) -> Values:
    return _qkv(s, source) | {"beta": _beta(s, source)}


def gated_delta_rule(s: Scenario, source: Source) -> Values:
    found = delta_rule(s, source)
    if "A_log" in s.options:
        found["A_log"] = Value("gate", source.normal(s.H) + {"strong": 4.0, "weak": -6.0}.get(s.strength, 0.0))
        found["g"] = Value("gate", source.normal(s.B, s.T, s.H))
        if "dt_bias" in s.options:
            found["dt_bias"] = Value("gate", source.uniform(s.H))
    else:
        shape = (s.H,) if "g1" in s.options else (s.B, s.T, s.H)
        found["g"] = Value("gate", source.log_decay(s.strength, *shape))
    return found


def kda(s: Scenario, source: Source) -> Values:
    return delta_rule(s, source) | _vector_gate(s, source)


def gdn2(s: Scenario, source: Source) -> Values:
    found = _qkv(s, source) | _vector_gate(s, source)
    for name, shape in (("b", (s.B, s.T, s.H, s.K)), ("w", (s.B, s.T, s.H, s.V))):
        found[name] = Value("gate", source.normal(*shape).sigmoid())
    return found


def comba(s: Scenario, source: Source) -> Values:
    found = _qkv(s, source)
    # near the key, as the layer's are: products of steps with keys far apart grow
    found["p"] = Value("input", found["k"].x * source.uniform(s.B, s.T, s.Hq, s.K))
    found["g"] = Value("gate", source.log_decay(s.strength, s.B, s.T, s.H))
    if "beta" in s.options:
        found["beta"] = _beta(s, source)
    return found


def gated_delta_product(s: Scenario, source: Source) -> Values:
    steps = 3 if "three" in s.options else 2
    parts = [delta_rule(s, source) for _ in range(steps)]
    found = gated_delta_rule(s, source)
    for name in ("k", "v", "beta"):
        found[name] = Value(found[name].kind, torch.stack([part[name].x for part in parts], 2))
    return found


def rwkv7(s: Scenario, source: Source) -> Values:
    found = _qkv(s, source)
    removed = F.normalize(source.normal(s.B, s.T, s.Hq, s.K), dim=-1)
    found["r"] = found.pop("q")
    found["w"] = Value("gate", source.log_decay(s.strength, s.B, s.T, s.H, s.K))
    found["a"] = Value("input", -removed)
    found["b"] = Value("input", removed * source.uniform(s.B, s.T, s.Hq, s.K))
    return found


def _vector_gate(s: Scenario, source: Source) -> Values:
    found = {}
    if "A_log" in s.options:
        found["A_log"] = Value("gate", source.normal(s.H) + {"strong": 4.0, "weak": -6.0}.get(s.strength, 0.0))
    if "dt_bias" in s.options:
        found["dt_bias"] = Value("gate", source.uniform(s.H, s.K))
    if "A_log" in s.options or "bound" in s.options:
        found["g"] = Value("gate", source.normal(s.B, s.T, s.H, s.K))
    else:
        found["g"] = Value("gate", source.log_decay(s.strength, s.B, s.T, s.H, s.K))
    return found


def mlstm(s: Scenario, source: Source) -> Values:
    shape = s.B, s.T, s.H
    i, f = source.normal(*shape), source.normal(*shape) + 3
    if s.strength == "strong":
        i, f = 20 * torch.sign(source.normal(*shape)) + i, 8 * source.normal(*shape)
    if s.strength == "weak":
        i, f = i - 10, f + 3
    if s.strength == "zero":
        i, f = i * 0, f * 0 + 20
    if s.strength == "inf":
        i, f = i + 20, torch.where(source.uniform(*shape) < 0.06, -100.0, f)
    if s.strength == "mixed":
        i = torch.where(source.uniform(*shape) < 0.2, 20 * torch.sign(source.normal(*shape)), i)
        f = torch.where(source.uniform(*shape) < 0.2, -20.0, f)
    found = _qkv(s, source) | {"i": Value("gate", i), "f": Value("gate", f)}
    if s.state:
        found["C"] = found.pop("initial_state")
        found["n"] = Value("state", source.normal(s.sequences, s.H, s.K))
        found["m"] = Value("state", source.normal(s.sequences, s.H))
    return found
