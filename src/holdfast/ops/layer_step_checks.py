"""Random calls of a layer's step, for doctor and tests: a token is a slice of a wider tensor, as of a projection."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.layer_step.call import ConvStep, LayerStep, MLSTMStep, RetentionStep, RGLRUStep
from holdfast.recurrences import Draw, Sizes

from .layer_step import conv_step, mlstm_step, retention_step, rglru_step

STATES = ("tail", "state", "position", "C", "n", "m", "h")
_OPS = {ConvStep: conv_step, RetentionStep: retention_step, MLSTMStep: mlstm_step, RGLRUStep: rglru_step}


def _token(draw: Draw, B: int, N: int) -> Tensor:
    return draw.normal(B, 1, N + 7)[..., 3 : 3 + N]


def _tail(draw: Draw, B: int, C: int, taps: int, spare: int) -> Tensor:
    """spare: inputs beyond the taps, as in transformers' caches, where channels are apart too."""
    return draw.state(B, C, taps - 1 + spare).mT if spare else draw.state(B, taps - 1, C)


def draw_delta(draw: Draw, s: Sizes, taps: int = 4, spare: int = 0, decay: bool = True, gate: bool = True) -> ConvStep:
    """Of a Gated DeltaNet; without decay and gate, of a DeltaNet."""
    C = 2 * s.query_heads * s.K + s.H * s.V
    return ConvStep(
        x=_token(draw, s.B, C),
        tail=_tail(draw, s.B, C, taps, spare),
        state=draw.state(s.B, s.H, s.K, s.V),
        conv_weight=draw.normal(C, taps, scale=0.5),
        conv_bias=None,
        a=_token(draw, s.B, s.H) if decay else None,
        beta=_token(draw, s.B, s.H),
        A_log=draw.state(s.H) if decay else None,
        dt_bias=draw.state(s.H) if decay else None,
        D=None,
        gate=_token(draw, s.B, s.H * s.V) if gate else None,
        norm_weight=draw.state(s.V),
        heads=s.query_heads,
        largest=2.0,
        norm_eps=1e-5,
    )


def draw_ssd(draw: Draw, s: Sizes, taps: int = 4, spare: int = 0, groups: int = 1) -> ConvStep:
    """Of a Mamba-2 whose norm has so many groups."""
    C = 2 * s.query_heads * s.K + s.H * s.V
    return ConvStep(
        x=_token(draw, s.B, C),
        tail=_tail(draw, s.B, C, taps, spare),
        state=draw.state(s.B, s.H, s.K, s.V),
        conv_weight=draw.normal(C, taps, scale=0.5),
        conv_bias=draw.normal(C),
        a=_token(draw, s.B, s.H),
        beta=None,
        A_log=draw.state(s.H),
        dt_bias=draw.state(s.H),
        D=draw.state(s.H),
        gate=_token(draw, s.B, s.H * s.V),
        norm_weight=draw.state(groups, s.H * s.V // groups),
        heads=s.query_heads,
        largest=1.0,
        norm_eps=1e-5,
    )


def draw_gla(draw: Draw, s: Sizes) -> RetentionStep:
    x, gate = _token(draw, s.B, s.H * (2 * s.K + s.V)), _token(draw, s.B, s.H * s.V)
    a, state = _token(draw, s.B, s.H * s.K), draw.state(s.B, s.H, s.K, s.V)
    return RetentionStep(x, state, a, None, gate, draw.state(s.V), 16.0, 1.0, 1e-5)


def draw_retnet(draw: Draw, s: Sizes) -> RetentionStep:
    """After a hundred thousand tokens and more, of K even."""
    x, gate = _token(draw, s.B, s.H * (2 * s.K + s.V)), _token(draw, s.B, s.H * s.V)
    position = torch.arange(100_000, 100_000 + s.B, dtype=torch.int64, device=draw.device)
    return RetentionStep(x, draw.state(s.B, s.H, s.K, s.V), None, position, gate, draw.state(s.V), 1.0, 10000.0, 1e-5)


def draw_mlstm(draw: Draw, s: Sizes, exponential: bool = True, normalize: bool = True, cap: float = 15.0) -> MLSTMStep:
    # C and n lie as the op returns them
    states = draw.state(s.B, s.H, s.K, s.V + 1)
    return MLSTMStep(
        x=_token(draw, s.B, s.H * (2 * s.K + s.V)),
        gates=3 * _token(draw, s.B, 2 * s.H),
        C=states[..., : s.V],
        n=states[..., s.V],
        m=draw.state(s.B, s.H),
        gate=_token(draw, s.B, s.H * s.V),
        norm_weight=draw.state(s.H, s.V),
        exponential=exponential,
        normalize=normalize,
        cap=cap,
        norm_eps=1e-6,
    )


def draw_rglru(draw: Draw, s: Sizes) -> RGLRUStep:
    D = s.H * s.V
    u, z, gates = _token(draw, s.B, D), _token(draw, s.B, D), draw.normal(s.B, 1, s.H, 2 * s.V)
    return RGLRUStep(u, z, gates, draw.state(s.B, D), 3 * draw.state(D) - 3, 8.0)


DRAWN: dict[str, Callable[..., LayerStep]] = {
    "delta": draw_delta,
    "ssd": draw_ssd,
    "gla": draw_gla,
    "retnet": draw_retnet,
    "mlstm": draw_mlstm,
    "rglru": draw_rglru,
}


def apart(call: LayerStep) -> LayerStep:
    """The call on copies of its states, laid out as they are."""
    held = {name: x for name in STATES if (x := getattr(call, name, None)) is not None}
    copies = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        for name, x in held.items()
    }
    return call._replace(**copies)


def states_of(call: LayerStep) -> list[Tensor]:
    return [x for name in STATES if (x := getattr(call, name, None)) is not None]


def stepped(kind: type[LayerStep], arguments: dict[str, Any], backend: str) -> tuple[Tensor, ...]:
    """y of the call with these fields, and its states afterwards."""
    call = apart(kind(**arguments))
    return _OPS[kind](*call, backend), *states_of(call)
