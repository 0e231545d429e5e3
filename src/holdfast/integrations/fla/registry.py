"""flash-linear-attention's delta rules by Holdfast, for every layer and model that calls them: `enable()`.

fla (0.6 or newer) lets other libraries run whole ops. Before each call it asks whether they serve it; what Holdfast
does not serve, fla's own kernels run.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from torch import Tensor

from holdfast.ops import gated_delta_rule, kda
from holdfast.ops.check import needs_grad
from holdfast.ops.explain import explain

from .arguments import gated_delta_rule_arguments, kda_arguments
from .call import Arguments, Result, run_op

_NAME = "holdfast"
# before fla's own other kernels, which have 3 and more
_PRIORITY = 1
# backends that plain PyTorch is: fla's kernels are faster
_PYTORCH = ("chunked", "reference")
_enabled = False


def enable() -> None:
    """Lets Holdfast run fla's `chunk_gated_delta_rule` and `chunk_kda`, from their next call on.

    Calls that it does not serve stay with fla: the arguments of context parallelism and of CUDA graphs
    (`cp_context`, `use_graph`), intermediate states, unknown ones, and on a GPU sizes that it has no kernel for. fla
    logs why (level INFO of "fla.backends"), once for each op.

    Raises:
        ImportError: without flash-linear-attention of 0.6 or newer.
        RuntimeError: where FLA_DISABLE_BACKEND_DISPATCH=1 keeps fla from asking.
    """
    global _enabled
    _register()
    _enabled = True


def disable() -> None:
    """Lets fla run its ops itself again, from their next call on."""
    global _enabled
    _enabled = False


@cache
def _register() -> None:
    try:
        from fla import backends
        from fla.ops.kda import chunk_kda

        register, base = backends.register, backends.BaseBackend
    except (ImportError, AttributeError) as error:
        raise ImportError("holdfast.integrations.fla: expected flash-linear-attention of 0.6 or newer") from error
    if getattr(backends, "_DISPATCH_DISABLED", False):
        raise RuntimeError("FLA_DISABLE_BACKEND_DISPATCH=1: fla asks no other library while it is set; unset it")

    def backend(name: str, arguments: Callable[..., tuple[Arguments, bool]], op: Callable[..., Any]) -> type[Any]:
        def run(self: Any, *given: Any, **named: Any) -> Result:
            return run_op(op, *arguments(*given, **named))

        def serves(self: Any, *given: Any, **named: Any) -> tuple[bool, str | None]:
            # fla takes an error for a no, and its text for the reason
            _check_served(op.__name__, arguments(*given, **named)[0])
            return True, None

        methods = {name: run, f"{name}_verifier": serves, "is_available": classmethod(lambda cls: _enabled)}
        return type("HoldfastBackend", (base,), {"backend_type": _NAME, "priority": _PRIORITY} | methods)

    register("gated_delta_rule")(backend("chunk_gated_delta_rule", gated_delta_rule_arguments, gated_delta_rule))
    register(chunk_kda)(backend("chunk_kda", kda_arguments, kda))


def _check_served(op: str, given: Arguments) -> None:
    """Raises ValueError where plain PyTorch would run the call on a GPU."""
    q, v = given["q"], given["v"]
    if v.is_cuda:
        sizes = (*v.shape[:3], q.shape[2], q.shape[3], v.shape[3])
        grad = needs_grad(*(x for x in given.values() if isinstance(x, Tensor)))
        _check_sizes(op, sizes, str(v.dtype).removeprefix("torch."), grad, given["cu_seqlens"] is not None)


@lru_cache(maxsize=4096)
def _check_sizes(op: str, sizes: tuple[int, ...], dtype: str, grad: bool, varlen: bool) -> None:
    found = explain(op, dict(zip(("B", "T", "H", "Hq", "K", "V"), sizes, strict=True)), dtype, "cuda", grad, varlen)
    for each in found.passes:
        if each.chosen.plan.backend in _PYTORCH:
            raise ValueError(f"{op}: no kernel of Holdfast serves K = {sizes[4]} and V = {sizes[5]} in {dtype} here")
