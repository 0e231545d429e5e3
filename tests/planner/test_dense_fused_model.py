"""The model of the fused dense kernels: what it plans, what it refuses, and how near it is to what was measured."""

import pytest

from holdfast.planner import Device, Problem
from holdfast.planner.models.dense import cuda as dense_fused

H200, A100 = Device.named("h200"), Device.named("a100")
SIZES = {"lstm": (2, 4, 4, 4), "gru": (1, 4, 3, 3), "elman": (1, 1, 1, 1), "slstm": (4, 4, 4, 4)}


def problem(name, B, H, D, T=1024, grad=True):
    S, G, Gi, Gr = SIZES[name]
    sizes = {"B": B, "T": T, "H": H, "D": D, "S": S, "G": G, "Gi": Gi, "Gr": Gr}
    return Problem.of(name, "dense", "bfloat16", sizes, {"needs_grad": grad})


def best(name, B, H, D, direction="forward", device=H200):
    return dense_fused.candidates(problem(name, B, H, D), device, direction)[0]


# ms on an H200: events around a pass, L2 flushed, T 1024, bfloat16; forward stores for the backward pass, which is
# without the product that forms dR
MEASURED = [
    ("lstm", 1, 12, 64, 0.199, 0.347),
    ("lstm", 16, 12, 64, 0.210, 0.334),
    ("lstm", 32, 12, 64, 0.292, 0.500),
    ("lstm", 64, 12, 64, 0.410, 0.600),
    ("lstm", 128, 12, 64, 0.791, 1.187),
    ("slstm", 16, 12, 64, 0.302, 0.52),
    ("lstm", 16, 1, 128, 0.414, 0.678),
    ("lstm", 16, 1, 256, 1.160, 1.512),
    ("lstm", 16, 1, 512, 1.299, 1.754),
    ("lstm", 1, 1, 768, 1.279, 1.619),
    ("lstm", 8, 1, 768, 1.400, 1.946),
    ("lstm", 16, 1, 768, 1.347, 2.248),
    ("lstm", 32, 1, 768, 1.678, 2.783),
    ("lstm", 64, 1, 768, 2.550, 3.922),
    ("lstm", 128, 1, 768, 4.485, 6.853),
    ("lstm", 16, 1, 1024, 1.897, 3.321),
    ("lstm", 16, 1, 1536, 2.572, 5.129),
    ("lstm", 16, 1, 2048, 3.928, 6.967),
    ("gru", 16, 1, 768, 1.469, 2.071),
    ("elman", 16, 1, 768, 0.945, 1.371),
    ("elman", 64, 1, 768, 1.516, 2.172),
]
# inference, H 12, D 64: ms with so many blocks of four sequences a head, the rest in blocks of two
EITHER = [
    ("lstm", 16, {0: 0.174, 4: 0.232}),
    ("lstm", 32, {0: 0.228, 8: 0.226}),
    ("lstm", 64, {0: 0.348, 10: 0.311, 11: 0.282, 16: 0.310}),
    ("lstm", 128, {0: 0.651, 11: 0.679, 22: 0.537, 31: 0.440, 32: 0.453}),
    ("lstm", 256, {62: 0.836, 64: 0.856}),
]


@pytest.mark.parametrize(("name", "B", "measured"), EITHER)
def test_the_fastest_blocks_are_chosen(name, B, measured):
    what = problem(name, B, 12, 64, grad=False)
    fours = dense_fused.candidates(what, H200, "forward")[0].plan["fours"]
    # where they are within 5% of one another, any
    assert measured[fours] <= 1.05 * min(measured.values())


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
    for name in ("lstm", "elman"):
        plan = best(name, B, H, 256, device=device).plan
        assert plan["blocks"] * -(-B // plan["rows"]) * plan["heads"] <= device.sms
        assert plan["rows"] % 8 == 0 or (name == "elman" and plan["rows"] < 8)


def test_machine_code_is_the_same_for_every_batch():
    """Of a head in one block it is that of blocks of two and of four sequences."""
    spread, stages = ("warps", "in_registers", "at_once"), ("turns", "stages_2", "stages_4")
    for D, keys in ((64, {"forward": stages, "backward": stages[:2]}), (768, {"forward": spread, "backward": spread})):
        for direction, names in keys.items():
            plans = [best("lstm", B, 12 if D == 64 else 1, D, direction).plan for B in (1, 8, 16, 64, 128)]
            assert len({tuple(plan[name] for name in names) for plan in plans}) == 1
