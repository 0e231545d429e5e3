"""What runs inside an op computes in the dtypes that it is given, also where autocast is on around the op."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_AS_IT_IS = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on x's kind of device."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS
