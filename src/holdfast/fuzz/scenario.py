"""A scenario: everything that was drawn for one check, on one line that says how to run it again."""

from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Scenario:
    """One check of one op. Sizes that an op has no use for stay 0; which values are drawn follows from `seed`.

    op: a public op, or "nn.<module>". device: "cpu" or "cuda". backend: a name, "default" for the op's own choice.
    dtype: of the inputs (in mode autocast that of the autocast, the inputs being float32). gates: dtype of gates and
    decays, "same" for that of the inputs. options: words that the op's family knows. strength: of decays and gates.
    K, Hq: of mamba1 the numbers of state a channel, and the groups of B and C.
    keys: how long keys are. values: how large values and states are. layout: how tensors lie in memory.
    cu: offsets of packed sequences, empty for a batch. offsets: their dtype, with "_cpu" where they stay there.
    state: whether an initial state is given. final: whether the final state is asked for. grads: which outputs have a
    gradient: "both", "out", "state", or "none" for no backward pass. needs: "all" inputs have a gradient or "some".
    mode: how the calls are made.
    """

    op: str
    device: str
    seed: int
    mode: str = "plain"
    backend: str = "default"
    dtype: str = "float32"
    B: int = 0
    T: int = 0
    H: int = 0
    Hq: int = 0
    K: int = 0
    V: int = 0
    D: int = 0
    chunk: int = 0
    rank: int = 0
    gates: str = "float32"
    options: tuple[str, ...] = ()
    strength: str = "mild"
    keys: str = "unit"
    values: str = "normal"
    layout: str = "plain"
    cu: tuple[int, ...] = ()
    offsets: str = "int32"
    state: bool = False
    final: bool = True
    grads: str = "both"
    needs: str = "all"

    def line(self) -> str:
        """key=value for whatever differs from its default; `parse` reads it."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                words.append(f"{field.name}={_shown(value)}")
        return " ".join(words)

    @property
    def torch_dtype(self) -> "torch.dtype":
        return _dtype(self.dtype)

    @property
    def wide(self) -> "torch.dtype":
        """The dtype of states."""
        return _dtype("float64" if self.dtype == "float64" else "float32")

    @property
    def gate_dtype(self) -> "torch.dtype":
        return _dtype(self.dtype if self.gates == "same" else self.gates)

    @property
    def sequences(self) -> int:
        return len(self.cu) - 1 if self.cu else self.B

    def longer(self, steps: int) -> "Scenario":
        """The same with so many more steps, at the end of the last sequence."""
        cu = (*self.cu[:-1], self.cu[-1] + steps) if self.cu else ()
        return replace(self, T=self.T + steps, cu=cu)


def _dtype(name: str) -> "torch.dtype":
    import torch

    return {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}[name]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"
    return str(value)


def parse(line: str) -> Scenario:
    """The scenario of a line that `Scenario.line` made. Raises ValueError for what is none, naming the word."""
    known = {field.name: field for field in fields(Scenario)}
    found: dict[str, Any] = {}
    for word in line.split():
        name, equals, text = word.partition("=")
        if not equals or name not in known:
            raise ValueError(f"replay: expected words such as op=gla or T=65; got {word!r}")
        try:
            found[name] = _read(name, known[name].default, text)
        except ValueError:
            raise ValueError(f"replay: expected a value of {name}; got {word!r}") from None
    if missing := [name for name in ("op", "device", "seed") if name not in found]:
        raise ValueError(f"replay: expected {' and '.join(missing)} in the line; got {line!r}")
    return Scenario(**found)


def _read(name: str, default: Any, text: str) -> Any:
    if isinstance(default, bool):
        return {"yes": True, "no": False}[text] if text in ("yes", "no") else int("")
    if isinstance(default, tuple):
        words = [] if text == "-" else text.split(",")
        return tuple(map(int, words)) if name == "cu" else tuple(words)
    return int(text) if isinstance(default, int) or name == "seed" else text
