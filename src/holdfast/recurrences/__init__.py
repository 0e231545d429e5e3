"""What each recurrence is, one file each, and the step-by-step oracle that all code is checked against."""

from .cell import Cell, cell
from .comba import COMBA
from .definition import Argument, DenseCall, DiagonalCall, MatrixCall, Recurrence, SelectiveCall
from .delta_rule import DELTA_RULE
from .elman import ELMAN
from .example import Draw, Sizes
from .gated_delta_product import GATED_DELTA_PRODUCT
from .gated_delta_rule import GATED_DELTA_RULE
from .gdn2 import GDN2
from .gla import GLA
from .gru import GRU
from .hgrn import HGRN
from .kda import KDA
from .lightning import LIGHTNING
from .linear_attention import LINEAR_ATTENTION
from .lstm import LSTM
from .mamba1 import MAMBA1
from .mlstm import MLSTM
from .oracle import oracle
from .retnet import RETNET
from .rglru import RGLRU
from .rotlru import ROTLRU
from .rwkv7 import RWKV7
from .simple_gla import SIMPLE_GLA
from .slstm import SLSTM
from .ssd import SSD

RECURRENCES: dict[str, Recurrence] = {
    recurrence.name: recurrence
    for recurrence in (
        ELMAN,
        LSTM,
        GRU,
        SLSTM,
        LINEAR_ATTENTION,
        RETNET,
        LIGHTNING,
        SIMPLE_GLA,
        GLA,
        SSD,
        MLSTM,
        DELTA_RULE,
        GATED_DELTA_RULE,
        KDA,
        GDN2,
        COMBA,
        GATED_DELTA_PRODUCT,
        RWKV7,
        RGLRU,
        ROTLRU,
        HGRN,
        MAMBA1,
    )
}

# whose write takes away what the state has for a key
DELTA_RULES = ("delta_rule", "gated_delta_rule", "kda", "gdn2", "comba", "gated_delta_product", "rwkv7")

__all__ = [
    "DELTA_RULES",
    "RECURRENCES",
    "Argument",
    "Cell",
    "DenseCall",
    "DiagonalCall",
    "Draw",
    "MatrixCall",
    "Recurrence",
    "SelectiveCall",
    "Sizes",
    "cell",
    "oracle",
]
