"""A model and a text so small that a training step takes milliseconds."""

import random
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
TINY = (
    "--mixer",
    "gla",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--length",
    "16",
    "--batch",
    "2",
    "--device",
    "cpu",
)
WORDS = ["state", "gate", "decay", "head", "chunk", "write", "read", "carry", "scan", "fold", "cell", "norm"]


def make_text(size: int = 4000) -> str:
    words = random.Random(1)
    return " ".join(words.choice(WORDS) for _ in range(size // 4))[:size]
