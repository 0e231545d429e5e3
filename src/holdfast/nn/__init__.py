"""Modules: drop-ins for torch.nn's recurrent layers, sequence mixers with a decode step, and patch for transformers."""

from .captured_step import CapturedStep
from .delta_net import DeltaNet
from .gated_delta_net import GatedDeltaNet
from .gated_delta_product import GatedDeltaProduct
from .gla import GLA
from .gru import GRU
from .kda import KDA
from .lstm import LSTM
from .mamba import Mamba
from .mamba2 import Mamba2
from .mlstm import MLSTM
from .patching import patch, unpatch
from .retnet import RetNet
from .rglru import RGLRU
from .rnn import RNN
from .rotlru import RotLRU
from .rwkv7 import RWKV7
from .slstm import SLSTM

__all__ = [
    "GLA",
    "GRU",
    "KDA",
    "LSTM",
    "MLSTM",
    "RGLRU",
    "RNN",
    "RWKV7",
    "SLSTM",
    "CapturedStep",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "Mamba",
    "Mamba2",
    "RetNet",
    "RotLRU",
    "patch",
    "unpatch",
]
