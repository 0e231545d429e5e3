"""What the chunkwise PyTorch backends cost on a GPU: passes over tensors in float32, products, and launches.

Each operation reads and writes memory, and the next waits for it, so memory and arithmetic add up. The host issues an
operation in about 14 us. Launches and bytes were counted from the operations that the backends run; a test counts
again. The times leave out how far operations fall short of a copy: at B4 T4096 H32 D128 on an H200 two that were
measured took 1.8 and 2.3 times as long.
"""

import math
from dataclasses import dataclass, replace

from ..candidate import Candidate
from ..device import Device
from ..floors import floor
from ..movement.prediction import Prediction
from ..plan import Direction, Plan
from ..problem import Problem

# an H200's host, between two operations of PyTorch: 2.5 to 4.3 ms of host time over 181 to 337 of them
HOST_SECONDS = 14e-6


@dataclass(frozen=True, slots=True)
class Eager:
    """launches: operations of one pass. passes: bytes over the fewest bytes of the call in float32."""

    launches: int
    passes: float


def matrix_chunked(problem: Problem, direction: Direction, segment: int) -> Eager:
    """Of the chunked backend, a segment of that many tokens after another."""
    traits, segments = problem.traits, -(-problem["T"] // segment)
    is_forward = direction == "forward"
    if "delta" in traits:
        launches, passes = (85, 23.5) if is_forward else (290, 49.0)
    elif "decay=vector" in traits:
        launches, passes = (114, 25.0) if is_forward else (305, 51.0)
    elif "decay=scalar" in traits:
        launches, passes = (47, 12.0) if is_forward else (145, 23.5)
    else:
        launches, passes = (44, 11.0) if is_forward else (90, 18.5)
    if "normalizer" in traits:
        launches, passes = (launches + 6, passes + 1.5) if is_forward else (launches + 30, passes + 4)
    return Eager(segments * launches, passes)


def matrix_one_token(problem: Problem, direction: Direction) -> Eager:
    """Of the step loop, for a call of one token, at sizes whose states outweigh the rest."""
    traits, is_forward = problem.traits, direction == "forward"
    is_scalar, is_delta = "decay=scalar" in traits, "delta" in traits
    decays, beta, normalizer = is_scalar or "decay=vector" in traits, "beta" in traits, "normalizer" in traits
    if is_forward:
        return Eager(9 + 2 * decays + beta + 2 * is_delta + 6 * normalizer, 115 + 30 * is_scalar + 17 * is_delta)
    launches = 25 + 8 * decays + 6 * beta + 8 * is_delta + 28 * normalizer
    return Eager(launches, 190 + 15 * decays + 55 * is_scalar + 55 * is_delta)


def diagonal_chunked(problem: Problem, direction: Direction, chunk: int) -> Eager:
    """Of the chunked backend, all chunks side by side, one step of them after another."""
    is_complex = "complex" in problem.traits
    if direction == "forward":
        return Eager(5 * chunk, 5.8 if is_complex else 4.0)
    return Eager(6 * chunk + 10, 7.6 if is_complex else 4.1)


# Numbers of state times tokens of a segment, of which some five tensors are in memory at once: shorter ones take more
# operations. From so many numbers of state on, chunks side by side save nothing.
SELECTIVE_NUMBERS, SELECTIVE_WIDE = 2**20, 2**14


def selective_segment(problem: Problem) -> tuple[int, int]:
    """Tokens of a segment, and of the chunks that run side by side in it: one chunk where a token is work enough."""
    numbers = max(1, problem["B"] * problem["D"] * problem["N"])
    segment = min(max(1, problem["T"]), max(16, min(1024, SELECTIVE_NUMBERS // numbers)))
    return segment, segment if numbers >= SELECTIVE_WIDE else math.isqrt(segment)


def selective_chunked(problem: Problem, direction: Direction, segment: int, chunk: int) -> Eager:
    """Of the chunked backend, a segment of that many tokens after another; its states are [B, segment, D, N]."""
    tokens, segments = problem["T"], -(-problem["T"] // segment)
    is_whole = chunk >= segment
    # operations of a scan over all tokens, and its passes over the states
    scan, passes = (tokens, 4.0) if is_whole else (4 * chunk * segments + tokens // chunk, 11.4)
    # all passes go over states in float32: in units of the call's bytes
    states = 4 * problem["B"] * tokens * problem["D"] * problem["N"]
    share = states / max(1, floor(replace(problem, dtype="float32"), direction).moved)
    forward, forward_passes = scan + 8 * segments + 6, 4.6 + passes
    if direction == "forward":
        return Eager(forward, share * forward_passes)
    # a gate needs the outputs, and without one the states before each segment are wanted too
    sweeps = 2 if "gate" in problem.traits else 1
    launches = sweeps * forward + 2 * scan + 30 * segments + 20
    return Eager(launches, share * (sweeps * forward_passes + 18.5 + 2 * passes))


def predicted(plan: Plan, cost: Eager, problem: Problem, device: Device, direction: Direction) -> Candidate:
    """The plan beside its cost; where rates are not known, as a CPU's, only for one token, all of whose time is the
    host's."""
    if device.reached_bandwidth is None or device.fp32_rate is None:
        serial = cost.launches * HOST_SECONDS
        return Candidate(plan, Prediction(0.0, 0.0, serial) if problem["T"] == 1 else None)
    wide = replace(problem, dtype="float64" if problem.dtype == "float64" else "float32")
    moved = int(cost.passes * floor(wide, direction).moved)
    # within chunks of 64 the products of a chunkwise form are twice to three times the definition's
    operations = 3 * floor(wide, direction).operations
    memory, arithmetic = moved / device.reached_bandwidth, operations / device.fp32_rate
    prediction = Prediction(memory, arithmetic, cost.launches * HOST_SECONDS, apart=min(memory, arithmetic))
    return Candidate(plan, prediction, moved, operations)
