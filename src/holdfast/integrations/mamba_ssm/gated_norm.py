"""mamba_ssm's RMSNormGated and rmsnorm_fn: the norm behind Mamba-2's scan, its gate before or after it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast import ops
from holdfast.recurrences.scalars import flag


class RMSNormGated(nn.Module):
    """`holdfast.gated_rms_norm` of groups of channels: norm(x) * silu(z), or norm(x * silu(z)).

    Args:
        hidden_size: channels.
        eps: added to the mean square.
        group_size: channels that are normalised together, which divides hidden_size; all of them by default.
        norm_before_gate: whether z gates the normalised channels, and not those before.
        device, dtype: of `weight` [hidden_size], which is 1 at first. There is no `bias`.

    Raises:
        ValueError, TypeError: for sizes that are not positive or do not divide, named in the message.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_groups(hidden_size, group_size)
        self.eps, self.group_size = eps, group_size
        self.norm_before_gate = flag("norm_before_gate", norm_before_gate)
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Sets `weight` to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """x, z and the result, in x's dtype: [..., hidden_size]. Raises ValueError or TypeError for others."""
        return gated_norm(x, self.weight, z, self.eps, self.group_size, self.norm_before_gate)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """`RMSNormGated` of x and z [..., D] with weight [D]; there is no bias.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape or dtype, named in the message, and for a bias.
    """
    if bias is not None:
        raise ValueError("bias: expected None, as no op adds one between the norm and the gate; got one")
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        found = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight: expected shape [D]; got {found}")
    return gated_norm(x, weight, z, eps, group_size, flag("norm_before_gate", norm_before_gate))


def gated_norm(
    x: Tensor, weight: Tensor, z: Tensor | None, eps: float, group_size: int | None, norm_before_gate: bool
) -> Tensor:
    """x and z [..., D], weight [D] -> [..., D] in x's dtype, computed in float32 (float64 for float64)."""
    channels = weight.shape[0]
    for name, tensor in (("x", x), ("z", z)):
        if tensor is None and name == "z":
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected a tensor of a floating-point dtype; got {found}")
        if tensor.dim() < 1 or tensor.shape[-1] != channels:
            raise ValueError(f"{name}: expected shape [..., {channels}]; got {list(tensor.shape)}")
    if z is not None and z.shape != x.shape:
        raise ValueError(f"z: expected x's shape {list(x.shape)}; got {list(z.shape)}")
    _check_groups(channels, group_size)
    width = group_size or channels
    dtype, o, gate = x.dtype, x, z
    if z is not None and not norm_before_gate:
        wide = torch.promote_types(dtype, torch.float32)
        o, gate = x.to(wide) * F.silu(z.to(wide)), None
    elif z is not None and z.dtype != dtype:
        wide = torch.promote_types(dtype, z.dtype)
        o, gate = x.to(wide), z.to(wide)
    o, gate = (None if each is None else each.reshape(1, -1, channels // width, width) for each in (o, gate))
    return ops.gated_rms_norm(o, gate, weight.view(-1, width), eps).view(x.shape).to(dtype)


def _check_groups(channels: int, group_size: int | None) -> None:
    if group_size is not None and (group_size < 1 or channels % group_size):
        raise ValueError(f"group_size: expected a divisor of {channels}; got {group_size}")
