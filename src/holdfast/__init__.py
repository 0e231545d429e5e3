"""Holdfast: fused kernels for recurrent sequence models that hold the state of the recurrence on the chip.

Names load on first use, so that the command line answers before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import mlx, nn, ops, parallel, planner, recurrences  # noqa: F401 - names of the package
    from .ops import *  # noqa: F403
    from .ops import explain, pooled_prefill, pooled_step, step
    from .recurrences import RECURRENCES, Cell, cell

__version__ = "0.1.0"

_OPS = (
    "causal_conv1d",
    "causal_conv1d_update",
    "comba",
    "delta_rule",
    "elman",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_rms_norm",
    "gdn2",
    "gla",
    "gru",
    "hgrn",
    "inter_chunk_scan",
    "intra_chunk",
    "kda",
    "lightning",
    "linear_attention",
    "lstm",
    "mamba1",
    "mlstm",
    "retnet",
    "rglru",
    "rnn",
    "rotlru",
    "rwkv7",
    "simple_gla",
    "slstm",
    "ssd",
)
_HOME = dict.fromkeys((*_OPS, "explain", "pooled_prefill", "pooled_step", "step"), "ops")
_HOME |= dict.fromkeys(("RECURRENCES", "Cell", "cell"), "recurrences")
__all__ = [
    "RECURRENCES",
    "Cell",
    "__version__",
    "cell",
    "explain",
    "nn",
    "ops",
    "pooled_prefill",
    "pooled_step",
    "step",
    *_OPS,
]


if not TYPE_CHECKING:
    # a checker would take any name for one that there is
    def __getattr__(name: str) -> Any:
        if name in ("mlx", "nn", "ops", "parallel", "planner", "recurrences"):
            return import_module(f"{__name__}.{name}")
        if name in _HOME:
            value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
