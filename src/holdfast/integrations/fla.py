"""flash-linear-attention's delta rules by Holdfast, for every layer and model that calls them: `enable()`.

fla (0.6 or newer) lets other libraries run whole ops. Before each call it asks whether they serve it; what Holdfast
does not serve, fla's own kernels run.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from holdfast.ops import gated_delta_rule, kda
from holdfast.ops.check import needs_grad
from holdfast.ops.explain import explain

Arguments = dict[str, Any]

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
        def run(self: Any, *given: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
            return _run(op, *arguments(*given, **named))

        def serves(self: Any, *given: Any, **named: Any) -> tuple[bool, str | None]:
            # fla takes an error for a no, and its text for the reason
            _check_served(op.__name__, arguments(*given, **named)[0])
            return True, None

        methods = {name: run, f"{name}_verifier": serves, "is_available": classmethod(lambda cls: _enabled)}
        return type("HoldfastBackend", (base,), {"backend_type": _NAME, "priority": _PRIORITY} | methods)

    register("gated_delta_rule")(backend("chunk_gated_delta_rule", gated_delta_rule_arguments, gated_delta_rule))
    register(chunk_kda)(backend("chunk_kda", kda_arguments, kda))


def gated_delta_rule_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Arguments, bool]:
    """What `holdfast.gated_delta_rule` is given for a call of fla's `chunk_gated_delta_rule`, and whether states are
    [N, HV, V, K].

    cu_seqlens_cpu, chunk_indices and chunk_size say how fla's kernels go about it. Raises ValueError for what Holdfast
    does not serve.
    """
    _refuse(cp_context=cp_context)
    if use_gate_in_kernel and A_log is None:
        raise ValueError("A_log: expected a tensor beside use_gate_in_kernel=True; got None")
    given = _common(q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    given |= _options(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return given | (_gate(A_log, dt_bias) if use_gate_in_kernel else {}), state_v_first


def kda_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Arguments, bool]:
    """The same for `holdfast.kda` and fla's `chunk_kda`; disable_recompute, too, says how fla's kernels go about it."""
    _refuse(cp_context=cp_context, use_graph=use_graph, return_intermediate_states=return_intermediate_states)
    if use_gate_in_kernel and A_log is None and lower_bound is None:
        raise ValueError("A_log: expected a tensor beside use_gate_in_kernel=True without lower_bound; got None")
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ValueError(f"lower_bound: expected a number from -5 to below 0 beside safe_gate=True; got {lower_bound}")
    given = _common(q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    given |= _options(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if use_gate_in_kernel:
        # fla has it as one axis
        bias = None if dt_bias is None else dt_bias.view(g.shape[2:])
        given |= _gate(A_log, bias) | {"lower_bound": lower_bound}
    return given, state_v_first


def _refuse(**asked: object) -> None:
    """Raises ValueError for an argument that is given."""
    for name, value in asked.items():
        if value:
            raise ValueError(f"{name}: Holdfast's op has none")


def _common(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> Arguments:
    if initial_state is not None:
        initial_state = initial_state.mT if state_v_first else initial_state
        # as fla's kernels compute
        initial_state = initial_state.to(torch.promote_types(q.dtype, torch.float32))
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return tensors | {"scale": scale, "output_final_state": output_final_state}


def _options(l2norm: bool, beta_sigmoid: bool, allow_neg_eigval: bool) -> Arguments:
    if allow_neg_eigval and not beta_sigmoid:
        raise ValueError("allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it; got False")
    return {"qk_l2norm": l2norm, "beta_sigmoid": beta_sigmoid, "allow_neg_eigval": allow_neg_eigval}


def _gate(A_log: Tensor | None, dt_bias: Tensor | None) -> Arguments:
    return {"A_log": A_log, "dt_bias": dt_bias}


def _run(op: Callable[..., Any], given: Arguments, state_v_first: bool) -> tuple[Tensor, Tensor | None]:
    o, state = op(**given)
    return o, state.mT.contiguous() if state_v_first and state is not None else state


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
