"""One token of decoding through a whole layer of transformers, on the model's own cache in place.

Between a layer's projections one op runs (`ops.layer_step`), in the place of some seventy operations of PyTorch. That
leaves nothing of the layer's own code between its calls, so it is done only for layers whose code is known: `reader_of`
compares the names that their forward uses with those of the layers written down here. Any other layer, and any other
call than one token after others without a gradient, goes the layer's own way, with the functions that patch puts in.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.kernels.runtime.torch_private import has_hooks
from holdfast.ops.layer_step import conv_step

from ..check import wide


class Token(NamedTuple):
    """What a layer's projections make of a token, as `ConvStep` takes it. norm, leave: the modules that follow."""

    x: Tensor  # [B, 1, C]
    a: Tensor  # [B, 1, H]
    beta: Tensor | None  # [B, 1, H]; None for Mamba-2
    gate: Tensor  # [B, 1, H * V]
    norm: nn.Module
    leave: nn.Module
    key_heads: int
    largest: float = 1.0


def qwen3_next(layer: Any, hidden_states: Tensor) -> Token:
    mixed = layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(*mixed)
    x = torch.cat([part.flatten(2) for part in (q, k, v)], -1)
    return Token(x, a, b, z.flatten(2), layer.norm, layer.out_proj, layer.num_k_heads)


def qwen3_5(layer: Any, hidden_states: Tensor) -> Token:
    parts = (
        project(hidden_states) for project in (layer.in_proj_qkv, layer.in_proj_a, layer.in_proj_b, layer.in_proj_z)
    )
    return Token(*parts, layer.norm, layer.out_proj, layer.num_k_heads)


def olmo_hybrid(layer: Any, hidden_states: Tensor) -> Token:
    x = torch.cat([project(hidden_states) for project in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
    a, b, gate = (project(hidden_states) for project in (layer.a_proj, layer.b_proj, layer.g_proj))
    return Token(x, a, b, gate, layer.o_norm, layer.o_proj, layer.num_k_heads, 1.0 + layer.allow_neg_eigval)


def mamba2(layer: Any, hidden_states: Tensor) -> Token:
    widths = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
    gate, x, dt = layer.in_proj(hidden_states).split(widths, -1)
    return Token(x, dt, None, gate, layer.norm, layer.out_proj, layer.n_groups)


# the names in the code of each layer's forward, and of its norm's
_DELTA = """
A_log F activation apply_mask_to_padding_states bias causal_conv1d_fn causal_conv1d_update conv1d conv_kernel_size
conv_states dt_bias exp float has_previous_state head_k_dim head_v_dim key_dim layer_idx layers num_k_heads num_v_heads
pop record_past recurrent_states repeat_interleave reshape shape sigmoid softplus split squeeze torch
torch_chunk_gated_delta_rule torch_recurrent_gated_delta_rule transpose update_conv_state update_recurrent_state
value_dim weight
"""
_MAMBA2 = """
A_log D activation apply_mask_to_padding_states bias causal_conv1d_fn causal_conv1d_update chunk_size conv1d conv_dim
conv_kernel_size conv_states dt_bias dtype exp expand float has_previous_state head_dim in_proj intermediate_size
layer_idx layers mamba2_chunk_scan mamba2_selective_state_update mamba2_split_conv1d_scan_combined n_groups norm
num_heads out_proj record_past recurrent_states reshape shape split squeeze ssm_state_size time_step_limit to torch
training transpose update_conv_state update_recurrent_state variance_epsilon view weight
"""
_NORM = "dtype float32 mean pow rsqrt to torch variance_epsilon weight"
_READERS: tuple[tuple[Callable[[Any, Tensor], Token], frozenset[str]], ...] = tuple(
    (reader, frozenset(names.split()))
    for reader, names in (
        (qwen3_next, _DELTA + "cat fix_query_key_value_ordering in_proj_ba in_proj_qkvz norm out_proj"),
        (qwen3_5, _DELTA + "in_proj_a in_proj_b in_proj_qkv in_proj_z norm out_proj"),
        (olmo_hybrid, _DELTA + "a_proj allow_neg_eigval b_proj cat g_proj k_proj o_norm o_proj q_proj v_proj view"),
        (mamba2, _MAMBA2),
    )
)
_NORMS = tuple(
    frozenset((_NORM + more).split())
    for more in (" ACT2FN activation", " functional nn silu", " functional group_size nn shape silu view")
)
_SILU = ("silu", "swish")


def _names(module: nn.Module) -> frozenset[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def reader_of(layer: nn.Module) -> Callable[[Any, Tensor], Token] | None:
    """What reads a token off the projections of a layer whose code is known; None for another layer."""
    norm = getattr(layer, "o_norm", getattr(layer, "norm", None))
    activations = {getattr(layer, "activation", None), getattr(norm, "activation", "silu")}
    if norm is None or _names(norm) not in _NORMS or not activations <= {*_SILU}:
        return None
    return next((reader for reader, names in _READERS if names == _names(layer)), None)


def by_token(forward: Callable[..., Any], reader: Callable[[Any, Tensor], Token]) -> Callable[..., Any]:
    """forward of a layer, but for one token after others, which takes a step on the cache."""

    @wraps(forward)
    def run(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **named: Any
    ) -> Any:
        held = None
        if attention_mask is None and not any(isinstance(x, Tensor) for x in named.values()):
            held = _held(self, hidden_states, cache_params)
        if held is None:
            return forward(self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **named)
        return _step(self, reader(self, hidden_states), *held)

    return run


def _held(layer: Any, hidden_states: Tensor, cache: Any) -> tuple[Tensor, Tensor] | None:
    """(the convolution's last inputs [B, W, C], the state [B, H, K, V]) of a layer in the cache, where a step may
    update both in place; None where it may not."""
    if cache is None or hidden_states.shape[1] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not cache.has_previous_state(layer.layer_idx) or cache.layers[layer.layer_idx].record_past:
        return None
    # hooks that move weights, or look at what the layer's parts return
    parts = (layer.conv1d, getattr(layer, "o_norm", getattr(layer, "norm", None)))
    if any("_hf_hook" in vars(x) or has_hooks(x) for x in parts):
        return None
    states = cache.layers[layer.layer_idx]
    tail, state = states.conv_states[0], states.recurrent_states[0]
    if tail is None or state is None or state.dtype != wide(hidden_states.dtype):
        return None
    if hasattr(layer, "ssm_state_size"):
        # [B, H, P, N], which a patched prompt leaves as a view of Holdfast's layout
        state = state.mT
    return (tail.mT, state) if state.stride(-1) == 1 else None


def _step(layer: Any, token: Token, tail: Tensor, state: Tensor) -> Tensor:
    norm, weight = token.norm, token.norm.weight
    if token.beta is None:
        weight = weight.unflatten(0, (-1, getattr(norm, "group_size", weight.shape[0])))
    y = conv_step(
        token.x,
        tail,
        state,
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        token.a,
        token.beta,
        layer.A_log,
        layer.dt_bias,
        layer.D if token.beta is None else None,
        token.gate,
        weight,
        token.key_heads,
        token.largest,
        norm.variance_epsilon,
        "",
    )
    return token.leave(y)
