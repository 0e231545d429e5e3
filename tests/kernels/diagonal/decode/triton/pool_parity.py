"""The kernel of pools of vectors, called as its backend is, against the step loop: interpreted and on a GPU."""

import torch

import layouts
from holdfast.kernels.diagonal.decode.torch.update import PooledSteps
from holdfast.kernels.diagonal.decode.triton.backend import TritonSteps
from holdfast.kernels.slots import Slots
from holdfast.planner.models.diagonal.decode.triton import pool_plan
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from kernels.matrix.decode.triton.pool_parity import SLOTS, places
from parity import relative_error

ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
OPS = ("rglru", "hgrn", "rotlru")


def run(backend, call, states, slots):
    """slots: as of Slots. The outputs; states are updated."""
    return backend.update(pool_plan(call.a.shape[2]), call, states, Slots(*slots))


def check(name, tokens, channels, dtype=torch.float32, wide=torch.float32, device="cpu", views=None):
    """views: of which kind of layouts.view_of the first tensor is, where they are views."""
    arguments = RECURRENCES[name].example(Draw(0, dtype, device), Sizes(B=3, T=tokens, D=channels))
    arguments.pop("initial_state")
    call, _ = RECURRENCES[name].map(**arguments)
    # with room between states
    states = Draw(1, torch.float32, device).normal(SLOTS, channels + 6).to(wide)[:, :channels]
    if views is not None:
        call = layouts.views(call, views)
    worst = 0.0
    for slots in places(tokens, device):
        mine, right = states.clone(), states.clone()
        h = run(TritonSteps(), call, mine, slots)
        y = run(PooledSteps(), call, right, slots)
        # a slot that was not written is what it was
        same = (right == states).all(1)
        assert 0 < same.sum() < SLOTS
        assert torch.equal(mine[same], states[same]), (name, slots)
        errors = relative_error(h.double(), y.double()), relative_error(mine.double(), right.double())
        assert errors[0] <= max(ROUNDING[dtype], ROUNDING[wide]), (name, tokens, errors)
        assert errors[1] <= ROUNDING[wide], (name, tokens, errors)
        worst = max(worst, *errors)
        if slots[0] is slots[1]:
            several(call, states, slots[0])
    print(name, tokens, dtype, wide, f"{worst:.0e}")


def several(call, states, slots):
    """Several tokens are as many calls of one, bit for bit, and neighbours do not matter."""
    mine, again, alone = states.clone(), states.clone(), states.clone()
    h = run(TritonSteps(), call, mine, (slots, slots, None))

    def cut(axis, n):
        return type(call)(*(None if x is None else x.narrow(axis, n, 1) for x in call[:3]), log=call.log)

    steps = [run(TritonSteps(), cut(1, n), again, (slots, slots, None)) for n in range(call.x.shape[1])]
    assert torch.equal(torch.cat(steps, 1), h)
    assert torch.equal(again, mine)
    rows = [run(TritonSteps(), cut(0, n), alone, (at, at, None)) for n, at in enumerate(slots.split(1))]
    assert torch.equal(torch.cat(rows), h)
    assert torch.equal(alone, mine)


def interpreted():
    for name in OPS:
        check(name, 3, 70)
        # of several blocks
        check(name, 2, 1200, views=0)
        check(name, 1, 2, views=1)
        check(name, 3, 70, torch.bfloat16, torch.bfloat16, views=2)
        check(name, 3, 24, torch.float16, torch.float16)
