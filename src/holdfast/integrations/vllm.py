"""vLLM's decode step of Gated DeltaNet by Holdfast's: its name and arguments, on its pool of states.

    [project.entry-points."vllm.general_plugins"]
    holdfast = "holdfast.integrations.vllm:register"

in a plugin's pyproject.toml has vLLM call `register` in each process before it imports a model.
"""

import sys
from importlib import import_module

import torch
from torch import Tensor

from holdfast.ops import pooled_step

from .integers import check_integers

# where vLLM's models import the function from, and where it is written
_PLACES = ("vllm.model_executor.layers.fla.ops", "vllm.model_executor.layers.fla.ops.fused_recurrent")
_NAME = "fused_recurrent_gated_delta_rule"
_theirs: dict[str, object] = {}


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of each sequence, or as many as ssm_state_indices has columns, on a pool of states.

    Args:
        q, k, v, g, beta: [1, N L, ...] with cu_seqlens, else [N, L, ...]: q, k [.., H, K], v [.., HV, V], g and beta
            [.., HV].
        scale: K ** -0.5 by default.
        initial_state: the pool [slots, HV, K, V], written to.
        cu_seqlens: [N + 1] of sequences of L tokens; rows that fill a batch up have none, and touch nothing.
        ssm_state_indices: [N], or [N, L]: the slot of the state after each token.
        num_accepted_tokens: [N], 1 to L: of the tokens before these; the state is that after the last accepted one.
        use_qk_l2norm_in_kernel: as qk_l2norm.

    Returns:
        o in v's shape, and the pool.

    Raises:
        ValueError, TypeError: for what is not served, named: states that are not a pool, or not in place; sequences of
            other lengths.
    """
    if initial_state is None or ssm_state_indices is None:
        name = "initial_state" if initial_state is None else "ssm_state_indices"
        raise ValueError(f"{name}: expected a tensor, as of states in a pool; got None")
    if not inplace_final_state:
        raise ValueError("inplace_final_state: expected True, as states go on in the pool; got False")
    places = ssm_state_indices if ssm_state_indices.dim() == 2 else ssm_state_indices[:, None]
    count, tokens = places.shape
    check_integers("ssm_state_indices", places, q, N=count, L=tokens)
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": torch.ones_like(g) if beta is None else beta}
    slots = places[:, 0]
    if num_accepted_tokens is not None:
        check_integers("num_accepted_tokens", num_accepted_tokens, q, N=count)
        slots = places.gather(1, (num_accepted_tokens.long() - 1)[:, None])[:, 0]
    if cu_seqlens is None:
        expected = [count, tokens]
    else:
        check_integers("cu_seqlens", cu_seqlens, q, **{"N + 1": count + 1})
        expected = [1, count * tokens]
        has_tokens = cu_seqlens[1:] > cu_seqlens[:-1]
        slots, places = torch.where(has_tokens, slots, -1), torch.where(has_tokens[:, None], places, -1)
    for name, x in arguments.items():
        if list(x.shape[:2]) != expected:
            raise ValueError(f"{name}: expected [{expected[0]}, {expected[1]}, ...]; got {list(x.shape)}")
    by_sequence = {name: x.reshape(count, tokens, *x.shape[2:]) for name, x in arguments.items()}
    options = {"scale": scale, "qk_l2norm": use_qk_l2norm_in_kernel}
    following = places.int() if tokens > 1 else places[:, 0].int()
    o = pooled_step(
        "gated_delta_rule", by_sequence | options, initial_state, slots.int().contiguous(), following.contiguous()
    )
    return o.reshape(v.shape), initial_state


def register() -> None:
    """Has vLLM's models that are imported from now on take Holdfast's function for its own; unregister takes it back.

    Raises:
        ImportError: where vLLM has not such a function.
    """
    for place in _PLACES:
        try:
            module = import_module(place)
            _theirs.setdefault(place, getattr(module, _NAME))
        except (ImportError, AttributeError) as error:
            raise ImportError(f"holdfast.integrations.vllm: expected a vLLM with {place}.{_NAME}") from error
    for place in _PLACES:
        setattr(sys.modules[place], _NAME, fused_recurrent_gated_delta_rule)


def unregister() -> None:
    """Puts vLLM's own function back."""
    while _theirs:
        place, own = _theirs.popitem()
        setattr(sys.modules[place], _NAME, own)
