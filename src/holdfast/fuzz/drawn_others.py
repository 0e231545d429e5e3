"""Random arguments of the dense, diagonal and selective recurrences, the chunk primitives, norm and convolution."""

import torch

from .scenario import Scenario
from .source import Source, Value

Values = dict[str, Value]
# input gates, recurrent gates, gates and states of each cell
COUNTS = {"elman": (1, 1, 1, 1), "lstm": (4, 4, 4, 2), "gru": (3, 3, 4, 1), "slstm": (4, 4, 4, 4), "rnn": (3, 2, 3, 2)}


def dense(s: Scenario, source: Source) -> Values:
    inputs, recurrent, gates, states = COUNTS[s.op]
    x = source.sized(s.values, True, s.B, s.T, inputs, s.H, s.D)
    if s.strength in ("strong", "mixed"):
        saturated = 20 * torch.sign(source.normal(*x.shape))
        x = torch.where(source.uniform(*x.shape) < (0.5 if s.strength == "strong" else 0.1), saturated, x)
    size = {"weak": 0.0, "zero": 0.1}.get(s.strength, 1.0) * (3 * s.D) ** -0.5
    found = {"x": Value("input", x), "R": Value("input", source.normal(recurrent, s.H, s.D, s.D) * size)}
    if "b" in s.options:
        found["b"] = Value("input", source.normal(gates, s.H, s.D))
    if "reset" in s.options:
        reset = source.uniform(s.B, s.T) < source.choose((0.05, 0.3))
        if s.T > 32 and source.integer(2):
            reset[:, 32::32] = True
        found["reset"] = Value("bool", reset)
    if s.state:
        state = source.normal(states, s.sequences, s.H, s.D)
        if s.op == "slstm":
            # the normaliser of a state that holds something
            state[2] = state[2].abs() + 1
        found["initial_state"] = Value("state", state)
    return found


def _state(s: Scenario, source: Source) -> Values:
    return {"initial_state": Value("state", source.normal(s.sequences, s.D))} if s.state else {}


def _magnitude(s: Scenario, source: Source, *shape: int) -> torch.Tensor:
    a = source.log_decay(s.strength, *shape).exp()
    if s.strength in ("mixed", "strong"):
        a = a * torch.sign(source.normal(*shape))
    return a


def rglru(s: Scenario, source: Source) -> Values:
    return {
        "a": Value("gate", _magnitude(s, source, s.B, s.T, s.D)),
        "x": Value("input", source.sized(s.values, s.dtype == "float16", s.B, s.T, s.D)),
    } | _state(s, source)


def hgrn(s: Scenario, source: Source) -> Values:
    return {
        "x": Value("input", source.sized(s.values, s.dtype == "float16", s.B, s.T, s.D)),
        "g": Value("gate", source.log_decay(s.strength, s.B, s.T, s.D)),
    } | _state(s, source)


def rotlru(s: Scenario, source: Source) -> Values:
    pairs = s.B, s.T, s.D // 2
    return {
        "a": Value("gate", _magnitude(s, source, *pairs)),
        "theta": Value("gate", source.normal(*pairs) * source.choose((1.0, 1.0, 10.0))),
        "x": Value("input", source.sized(s.values, s.dtype == "float16", s.B, s.T, s.D)),
    } | _state(s, source)


def mamba1(s: Scenario, source: Source) -> Values:
    B, T, D, N = s.B, s.T, s.D, s.K
    rate = {"strong": 16.0, "inf": 1e4, "mixed": 100.0, "weak": 1e-3, "zero": 0.0}.get(s.strength, 1.0)
    dt = source.normal(B, T, D)
    dt = dt - 1 if "softplus" in s.options else dt.sigmoid()
    if s.strength == "mixed":
        dt = torch.where(source.uniform(B, T, D) < 0.2, -40.0 if "softplus" in s.options else 0.0, dt)
    groups = (B, T, N) if "flat" in s.options else (B, T, s.Hq, N)
    found = {
        "x": Value("input", source.sized(s.values, s.dtype == "float16", B, T, D)),
        "dt": Value("gate", dt),
        "A": Value("gate", -rate * source.uniform(D, N)),
        "B": Value("input", source.normal(*groups)),
        "C": Value("input", source.normal(*groups) * N**-0.5),
    }
    if "D" in s.options:
        found["D"] = Value("gate", source.normal(D))
    if "z" in s.options:
        found["z"] = Value("input", source.normal(B, T, D) * (8 if s.strength == "strong" else 1))
    if "dt_bias" in s.options:
        found["dt_bias"] = Value("gate", source.uniform(D))
    if s.state:
        found["initial_state"] = Value("state", source.normal(s.sequences, D, N))
    return found


def gated_rms_norm(s: Scenario, source: Source) -> Values:
    shape = s.B, s.T, s.H, s.D
    found = {"o": Value("input", source.sized(s.values, s.dtype == "float16", *shape))}
    if "gate" in s.options:
        found["gate"] = Value("input", source.normal(*shape) * (8 if s.strength == "strong" else 1))
    if "w1" in s.options or "w2" in s.options:
        found["weight"] = Value("gate", source.normal(*((s.H, s.D) if "w2" in s.options else (s.D,))))
    return found


def causal_conv1d(s: Scenario, source: Source) -> Values:
    width = next((int(word.removeprefix("taps")) for word in s.options if word.startswith("taps")), 4)
    found = {
        "x": Value("input", source.sized(s.values, s.dtype == "float16", s.B, s.T, s.D)),
        "weight": Value("gate", source.normal(s.D, width) * width**-0.5),
    }
    if "b" in s.options:
        found["bias"] = Value("gate", source.normal(s.D) * (8 if s.strength == "strong" else 1))
    if s.state:
        found["initial_state"] = Value("state", source.normal(s.sequences, width - 1, s.D))
    return found


def inter_chunk_scan(s: Scenario, source: Source) -> Values:
    B, G, H, K, V = s.B, s.T, s.H, s.K, s.V
    found = {
        "states": Value("input", source.sized(s.values, s.dtype == "float16", B, G, H, K, V)),
        "decay": Value("gate", source.log_decay(s.strength, *((B, G, H, K) if "vector" in s.options else (B, G, H)))),
    }
    if "low" in s.options:
        # W Y^T projects onto about half of r directions, so that the state stays bounded
        Y = torch.nn.functional.normalize(source.normal(B, G, H, K, s.rank), dim=-2)
        found["Y"] = Value("input", Y)
        found["W"] = Value("input", Y * source.uniform(B, G, H, 1, s.rank) / s.rank)
    if s.state:
        found["initial_state"] = Value("state", source.normal(s.sequences, H, K, V))
    return found


def intra_chunk(s: Scenario, source: Source) -> Values:
    B, T, H, K, V = s.B, s.T, s.H, s.K, s.V
    found = {
        "q": Value("input", source.normal(B, T, s.Hq, K)),
        "k": Value("input", source.normal(B, T, s.Hq, K) * K**-0.5),
        "v": Value("input", source.sized(s.values, s.dtype == "float16", B, T, H, V)),
    }
    if "g" in s.options:
        found["g"] = Value("gate", source.log_decay(s.strength, B, T, H))
    if "states" in s.options:
        found["states"] = Value("gate", source.normal(B, -(-T // s.chunk), H, K, V))
    if "gate" in s.options:
        found["gate"] = Value("input", source.normal(B, T, H, V) * (8 if s.strength == "strong" else 1))
    return found
