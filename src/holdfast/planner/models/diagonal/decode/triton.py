"""A few tokens on a pool of states: a program a sequence and block of channels, each of which is on its own."""

from holdfast.planner import Plan

# four neighbours a thread of 16 bits or 32; a pair counts as one
CHANNELS, WARPS = 512, 4


def pool_plan(channels: int) -> Plan:
    """The plan, the same for any number of sequences and tokens. channels: of a state, or pairs of them."""
    block = min(CHANNELS, 1 << (channels - 1).bit_length())
    return Plan("decode", (("channels", block), ("warps", max(1, block * WARPS // CHANNELS))))
