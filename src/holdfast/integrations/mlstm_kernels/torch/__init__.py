"""mlstm_kernels.torch: its functions by the names that configurations give them."""

from collections.abc import Callable, Mapping
from typing import Any

from . import chunkwise, parallel, recurrent

__all__ = [
    "get_available_mlstm_kernels",
    "get_available_mlstm_sequence_kernels",
    "get_available_mlstm_step_kernels",
    "get_mlstm_kernel",
    "get_mlstm_sequence_kernel",
    "get_mlstm_step_kernel",
]

_KERNELS = {f"chunkwise--{name}": kernel for name, kernel in chunkwise.registry.items()}
_KERNELS |= {f"parallel--{name}": kernel for name, kernel in parallel.registry.items()}


def get_available_mlstm_kernels() -> list[str]:
    """Names of the functions of whole sequences, for training."""
    return list(_KERNELS)


def get_mlstm_kernel(name: str) -> Callable[..., Any]:
    """The function of that name. Raises ValueError for another."""
    return _named(_KERNELS, name)


def get_available_mlstm_step_kernels() -> list[str]:
    """Names of the functions of one token."""
    return list(recurrent.registry_step)


def get_mlstm_step_kernel(name: str) -> Callable[..., Any]:
    """The function of that name. Raises ValueError for another."""
    return _named(recurrent.registry_step, name)


def get_available_mlstm_sequence_kernels() -> list[str]:
    """Names of the functions of whole sequences, for decoding."""
    return list(recurrent.registry_sequence)


def get_mlstm_sequence_kernel(name: str) -> Callable[..., Any]:
    """The function of that name. Raises ValueError for another."""
    return _named(recurrent.registry_sequence, name)


def _named(kernels: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    if name not in kernels:
        raise ValueError(f"name: expected one of {', '.join(map(repr, kernels))}; got {name!r}")
    return kernels[name]
