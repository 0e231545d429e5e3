"""The parity task: is the number of ones so far odd? It takes a state that each bit can flip."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .language_model import Block, make_mixer

LONGEST_TRAINED = 40
LONGEST = 256
# Inclusive ranges of sequence length; the last four cover those that training never sees, and 40, as in the paper.
RANGES = ((1, 40), (40, 79), (80, 127), (128, 191), (192, 256))
EXTRAPOLATION = (40, 256)


def running_parity(bits: Tensor) -> Tensor:
    """1 where the number of ones up to and including the position is odd; bits [..., T]."""
    return bits.cumsum(-1) % 2


def training_batch(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Bits [batch, 40], the length of each sequence (uniform in 1..40) and the parity of that many bits."""
    bits = torch.randint(2, (batch, LONGEST_TRAINED), generator=generator)
    lengths = torch.randint(1, LONGEST_TRAINED + 1, (batch,), generator=generator)
    labels = running_parity(bits).gather(1, lengths[:, None] - 1)[:, 0]
    return bits, lengths, labels


class ParityModel(nn.Module):
    """Two embedded bits, blocks as in the language model, and two logits at every position."""

    def __init__(self, mixer: str, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, width)
        self.blocks = nn.ModuleList(Block(make_mixer(mixer, width, heads), width) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 2)

    def forward(self, bits: Tensor) -> Tensor:
        x: Any = self.embedding(bits)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))


def last_bit_loss(logits: Tensor, lengths: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and accuracy at the last bit of each sequence; one label a sequence, as the task has it."""
    last = logits[torch.arange(len(lengths), device=logits.device), lengths - 1].float()
    return F.cross_entropy(last, labels), (last.argmax(-1) == labels).float().mean()


@torch.no_grad()
def accuracy_by_length(model: ParityModel, sequences: int, batch: int, generator: torch.Generator) -> Tensor:
    """Accuracy [256] at each length. The model is causal, so the output at t is its answer to the first t bits."""
    device = model.head.weight.device
    right = torch.zeros(LONGEST, dtype=torch.float64)
    for start in range(0, sequences, batch):
        bits = torch.randint(2, (min(batch, sequences - start), LONGEST), generator=generator)
        answers = model(bits.to(device)).argmax(-1).cpu()
        right += (answers == running_parity(bits)).double().sum(0)
    return right / sequences


def mean_accuracy(accuracy: Tensor, lengths: tuple[int, int]) -> float:
    """Mean over an inclusive range of lengths, each counting the same."""
    first, last = lengths
    return accuracy[first - 1 : last].mean().item()
