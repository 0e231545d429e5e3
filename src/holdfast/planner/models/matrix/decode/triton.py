"""One token a sequence: a program a (sequence, head, block of V's columns) reads and writes its part of the state.

On a pool of states, a few tokens: what a program computes between them counts too.
"""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

WIDEST = 512
# of the state a thread; loads of all of them are in flight at once
STATE_REGISTERS = 64


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first. values: columns, the block of V's columns; warps."""
    if direction == "backward":
        return ()
    B, H, K, V = (problem[name] for name in "BHKV")
    rows = 1 << (K - 1).bit_length()
    cells = B * H * K * (V + ("normalizer" in problem.traits))
    # 32 columns are a whole cache line of each row
    found = []
    for columns in (32, 64, 16, 128):
        for warps in (4, 2, 8):
            held = rows * columns / (32 * warps)
            if held > STATE_REGISTERS or (columns > 16 and columns >= 2 * V):
                continue
            grid = Grid(B * H * -(-V // columns), 32 * warps, int(held) * 2 + 40, 1024)
            if grid.fits(device):
                plan = Plan("decode", (("columns", columns), ("warps", warps)))
                found.append(Candidate.of(plan, device, grid, 8 * cells, 6 * cells, tensor_cores=False))
    return ranked(found)


def pool_plan(keys: int, values: int, keys_last: bool, is_wide: bool) -> Plan:
    """The plan on a pool of states, in 32 bits if is_wide, else 16, the same for any number of sequences and tokens.

    Where K is a state's last axis, a row of it is a cache line or two, and one warp has all of a column: it sums over K
    without waiting for others. Where V is, 32 columns are half a line or a whole one, and two warps share them.
    """
    columns, warps = (8 if is_wide else 16, 1) if keys_last else (32, 2)
    columns = min(columns, 1 << (values - 1).bit_length())
    rows = 1 << (keys - 1).bit_length()
    while rows * columns > 32 * warps * STATE_REGISTERS:
        if warps < 8:
            warps *= 2
        else:
            columns //= 2
    # no cell is held by two warps: one of them could read it after the other has written it
    warps = min(warps, max(1, rows * columns // 32))
    return Plan("decode", (("columns", columns), ("warps", warps)))
