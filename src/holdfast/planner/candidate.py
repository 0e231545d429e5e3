"""A plan beside what it is predicted to cost: what the planner compares and `explain` shows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .device import Device
from .movement.prediction import Prediction
from .occupancy import Grid
from .plan import Plan

if TYPE_CHECKING:
    from .report import Report


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run one pass of a call.

    prediction: how long it should take; None where no model says. moved: bytes to and from memory. operations:
    arithmetic, a multiply-add is two. blocks: thread blocks of the launch that counts most. shared: bytes of shared
    memory a block. registers: 32-bit registers a thread. report: makes the integer problem that the plan comes from, as
    explain tells it; None for a plan that was not chosen.
    """

    plan: Plan
    prediction: Prediction | None = None
    moved: int = 0
    operations: int = 0
    blocks: int = 0
    shared: int = 0
    registers: int = 0
    report: "Callable[[], Report] | None" = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(
        plan: Plan,
        device: Device,
        grid: Grid,
        moved: int,
        operations: int,
        tensor_cores: bool = True,
        serial: float = 0.0,
        exchanges: int = 0,
        exchange_latency: float = 1.7e-6,
    ) -> "Candidate":
        """Of one launch; the arguments are those of Prediction.of. For several launches see `after`."""
        prediction = Prediction.of(
            device,
            moved,
            operations,
            grid,
            tensor_cores,
            serial,
            exchanges=exchanges,
            exchange_latency=exchange_latency,
        )
        return Candidate(plan, prediction, moved, operations, grid.blocks, grid.shared, grid.registers)

    def after(self, before: "Candidate") -> "Candidate":
        """This launch when it waits for the end of another: what both cost together, this one's grid and plan."""
        assert self.prediction is not None
        assert before.prediction is not None
        return Candidate(
            self.plan,
            before.prediction.then(self.prediction),
            before.moved + self.moved,
            before.operations + self.operations,
            self.blocks,
            self.shared,
            self.registers,
        )

    @property
    def seconds(self) -> float:
        """Predicted; infinite without a prediction."""
        return float("inf") if self.prediction is None else self.prediction.seconds
