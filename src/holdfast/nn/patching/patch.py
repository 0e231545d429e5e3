"""Finds the recurrent layers of a transformers model and puts Holdfast's ops in the place of their kernels."""

import inspect
import sys
from functools import partial
from types import MethodType, ModuleType
from typing import Any

from torch import nn

from .layout import LAYOUTS, Layout
from .rebound import rebind, twin
from .token import by_token, reader_of


def patch(model: nn.Module, backend: str | None = None) -> int:
    """Runs the recurrent layers of a Hugging Face transformers model on Holdfast's ops; returns how many it patched.

    Weights, projections, convolutions, norms and the model's cache stay as they are: what changes is the function that
    each layer calls for its recurrence, in this model alone. `unpatch` undoes it. A model that is patched again takes
    the new backend.

    Args:
        model: a model, or any module that holds layers of Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo Hybrid), Kimi Delta
            Attention (Kimi Linear, GLM-5.3), Mamba-2 (Mamba-2, Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba2),
            Mamba-1 (Mamba, Falcon-Mamba, Jamba) or RG-LRU (RecurrentGemma).
        backend: forces a backend of the ops beneath.

    Raises:
        TypeError: for a model that is no torch.nn.Module.
        ValueError: for one without such a layer, or with one whose code is not laid out as in the transformers that
            Holdfast knows; nothing is patched then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module; got {type(model).__name__}")
    found = _layers_of(model)
    if not found:
        kinds = ", ".join(layout.title for layout in LAYOUTS)
        raise ValueError(f"model: expected layers of {kinds}; got a {type(model).__name__} with none of them")
    made = [_attributes(layer, layout, backend) for layer, layout in found]
    for (layer, layout), attributes in zip(found, made, strict=True):
        _restore(layer)
        vars(layer).update(attributes, _patched_by_holdfast=layout)
    return len(found)


def unpatch(model: nn.Module) -> int:
    """Gives the layers of a model their own code back; returns how many had been patched."""
    return sum(_restore(layer) for layer in model.modules())


def _attributes(layer: nn.Module, layout: Layout, backend: str | None) -> dict[str, Any]:
    """What goes over the layer's methods."""
    replacements = {name: call.replacement for name, call in layout.calls.items()} | dict(layout.optional)
    replaced = {name: partial(replacement, backend=backend) for name, replacement in replacements.items()}
    if layout.method:
        return replaced
    own = _home(layer)
    forward = rebind(type(layer).forward, twin(own, f"{own.__name__}_on_holdfast_{backend}", replaced))
    # a forced backend is one of the ops that run in the layer's own code
    if backend is None and (reader := reader_of(layer)) is not None:
        forward = by_token(forward, reader)
    return {_slot(layer): MethodType(forward, layer)}


def _restore(layer: nn.Module) -> bool:
    layout = vars(layer).pop("_patched_by_holdfast", None)
    if layout is None:
        return False
    for name in layout.calls if layout.method else [_slot(layer)]:
        del vars(layer)[name]
    if "_hf_hook" in vars(layer) and not layout.method:
        layer._old_forward = MethodType(type(layer).forward, layer)
    return True


def _layers_of(module: nn.Module) -> list[tuple[nn.Module, Layout]]:
    """The recurrent layers with their layouts; what is inside one, such as the gate of KDA, is part of it."""
    if (layout := _layout_of(module)) is not None:
        return [(module, layout)]
    found = [each for child in module.children() for each in _layers_of(child)]
    # each once, wherever else it is
    return list({id(layer): (layer, layout) for layer, layout in found}.values())


def _slot(layer: nn.Module) -> str:
    """Where an instance keeps its forward: accelerate's hooks sit in forward and call what was there before."""
    return "_old_forward" if "_hf_hook" in vars(layer) else "forward"


def _home(layer: nn.Module) -> ModuleType:
    """The module whose globals the layer's forward sees."""
    return sys.modules[inspect.unwrap(type(layer).forward).__module__]


def _layout_of(layer: nn.Module) -> Layout | None:
    """The layout of a recurrent layer; None for other modules. Raises ValueError for one that is not as expected."""
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    called = set() if code is None else set(code.co_names)
    for layout in LAYOUTS:
        if called & set(layout.calls):
            _check(layer, layout, called)
            return layout
    # what Gated DeltaNet and Mamba-2 have and no other layer does: Mamba's own A_log has two axes
    A_log = getattr(layer, "A_log", None)
    if hasattr(layer, "dt_bias") and isinstance(A_log, nn.Parameter) and A_log.dim() == 1:
        names = ", or ".join(" and ".join(layout.calls) for layout in LAYOUTS[:2])
        raise ValueError(
            f"model: expected {_name(layer)} to call {names}, as in transformers 5.16 to 5.23; its forward calls none"
        )
    return None


def _check(layer: nn.Module, layout: Layout, called: set[str]) -> None:
    holder = type(layer) if layout.method else _home(layer)
    missing = [name for name in layout.calls if name not in called or not hasattr(holder, name)]
    if missing:
        raise ValueError(
            f"model: expected {_name(layer)}, a layer of {layout.title}, to call {', '.join(layout.calls)}; "
            f"its forward or its module does not have {', '.join(missing)}"
        )
    for name, call in layout.calls.items():
        got = tuple(inspect.signature(getattr(holder, name)).parameters)
        if call.parameters not in (None, got):
            raise ValueError(
                f"model: expected {name} of {_name(layer)} to take ({', '.join(call.parameters)}); "
                f"it takes ({', '.join(got)})"
            )
    present = vars(layer).get(_slot(layer))
    is_own = present is None or getattr(present, "__func__", None) is type(layer).forward
    if not is_own and "_patched_by_holdfast" not in vars(layer):
        raise ValueError(
            f"model: expected {_name(layer)} with its class's forward; got one that was replaced on the instance"
        )


def _name(layer: nn.Module) -> str:
    package = type(layer).__module__.partition(".")[0]
    version = getattr(sys.modules[package], "__version__", "of unknown version")
    return f"{type(layer).__name__} ({package} {version})"
