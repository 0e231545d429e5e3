"""The kernel of pools, called as its backend is, against the step loop in PyTorch: interpreted and on a GPU."""

import torch

import layouts
from holdfast.kernels.matrix.decode.call import Pool
from holdfast.kernels.matrix.decode.torch.update import PooledReference
from holdfast.kernels.matrix.decode.triton.backend import TritonPool
from holdfast.kernels.slots import Slots
from holdfast.planner import Plan
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import relative_error

OPS = ("simple_gla", "gla", "ssd", "delta_rule", "gated_delta_rule", "kda", "gdn2", "comba")
PLAN = Plan("decode", (("columns", 16), ("warps", 4)))
SLOTS = 6


def example(name, tokens, dtype=torch.float32, wide=torch.float32, keys_last=False, device="cpu", **sizes):
    """A call of three sequences, and a pool with room between its states."""
    draw = Draw(0, dtype, device)
    sizes = Sizes(**({"B": 3, "T": tokens, "H": 4, "Hq": 2, "K": 24, "V": 20} | sizes))
    arguments = RECURRENCES[name].example(draw, sizes)
    arguments.pop("initial_state", None)
    call, _ = RECURRENCES[name].map(**arguments)
    shape = (sizes.V, sizes.K) if keys_last else (sizes.K, sizes.V)
    states = Draw(1, torch.float32, device).normal(SLOTS, 2 * sizes.H, *shape).to(wide)[:, : sizes.H]
    return call, states


def index(*numbers, device="cpu"):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def places(tokens, device="cpu"):
    """(slots, where states go, after how many tokens): in place, padded, elsewhere, in part, after each token."""
    each = torch.full((3, tokens), -1, dtype=torch.int32, device=device)
    each[0, -1], each[2, 0] = 3, 1
    at = index(5, 0, 2, device=device)
    yield at, at, None
    yield index(-1, 4, SLOTS, device=device), index(1, 4, 2, device=device), None
    yield at, index(3, -1, SLOTS, device=device), None
    yield at, index(3, 0, 4, device=device), index(0, tokens, 1, device=device)
    yield at, each, None


def check(name, tokens, dtype=torch.float32, wide=torch.float32, keys_last=False, device="cpu", views=None, **sizes):
    """views: of which kind of layouts.view_of the first tensor is, where they are views."""
    call, states = example(name, tokens, dtype, wide, keys_last, device, **sizes)
    if views is not None:
        call = layouts.views(call, views)
    worst = 0.0
    for slots, following, accepted in places(tokens, device):
        mine, right = states.clone(), states.clone()
        o = TritonPool().update(PLAN, call, Pool(mine, Slots(slots, following, accepted), keys_last))
        y = PooledReference().update(PLAN, call, Pool(right, Slots(slots, following, accepted), keys_last))
        # a slot that was not written is what it was
        same = (right == states).flatten(1).all(1)
        assert torch.equal(mine[same], states[same]), (name, slots, following)
        errors = relative_error(o.double(), y.double()), relative_error(mine.double(), right.double())
        rounding = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
        assert errors[0] <= max(rounding[dtype], rounding[wide]), (name, tokens, errors)
        assert errors[1] <= rounding[wide], (name, tokens, errors)
        worst = max(worst, *errors)
        if slots is following:
            several(call, states, slots, keys_last)
    print(name, tokens, dtype, wide, f"{worst:.0e}")


def several(call, states, slots, keys_last):
    """Several tokens are as many calls of one, bit for bit, and neighbours do not matter."""
    mine, again, alone = states.clone(), states.clone(), states.clone()
    backend = TritonPool()
    o = backend.update(PLAN, call, Pool(mine, Slots(slots, slots, None), keys_last))

    def cut(axis, n):
        tensors = [None if x is None else x.narrow(axis, n, 1) for x in call[:8]]
        return type(call)(*tensors, *call[8:])

    in_place = Pool(again, Slots(slots, slots, None), keys_last)
    steps = [backend.update(PLAN, cut(1, n), in_place) for n in range(call.v.shape[1])]
    assert torch.equal(torch.cat(steps, 1), o)
    assert torch.equal(again, mine)
    of_rows = [Pool(alone, Slots(at, at, None), keys_last) for at in slots.split(1)]
    rows = [backend.update(PLAN, cut(0, n), pool) for n, pool in enumerate(of_rows)]
    assert torch.equal(torch.cat(rows), o)
    assert torch.equal(alone, mine)


def interpreted():
    check("kda", 2, keys_last=True)
    for name in ("gdn2", "comba"):
        check(name, 2, H=2, Hq=1, K=8, V=6)
    check("gated_delta_rule", 3, torch.bfloat16, torch.bfloat16, views=0, H=2, K=8, V=6)
    check("gla", 1, torch.float16, torch.float16, keys_last=True, views=1, H=2, K=8, V=6)


def interpreted_further():
    for name in OPS:
        check(name, 2)
