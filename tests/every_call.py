"""A call of every public op with every option that changes what runs, small enough to be made by the hundred."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import holdfast
from holdfast.ops.gated_gelu import gated_gelu
from holdfast.ops.lru_gates import lru_gates
from holdfast.ops.rotary import rotary
from holdfast.ops.soft_cap import soft_cap
from holdfast.recurrences import RECURRENCES, Draw, Sizes

SIZES = Sizes(B=2, T=5, H=2, K=4, V=3, D=4)


@dataclass(frozen=True)
class Call:
    """op(**arguments, **options). draw: makes the arguments, tensors and tuples of them."""

    op: Callable[..., Any]
    draw: Callable[[Draw, Sizes], dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    # an op that returns a final state where it is asked to
    has_state: bool = True

    def arguments(
        self, dtype: torch.dtype = torch.float64, seed: int = 0, sizes: Sizes = SIZES, device: str = "cpu"
    ) -> dict[str, Any]:
        found = self.draw(Draw(seed, dtype, device), sizes)
        return {name: x for name, x in found.items() if x is not None}

    def __call__(self, arguments: dict[str, Any], **more: Any) -> Any:
        final = {"output_final_state": True} if self.has_state else {}
        return self.op(**arguments, **final, **self.options, **more)


def _changed(name: str, change: Callable[[Draw, Sizes], dict[str, Any]], **options: Any) -> Call:
    """The example of a recurrence with other arguments."""
    return Call(getattr(holdfast, name), lambda draw, s: RECURRENCES[name].example(draw, s) | change(draw, s), options)


def _raw(draw: Draw, s: Sizes) -> dict[str, Any]:
    return {"k": draw.normal(s.B, s.T, s.query_heads, s.K), "beta": draw.normal(s.B, s.T, s.H)}


def _gate(draw: Draw, s: Sizes) -> dict[str, Any]:
    return {"g": draw.normal(s.B, s.T, s.H), "A_log": draw.normal(s.H), "dt_bias": draw.normal(s.H)}


def _vector_gate(draw: Draw, s: Sizes) -> dict[str, Any]:
    return {"g": draw.normal(s.B, s.T, s.H, s.K), "A_log": draw.normal(s.H), "dt_bias": draw.normal(s.H, s.K)}


def _chunk(draw: Draw, s: Sizes) -> dict[str, Any]:
    qkv = RECURRENCES["simple_gla"].example(draw, s)
    del qkv["initial_state"]
    chunks = -(-s.T // 2)
    return qkv | {"states": draw.normal(s.B, chunks, s.H, s.K, s.V), "gate": draw.normal(s.B, s.T, s.H, s.V)}


def _states(draw: Draw, s: Sizes, rank: int = 2) -> dict[str, Any]:
    factors = {name: draw.normal(s.B, s.T, s.H, s.K, rank, scale=0.5) for name in "WY"}
    decay = draw.log_decay(s.B, s.T, s.H, s.K)
    states, first = draw.normal(s.B, s.T, s.H, s.K, s.V), draw.state(s.B, s.H, s.K, s.V)
    return {"states": states, "decay": decay, **factors, "initial_state": first}


def _without_factors(draw: Draw, s: Sizes) -> dict[str, Any]:
    found = _states(draw, s)
    return {"states": found["states"], "decay": found["decay"][..., 0], "initial_state": found["initial_state"]}


def _norm(draw: Draw, s: Sizes) -> dict[str, Any]:
    shape = (s.B, s.T, s.H, s.D)
    return {"o": draw.normal(*shape), "gate": draw.normal(*shape), "weight": draw.normal(s.H, s.D)}


def _rotated(draw: Draw, s: Sizes) -> dict[str, Any]:
    return {"q": draw.normal(s.B, s.T, s.query_heads, 4), "k": draw.normal(s.B, s.T, s.H, 4)}


def _branch(draw: Draw, s: Sizes) -> dict[str, Any]:
    return {"h": draw.normal(s.B, s.T, s.D), "z": draw.normal(s.B, s.T, s.D)}


def _lru(draw: Draw, s: Sizes) -> dict[str, Any]:
    u, gates, bias = draw.normal(s.B, s.T, s.H * s.D), draw.normal(s.B, s.T, s.H, 2 * s.D), draw.normal(s.H, 2 * s.D)
    return {"u": u, "gates": gates, "bias": bias, "rate": draw.normal(s.H * s.D)}


def _lru_of_pairs(draw: Draw, s: Sizes) -> dict[str, Any]:
    numbers = s.H * s.D // 2
    return _lru(draw, s) | {"rate": draw.normal(numbers), "phase": draw.normal(numbers)}


def _conv(draw: Draw, s: Sizes) -> dict[str, Any]:
    x, state = draw.normal(s.B, s.T, s.D), draw.state(s.B, 3, s.D)
    return {"x": x, "weight": draw.normal(s.D, 4), "bias": draw.normal(s.D), "initial_state": state}


def _some(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """The others of these are left out."""
    return {name: given[name] for name in names}


def _resets(draw: Draw, s: Sizes) -> dict[str, Any]:
    return {"reset": draw.normal(s.B, s.T) > 0}


@holdfast.cell(states=("h",), gates=("u", "w"))
def leaky(s, g):
    """A cell of a user's own."""
    return {"h": torch.sigmoid(g.u) * s.h + torch.tanh(g.w)}


def _leaky(draw: Draw, s: Sizes) -> dict[str, Any]:
    weights = draw.normal(2, s.H, s.D, s.D, scale=0.3)
    x, b, state = draw.normal(s.B, s.T, 2, s.H, s.D), draw.normal(2, s.H, s.D), draw.state(1, s.B, s.H, s.D)
    return {"x": x, "R": weights, "b": b, "initial_state": state}


CALLS = {name: Call(getattr(holdfast, name), found.example) for name, found in RECURRENCES.items()}
CALLS |= {
    "simple_gla with a constant g": _changed("simple_gla", lambda draw, s: {"g": draw.log_decay(s.H)}),
    "simple_gla without g": _changed("simple_gla", lambda draw, s: {"g": None}),
    "delta_rule with all options": _changed(
        "delta_rule", _raw, qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=True
    ),
    "gated_delta_rule with qk_l2norm": _changed("gated_delta_rule", _raw, qk_l2norm=True),
    "gated_delta_rule with beta_sigmoid": _changed("gated_delta_rule", _raw, beta_sigmoid=True),
    "gated_delta_rule with A_log": _changed("gated_delta_rule", _gate),
    "gated_delta_rule with all options": _changed(
        "gated_delta_rule", lambda draw, s: _raw(draw, s) | _gate(draw, s), qk_l2norm=True, beta_sigmoid=True
    ),
    "gated_delta_product with all options": _changed(
        "gated_delta_product", _gate, qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=True
    ),
    "kda with all options": _changed(
        "kda", lambda draw, s: _raw(draw, s) | _vector_gate(draw, s), qk_l2norm=True, beta_sigmoid=True
    ),
    "mlstm, sigmoid": _changed("mlstm", lambda draw, s: {}, gating="sigmoid"),
    "mlstm, sigmoid, not normalised": _changed("mlstm", lambda draw, s: {}, gating="sigmoid", normalize=False),
    "ssd with a rate a channel": _changed(
        "ssd", lambda draw, s: {"A": -draw.gate(s.H, s.K), "D": draw.normal(s.H, s.V)}, dt_softplus=True
    ),
    "lightning, a later layer": _changed("lightning", lambda draw, s: {}, layer=1, num_layers=3),
    "lstm with resets": _changed("lstm", _resets, recurrent_grad_clip=0.1),
    "gru with resets": _changed("gru", _resets, cut_recurrent_grad=True),
    "rnn": Call(lambda **given: holdfast.rnn(leaky, **given), _leaky),
    "inter_chunk_scan": Call(holdfast.inter_chunk_scan, _states),
    "inter_chunk_scan without W and Y": Call(holdfast.inter_chunk_scan, _without_factors),
    "intra_chunk": Call(holdfast.intra_chunk, _chunk, {"chunk_size": 2}, has_state=False),
    "intra_chunk, sigmoid": Call(
        holdfast.intra_chunk, _chunk, {"chunk_size": 2, "gate_activation": "sigmoid"}, has_state=False
    ),
    "gated_rms_norm": Call(holdfast.gated_rms_norm, _norm, has_state=False),
    "gated_rms_norm, sigmoid": Call(
        holdfast.gated_rms_norm, _norm, {"activation": "sigmoid", "center": True}, has_state=False
    ),
    "causal_conv1d": Call(holdfast.causal_conv1d, _conv),
    "causal_conv1d without a bias": Call(
        holdfast.causal_conv1d, lambda draw, s: _some(_conv(draw, s), "x", "weight", "initial_state")
    ),
    "gated_rms_norm of o alone": Call(
        holdfast.gated_rms_norm, lambda draw, s: _some(_norm(draw, s), "o"), has_state=False
    ),
    "intra_chunk without states": Call(
        holdfast.intra_chunk,
        lambda draw, s: _some(_chunk(draw, s), "q", "k", "v", "g"),
        {"chunk_size": 2},
        has_state=False,
    ),
    "causal_conv1d, silu": Call(holdfast.causal_conv1d, _conv, {"activation": "silu"}),
}
# what a mixer has done around its op, by a kernel on a GPU
PARTS = {
    "rotary": Call(rotary, _rotated, has_state=False),
    "lru_gates": Call(lru_gates, _lru, {"strength": 8.0}, has_state=False),
    "lru_gates of pairs": Call(lru_gates, _lru_of_pairs, {"strength": 8.0}, has_state=False),
    "gated_gelu": Call(gated_gelu, _branch, has_state=False),
    "soft_cap": Call(soft_cap, lambda draw, s: {"x": draw.normal(s.B, s.T, s.H)}, {"cap": 2.0}, has_state=False),
}
# those whose inputs a kernel prepares on a GPU
FUSED = [name for name in CALLS if name.startswith(("delta_rule", "gated_delta", "gdn2", "kda", "mlstm"))] + [*PARTS]
