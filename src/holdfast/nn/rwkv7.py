"""The time mix of RWKV-7."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.ops import rwkv7
from holdfast.recurrences.torch_private import tree_leaves

from .check import check_divides, check_input, check_positive, check_state, wide
from .norm import HeadLayerNorm
from .projection import Projection
from .short_convolution import TokenShift
from .step import Mixer, check_token

State = tuple[Tensor, Tensor]
# what is made of a token and the one before it, in the order of `mix`
_PARTS = ("r", "w", "k", "v", "a", "g")
_FASTEST_DECAY = -math.exp(-0.5)
# of fla's layer: names of low ranks, and what has another name alone
_LOW_RANKS = {"w_lora": "decay", "a_lora": "rate", "v_lora": "residual", "g_lora": "gate"}
_RENAMED = {"o_proj.weight": "out_proj.weight"}
_RENAMED |= {
    f"{theirs}.lora.{place}": f"{own}.{part}"
    for theirs, own in _LOW_RANKS.items()
    for place, part in (("0.weight", "down.weight"), ("2.weight", "up.weight"), ("2.bias", "up.bias"))
}


class LowRank(nn.Module):
    """up(activation(down(x))): a projection of low rank; its bias is up's."""

    def __init__(
        self, width: int, rank: int, activation: Callable[[Tensor], Tensor] | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.activation = activation
        self.down = Projection(width, rank)
        self.up = nn.Linear(rank, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        low = self.down(x)
        return self.up(low if self.activation is None else self.activation(low))


class RWKV7(Mixer):
    """RWKV-7's time mix: a decay of each key channel, and a key that is removed and in part written again.

        x_i = x + m_i (x of the token before - x), for i of r, w, k, v, a, g
        r, k, v = W_r x_r, W_k x_k, W_v x_v;  w = -e^-0.5 sigmoid(low(x_w));  a = sigmoid(low(x_a))
        v = v + sigmoid(low(x_v)) (v of the first layer - v), from the second layer on
        c = k_k k / |k_k k|;  k = k (1 + k_a (a - 1));  o = rwkv7(r, w, k, v, -c, a c)
        y = W_o ((layernorm(o) + (r_k r . k) v) low(x_g))

    Lengths, norm and r . k are of each head; `low` is a projection of low rank with a bias (tanh between its two for w;
    sigmoid, and no bias, for g). Source: Peng et al. 2025, RWKV-7 (arXiv:2503.14456), section 4. Checkpoints of
    RWKV7Attention in flash-linear-attention load as they are, and m, k_k, k_a, r_k, biases and the norm's weight start
    as they do there.

    Args:
        d_model: width of inputs and outputs.
        num_heads: divides d_model.
        decay_rank, rate_rank, value_rank, gate_rank: ranks of `low` for w, a, v and g; by default those of fla's layer:
            with heads of 64 channels 2.5, 2.5, 1.7 and 5 sqrt(d_model), the first three more for wider heads, rounded
            to multiples of 32.
        layer, num_layers: which layer of how many this is, from 0 on. Layers from 1 on take values of the first.
        norm_eps: of the norm over each head's output, a channel of the head.
        backend: forces a backend of `holdfast.rwkv7`.

    State: (S [N, num_heads, K, K], tail [N, 1, d_model]), float32 (float64 for float64 inputs), K = d_model /
    num_heads: the matrix state and the last input.

    Raises:
        ValueError: for sizes that are not positive or do not divide and for a layer that is none of num_layers, named
            in the message.
    """

    # holdfast.parallel puts the same over several ranks in its place
    op = staticmethod(rwkv7)

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        layer: int = 0,
        num_layers: int = 1,
        norm_eps: float = 1e-5,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads = check_positive("d_model", d_model), num_heads
        self.key_dim = self.value_dim = check_divides("num_heads", num_heads, "d_model", d_model)
        if not isinstance(layer, int) or not 0 <= layer < check_positive("num_layers", num_layers):
            raise ValueError(f"layer: expected an integer from 0 to num_layers - 1 = {num_layers - 1}; got {layer!r}")
        self.layer, self.num_layers, self.backend = layer, num_layers, backend
        in_heads, root = self.key_dim / 64, math.sqrt(d_model)

        def rank(name: str, given: int | None, usual: float) -> int:
            return max(32, round(usual / 32) * 32) if given is None else check_positive(name, given)

        self.shift = TokenShift(d_model)
        self.mix = nn.Parameter(torch.empty(len(_PARTS), d_model))
        self.r_proj, self.k_proj, self.v_proj = (Projection(d_model, d_model) for _ in range(3))
        self.decay = LowRank(d_model, rank("decay_rank", decay_rank, 2.5 * root * in_heads), torch.tanh)
        self.rate = LowRank(d_model, rank("rate_rank", rate_rank, 2.5 * root * in_heads))
        values = rank("value_rank", value_rank, 1.7 * root * in_heads)
        self.residual = LowRank(d_model, values) if layer else None
        self.gate = LowRank(d_model, rank("gate_rank", gate_rank, 5 * root), torch.sigmoid, bias=False)
        self.k_k, self.k_a = (nn.Parameter(torch.empty(d_model)) for _ in range(2))
        self.r_k = nn.Parameter(torch.full((num_heads, self.key_dim), -0.04))
        self.norm = HeadLayerNorm(num_heads, self.value_dim, eps=norm_eps * self.value_dim)
        self.norm_bias = nn.Parameter(torch.zeros(num_heads, self.value_dim))
        self.out_proj = Projection(d_model, d_model)
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """The starting values that are not those of projections."""
        d_model, head = self.d_model, self.key_dim
        behind = self.layer / max(self.num_layers - 1, 1)
        channel = torch.arange(d_model)
        place = channel / max(d_model - 1, 1)
        powers = (1 - self.layer / self.num_layers) * torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])
        self.mix.copy_(1 - (channel / d_model) ** powers[:, None])
        # from -1 to 1 in each head, flat in the middle
        across = (channel % head - (head - 1) / 2) / max((head - 1) / 2, 1)
        across = across * across.abs()
        self.decay.up.bias.copy_(-5.5 + 6 * place ** (1 + behind**0.3) + 2.5 * across)
        self.rate.up.bias.copy_(-0.19 + 0.3 * across + 0.4 * (place - 0.5))
        if self.residual is not None:
            self.residual.up.bias.copy_(0.73 - 0.4 * (place - 0.5))
        self.k_k.copy_(0.71 - 0.1 * (place - 0.5))
        self.k_a.fill_(1.02)
        self.norm.weight.fill_(((self.layer + 1) / self.num_layers) ** 0.7)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        shares = [f"{prefix}x_{part}" for part in _PARTS]
        if all(key in state_dict for key in shares):
            state_dict[f"{prefix}mix"] = torch.cat([state_dict.pop(key).flatten(0, -2) for key in shares])
        for theirs, own in {"g_norm.weight": "norm.weight", "g_norm.bias": "norm_bias"}.items():
            if f"{prefix}{theirs}" in state_dict:
                state_dict[f"{prefix}{own}"] = state_dict.pop(f"{prefix}{theirs}").unflatten(0, (self.num_heads, -1))
        for theirs, own in _RENAMED.items():
            if f"{prefix}{theirs}" in state_dict:
                state_dict[f"{prefix}{own}"] = state_dict.pop(f"{prefix}{theirs}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        first_values: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """x [B, T, d_model] -> (y [B, T, d_model], the state to continue from).

        cu_seqlens: int32 or int64 [N + 1], offsets of sequences packed along T, with B = 1. first_values: what
        `values` of the first layer returns for the same tokens, [B, T, d_model], for layers from 1 on alone. Raises
        ValueError or TypeError for x, a state, cu_seqlens or first_values of the wrong shape or dtype.
        """
        S, tail = self._checked(x, state, cu_seqlens)
        self._check_first(x, first_values)
        moved, tail = self.shift(x, tail, cu_seqlens)
        of_r, of_w, of_k, of_v, of_a, of_g = (x + moved * share for share in self.mix.to(x.dtype))
        r, k, v = self.r_proj(of_r), self.k_proj(of_k), self.v_proj(of_v)
        dtype, gates = v.dtype, wide(v.dtype)
        if self.residual is not None:
            v = (v + self.residual(of_v).to(gates).sigmoid() * (first_values - v)).to(dtype)
        w = _FASTEST_DECAY * self.decay(of_w).to(gates).sigmoid()
        a = self.rate(of_a).to(gates).sigmoid()
        removed = F.normalize(self._by_head(self.k_k * k.to(gates)), dim=-1)
        k = (k * (1 + self.k_a * (a - 1))).to(dtype)
        r, w, k, v, a = (self._by_head(part) for part in (r, w, k, v, a))
        o, S = self.op(
            r,
            w,
            k,
            v,
            -removed.to(dtype),
            (removed * a).to(dtype),
            initial_state=S,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        read = (self.r_k * r.to(gates) * k).sum(-1, keepdim=True) * v
        y = (self.norm(o) + self.norm_bias + read).flatten(-2) * self.gate(of_g)
        return self.out_proj(y.to(dtype)), (S, tail)

    def values(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """W_v x_v [B, T, d_model], which layers from 1 on take of the first; the arguments are forward's."""
        _, tail = self._checked(x, state, cu_seqlens)
        moved, _ = self.shift(x, tail, cu_seqlens)
        return self.v_proj(x + moved * self.mix[_PARTS.index("v")].to(x.dtype))

    def step(self, x: Tensor, state: State, first_values: Tensor | None = None) -> Tensor:
        """As `Mixer.step`; first_values: [B, 1, d_model], as in `forward`.

        `values` of the first layer is to be asked before its step, which overwrites the state.
        """
        check_token(x, state)
        with torch.no_grad():
            y, after = self(x, state, None, first_values)
            for held, new in zip(tree_leaves(state), tree_leaves(after), strict=True):
                held.copy_(new)
        return y

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))

    def _checked(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        sequences = check_input(x, self.d_model, cu_seqlens)
        dtype = wide(x.dtype)
        shape = (sequences, self.num_heads, self.key_dim, self.value_dim)
        S, tail = check_state(state, [("S", shape, dtype), ("tail", (sequences, 1, self.d_model), dtype)])
        return S, tail

    def _check_first(self, x: Tensor, first_values: Tensor | None) -> None:
        found = list(first_values.shape) if isinstance(first_values, Tensor) else first_values
        if self.residual is None and first_values is not None:
            raise ValueError(f"first_values: expected None, as layer 0 has values of its own; got {found}")
        if self.residual is not None and found != list(x.shape):
            expected = f"what layer 0's values returned, {list(x.shape)}, in layer {self.layer}"
            raise ValueError(f"first_values: expected {expected}; got {found}")
