"""The layouts of transformers' layers that patch knows: the functions that a layer's forward calls by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import delta, mamba2, rglru

# transformers writes a model's code out in its own module: these are globals of that module, in 5.16 to 5.23 at least
_DELTA_RULE = ("query", "key", "value", "g", "beta")
_STATES = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "kwargs")
_SCAN = ("dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus", "dt_limit")
_UPDATE = ("dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z", "kwargs")


@dataclass(frozen=True)
class Call:
    """A function that a layer calls: the parameters that it must have (None: any), and what runs in its place."""

    parameters: tuple[str, ...] | None
    replacement: Callable[..., Any]


@dataclass(frozen=True)
class Layout:
    """One kind of layer: what it is, and its functions by name. method: whether they are methods, not globals."""

    title: str
    calls: Mapping[str, Call]
    method: bool = False


LAYOUTS = (
    Layout(
        "Gated DeltaNet",
        {
            "torch_chunk_gated_delta_rule": Call((*_DELTA_RULE, "chunk_size", *_STATES), delta.chunk_gated_delta_rule),
            "torch_recurrent_gated_delta_rule": Call((*_DELTA_RULE, *_STATES), delta.recurrent_gated_delta_rule),
        },
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
        "RG-LRU",
        {
            "_rnn_scan": Call(
                ("self", "hidden_states", "recurrent_gate", "reset", "recurrent_states", "acc_dtype"), rglru.rnn_scan
            ),
        },
        method=True,
    ),
)
