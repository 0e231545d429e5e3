"""Settings of the training commands, their checks, and the way to and from a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from holdfast.planner.choices import no_choice

from .errors import UserError

# How ranks that share a batch hold the model: each all of it, or each a part.
SHARDINGS = ("ddp", "fsdp")
# Name on the command line -> class in holdfast.nn, but for attention, which is there to be held against.
ATTENTION = "attention"
MIXERS = {
    "gla": "GLA",
    "retnet": "RetNet",
    "mamba2": "Mamba2",
    "mlstm": "MLSTM",
    "deltanet": "DeltaNet",
    "gated-deltanet": "GatedDeltaNet",
    "gated-deltaproduct": "GatedDeltaProduct",
    "kda": "KDA",
    "rwkv7": "RWKV7",
    "rglru": "RGLRU",
    "rotlru": "RotLRU",
    "slstm": "SLSTM",
    "lstm": "LSTM",
    "gru": "GRU",
    "elman": "RNN",
    ATTENTION: "Attention",
}
DTYPES = ("float32", "bfloat16")
# Of two options that say the same, which one leaves the other as it is by itself.
EITHER = {"accumulate": "local_batch", "local_batch": "accumulate"}
LONGEST_WARMUP = 200
# Rows of the embedding beyond the data's tokens, as vocabularies are rounded up: to a multiple of 128 at most.
MOST_ROUNDED = 127


def check_choice(option: str, value: str, choices: Mapping[str, object] | tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(no_choice(f"--{option}", choices, value))


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
    # instead of accumulate
    local_batch: int | None = None
    steps: int = 2000
    lr: float = 2e-3
    # None: a tenth of lr
    min_lr: float | None = None
    # None: a tenth of the steps, at most LONGEST_WARMUP
    warmup_steps: int | None = None
    # of the head's weights and the embedding's
    tie: bool = True
    # None: the data's
    vocabulary: int | None = None
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
        for option, least in (("local_batch", 1), ("vocabulary", 1), ("warmup_steps", 0)):
            if getattr(self, option) is not None:
                check_at_least(option.replace("_", "-"), getattr(self, option), least)
        check_at_least("seed", self.seed, 0)
        check_at_least("threads", self.threads, 0)
        check_learning_rate(self.lr)
        if self.min_lr is not None and not 0 <= self.min_lr <= self.lr:
            raise UserError(f"--min-lr: expected a learning rate from 0 to --lr ({self.lr:g}); got {self.min_lr:g}")
        if self.local_batch is not None and self.accumulate > 1:
            raise UserError("--local-batch: expected no --accumulate beside it; it follows")
        if self.data is not None and (self.text is not None or self.glob):
            raise UserError("--data: expected no --text or --glob beside it; its tokens are of the text it was made of")
        if self.mixer == ATTENTION and self.cp > 1:
            raise UserError(f"--cp: expected 1 for attention, whose tokens read all tokens before them; got {self.cp}")
        if self.width % self.heads:
            raise UserError(f"--width: expected a multiple of --heads ({self.heads}); got {self.width}")

    @property
    def warmup(self) -> int:
        """Steps of the linear warm-up."""
        default = min(LONGEST_WARMUP, max(1, self.steps // 10))
        return default if self.warmup_steps is None else self.warmup_steps

    @property
    def floor(self) -> float:
        """The last learning rate as a part of the peak."""
        return 0.1 if self.min_lr is None else self.min_lr / self.lr

    def parts(self, processes: int) -> int:
        """In how many parts each of the processes that share a batch takes its sequences."""
        return self.accumulate if self.local_batch is None else self.batch // (processes * self.local_batch)

    def rows_for(self, tokens: int, name: str) -> int:
        """Of the embedding and the head, for the tokens that the data of that name have."""
        rows = tokens if self.vocabulary is None else self.vocabulary
        if not 0 <= rows - tokens <= MOST_ROUNDED:
            raise UserError(
                f"--vocabulary: expected the {tokens:,} tokens of {name}, or up to {MOST_ROUNDED} more to round it; "
                f"got {rows:,}. holdfast data prepare makes data of as many with --tokenizer bpe --vocabulary {rows}, "
                "or with --tokenizer and a file that has them"
            )
        return rows

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
        values = {name: value for name, value in given.items() if value is not None}
        unset = {other: getattr(type(self), other) for name, other in EITHER.items() if name in values}
        return replace(self, **unset | values)


# What a resumed run may change: where the text is (its content is checked), when to save, how processes share work.
FREE_ON_RESUME = {"text", "glob", "data", "save_every", "accumulate", "local_batch", "sharding", "cp", "tp"}

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
# The language model of FlashRNN's Tables 1 and 3 (Pöppel, Beck and Hochreiter 2024, arXiv:2412.07752, section 6.2 and
# appendix J): its sizes, GPT-2's 50,257 tokens, 512 sequences a step (32 at a time on GPUs of 80 GB), peak and warm-up.
FLASHRNN_165M = {
    "mixer": "lstm",
    "layers": 12,
    "width": 768,
    "heads": 12,
    "length": 1024,
    "batch": 512,
    "local_batch": 32,
    "steps": 30000,
    "lr": 1e-3,
    "warmup_steps": 750,
    "tie": False,
    "vocabulary": 50257,
    "dtype": "bfloat16",
    "validate_every": 1000,
    "save_every": 1000,
}
PRESETS: dict[str, Mapping[str, Any]] = {"demo": DEMO, "flashrnn-165m": FLASHRNN_165M}
