"""mLSTM on a pool of states, called as its backend is, against the step loop in PyTorch: interpreted and on a GPU."""

import torch

import layouts
from holdfast.kernels.matrix.decode.call import NormalizedPool, NormalizedTokens
from holdfast.kernels.matrix.decode.torch.update import PooledReference
from holdfast.kernels.matrix.decode.triton.backend import TritonPool
from holdfast.kernels.slots import Slots
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from kernels.matrix.decode.triton.pool_parity import PLAN, SLOTS, index, places
from parity import relative_error

ROUNDING = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
EXP, SIGMOID, PLAIN = (True, True), (False, True), (False, False)


def example(tokens, dtype, wide, keys_last, device, gating, **sizes):
    """A call of three sequences, and pools with room between their states. gating: exponential, and normalize."""
    draw, more = Draw(0, dtype, device), Draw(1, torch.float32, device)
    sizes = Sizes(**({"B": 3, "T": tokens, "H": 4, "Hq": 2, "K": 24, "V": 20} | sizes))
    given = RECURRENCES["mlstm"].example(draw, sizes)
    call = NormalizedTokens(*(given[name] for name in "qkvif"), sizes.K**-0.5, 1e-6, *gating)
    shape = (sizes.V, sizes.K) if keys_last else (sizes.K, sizes.V)
    C, n = (more.normal(SLOTS, 2 * sizes.H, *x).to(wide)[:, : sizes.H] for x in (shape, (sizes.K,)))
    return call, (C, n, more.normal(SLOTS, 2 * sizes.H)[:, : sizes.H])


def copied(states):
    return [x.clone() for x in states]


def run(backend, call, states, slots, keys_last):
    """slots: as of Slots. The outputs; states are updated."""
    return backend.update_normalized(PLAN, call, NormalizedPool(*states, Slots(*slots), keys_last))


def check(
    tokens, dtype=torch.float32, wide=torch.float32, keys_last=False, device="cpu", views=None, gating=EXP, **sizes
):
    """views: of which kind of layouts.view_of the first tensor is, where they are views."""
    call, states = example(tokens, dtype, wide, keys_last, device, gating, **sizes)
    if views is not None:
        call = layouts.views(call, views)
    worst = 0.0
    for slots in places(tokens, device):
        mine, right = copied(states), copied(states)
        o = run(TritonPool(), call, mine, slots, keys_last)
        y = run(PooledReference(), call, right, slots, keys_last)
        # a slot that was not written is what it was
        same = (right[0] == states[0]).flatten(1).all(1)
        assert 0 < same.sum() < SLOTS
        for x, before in zip(mine, states, strict=True):
            assert torch.equal(x[same], before[same])
        errors = [relative_error(x.double(), z.double()) for x, z in zip((o, *mine), (y, *right), strict=True)]
        assert errors[0] <= max(ROUNDING[dtype], ROUNDING[wide]), (tokens, gating, errors)
        assert max(errors[1:3]) <= ROUNDING[wide], (tokens, gating, errors)
        assert errors[3] <= ROUNDING[torch.float32], (tokens, gating, errors)
        worst = max(worst, *errors)
        if slots[0] is slots[1]:
            several(call, states, slots[0], keys_last)
    print("mlstm", tokens, dtype, wide, gating, f"{worst:.0e}")


def several(call, states, slots, keys_last):
    """Several tokens are as many calls of one, bit for bit, and neighbours do not matter."""
    mine, again, alone = copied(states), copied(states), copied(states)
    o = run(TritonPool(), call, mine, (slots, slots, None), keys_last)

    def cut(axis, n):
        return NormalizedTokens(*(x.narrow(axis, n, 1) for x in call[:5]), *call[5:])

    tokens = range(call.v.shape[1])
    steps = [run(TritonPool(), cut(1, n), again, (slots, slots, None), keys_last) for n in tokens]
    assert torch.equal(torch.cat(steps, 1), o)
    rows = [run(TritonPool(), cut(0, n), alone, (at, at, None), keys_last) for n, at in enumerate(slots.split(1))]
    assert torch.equal(torch.cat(rows), o)
    for each in zip(mine, again, alone, strict=True):
        assert torch.equal(each[0], each[1])
        assert torch.equal(each[0], each[2])


def check_extremes(device="cpu"):
    """Gates and an m far from 0 are exact: decays are differences of large numbers, and -inf is a state of nothing."""
    call, states = example(3, torch.float32, torch.float32, False, device, EXP)
    large = call._replace(i=call.i + 3000.0, f=call.f - 40.0)
    states[2].add_(3000.0)
    states[2][0, 0] = -torch.inf
    mine, right = copied(states), [x.double() for x in states]
    slots = (index(5, 0, 2, device=device),) * 2 + (None,)
    o = run(TritonPool(), large, mine, slots, False)
    exact = NormalizedTokens(*(x.double() for x in large[:5]), *large[5:])
    y = run(PooledReference(), exact, right, slots, False)
    # m is stored in float32: at 3000 a unit is known to 2^-13
    assert relative_error(o.double(), y) <= 2.0**-12
    assert relative_error(mine[0].double(), right[0]) <= 2.0**-12
    read = [5, 0, 2]
    assert relative_error(mine[2][read].double(), right[2][read]) <= 1e-7


def interpreted():
    check(2, keys_last=True)
    check(2, gating=SIGMOID, H=2, Hq=1, K=8, V=6)
    check(2, gating=PLAIN, H=2, Hq=1, K=8, V=6)
    check(3, torch.bfloat16, torch.bfloat16, views=0, H=2, K=8, V=6)
    check(1, torch.float16, torch.float16, keys_last=True, views=1, H=2, K=8, V=6)
    check_extremes()


def interpreted_further():
    for gating in (EXP, SIGMOID, PLAIN):
        for keys_last in (False, True):
            check(3, keys_last=keys_last, gating=gating, views=2)
