"""The short convolution: x is read once and y written once; a thread walks tokens of some channels."""

from collections.abc import Sequence

from holdfast.planner import Candidate, Device, Direction, Grid, Problem
from holdfast.planner.constrint import Expression, Variable, ceil_div, lookup, maximum
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, covering, planned

# Offsets inside a tile are 32-bit: of at most LONGEST tokens.
MOST_CHANNELS = 2**20
LONGEST = 2048
# A head that is normalised is one block's.
WIDEST_HEAD = 512
# Weights and the last inputs of each channel are in registers.
MOST_TAPS = 16
# Tokens that a thread takes at once, bytes of each, and how many it walks. With 16 bytes it would have 245 registers
# backward, and an SM 8 warps, whose latencies nothing hides.
STEPS = 4
BYTES = 8
LENGTHS = (64, 32, 128, 16, 8)
# Channels of a block: the last of many where the first would be partly empty; and of few.
BLOCKS, NARROW = (128, 256, 64), 32
# Backward with heads, whose time is that of instructions, whole waves count more than bytes read twice.
OF_HEADS = (48, *LENGTHS)
# Warps for each SM, at least, before threads walk further: more than a wave and a half, so that SMs end at about one
# time.
PER_SM = 24
# Seconds until what was read is there; backward with heads, what a wave takes for STEPS tokens while the next ones are
# copied. Estimates, of an H200 and of an H100.
LATENCY, TURN = 0.8e-6, 2.4e-6
# Tiles of x, of y's gradient and of the last state's that are on their way, backward.
AHEAD = 2
# Channels of a program that adds up what tiles have summed.
REDUCED = 32
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: channels a block, segments of a tile, tokens read ahead, times that a thread does so, warps."""
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    T, W, size, backward = problem["T"], problem["W"], ELEMENT[problem.dtype], direction == "backward"
    model, channels = KernelModel(device), _channels(problem)
    block = model.variable("block", _blocks(problem), "given")
    if problem["D"] > NARROW and "heads" not in problem.traits:
        partly_empty = _padded(problem["D"], BLOCKS[-1]) < _padded(problem["D"], BLOCKS[0])
        model.add(block > (0 if partly_empty else BLOCKS[-1]), "narrow blocks where wide ones would be partly empty")
    warps = model.variable("warps", (1, 2, 4), "largest")
    length = model.variable("length", OF_HEADS if backward and "heads" in problem.traits else LENGTHS, "given")
    segments = model.let("segments", 32 * warps * channels // block)
    rows = model.let("rows", segments * length)
    model.add(segments >= 1, "a tile has a segment")
    model.add(rows <= LONGEST, "tokens of a tile")
    a_tile = maximum(rows, 1)
    tiles = T // a_tile + problem["N"] if problem.varlen else problem["B"] * ceil_div(T, a_tile)
    blocks = model.let("blocks", model.let("tiles", tiles) * _across(problem, block))
    least = lookup(length, dict.fromkeys(LENGTHS + OF_HEADS, PER_SM * device.processors) | {LENGTHS[-1]: 0})
    model.add(blocks * warps >= least, "warps for the device before a thread walks further")
    steps = STEPS if channels <= 4 or not backward else STEPS // 2
    model.let("chunks", length // model.let("steps", steps))
    shared = 1024 + (AHEAD * (2 * size + 4) * steps * segments * block if backward else 0)
    model.block(warps, _registers(direction, channels, steps, W, size), shared)
    return model


def _channels(problem: Problem) -> int:
    """Of a thread: fewer where the taps of so many do not fit registers."""
    W = problem["W"]
    channels = max(1, BYTES // ELEMENT[problem.dtype] // (1 if W <= 4 else 2 if W <= 8 else 4))
    if "heads" in problem.traits and W <= 4:
        # a head's sums stay within a warp, which waits for no other
        channels = max(channels, min(_head(problem) // 32, 8))
    return channels


def _head(problem: Problem) -> int:
    """Channels of a block that normalises a head."""
    return max(16, covering(problem["K"]))


def _padded(channels: int, block: int) -> int:
    return -(-channels // block) * block


def _blocks(problem: Problem) -> Sequence[int]:
    """Channels of a block, the best first: of fewer than 64, a token's bytes in memory are too few for its rate."""
    if "heads" in problem.traits:
        return (_head(problem),)
    if problem["D"] <= NARROW:
        return (NARROW,)
    return sorted(BLOCKS, key=lambda block: _padded(problem["D"], block))


def _across(problem: Problem, block: Variable) -> Expression:
    """Blocks of channels: one for each head that is normalised."""
    heads, width = (problem["H"], problem["K"]) if "heads" in problem.traits else (0, 0)
    return heads + ceil_div(problem["D"] - heads * width, block)


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, T, D, W = (problem[name] for name in "BTDW")
    plan, grid = values.plan("triton", "block", "segments", "steps", "chunks", "warps"), values.grid(values["blocks"])
    size, length = ELEMENT[problem.dtype], values["steps"] * values["chunks"]
    turn = TURN if direction == "backward" and "heads" in problem.traits else LATENCY
    serial = turn * (1 + values["chunks"])
    # what is read twice comes from a cache, at some four times the rate
    again = (W - 1) / (4 * length)
    if direction == "forward":
        moved = int(size * B * T * D * (2 + again))
        return Candidate.of(plan, device, grid, moved, B * T * D * (2 * W + 30), False, serial)
    sums = 4 * values["tiles"] * D * (W + ("bias" in problem.traits))
    moved = int(size * B * T * D * (3 + 3 * again)) + sums
    last = Candidate.of(plan, device, Grid(-(-D // REDUCED) * (W + 1), 128, 40, 1024), sums, sums // 4, False)
    return Candidate.of(plan, device, grid, moved, B * T * D * (6 * W + 45), False, serial).after(last)


def _registers(direction: Direction, channels: int, steps: int, W: int, size: int) -> int:
    """Taps and the last inputs, gradients and sums of each channel, what is read ahead, and addresses.

    As ptxas allots them for sm_90 with W 4 and no states, and a little more.
    """
    if direction == "forward":
        return min(255, 40 + 2 * W * channels + 4 * steps)
    return min(255, 56 + (4 * W + 2 * (size - 1)) * channels)
