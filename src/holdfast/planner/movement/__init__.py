"""Predicts what a tiled chain of matrix products moves and holds, and chooses its loops and tiles.

After Chimera's analytic model of data movement, which proposal 032 applies to chunkwise recurrences.
"""

from .chain import Chain, Stage, Tensor
from .optimum import Choice, best
from .prediction import Prediction
from .simulate import simulate
from .traffic import Movement, movement

__all__ = ["Chain", "Choice", "Movement", "Prediction", "Stage", "Tensor", "best", "movement", "simulate"]
