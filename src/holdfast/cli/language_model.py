"""A language model around any Holdfast mixer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.nn.step import Mixer

from .attention import Attention, with_room
from .config import ATTENTION, MIXERS
from .errors import UserError


class TorchLikeMixer(Mixer):
    """Gives one layer of holdfast.nn.LSTM, GRU or RNN the form of a mixer: forward(x, state) -> (y, state)."""

    def __init__(self, layer: type[nn.Module], width: int, heads: int) -> None:
        super().__init__()
        self.layer = layer(width, width, num_heads=heads, batch_first=True)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        return self.layer(x, state)


def make_mixer(name: str, width: int, heads: int) -> nn.Module:
    from holdfast import nn as holdfast_nn

    layer = Attention if name == ATTENTION else getattr(holdfast_nn, MIXERS[name])
    try:
        if name in ("lstm", "gru", "elman"):
            return TorchLikeMixer(layer, width, heads)
        if name in ("rglru", "rotlru"):
            return layer(width)
        return layer(width, num_heads=heads)
    except (ValueError, TypeError) as error:
        raise UserError(f"--mixer {name} --width {width} --heads {heads}: {error}") from error


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = -(-8 * width // 3 // 16) * 16
        self.enter = nn.Linear(width, 2 * hidden, bias=False)
        self.leave = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.enter(x).chunk(2, dim=-1)
        return self.leave(F.silu(gate) * value)


class Block(nn.Module):
    """A mixer over time, then a SwiGLU over channels, each behind a norm and added to what came in."""

    def __init__(self, mixer: nn.Module, width: int) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(width, eps=1e-6)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.mixer(self.mixer_norm(x), state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state

    def step(self, x: Tensor, state: Any) -> Tensor:
        """One token [B, 1, width]; state is updated in place."""
        x = x + self.mixer.step(self.mixer_norm(x), state)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Tokens in, logits of the next one out. tie: whether the head shares the embedding's weights."""

    def __init__(
        self, mixer: str, layers: int, width: int, heads: int, vocabulary: int = 256, tie: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(make_mixer(mixer, width, heads), width) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.head = None
        if not tie:
            self.head = nn.Linear(width, vocabulary, bias=False)
            nn.init.normal_(self.head.weight, std=width**-0.5)

    def forward(self, tokens: Tensor, states: list[Any] | None = None) -> tuple[Tensor, list[Any]]:
        """Logits [B, T, vocabulary] for tokens [B, T], and the state of every block to continue from."""
        x = self.embedding(tokens)
        after = []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, state)
            after.append(state)
        return self._logits(x), after

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), (self.embedding if self.head is None else self.head).weight)

    def with_room(self, states: list[Any], tokens: int) -> list[Any]:
        """The states, of which those that grow with the tokens have places for so many more."""
        pairs = zip(self.blocks, states, strict=True)
        return [with_room(x, tokens) if isinstance(block.mixer, Attention) else x for block, x in pairs]

    @torch.no_grad()
    def step(self, tokens: Tensor, states: list[Any]) -> Tensor:
        """Logits [B, 1, vocabulary] for tokens [B, 1]; the states of all blocks are updated in place."""
        x = self.embedding(tokens)
        for block, state in zip(self.blocks, states, strict=True):
            x = block.step(x, state)
        return self._logits(x)


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss in nats, summed over targets [B, T], each the token after that of inputs."""
    logits, _ = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """bfloat16 where asked for; otherwise a context that does nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")
