"""Settings of the training commands, their checks, and the way to and from a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from .errors import UserError

# How ranks that share a batch hold the model: each all of it, or each a part.
SHARDINGS = ("ddp", "fsdp")
# Name on the command line -> class in holdfast.nn.
MIXERS = {
    "gla": "GLA",
    "retnet": "RetNet",
    "mamba2": "Mamba2",
    "mlstm": "MLSTM",
    "deltanet": "DeltaNet",
    "gated-deltanet": "GatedDeltaNet",
    "rglru": "RGLRU",
    "rotlru": "RotLRU",
    "slstm": "SLSTM",
    "lstm": "LSTM",
    "gru": "GRU",
    "elman": "RNN",
}
DTYPES = ("float32", "bfloat16")


def check_choice(option: str, value: str, choices: Mapping[str, object] | tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"--{option}: expected one of {', '.join(choices)}; got {value!r}")


def check_at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"--{option}: expected {least} or more; got {value}")


def check_learning_rate(value: float) -> None:
    if not 0 < value < 10:
        raise UserError(f"--lr: expected a learning rate between 0 and 10; got {value}")


@dataclass(frozen=True)
class LanguageModelConfig:
    """All that decides what `train lm` computes, and where its text is."""

    mixer: str = "gla"
    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 256
    batch: int = 16
    accumulate: int = 1
    steps: int = 2000
    lr: float = 2e-3
    seed: int = 0
    dtype: str = "float32"
    validate_every: int = 200
    save_every: int = 200
    # 0 leaves it to torch. Kept because sums, and so the last bits, may depend on it.
    threads: int = 0
    sharding: str = "ddp"
    cp: int = 1
    tp: int = 1
    text: str | None = None
    glob: tuple[str, ...] = ()
    data: str | None = None

    def __post_init__(self) -> None:
        check_choice("mixer", self.mixer, MIXERS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("sharding", self.sharding, SHARDINGS)
        for option in (
            "layers", "width", "heads", "length", "batch", "accumulate", "steps", "validate_every", "save_every",
            "cp", "tp",
        ):  # fmt: skip
            check_at_least(option.replace("_", "-"), getattr(self, option), 1)
        check_at_least("seed", self.seed, 0)
        check_at_least("threads", self.threads, 0)
        check_learning_rate(self.lr)
        if self.data is not None and (self.text is not None or self.glob):
            raise UserError("--data: expected no --text or --glob beside it; its tokens are of the text it was made of")
        if self.width % self.heads:
            raise UserError(f"--width: expected a multiple of --heads ({self.heads}); got {self.width}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, so that torch.load(weights_only=True) reads them back."""
        return asdict(self) | {"glob": list(self.glob)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            odd = ", ".join(sorted(set(values) ^ names))
            raise UserError(f"settings do not match this version of holdfast: {odd}")
        return cls(**dict(values) | {"glob": tuple(values["glob"])})

    def changed(self, given: Mapping[str, Any]) -> Self:
        """A copy with the values that are given; None means not given."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


# What a resumed run may change: where the text is (its content is checked), when to save, how processes share work.
FREE_ON_RESUME = {"text", "glob", "data", "save_every", "accumulate", "sharding", "cp", "tp"}

DEMO = {
    "mixer": "gla",
    "layers": 2,
    "width": 128,
    "heads": 2,
    "length": 128,
    "batch": 16,
    "steps": 400,
    "lr": 4e-3,
    "validate_every": 50,
    # Where other processes run, a second thread costs more than it gains in a model this small.
    "threads": 1,
}
