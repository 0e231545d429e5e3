"""torch.compiler.disable without the import of Dynamo, which takes longer than the kernels of a first call."""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from .torch_private import DYNAMO


def disable_dynamo(run: Callable[..., Any]) -> Callable[..., Any]:
    """run, which Dynamo is not to trace. Before anything has imported Dynamo, nothing can."""

    @cache
    def disabled() -> Callable[..., Any]:
        return torch.compiler.disable(run)

    @wraps(run, updated=())
    def call(*arguments: Any) -> Any:
        return disabled()(*arguments) if DYNAMO in sys.modules else run(*arguments)

    return call
