"""Layers and directions of a recurrence with torch.nn's arguments, parameter names and shapes."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .check import check_divides, check_positive, wide
from .sequences import Sequences, pack, unpack


class Stack(nn.Module):
    """What LSTM, GRU and RNN share; a subclass says what one layer does in one direction.

    gates: rows of weight_ih and weight_hh, in hidden_size. states: tensors in hx.
    """

    gates: int
    states: int = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        device: Any,
        dtype: torch.dtype | None,
        num_heads: int,
        backend: str | None,
    ) -> None:
        super().__init__()
        self.input_size = check_positive("input_size", input_size)
        self.hidden_size = hidden_size
        self.num_layers = check_positive("num_layers", num_layers)
        self.head_dim = check_divides("num_heads", num_heads, "hidden_size", hidden_size)
        self.num_heads = num_heads
        for name, value in (("bias", bias), ("batch_first", batch_first), ("bidirectional", bidirectional)):
            if not isinstance(value, bool):
                raise TypeError(f"{name}: expected a bool; got {type(value).__name__}")
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout: expected a probability from 0 to 1; got {dropout!r}")
        if dropout and num_layers == 1:
            warnings.warn("dropout acts between layers, and num_layers is 1", stacklevel=3)
        self.bias, self.batch_first, self.bidirectional = bias, batch_first, bidirectional
        self.dropout = float(dropout)
        self.backend = backend
        rows, options = self.gates * hidden_size, {"device": device, "dtype": dtype}
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * (1 + bidirectional)
            for suffix in self._suffixes(layer):
                shapes = {"weight_ih": (rows, width), "weight_hh": (rows, self.head_dim)}
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                for name, shape in shapes.items():
                    self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape, **options)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within hidden_size ** -0.5, as torch.nn has it; weight_hh within head_dim ** -0.5, its fan-in."""
        for name, parameter in self.named_parameters():
            bound = (self.head_dim if name.startswith("weight_hh") else self.hidden_size) ** -0.5
            nn.init.uniform_(parameter, -bound, bound)

    def flatten_parameters(self) -> None:
        """Does nothing; torch.nn's layers have it."""

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        for name, default in (defaults | {"num_heads": 1, "backend": None}).items():
            value = getattr(self, name)
            if value != default:
                text += f", {name}={value!r}"
        return text

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"] if self.bidirectional else [f"_l{layer}"]

    def _step(
        self, x: Tensor, R: Tensor, b: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One layer in one direction, or in both as heads of one call.

        x [B, T, gates, H, D], R [gates, H, D, D], b of the op's gates [*, H, D], as `_bias` makes it, state
        [S, N, H, D]. Returns h [B, T, H, D] and the final state.
        """
        raise NotImplementedError

    def _bias(self, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
        """Both biases [gates * hidden] as the op adds them: [*, H, D], in its kernel, which finds the gradient too."""
        # the sum before the view: behind two views both gradients would be one memory, which clipping scales twice
        return (bias_ih + bias_hh).unflatten(0, (self.gates, self.num_heads, self.head_dim))

    def _groups(self, layer: int, x: Tensor) -> list[list[str]]:
        """The suffixes of a layer's directions, together those that run as heads of one call.

        On a GPU a step of two directions is expected to cost little more than one of either; on a CPU two heads of 512
        channels take longer than two calls.
        """
        suffixes = self._suffixes(layer)
        return [suffixes] if x.is_cuda else [[suffix] for suffix in suffixes]

    def _directions(
        self, sequences: Sequences, x: Tensor, suffixes: list[str], states: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """The output of each direction and the final states [S, directions, N, hidden], as states."""
        heads = (self.gates, self.num_heads, self.head_dim)
        inputs, weights, biases = [], [], []
        for suffix in suffixes:
            given = sequences.turned(x) if suffix.endswith("_reverse") else x
            inputs.append(F.linear(given, getattr(self, "weight_ih" + suffix)).unflatten(-1, heads))
            weights.append(getattr(self, "weight_hh" + suffix).unflatten(0, heads))
            if self.bias:
                biases.append(self._bias(*(getattr(self, name + suffix) for name in ("bias_ih", "bias_hh"))))
        if states is not None:
            states = states.unflatten(-1, heads[1:]).transpose(1, 2).flatten(2, 3).to(wide(inputs[0].dtype))
        b = _joined(biases, 1) if biases else None
        h, final = self._step(_joined(inputs, 3), _joined(weights, 1), b, states, sequences.cu_seqlens)
        split = (len(suffixes), self.num_heads)
        parts = zip(suffixes, h.unflatten(2, split).flatten(3).unbind(2), strict=True)
        outputs = [sequences.turned(y) if suffix.endswith("_reverse") else y for suffix, y in parts]
        return outputs, final.unflatten(2, split).flatten(3).transpose(1, 2)

    def _run(self, sequences: Sequences, states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output [B, T, directions * hidden] and final states [S, layers * directions, N, hidden]."""
        x, finals, done = sequences.x, [], 0
        for layer in range(self.num_layers):
            if layer > 0 and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            outputs = []
            for suffixes in self._groups(layer, x):
                given = None if states is None else states[:, done : done + len(suffixes)]
                found, final = self._directions(sequences, x, suffixes, given)
                outputs += found
                finals.append(final)
                done += len(suffixes)
            x = _joined(outputs, -1)
        # as torch.nn has it, hx has the output's dtype
        return x, torch.cat(finals, 1).to(x.dtype)

    def _states(self, hx: Any, names: tuple[str, ...], count: int, batched: bool) -> Tensor | None:
        """hx checked and stacked as [S, layers * directions, N, hidden]."""
        if hx is None:
            return None
        given = hx if self.states > 1 else (hx,)
        if not isinstance(given, tuple | list) or len(given) != self.states:
            raise TypeError(f"hx: expected a tuple ({', '.join(names)}); got {type(hx).__name__}")
        layers = self.num_layers * (1 + self.bidirectional)
        shape = [layers, count, self.hidden_size] if batched else [layers, self.hidden_size]
        for name, x in zip(names, given, strict=True):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name}: expected a tensor; got {type(x).__name__}")
            if list(x.shape) != shape:
                raise ValueError(f"{name}: expected shape {shape}; got {list(x.shape)}")
        stacked = torch.stack(list(given))
        return stacked if batched else stacked[:, :, None]

    def _check_input(self, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"input: expected a tensor or a PackedSequence; got {type(x).__name__}")
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size:
            order = "B, T" if self.batch_first else "T, B"
            expected = f"[{order}, {self.input_size}] or [T, {self.input_size}]"
            raise ValueError(f"input: expected shape {expected}; got {list(x.shape)}")

    def _forward(
        self, input: Tensor | PackedSequence, hx: Any, names: tuple[str, ...]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Output in the input's form, and the final states [layers * directions, N, hidden], or without N."""
        if isinstance(input, PackedSequence):
            if input.data.shape[-1] != self.input_size:
                raise ValueError(f"input: expected {self.input_size} features; got {input.data.shape[-1]}")
            sequences, place = unpack(input)
            states = self._states(hx, names, sequences.count, True)
            if states is not None and input.sorted_indices is not None:
                states = states[:, :, input.sorted_indices]
            output, finals = self._run(sequences, states)
            if input.unsorted_indices is not None:
                finals = finals[:, :, input.unsorted_indices]
            return pack(output, place, input), finals.unbind(0)
        self._check_input(input)
        batched = input.dim() == 3
        x = input if batched else input[None]
        if batched and not self.batch_first:
            x = x.transpose(0, 1)
        output, finals = self._run(Sequences(x), self._states(hx, names, x.shape[0], batched))
        if not batched:
            return output[0], finals[:, :, 0].unbind(0)
        return output if self.batch_first else output.transpose(0, 1), finals.unbind(0)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
