"""A function over again with other globals, which is how one model's layers are patched and no other model's.

transformers' layers call their kernels as globals of the module that they are defined in. To set those would change
every model of the kind in the process. So the layer's forward is built again over a twin of its module, which has the
same globals but for the functions that are replaced.
"""

import sys
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any


def twin(module: ModuleType, name: str, replaced: Mapping[str, Any]) -> ModuleType:
    """module's globals with some replaced, as a module of its own that is importable by name.

    torch.compile looks a function's globals up by importing the module that they name, hence the name and sys.modules.
    """
    made = ModuleType(name, module.__doc__)
    vars(made).update(vars(module) | dict(replaced) | {"__name__": name})
    return sys.modules.setdefault(name, made)


def rebind(function: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """function built again over module's globals; of one that functools.wraps decorated, the innermost.

    Raises ValueError for a decorator that keeps what it wraps elsewhere than in its closure.
    """
    inner = getattr(function, "__wrapped__", None)
    names, cells, attributes = vars(module), function.__closure__, dict(vars(function))
    if inner is not None:
        if not any(cell.cell_contents is inner for cell in cells or ()):
            raise ValueError(
                f"model: expected the decorators of {function.__qualname__} to hold in their closure what they wrap; "
                f"got one from {function.__code__.co_filename} that does not"
            )
        rebound = CellType(rebind(inner, module))
        names, attributes["__wrapped__"] = function.__globals__, rebound.cell_contents
        cells = tuple(rebound if cell.cell_contents is inner else cell for cell in cells)
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__, made.__doc__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__doc__,
    )
    vars(made).update(attributes)
    return made
