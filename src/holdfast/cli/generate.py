"""Tokens from a language model, one at a time, the mixers' states updated in place."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from holdfast.nn import CapturedStep
from holdfast.nn.captured_step import WARM_UPS

from .language_model import LanguageModel


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    count: int,
    seed: int = 0,
    temperature: float = 0.8,
    vocabulary: int | None = None,
) -> list[int]:
    """`count` tokens that follow the prompt, which has one at least. Temperature 0 takes the likeliest.

    vocabulary: of the model's tokens the first, which are taken; by default all.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[*prompt]], device=device)
    logits, states = model(tokens)
    token = tokens[:, -1:].clone()
    states = model.with_room(states, max(count, WARM_UPS))
    # a step is many small launches: as a graph the host starts them at once
    step = CapturedStep(model, token, state=states) if device.type == "cuda" else partial(model.step, states=states)
    made = []
    for _ in range(count):
        made.append(_pick(logits[0, -1, :vocabulary].float().cpu(), temperature, generator))
        logits = step(token.fill_(made[-1]))
    return made


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))


def printable(text: bytes) -> str:
    """The bytes as text in which nothing can steer a terminal."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "\ufffd" for c in decoded)
