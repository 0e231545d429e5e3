"""A few tokens on a pool of states: a program a sequence and block of channels, each of which is on its own."""

from holdfast.planner import Plan
from holdfast.planner.constrint import Model, maximum
from holdfast.planner.kernel_model import covering, powers_of_two

# four neighbours a thread of 16 bits or 32; a pair counts as one
CHANNELS, WARPS = 512, 4


def pool_plan(channels: int) -> Plan:
    """The plan, the same for any number of sequences and tokens. channels: of a state, or pairs of them."""
    model = Model()
    block = model.variable("channels", powers_of_two(1, CHANNELS), "largest")
    warps = model.variable("warps", powers_of_two(1, WARPS))
    model.add(block <= covering(channels), "channels of a block, of a state")
    model.add(warps == maximum(1, block * WARPS // CHANNELS), "channels of a thread")
    found = model.first()
    return Plan("decode", (("channels", found["channels"]), ("warps", found["warps"])))
