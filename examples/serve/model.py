"""A small language model of Gated DeltaNet layers, with the two ways in which an engine calls it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

import holdfast

TAPS = 4


class Places(NamedTuple):
    """Slots of a prefill's states: before its first token, behind its last and behind each block; -1 for none."""

    first: int
    last: int
    block: int
    blocks: list[int]


class Layer(nn.Module):
    """Short convolution, gated delta rule and MLP, each behind a norm and beside a residual stream [B, T, width]."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.mixed, self.gates = 3 * heads * head_dim, 2 * heads
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.into = nn.Linear(width, self.mixed + self.gates, bias=False)
        self.taps = nn.Parameter(torch.randn(self.mixed, TAPS) / TAPS)
        self.A_log, self.dt_bias = nn.Parameter(torch.rand(heads)), nn.Parameter(torch.randn(heads) - 3)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def _arguments(self, mixed: Tensor, gates: Tensor) -> dict[str, object]:
        """Of the gated delta rule, which takes its gates raw and normalises q and k itself."""
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        g, beta = gates.unflatten(-1, (2, self.heads)).unbind(2)
        options = {"A_log": self.A_log, "dt_bias": self.dt_bias, "qk_l2norm": True, "beta_sigmoid": True}
        return {"q": q, "k": k, "v": v, "g": g, "beta": beta, **options}

    def _rest(self, x: Tensor, o: Tensor) -> Tensor:
        x = x + self.out(o.flatten(2))
        return x + self.mlp(self.mlp_norm(x))

    def prefill(self, x: Tensor, pool: Tensor, tails: Tensor, places: Places) -> Tensor:
        """Many tokens of one sequence, whose states are in the pools; those behind blocks stay there too."""
        mixed, gates = self.into(self.norm(x)).split([self.mixed, self.gates], -1)
        tail = tails[places.first, None] if places.first >= 0 else torch.zeros_like(tails[:1])
        seen, ends = torch.cat([tail, mixed], 1), [*range(places.block, x.shape[1] + 1, places.block), x.shape[1]]
        mixed, _ = holdfast.causal_conv1d(mixed, self.taps, activation="silu", initial_state=tail.float())
        for end, slot in zip(ends, [*places.blocks, places.last], strict=True):
            if slot >= 0:
                tails[slot] = seen[0, end : end + TAPS - 1]
        first, last, blocks = (
            torch.tensor(slots, dtype=torch.int32, device=x.device)
            for slots in ([places.first], [places.last], places.blocks)
        )
        o = holdfast.pooled_prefill(
            "gated_delta_rule",
            self._arguments(mixed, gates),
            pool,
            first,
            cu_seqlens=torch.tensor([0, x.shape[1]]),
            next_slots=last,
            block=places.block,
            block_slots=blocks,
        )
        return self._rest(x, o)

    def decode(self, x: Tensor, pool: Tensor, tails: Tensor, slots: Tensor, following: Tensor) -> Tensor:
        """A few tokens of many sequences, whose states are in the pools; after each token the state goes to a slot."""
        mixed, gates = self.into(self.norm(x)).split([self.mixed, self.gates], -1)
        mixed = holdfast.causal_conv1d_update(
            mixed, tails, self.taps, activation="silu", slots=slots, next_slots=following
        )
        o = holdfast.pooled_step("gated_delta_rule", self._arguments(mixed, gates), pool, slots, following)
        return self._rest(x, o)


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int = 64, layers: int = 2, heads: int = 2, head_dim: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList(Layer(width, heads, head_dim) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one sequence's state and convolution tail in a layer."""
        layer = self.layers[0]
        return (layer.heads, layer.head_dim, layer.head_dim), (TAPS - 1, layer.mixed)

    @torch.no_grad()
    def prefill(self, tokens: list[int], pools: list[tuple[Tensor, Tensor]], places: Places) -> Tensor:
        """Logits [vocabulary] behind the last token."""
        x = self.embed(torch.tensor([tokens], device=self.embed.weight.device))
        for layer, (pool, tails) in zip(self.layers, pools, strict=True):
            x = layer.prefill(x, pool, tails, places)
        return self.head(self.norm(x[0, -1]))

    @torch.no_grad()
    def decode(self, tokens: Tensor, pools: list[tuple[Tensor, Tensor]], slots: Tensor, following: Tensor) -> Tensor:
        """Logits [B, L, vocabulary] of tokens [B, L]."""
        x = self.embed(tokens)
        for layer, (pool, tails) in zip(self.layers, pools, strict=True):
            x = layer.decode(x, pool, tails, slots, following)
        return self.head(self.norm(x))
