"""The public functions: check the arguments, plan, run a kernel. Each is a torch custom op underneath."""

from .causal_conv1d import causal_conv1d, causal_conv1d_update
from .comba import comba
from .delta_rule import delta_rule
from .elman import elman
from .explain import explain
from .gated_delta_product import gated_delta_product
from .gated_delta_rule import gated_delta_rule
from .gated_rms_norm import gated_rms_norm
from .gdn2 import gdn2
from .gla import gla
from .gru import gru
from .hgrn import hgrn
from .inter_chunk_scan import inter_chunk_scan
from .intra_chunk import intra_chunk
from .kda import kda
from .lightning import lightning
from .linear_attention import linear_attention
from .lstm import lstm
from .mamba1 import mamba1
from .mlstm import mlstm
from .pooled_prefill import pooled_prefill
from .pooled_step import pooled_step
from .retnet import retnet
from .rglru import rglru
from .rnn import rnn
from .rotlru import rotlru
from .rwkv7 import rwkv7
from .simple_gla import simple_gla
from .slstm import slstm
from .ssd import ssd
from .step import step

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "comba",
    "delta_rule",
    "elman",
    "explain",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_rms_norm",
    "gdn2",
    "gla",
    "gru",
    "hgrn",
    "inter_chunk_scan",
    "intra_chunk",
    "kda",
    "lightning",
    "linear_attention",
    "lstm",
    "mamba1",
    "mlstm",
    "pooled_prefill",
    "pooled_step",
    "retnet",
    "rglru",
    "rnn",
    "rotlru",
    "rwkv7",
    "simple_gla",
    "slstm",
    "ssd",
    "step",
]
