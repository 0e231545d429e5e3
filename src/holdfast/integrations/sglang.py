"""SGLang's decode steps of Gated DeltaNet and KDA by Holdfast's: their names and arguments, on its pool of states.

    [project.entry-points."sglang.srt.plugins"]
    holdfast = "holdfast.integrations.sglang:register"

in a plugin's pyproject.toml has SGLang call `register` in each process before its engine starts.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.slots import read_states, write_states
from holdfast.ops import pooled_step

from .integers import check_integers

_FOLDER = "sglang.kernels.ops.attention.fla"
# beyond it a softplus is its argument, to float32
_EXACT_FROM = 20.0


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences of Gated DeltaNet.

    Args:
        mixed_qkv: [B, 2 H K + HV V], a projection's q, k and v behind the short convolution.
        a, b: [B, HV], of the decay before its softplus, and of beta before its sigmoid. A_log, dt_bias: [HV].
        initial_state: the pool [slots, HV, V, K], written to.
        out: [B, 1, HV, V], written to.
        ssm_state_indices: [B], each sequence's slot; a negative number is of padding, whose output is 0.
        use_qk_l2norm_in_kernel: as qk_l2norm.

    Returns:
        out, and the pool.

    Raises:
        ValueError, TypeError: for what does not fit together, named.
    """
    shapes = {
        "mixed_qkv": (mixed_qkv, "[B, 2 H K + HV V]", 2),
        "initial_state": (initial_state, "[slots, HV, V, K]", 4),
    }
    for name, (x, expected, axes) in shapes.items():
        if x.dim() != axes:
            raise ValueError(f"{name}: expected {expected}; got {list(x.shape)}")
    _, heads, values, keys = initial_state.shape
    width = mixed_qkv.shape[1] - heads * values
    if width <= 0 or width % (2 * keys):
        raise ValueError(f"mixed_qkv: expected {heads * values} columns of v and 2 H {keys} of q and k; got {width}")
    q, k, v = mixed_qkv.split([width // 2, width // 2, heads * values], dim=1)
    q, k, v = (x.unflatten(1, (-1, size))[:, None] for x, size in ((q, keys), (k, keys), (v, values)))
    o = _step(False, {"q": q, "k": k, "v": v, "g": a[:, None], "beta": b[:, None]}, A_log, dt_bias, scale,
              use_qk_l2norm_in_kernel, initial_state, ssm_state_indices)  # fmt: skip
    out.copy_(o)
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> Tensor:
    """As many tokens of each of N sequences: one, or 1 to 8 that were guessed, whose states go to a buffer.

    Args:
        A_log, dt_bias: [HV]; with is_kda dt_bias [HV K].
        a, b: [.., HV], of the decay before its softplus, and of beta before its sigmoid; with is_kda a [.., HV K].
        softplus_beta, softplus_threshold: 1, and 20 or more.
        q, k, v: [1, N L, ...] with cu_seqlens, else [N, L, ...]: q, k [.., H, K], v [.., HV, V].
        initial_state_source: the pool [slots, HV, V, K], written to unless disable_state_update.
        initial_state_indices: [N], each sequence's slot; a negative number is of padding, whose outputs are 0.
        cu_seqlens: [N + 1] of sequences of L tokens; rows that fill a batch up have none, and touch nothing.
        intermediate_states_buffer: [rows, steps, HV, V, K], with disable_state_update alone: row
            intermediate_state_indices[n] [N] gets the state after each token, of at most `steps`.

    Returns:
        o in v's shape.

    Raises:
        ValueError, TypeError: for what is not served, named: guesses that are a tree, the rings of ReplaySSM, another
            softplus.
    """
    if retrieve_parent_token is not None:
        raise ValueError("retrieve_parent_token: expected None, as guesses in a row; got a tree's parents")
    if cache_ring:
        raise ValueError("cache_ring: expected False; got True")
    if softplus_beta != 1 or softplus_threshold < _EXACT_FROM:
        found = f"{softplus_beta} and {softplus_threshold}"
        raise ValueError(f"softplus_beta, softplus_threshold: expected 1.0 and {_EXACT_FROM} or more; got {found}")
    count = len(initial_state_indices)
    tokens, slots = v.shape[0] * v.shape[1] // max(count, 1), initial_state_indices
    check_integers("initial_state_indices", slots, q, N=count)
    if cu_seqlens is not None:
        check_integers("cu_seqlens", cu_seqlens, q, **{"N + 1": count + 1})
        slots = torch.where(cu_seqlens[1:] > cu_seqlens[:-1], slots, -1)
    heads, keys = v.shape[2], k.shape[3]
    gate = (heads, keys) if is_kda else (heads,)
    expected = [1, count * tokens] if cu_seqlens is not None else [count, tokens]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if list(x.shape[:2]) != expected or not tokens:
            raise ValueError(f"{name}: expected {count} sequences of as many tokens each; got {list(x.shape)}")
    by_sequence = {name: x.reshape(count, tokens, *x.shape[2:]) for name, x in (("q", q), ("k", k), ("v", v))}
    by_sequence |= {"g": a.reshape(count, tokens, *gate), "beta": b.reshape(count, tokens, heads)}
    options = (A_log.reshape(-1), dt_bias.reshape(gate), scale, use_qk_l2norm_in_kernel)
    if intermediate_states_buffer is None:
        following = torch.full_like(slots, -1) if disable_state_update else None
        return _step(is_kda, by_sequence, *options, initial_state_source, slots, following).reshape(v.shape)
    if not disable_state_update:
        raise ValueError("disable_state_update: expected True beside intermediate_states_buffer; got False")
    if intermediate_state_indices is None:
        raise ValueError("intermediate_state_indices: expected a tensor beside intermediate_states_buffer; got None")
    check_integers("intermediate_state_indices", intermediate_state_indices, q, N=count)
    places = _copied(initial_state_source, slots, intermediate_states_buffer, intermediate_state_indices, tokens)
    states = intermediate_states_buffer.flatten(0, 1)
    return _step(is_kda, by_sequence, *options, states, *places).reshape(v.shape)


def _copied(pool: Tensor, slots: Tensor, buffer: Tensor, rows: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Copies states to the last places of their rows of the buffer; there, and where the states after tokens go."""
    steps = buffer.shape[1]
    if tokens > steps:
        raise ValueError(f"intermediate_states_buffer: expected {tokens} steps or more; got {steps}")
    is_sequence = (slots >= 0) & (rows >= 0)
    states, first = buffer.flatten(0, 1), rows * steps
    last = torch.where(is_sequence, first + steps - 1, -1)
    write_states(states, last, read_states(pool, slots, states.dtype))
    each = first[:, None] + torch.arange(tokens, device=rows.device)
    return last, torch.where(is_sequence[:, None], each, -1)


def _step(
    is_kda: bool,
    tokens: dict[str, Tensor],
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    qk_l2norm: bool,
    pool: Tensor,
    slots: Tensor,
    following: Tensor | None = None,
) -> Tensor:
    """o [N, L, HV, V]."""
    options = {"A_log": A_log, "dt_bias": dt_bias, "scale": scale, "qk_l2norm": qk_l2norm, "beta_sigmoid": True}
    places = [None if x is None else x.int().contiguous() for x in (slots, following)]
    return pooled_step("kda" if is_kda else "gated_delta_rule", tokens | options, pool, *places, keys_last=True)


def _or_theirs(own: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Guesses that are a tree and ReplaySSM's rings stay with SGLang's own function."""
    if named.get("retrieve_parent_token") is not None or named.get("cache_ring"):
        return own(*args, **named)
    return fused_sigmoid_gating_delta_rule_update(*args, **named)


def _in_place(own: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return fused_recurrent_gated_delta_rule_packed_decode(*args, **named)


def register() -> None:
    """Hooks both functions into SGLang's registry, which puts them wherever its own were imported.

    Raises:
        ImportError: where SGLang has no such registry, or not these functions.
    """
    hooks = {
        "fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode": _in_place,
        "fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update": _or_theirs,
    }
    try:
        registry = import_module("sglang.srt.plugins.hook_registry")
        for place in hooks:
            module, name = place.split(".")
            getattr(import_module(f"{_FOLDER}.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"holdfast.integrations.sglang: expected an SGLang with plugins and {_FOLDER}") from error
    for place, hook in hooks.items():
        registry.HookRegistry.register(f"{_FOLDER}.{place}", hook, registry.HookType.AROUND)
