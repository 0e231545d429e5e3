"""The states beside h at every token, found behind h: with h known the gates are one product, and the rest are scans.

They are made of h, so that their gradients go through it where they go through time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast import ops


def lstm_states(gates: Tensor, before: Tensor) -> tuple[Tensor, ...]:
    """gates: pre-activations i, f, z, o [B, T, 4, H, D]; before: h and c [2, B, H, D] of the same dtype.

    Returns c [B, T, H, D].
    """
    i, f, z, _ = gates.unbind(2)
    return (_scan(torch.sigmoid(i) * torch.tanh(z), F.logsigmoid(f), before[1]),)


def slstm_states(gates: Tensor, before: Tensor) -> tuple[Tensor, ...]:
    """gates: pre-activations i, f, z, o [B, T, 4, H, D]; before: h, c, n and m [4, B, H, D] of the same dtype.

    Returns c, n and m [B, T, H, D].
    """
    i, f, z, _ = gates.unbind(2)
    _, c, n, m = before
    is_empty = n == 0
    # float64: sums over all tokens, of which small differences are taken
    total = F.logsigmoid(f.double()).cumsum(1)
    entry = m.double().masked_fill(is_empty, -torch.inf)
    stabilizer = total + torch.maximum((i - total).cummax(1).values, entry[:, None])
    # an empty state has no scale of its own, and no m that bounds what is kept of its zeros
    kept = F.logsigmoid(f.double()) + torch.cat([m.double()[:, None], stabilizer[:, :-1]], 1) - stabilizer
    kept = torch.cat([kept[:, :1].masked_fill(is_empty[:, None], 0), kept[:, 1:]], 1).to(gates.dtype)
    written = (i - stabilizer).exp().to(gates.dtype)
    c, n = _scan(
        torch.stack([written * torch.tanh(z), written], 2), torch.stack([kept, kept], 2), torch.stack([c, n], 1)
    ).unbind(2)
    return c, n, stabilizer.to(gates.dtype)


def _scan(x: Tensor, log_decay: Tensor, before: Tensor) -> Tensor:
    """s_t = exp(log_decay_t) s_{t-1} + x_t of [B, T, ...] from before [B, ...]."""
    return ops.hgrn(x.flatten(2), log_decay.flatten(2), before.flatten(1).contiguous())[0].view(x.shape)
