"""The model of the fused dense kernels: what it plans, what it refuses, and how near it is to what was measured."""

import pytest

from holdfast.planner import Device, Problem
from holdfast.planner.models import dense_fused

H200, A100 = Device.named("h200"), Device.named("a100")
SIZES = {"lstm": (2, 4, 4, 4), "gru": (1, 4, 3, 3), "elman": (1, 1, 1, 1), "slstm": (4, 4, 4, 4)}


def problem(name, B, H, D, T=1024):
    S, G, Gi, Gr = SIZES[name]
    sizes = {"B": B, "T": T, "H": H, "D": D, "S": S, "G": G, "Gi": Gi, "Gr": Gr}
    return Problem.of(name, "dense", "bfloat16", sizes, {"needs_grad": True})


def best(name, B, H, D, direction="forward", device=H200):
    return dense_fused.candidates(problem(name, B, H, D), device, direction)[0]


# ms on an H200: events around a pass, L2 flushed, T 1024, bfloat16; forward stores for the backward pass
MEASURED = [
    ("lstm", 1, 12, 64, 0.222, 0.359),
    ("lstm", 16, 12, 64, 0.215, 0.435),
    ("lstm", 32, 12, 64, 0.273, 0.671),
    ("lstm", 64, 12, 64, 0.391, 0.907),
    ("lstm", 128, 12, 64, 0.770, 1.779),
    ("slstm", 16, 12, 64, 0.349, 0.563),
    ("lstm", 16, 1, 128, 0.541, 0.952),
    ("lstm", 1, 1, 768, 1.127, 1.536),
    ("lstm", 16, 1, 768, 1.534, 2.799),
    ("lstm", 64, 1, 768, 3.535, 5.089),
    ("lstm", 16, 1, 2048, 4.624, 7.999),
    ("gru", 16, 1, 768, 1.582, 2.493),
]


@pytest.mark.parametrize(("name", "B", "H", "D", "forward", "backward"), MEASURED)
def test_predictions_are_within_a_factor_of_1_6(name, B, H, D, forward, backward):
    for direction, measured in (("forward", forward), ("backward", backward)):
        predicted = best(name, B, H, D, direction).seconds * 1e3
        assert measured / 1.6 <= predicted <= measured * 1.6, direction


@pytest.mark.parametrize("name", SIZES)
def test_the_head_dimension_decides_where_a_head_lives(name):
    assert best(name, 16, 12, 64).plan["blocks"] == 1
    assert best(name, 16, 1, 768).plan["blocks"] == (24 if name == "elman" else 48)
    for direction in ("forward", "backward"):
        plan = best(name, 16, 1, 2688, direction).plan
        assert plan["blocks"] <= 132
        # one gate's weights fit the chip, three or four do not: the rest is read from the cache
        assert dense_fused.streams(plan, 2688) == (name != "elman")
        wider = dense_fused.candidates(problem(name, 16, 1, 3072), H200, direction)
        assert all(not dense_fused.streams(candidate.plan, 3072) for candidate in wider)
        assert (wider == ()) == (name != "elman")
        assert dense_fused.candidates(problem("lstm", 16, 1, 2688), A100, direction) == ()


@pytest.mark.parametrize("B", [1, 8, 9, 16, 64, 100, 512])
@pytest.mark.parametrize("H", [1, 2, 12])
@pytest.mark.parametrize("device", [H200, A100], ids=["h200", "a100"])
def test_blocks_that_wait_for_one_another_fit_all_at_once(B, H, device):
    plan = best("lstm", B, H, 256, device=device).plan
    assert plan["blocks"] * plan["ranges"] * plan["heads"] <= device.sms
    eights = -(-B // 8)
    tiles = -(-eights // plan["ranges"])
    assert (plan["ranges"] - 1) * tiles < eights <= plan["ranges"] * tiles


def test_machine_code_is_the_same_for_every_batch():
    for D, keys in ((64, ("stages",)), (768, ("warps", "in_registers", "at_once"))):
        for direction in ("forward", "backward"):
            plans = [best("lstm", B, 1, D, direction).plan for B in (1, 8, 16, 64, 128)]
            assert len({tuple(plan[key] for key in keys) for plan in plans}) == 1
