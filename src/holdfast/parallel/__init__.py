"""Models over ranks: sequences cut through time, by the summary of a span and how two merge, and shared heads."""

from holdfast.recurrences.summary import Summary, merge

from .calls import outputs, state_of, summary
from .cuts import Cut
from .gradients import clip_grad_norm
from .headwise import HeadwiseParallel, weights_held
from .modules import context_parallel
from .ops import (
    comba,
    delta_rule,
    elman,
    gated_delta_product,
    gated_delta_rule,
    gdn2,
    gla,
    gru,
    hgrn,
    kda,
    lightning,
    linear_attention,
    lstm,
    mlstm,
    retnet,
    rglru,
    rnn,
    rotlru,
    rwkv7,
    simple_gla,
    slstm,
    ssd,
)
from .sections import Sections
from .tensor import tensor_parallel, tensor_parallel_plan

__all__ = [
    "Cut",
    "HeadwiseParallel",
    "Sections",
    "Summary",
    "clip_grad_norm",
    "comba",
    "context_parallel",
    "delta_rule",
    "elman",
    "gated_delta_product",
    "gated_delta_rule",
    "gdn2",
    "gla",
    "gru",
    "hgrn",
    "kda",
    "lightning",
    "linear_attention",
    "lstm",
    "merge",
    "mlstm",
    "outputs",
    "retnet",
    "rglru",
    "rnn",
    "rotlru",
    "rwkv7",
    "simple_gla",
    "slstm",
    "ssd",
    "state_of",
    "summary",
    "tensor_parallel",
    "tensor_parallel_plan",
    "weights_held",
]
