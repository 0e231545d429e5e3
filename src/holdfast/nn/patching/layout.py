"""The layouts of transformers' layers that patch knows: the functions that a layer's forward calls by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from . import delta, mamba1, mamba2, rglru

# transformers writes a model's code out in its own module: these are globals of that module, in 5.16 to 5.23 at least
_DELTA_RULE = ("query", "key", "value", "g", "beta")
_STATES = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "kwargs")
_SCAN = ("dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus", "dt_limit")
_UPDATE = ("dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z", "kwargs")
_SELECTIVE = ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state")


@dataclass(frozen=True)
class Call:
    """A function that a layer calls: the parameters that it must have (None: any), and what runs in its place."""

    parameters: tuple[str, ...] | None
    replacement: Callable[..., Any]


@dataclass(frozen=True)
class Layout:
    """One kind of layer: what it is, and its functions by name.

    method: whether they are methods, not globals. optional: what runs in place of functions that not all such layers
    have.
    """

    title: str
    calls: Mapping[str, Call]
    method: bool = False
    optional: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def _delta_rule(chunk: str, recurrent: str, rule: str) -> dict[str, Call]:
    """The calls of a layer of a delta rule: the names of its two functions, and the op."""
    return {
        chunk: Call((*_DELTA_RULE, "chunk_size", *_STATES), partial(delta.chunk_rule, rule=rule)),
        recurrent: Call((*_DELTA_RULE, *_STATES), partial(delta.recurrent_rule, rule=rule)),
    }


LAYOUTS = (
    Layout(
        "Gated DeltaNet",
        _delta_rule("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "gated_delta_rule"),
    ),
    Layout(
        "Mamba-2",
        {
            "mamba2_chunk_scan": Call(("hidden_states", *_SCAN, "return_final_states", "kwargs"), mamba2.chunk_scan),
            "mamba2_selective_state_update": Call(("state", "hidden_states", *_UPDATE), mamba2.selective_state_update),
            # fuses norm and projections too, which only its own package does; None tells the layer that it is not there
            "mamba2_split_conv1d_scan_combined": Call(None, mamba2.split_conv1d_scan_combined),
        },
    ),
    Layout(
        "Kimi Delta Attention",
        _delta_rule("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "kda"),
    ),
    Layout(
        "Mamba-1",
        {
            "mamba_selective_scan": Call(
                (*_SELECTIVE, "use_mambapy", "use_associative_scan", "kwargs"), mamba1.selective_scan
            ),
            "mamba_selective_state_update": Call(("state", "hidden_states", *_UPDATE), mamba1.selective_state_update),
        },
        # fuses projections and convolution, which only its own package does; Jamba's layers do not ask for it
        optional={"mamba_inner_fn": mamba1.inner},
    ),
    Layout(
        "RG-LRU",
        {
            "_rnn_scan": Call(
                ("self", "hidden_states", "recurrent_gate", "reset", "recurrent_states", "acc_dtype"), rglru.rnn_scan
            ),
        },
        method=True,
    ),
)
