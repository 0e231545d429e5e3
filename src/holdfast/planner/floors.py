"""What a pass of a call costs at the very least, whatever runs it."""

from dataclasses import dataclass

from .device import Device
from .plan import Direction
from .problem import Problem

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Floor:
    """moved: bytes when each input is read once and each output written once. operations: the arithmetic of the
    step-by-step definition, a multiply-add is two; a chunkwise kernel does more, to use matrix units.
    """

    moved: int
    operations: int

    def seconds(self, device: Device) -> float | None:
        """Of moving the bytes, at the bandwidth that a copy reaches; None where it is not known."""
        return None if device.reached_bandwidth is None else self.moved / device.reached_bandwidth


def floor(problem: Problem, direction: Direction, state: bool = False) -> Floor:
    """The floor of one pass.

    The backward pass is a call of its own: it reads the inputs and the output's gradient and writes a gradient for
    every input, with twice the arithmetic. state: whether initial and final states count, which a call need not have;
    they are float32 or wider, one a sequence of a batch.

    Raises ValueError for a dtype that no op takes.
    """
    if problem.dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype: expected one of {', '.join(ELEMENT_BYTES)}; got {problem.dtype!r}")
    count = {"inter_chunk_scan": _inter_chunk_scan, "intra_chunk": _intra_chunk}.get(problem.op)
    families = {"dense": _dense, "diagonal": _diagonal, "matrix": _matrix, "selective": _selective}
    count = count or families[problem.family]
    inputs, outputs, carried, operations = count(problem, ELEMENT_BYTES[problem.dtype])
    if state:
        inputs, outputs = inputs + carried, outputs + carried
    if direction == "forward":
        return Floor(inputs + outputs, operations)
    return Floor(2 * inputs + outputs, 2 * operations)


# Of each family, for an element size: bytes of inputs, of outputs and of a state, and forward operations. Decays, write
# strengths and gates that need not have the inputs' dtype are taken to be float32, or wider beside wider inputs.
Count = tuple[int, int, int, int]


def _matrix(problem: Problem, size: int) -> Count:
    B, T, H, Hq, K, V = (problem[name] for name in ("B", "T", "H", "Hq", "K", "V"))
    wide, traits = max(4, size), problem.traits
    steps = B * T
    gates = wide * steps * H * (("decay=scalar" in traits) + K * ("decay=vector" in traits) + ("beta" in traits))
    erase = problem["He"] if "erase_key" in traits else 0
    # the delta write needs the state's product with k too
    products = 6 if "delta" in traits else 4
    columns = V + ("normalizer" in traits)
    return (
        size * steps * (2 * Hq * K + erase * K + H * V) + gates,
        size * steps * H * V,
        wide * B * H * K * columns,
        products * steps * H * K * columns,
    )


def _diagonal(problem: Problem, size: int) -> Count:
    B, T, D = (problem[name] for name in "BTD")
    is_complex, wide = "complex" in problem.traits, max(4, size)
    # a gate and an angle a pair of channels are as many numbers as a gate a channel
    gates = (wide if "wide_gate" in problem.traits else size) * B * T * D
    return size * B * T * D + gates, size * B * T * D, wide * B * D, (4 if is_complex else 2) * B * T * D


def _selective(problem: Problem, size: int) -> Count:
    B, T, D, N, G = (problem[name] for name in "BTDNG")
    wide, traits = max(4, size), problem.traits
    steps = (wide if "wide_dt" in traits else size) * B * T * D
    inputs = size * B * T * (D * (1 + ("gate" in traits)) + 2 * G * N) + steps + wide * D * N
    # of a number of state the decay's exponent, its product, the write's and the read's multiply-adds
    return inputs, size * B * T * D, wide * B * D * N, 6 * B * T * D * N


def _dense(problem: Problem, size: int) -> Count:
    B, T, H, D, S, G, Gi, Gr = (problem[name] for name in ("B", "T", "H", "D", "S", "G", "Gi", "Gr"))
    weights = size * (Gr * H * D * D + G * H * D)
    resets = B * T * ("reset" in problem.traits)
    inputs = size * B * T * Gi * H * D + weights + resets
    return inputs, size * B * T * H * D, max(4, size) * S * B * H * D, 2 * B * T * Gr * H * D * D


def _inter_chunk_scan(problem: Problem, size: int) -> Count:
    B, G, H, K, V = (problem[name] for name in "BGHKV")
    wide = max(4, size)
    rank = problem["r"] if "low_rank" in problem.traits else 0
    states, decays = B * G * H * K * V, B * G * H * (K if "decay=vector" in problem.traits else 1)
    inputs = size * (states + 2 * B * G * H * K * rank) + wide * decays
    return inputs, size * states, wide * B * H * K * V, (2 + 4 * rank) * states


def _intra_chunk(problem: Problem, size: int) -> Count:
    B, T, H, Hq, K, V, C = (problem[name] for name in ("B", "T", "H", "Hq", "K", "V", "C"))
    steps = B * T
    gated = any(trait.startswith("gate=") for trait in problem.traits)
    inputs = size * steps * (2 * Hq * K + H * V * (1 + gated))
    inputs += max(4, size) * steps * H * ("decay=scalar" in problem.traits)
    has_states = "states" in problem.traits
    inputs += size * B * -(-T // C) * H * K * V * has_states
    # half of the scores lie above the diagonal
    operations = steps * H * (C * (K + V) + 2 * K * V * has_states)
    return inputs, size * steps * H * V, 0, operations
