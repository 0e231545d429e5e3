"""The short convolution: x is read once and y written once; a thread walks tokens of some channels."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked
from holdfast.planner.models.norm.triton import covering

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
    return ranked(every(problem, device, direction))


def every(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """All that fit, in no order."""
    B, T, W = (problem[name] for name in "BTW")
    size = ELEMENT[problem.dtype]
    is_heads = direction == "backward" and "heads" in problem.traits
    for block in _blocks(problem):
        # fewer where the taps of so many channels do not fit registers
        channels = max(1, BYTES // size // (1 if W <= 4 else 2 if W <= 8 else 4))
        if "heads" in problem.traits and W <= 4:
            # a head's sums stay within a warp, which waits for no other
            channels = max(channels, min(block // 32, 8))
        steps = STEPS if channels <= 4 or direction == "forward" else STEPS // 2
        for warps in (4, 2, 1):
            segments = 32 * warps * channels // block
            for length in OF_HEADS if is_heads else LENGTHS:
                rows = segments * length
                if not segments or rows > LONGEST:
                    continue
                tiles = T // rows + problem["N"] if problem.varlen else B * -(-T // rows)
                blocks = tiles * _across(problem, block)
                if length > LENGTHS[-1] and blocks * warps < PER_SM * device.processors:
                    continue
                shared = 1024 + (AHEAD * (2 * size + 4) * steps * segments * block if direction == "backward" else 0)
                grid = Grid(blocks, 32 * warps, _registers(direction, channels, steps, W, size), shared)
                if not grid.fits(device):
                    continue
                values = {"block": block, "segments": segments, "steps": steps, "chunks": length // steps}
                plan = Plan("triton", (*values.items(), ("warps", warps)))
                yield _candidate(plan, problem, device, direction, grid, tiles)


def _blocks(problem: Problem) -> tuple[int, ...]:
    """Channels of a block, the best first."""
    if "heads" in problem.traits:
        return (max(16, covering(problem["K"])),)
    # of fewer than 64, a token's bytes in memory are too few for its rate; 64 where 128 would be partly empty
    D = problem["D"]
    if D <= 32:
        return (32,)
    widths = {block: -(-D // block) * block for block in (128, 256, 64)}
    return tuple(sorted((b for b in widths if b != 64 or widths[64] < widths[128]), key=widths.__getitem__))


def _across(problem: Problem, block: int) -> int:
    """Blocks of channels: one for each head that is normalised."""
    heads, width = (problem["H"], problem["K"]) if "heads" in problem.traits else (0, 0)
    return heads + -(-(problem["D"] - heads * width) // block)


def _candidate(plan: Plan, problem: Problem, device: Device, direction: Direction, grid: Grid, tiles: int) -> Candidate:
    B, T, D, W = (problem[name] for name in "BTDW")
    size, length = ELEMENT[problem.dtype], plan["steps"] * plan["chunks"]
    turn = TURN if direction == "backward" and "heads" in problem.traits else LATENCY
    serial = turn * (1 + plan["chunks"])
    # what is read twice comes from a cache, at some four times the rate
    again = (W - 1) / (4 * length)
    if direction == "forward":
        moved = int(size * B * T * D * (2 + again))
        return Candidate.of(plan, device, grid, moved, B * T * D * (2 * W + 30), False, serial)
    sums = 4 * tiles * D * (W + ("bias" in problem.traits))
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
