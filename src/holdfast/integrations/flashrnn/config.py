"""flashrnn's FlashRNNConfig: what its function is told beside tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .functions import function_named
from .layouts import BIAS, INPUT, OUTPUT, RECURRENT, check_layout

# all the same here, but that those in CUDA cast what they are given
BACKENDS = ("vanilla", "vanilla_fwbw", "cuda", "cuda_fused", "triton_fused", "triton")
IN_CUDA = ("cuda", "cuda_fused")
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass
class FlashRNNConfig:
    """flashrnn's options, with its names and defaults; docs/integrations.md tells of each what becomes of it."""

    backend: str = "cuda_fused"
    function: str = "lstm"
    gradient_recurrent_cut: bool = False
    gradient_recurrent_clipval: float | None = None
    forward_clipval: float | None = None
    constants: dict[str, float] | None = None
    simple_agg: bool = True
    hidden_dim: int = -1
    num_heads: int = -1
    head_dim: int = -1
    num_states: int = 4
    num_gates_r: int = 4
    num_gates_w: int = 4
    num_gates_i: int = 4
    num_gates_t: int = 4
    batch_size: int = 8
    input_shape: str = INPUT
    output_shape: str = OUTPUT
    recurrent_shape: str = RECURRENT
    bias_shape: str = BIAS
    dtype: str = "bfloat16"
    dtype_acc: str | None = "float32"
    dtype_b: str | None = None
    dtype_r: str | None = None
    dtype_w: str | None = None
    dtype_g: str | None = None
    dtype_s: str | None = None
    dtype_a: str | None = None
    enable_automatic_mixed_precision: bool = True
    trainable_r: list[bool] | bool = True
    trainable_b: list[bool] | bool = True
    initial_val: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        self._check()
        of = function_named(self.function)
        self.num_gates_w, self.num_gates_r, self.num_gates_t = of.input_gates, of.recurrent_gates, of.gates
        self.num_gates_i, self.num_states, self.simple_agg = of.gates, of.states, not of.first_is_last
        if self.num_heads <= 0:
            self.num_heads = max(1, self.hidden_dim // self.head_dim) if self.head_dim > 0 else 1
        if self.head_dim <= 0:
            self.head_dim = self.hidden_dim // self.num_heads
        if self.hidden_dim <= 0:
            self.hidden_dim = self.num_heads * self.head_dim
        self.dtype_b, self.dtype_r, self.dtype_w = (x or self.dtype for x in (self.dtype_b, self.dtype_r, self.dtype_w))
        self.dtype_a, self.dtype_s = self.dtype_a or self.dtype_b, self.dtype_s or self.dtype_w
        self.dtype_g = self.dtype_g or self.dtype_r

    def _check(self) -> None:
        """Raises ValueError for what Holdfast's ops do not serve."""
        if self.backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(map(repr, BACKENDS))}; got {self.backend!r}")
        if self.forward_clipval is not None:
            raise ValueError(f"forward_clipval: expected None, as no op clips its output; got {self.forward_clipval}")
        if self.constants:
            raise ValueError(f"constants: expected none, as no function has one; got {self.constants}")
        if self.function == "gru" and self.gradient_recurrent_clipval is not None:
            raise ValueError(
                "gradient_recurrent_clipval: expected None with function='gru', where the gradient that goes past R "
                f"would be clipped too; got {self.gradient_recurrent_clipval}"
            )
        for name, axes in (("input", INPUT), ("output", OUTPUT), ("recurrent", RECURRENT), ("bias", BIAS)):
            check_layout(f"{name}_shape", getattr(self, f"{name}_shape"), axes)
        if self.output_shape[0] != "S":
            raise ValueError(f"output_shape: expected S first; got {self.output_shape!r}")
        for name in ("dtype", "dtype_b", "dtype_r", "dtype_w", "dtype_s"):
            found = getattr(self, name)
            if found not in DTYPES and (found is not None or name == "dtype"):
                raise ValueError(f"{name}: expected one of {', '.join(map(repr, DTYPES))}; got {found!r}")
