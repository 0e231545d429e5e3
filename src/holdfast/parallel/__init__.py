"""Sequences cut through time: the summary of a span and how two merge, and context parallelism over ranks."""

from .calls import outputs, state_of, summary
from .modules import context_parallel
from .ops import (
    delta_rule,
    elman,
    gated_delta_rule,
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
    simple_gla,
    slstm,
    ssd,
)
from .summary import Summary, merge

__all__ = [
    "Summary",
    "context_parallel",
    "delta_rule",
    "elman",
    "gated_delta_rule",
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
    "simple_gla",
    "slstm",
    "ssd",
    "state_of",
    "summary",
]
