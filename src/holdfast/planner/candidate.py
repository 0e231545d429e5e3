"""A plan beside what it is predicted to cost: what the planner compares and `explain` shows."""

from dataclasses import dataclass

from .movement.prediction import Prediction
from .plan import Plan


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run one pass of a call.

    prediction: how long it should take; None where no model says, as for the PyTorch backends.
    moved: bytes to and from memory. operations: arithmetic, a multiply-add is two. blocks: thread blocks of the launch
    that counts most. shared: bytes of shared memory a block. registers: 32-bit registers a thread.
    """

    plan: Plan
    prediction: Prediction | None = None
    moved: int = 0
    operations: int = 0
    blocks: int = 0
    shared: int = 0
    registers: int = 0

    @property
    def seconds(self) -> float:
        """Predicted; infinite without a prediction."""
        return float("inf") if self.prediction is None else self.prediction.seconds
