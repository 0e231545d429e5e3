"""Layers that kernels.kernelize puts in a model's place of: they hold nothing, and read the model's own weights."""

from torch import Tensor, nn

from . import gated_rms_norm


class GatedRMSNorm(nn.Module):
    """RMSNorm of hidden_states [..., D] times weight [D] and, where it is given, silu(gate), as Qwen3-Next's."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _norm(hidden_states, gate, self.weight, self.variance_epsilon)


class RMSNorm(nn.Module):
    """RMSNorm of hidden_states [..., D] times weight [D], as Llama's."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _norm(hidden_states, None, self.weight, self.variance_epsilon)


def _norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows = (None if y is None else y.reshape(1, -1, 1, y.shape[-1]) for y in (x, gate))
    return gated_rms_norm(*rows, weight, eps).view_as(x)
