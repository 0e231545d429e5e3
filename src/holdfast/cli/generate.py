"""Bytes from a language model, one at a time, the mixers' states updated in place."""

from functools import partial

import torch
from torch import Tensor

from holdfast.nn import CapturedStep

from .language_model import LanguageModel


@torch.inference_mode()
def generate(model: LanguageModel, prompt: bytes, count: int, seed: int = 0, temperature: float = 0.8) -> bytes:
    """`count` bytes that follow the prompt. Temperature 0 takes the likeliest byte."""
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.frombuffer(bytearray(prompt), dtype=torch.uint8).long().to(device)[None]
    logits, states = model(tokens)
    token = tokens[:, -1:].clone()
    # a step is many small launches: as a graph the host starts them at once
    step = CapturedStep(model, token, state=states) if device.type == "cuda" else partial(model.step, states=states)
    made = bytearray()
    for _ in range(count):
        byte = _pick(logits[0, -1].float().cpu(), temperature, generator)
        made.append(byte)
        logits = step(token.fill_(byte))
    return bytes(made)


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))


def printable(text: bytes) -> str:
    """The bytes as text in which nothing can steer a terminal."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "\ufffd" for c in decoded)
