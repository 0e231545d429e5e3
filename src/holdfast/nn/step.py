"""The step of decoding: one token through a mixer, its state updated in place.

Between a mixer's projections all is one op of `ops.layer_step`: two launches on a GPU. `Mamba` has projections inside.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.ops import causal_conv1d_update
from holdfast.ops import step as recurrence_step
from holdfast.ops.layer_step import conv_step, mlstm_step, retention_step, rglru_step
from holdfast.recurrences.torch_private import tree_leaves

from .check import check_input, check_state, wide


class Mixer(nn.Module):
    """A layer over time: forward(x, state) -> (y, the state to continue from), and step(x, state) -> y in place."""

    # the op that `_token` stands for
    _op_of_token = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "_token" in vars(cls):
            cls._op_of_token = vars(cls).get("op")

    def step(self, x: Tensor, state: Any) -> Tensor:
        """One token of decoding, with the state's memory used again.

        What forward(x, state) returns as y, to rounding, without gradients. forward leaves the state that it is given
        as it was and returns another; this one overwrites it, so that a captured CUDA graph decodes token after token
        on it (`CapturedStep`). A copy of the state is made with `tuple(s.clone() for s in state)`.

        Args:
            x: [B, 1, d_model].
            state: what forward returned, of a prompt or of no tokens (x[:, :0]); overwritten by the state after the
                token.

        Returns:
            y [B, 1, d_model].

        Raises:
            ValueError, TypeError: for x or a state of the wrong shape, dtype or layout, named in the message.
        """
        check_token(x, state)
        with torch.no_grad():
            # an op that was replaced, in an instance or a subclass, or a backend that was named is what is asked for
            if getattr(self, "op", None) is not self._op_of_token or getattr(self, "backend", None) is not None:
                return Mixer._token(self, x, state)
            return self._token(x, state)

    def _token(self, x: Tensor, state: Any) -> Tensor:
        """`step` of what passed its checks: here forward's, and a copy of the state that it returns."""
        y, after = self(x, state)
        for held, new in zip(tree_leaves(state), tree_leaves(after), strict=True):
            held.copy_(new)
        return y


def check_token(x: Tensor, state: Any) -> None:
    """Raises ValueError for x that is not one token [B, 1, d_model], TypeError for no state."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1] != 1:
        found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x: expected one token, of shape [B, 1, d_model]; got {found}")
    if state is None:
        raise TypeError("state: expected what forward returned; got None")


def _held(x: Tensor, d_model: int, state: Any, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[Tensor, ...]:
    """The tensors of a state, checked: shapes of one sequence, by name."""
    batch, dtypes = check_input(x, d_model, None), {"position": torch.int64}
    held = check_state(state, [(name, (batch, *shape), dtypes.get(name, wide(x.dtype))) for name, shape in shapes])
    for n, ((name, _), part) in enumerate(zip(shapes, held, strict=True)):
        # kernels write where it lies; a state that forward returns is laid out so
        is_shared = any(size > 1 and not stride for size, stride in zip(part.shape, part.stride(), strict=True))
        if is_shared or (part.stride(-1) != 1 and name not in ("tail", "n")):
            expected = f"{name} with memory of its own for each element, its last axis side by side"
            raise ValueError(f"state[{n}]: expected {expected}; got strides {list(part.stride())}")
    return held


def gated_delta_net(mixer: Any, x: Tensor, state: Any) -> Tensor:
    """A `GatedDeltaNet`'s step, or a `DeltaNet`'s."""
    gated = hasattr(mixer, "A_log")
    heads = mixer.num_v_heads if gated else mixer.num_heads
    tail_shape = (mixer.conv.width - 1, mixer.conv.channels)
    shapes = [("S", (heads, mixer.key_dim, mixer.value_dim)), ("tail", tail_shape)]
    S, tail = _held(x, mixer.d_model, state, shapes)
    qkv, *others = _projected(mixer, x, 3)
    gate, a, beta = others if gated else (None, None, *others)
    decay = (mixer.A_log, mixer.dt_bias) if gated else (None, None)
    y = conv_step(
        qkv,
        tail,
        S,
        mixer.conv.weight,
        mixer.conv.bias,
        a,
        beta,
        *decay,
        None,
        gate,
        mixer.norm.weight,
        mixer.num_heads,
        1.0 + mixer.allow_neg_eigval,
        mixer.norm.eps,
        "",
    )
    return mixer.out_proj(y)


def mamba2(mixer: Any, x: Tensor, state: Any) -> Tensor:
    """A `Mamba2`'s step."""
    tail_shape = (mixer.conv.width - 1, mixer.conv.channels)
    shapes = [("S", (mixer.num_heads, mixer.d_state, mixer.head_dim)), ("tail", tail_shape)]
    S, tail = _held(x, mixer.d_model, state, shapes)
    z, mixed, dt = _projected(mixer, x)
    y = conv_step(
        mixed,
        tail,
        S,
        mixer.conv.weight,
        mixer.conv.bias,
        dt,
        None,
        mixer.A_log,
        mixer.dt_bias,
        mixer.D,
        z,
        mixer.norm.weight,
        mixer.n_groups,
        1.0,
        mixer.norm.eps,
        "",
    )
    return mixer.out_proj(y)


def mamba(mixer: Any, x: Tensor, state: Any) -> Tensor:
    """A `Mamba`'s step: two projections stand between its convolution and its scan."""
    S, tail = _held(x, mixer.d_model, state, [(name, shape[1:]) for name, shape, _ in mixer.state_of(1, x.dtype)])
    u, z = mixer.in_proj(x).chunk(2, -1)
    u = causal_conv1d_update(u, tail, mixer.conv1d.weight[:, 0], mixer.conv1d.bias, "silu")
    dt, B, C = mixer.parameters_of(u)
    given = {"x": u, "dt": dt, "A": mixer.rate(u.dtype), "B": B, "C": C, "D": mixer.D, "z": z}
    y = recurrence_step("mamba1", given | {"dt_bias": mixer.dt_proj.bias, "dt_softplus": True}, S)
    return mixer.out_proj(y)


def gla(mixer: Any, x: Tensor, state: Any) -> Tensor:
    """A `GLA`'s step."""
    (S,) = _held(x, mixer.d_model, state, [("S", (mixer.num_heads, mixer.key_dim, mixer.value_dim))])
    qkv, gate, down = _projected(mixer, x, 3)
    norm = mixer.norm
    y = retention_step(qkv, S, mixer.decay_up(down), None, gate, norm.weight, mixer.gate_normalizer, 1.0, norm.eps, "")
    return mixer.out_proj(y)


def retnet(mixer: Any, x: Tensor, state: Any) -> Tensor:
    """A `RetNet`'s step."""
    shape = (mixer.num_heads, mixer.key_dim, mixer.value_dim)
    S, position = _held(x, mixer.d_model, state, [("S", shape), ("position", ())])
    qkv, gate = _projected(mixer, x, 3)
    y = retention_step(
        qkv, S, None, position, gate, mixer.norm.weight, 1.0, float(mixer.rotary_base), mixer.norm.eps, ""
    )
    return mixer.out_proj(y)


def mlstm(mixer: Any, x: Tensor, state: Any) -> Tensor:
    """An `MLSTM`'s step."""
    H, K, V = mixer.num_heads, mixer.key_dim, mixer.value_dim
    C, n, m = _held(x, mixer.d_model, state, [("C", (H, K, V)), ("n", (H, K)), ("m", (H,))])
    qkv, gate, gates = _projected(mixer, x, 3)
    gates, norm = gates + mixer.gate_bias.to(wide(gates.dtype)), mixer.norm
    options = (mixer.gating == "exp", mixer.normalize, mixer.gate_soft_cap or 0.0, norm.eps, 1e-6)
    return mixer.out_proj(mlstm_step(qkv, gates, C, n, m, gate, norm.weight, *options, ""))


def rglru(mixer: Any, x: Tensor, state: Any) -> Tensor:
    """An `RGLRU`'s step."""
    (h,) = _held(x, mixer.d_model, state, [("h", (mixer.width,))])
    u, z = mixer.in_proj(x).chunk(2, -1)
    gates = mixer.gates(u) + mixer.gates.bias
    return mixer.out_proj(rglru_step(u, z, gates, h, mixer.rate, float(mixer.decay_strength), ""))


def _projected(mixer: Any, x: Tensor, joined: int = 1) -> tuple[Tensor, ...]:
    """The parts of a mixer's projection, the first `joined` of its widths in one; what it has beyond is left out."""
    packed, widths = mixer.in_proj(x), [sum(mixer.widths[:joined]), *mixer.widths[joined:]]
    return packed.split([*widths, packed.shape[2] - sum(widths)], -1)[: len(widths)]
