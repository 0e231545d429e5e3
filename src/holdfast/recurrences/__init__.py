"""What each recurrence is, one file each, and the step-by-step oracle that all code is checked against."""

from .definition import Argument, DenseCall, DiagonalCall, MatrixCall, Recurrence
from .delta_rule import DELTA_RULE
from .example import Draw, Sizes
from .gated_delta_rule import GATED_DELTA_RULE
from .gla import GLA
from .lightning import LIGHTNING
from .linear_attention import LINEAR_ATTENTION
from .mlstm import MLSTM
from .oracle import oracle
from .retnet import RETNET
from .simple_gla import SIMPLE_GLA
from .ssd import SSD

RECURRENCES: dict[str, Recurrence] = {
    recurrence.name: recurrence
    for recurrence in (
        LINEAR_ATTENTION,
        RETNET,
        LIGHTNING,
        SIMPLE_GLA,
        GLA,
        SSD,
        MLSTM,
        DELTA_RULE,
        GATED_DELTA_RULE,
    )
}

__all__ = [
    "RECURRENCES",
    "Argument",
    "DenseCall",
    "DiagonalCall",
    "Draw",
    "MatrixCall",
    "Recurrence",
    "Sizes",
    "oracle",
]
