"""How far results are from float64, and how far they may be."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .case import Case, Fault, Tensors

# what the dtype itself costs: a spacing of 16-bit numbers; of float32 what three TF32 products a product leave
FLOORS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 1e-5, torch.float64: 1e-10}
PYTORCH_FACTOR = 2.0
ROUNDING_FACTOR = 2.5
# by so many draws, and more for a tensor of a few numbers: in every tenth set of four, one number moves by less than
# half of what it does on the whole
ROUNDING_DRAWS = 4
DRAWS_FOR_FEW = 16
_FEW = 16
# of the step loop, for the PyTorch path itself
OWN_FACTOR = 16.0
# beside the largest gradient of the call, what is left of a sum that cancels to nothing
_NOISE = 2.0**-22


@dataclass(frozen=True, slots=True)
class Result:
    """What a call returned for a case, gradients being those of the which-th gradients of its results."""

    case: Case
    values: Tensors
    which: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor: relative error, the error it may have, and what that rests on."""

    name: str
    error: float
    limit: float
    ground: str

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.name} is off by {self.error:.2g}, limit {self.limit:.2g} ({self.ground})"


def _distance(got: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> tuple[float, float]:
    """|got - exact| and |exact|, over what dtype, by default got's, holds; infinite where got is not finite there."""
    holds = exact.abs() <= 0.99 * torch.finfo(dtype or got.dtype).max
    off = torch.where(holds, got.double() - exact, 0.0)
    apart = off.norm().item()
    return (apart if apart == apart else torch.inf), torch.where(holds, exact, 0.0).norm().item()


def _size(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _smallest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


class Judge:
    """Compares results, and finds what excuses an error only where there is one."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, str], Tensors] = {}

    def compare(self, result: Result) -> list[Comparison]:
        """One comparison for each tensor, in order. Raises Fault for one that is missing, of another shape or dtype."""
        case, exact = result.case, result.case.exact(result.which)
        if missing := [name for name in exact if name[0] != "d" and name not in result.values]:
            raise Fault(f"{' and '.join(missing)} did not come back")
        found = []
        gradients = [x for name, x in exact.items() if name[0] == "d" and x.numel()]
        largest = max(gradients, key=_size, default=None)
        for name, got in result.values.items():
            right = exact[name]
            if got.shape != right.shape:
                raise Fault(f"{name} has shape {list(got.shape)}, expected {list(right.shape)}")
            if name == "o" and got.dtype != case.s.torch_dtype:
                raise Fault(f"{name} is {got.dtype}, expected {case.s.torch_dtype}")
            # under autocast a gradient comes back through the dtype that its argument was cast to
            cast = case.s.mode == "autocast" and name[0] == "d" and case.kinds.get(name[1:]) == "input"
            apart, norm = _distance(got, right, case.s.torch_dtype if cast else None)
            # what is below it is lost on the way to a result in float32 too, where operands are in the call's dtype
            smallest = max(_smallest(got.dtype), _smallest(case.s.torch_dtype))
            floor = max(FLOORS[case.s.torch_dtype], FLOORS[got.dtype])
            # subnormal numbers, and sums that cancel
            cancelled = 0.0
            if name[0] == "d" and largest is not None:
                cancelled = _NOISE * _size(largest)
                if case.kinds.get(name[1:]) == "gate" and right.dim() < largest.dim():
                    # a sum over a head's channels
                    cancelled *= largest.shape[-1] ** 0.5
            spare = right.numel() ** 0.5 * (smallest + cancelled)
            apart = max(apart - spare, 0.0)
            error = apart / norm if norm else apart
            limit, ground = floor, "dtype"
            if not error <= floor:
                limit, ground = self._excused(result, name, right, norm or 1.0, floor)
            found.append(Comparison(name, error, limit, ground))
        return found

    def _excused(self, result: Result, name: str, right: Tensor, norm: float, floor: float) -> tuple[float, str]:
        case = result.case
        ways = [(floor, "dtype")]
        first, *rest = case.pytorch_paths()
        by_first = self._made_by(first, case, result.which).get(name)
        if by_first is not None and torch.equal(by_first, result.values[name]):
            # a path is no excuse for itself: the step loop is, whose sums run in another order
            ways += [self._as_far_as(path, OWN_FACTOR, result, name, right, norm) for path in rest]
        else:
            ways.append(self._as_far_as(first, PYTORCH_FACTOR, result, name, right, norm))
        draws = DRAWS_FOR_FEW if right.numel() < _FEW else ROUNDING_DRAWS
        # what is one number in memory rounds as one, and what an op makes of it may not
        for sign in (1, -1) if case.has_expanded else (1,):
            moved = [case.exact(result.which, sign * draw).get(name) for draw in range(1, 1 + draws)]
            if all(x is not None for x in moved):
                squares = [_distance(x, right)[0] ** 2 for x in moved]
                ways.append((ROUNDING_FACTOR * (sum(squares) / len(squares)) ** 0.5 / norm, "rounded inputs"))
        return max(way for way in ways if way[0] < torch.inf)

    def _as_far_as(
        self, path: str, factor: float, result: Result, name: str, right: Tensor, norm: float
    ) -> tuple[float, str]:
        """So many times what a path in plain PyTorch is off by; 0 where it did not come to that tensor."""
        other = self._made_by(path, result.case, result.which).get(name)
        if other is None or other.shape != right.shape:
            return 0.0, path
        return factor * _distance(other, right)[0] / norm, f"{factor:.0f} times that of {path}"

    def _made_by(self, path: str, case: Case, which: int) -> Tensors:
        key = id(case), which, path
        if key not in self._made:
            try:
                self._made[key] = case.by_backend(path, which)
            except Exception:  # a path that fails excuses nothing; it is fuzzed itself
                self._made[key] = {}
        return self._made[key]
