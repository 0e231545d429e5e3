"""The steps of layers as custom ops: one token between a mixer's projections, its states updated in place.

What `holdfast.nn`'s mixers and patched models of transformers decode with. Their arguments are checked there.
"""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.layer_step.call import ConvStep, LayerStep, MLSTMStep, RetentionStep, RGLRUStep
from holdfast.kernels.layer_step.torch.backend import PyTorchLayerStep
from holdfast.kernels.layer_step.triton.backend import TritonLayerStep
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.select import clearable_cache, resolve
from holdfast.planner import Plan, Problem

from .autocast import without_autocast
from .registration import define

BACKENDS = (TritonLayerStep(), PyTorchLayerStep())


def problem(call: LayerStep) -> Problem:
    """What planning needs to know of a call: sizes B, H, K and V of its state (D of a vector: K 0 and V), W taps, N
    channels of a row of the norm, and the dtype of its inputs; 0 for what it has not."""
    state, x = state_of(call), call[0]
    batch, *sizes = state.shape
    heads, keys, values = sizes if len(sizes) == 3 else (1, 0, sizes[0])
    norm = getattr(call, "norm_weight", None)
    taps = call.conv_weight.shape[1] if isinstance(call, ConvStep) else 0
    named = {"B": batch, "H": heads, "K": keys, "V": values, "W": taps, "N": 0 if norm is None else norm.shape[-1]}
    return Problem.of("layer_step", "matrix", x.dtype, named, {})


def state_of(call: LayerStep) -> Tensor:
    """The matrix or vector that the recurrence carries."""
    if isinstance(call, MLSTMStep):
        return call.C
    return call.h if isinstance(call, RGLRUStep) else call.state


_SELECTED: dict[tuple[Any, ...], tuple[Any, Plan]] = clearable_cache()


def _select(call: LayerStep, backend: str) -> tuple[Any, Plan]:
    x, state = call[0], state_of(call)
    key = (BACKENDS, type(call), x.shape, x.dtype, x.device, state.shape, backend)
    found = _SELECTED.get(key)
    if found is None:
        found = _SELECTED[key] = resolve(BACKENDS, problem(call), describe(x.device), backend, "forward")
    return found


def _op_of(kind: type[LayerStep], name: str, mutates: tuple[str, ...], width: Callable[[Any], int]) -> Any:
    """A function of kind's fields and a backend's name ("" for none) that returns y [B, 1, width]."""

    def run(*arguments: Any) -> Tensor:
        *given, backend = arguments
        call = kind(*given)
        chosen, plan = _select(call, backend)
        with without_autocast(call[0]):
            return chosen.run(plan, call)

    def fake(*arguments: Any) -> Tensor:
        call = kind(*arguments[:-1])
        return call[0].new_empty(call[0].shape[0], 1, width(call))

    # from which the schema follows
    fields = {**kind.__annotations__, "backend": str}
    run.__signature__ = Signature(
        [Parameter(field, Parameter.POSITIONAL_OR_KEYWORD, annotation=of) for field, of in fields.items()],
        return_annotation=Tensor,
    )
    return replayed_below(define(name, run, fake, mutates), changes=True)


def _heads(call: Any) -> int:
    return state_of(call).shape[1] * state_of(call).shape[3]


conv_step = _op_of(ConvStep, "conv_step", ("tail", "state"), _heads)
retention_step = _op_of(RetentionStep, "retention_step", ("state", "position"), _heads)
mlstm_step = _op_of(MLSTMStep, "mlstm_step", ("C", "n", "m"), _heads)
rglru_step = _op_of(RGLRUStep, "rglru_step", ("h",), lambda call: call.h.shape[1])
