"""The language model around a mixer, and one step of its training."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...language_model import Block, autocast
from .mixers import Mixer
from .scale import Scale


class TrainedBlock(Block):
    """A block that hands out no state, which training does not read: a compiled graph that does takes a gradient of
    zeros for each in its backward pass, and computes with it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Model(nn.Module):
    """Tokens in, logits of the next one out. Embedding and head are untied: 162M parameters with attention."""

    def __init__(self, mixer: Mixer, scale: Scale) -> None:
        super().__init__()
        width = scale.width
        self.embedding = nn.Embedding(scale.vocabulary, width)
        self.blocks = nn.ModuleList(
            TrainedBlock(mixer.make(width, scale.head, scale.narrow), width) for _ in range(scale.blocks)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, scale.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of tokens [B, T]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(mixer: Mixer, scale: Scale, device: torch.device) -> Model:
    """The same weights for the same mixer each time."""
    torch.manual_seed(0)
    with device:
        return Model(mixer, scale).to(torch.float32)


def training_step(model: Model, tokens: Tensor) -> Callable[[], Tensor]:
    """A function that takes one step, bfloat16 by autocast and fused AdamW, and returns the loss before it.

    tokens: [B, T + 1].
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        with autocast(tokens.device, "bfloat16"):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
