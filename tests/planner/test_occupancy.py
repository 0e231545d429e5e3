"""Blocks of an SM, waves, and what they do to predicted times."""

from dataclasses import replace

import pytest

from holdfast.planner import Candidate, Device, Grid, Plan
from holdfast.planner.models import ranked
from holdfast.planner.movement import Prediction

H200, RTX3090 = Device.named("h200"), Device.named("rtx3090")


@pytest.mark.parametrize(
    ("device", "grid", "blocks"),
    [
        # NVIDIA's occupancy calculator: what runs out is threads, blocks, registers, registers, shared memory
        (H200, Grid(1, 256), 8),
        (H200, Grid(1, 32), 32),
        (RTX3090, Grid(1, 32), 16),
        (H200, Grid(1, 256, registers=255), 1),
        (H200, Grid(1, 128, registers=168), 3),
        (H200, Grid(1, 256, shared=100 * 1024), 2),
        (H200, Grid(1, 256, shared=114 * 1024), 1),
        (RTX3090, Grid(1, 256, shared=49 * 1024), 2),
        (RTX3090, Grid(1, 256, shared=50 * 1024), 1),
        # ten warps' registers hold eight warps, since they are handed out to four at a time
        (H200, Grid(1, 32, registers=200), 8),
        (H200, Grid(1, 160, registers=200), 1),
        (RTX3090, Grid(1, 96, registers=136), 4),
        # a warp begun takes a whole one's, and an odd number of registers the next multiple of eight
        (H200, Grid(1, 33, registers=128), 8),
        (H200, Grid(1, 128, registers=129), 3),
        # 1 KiB a block is CUDA's own
        (H200, Grid(1, 32, shared=113 * 1024 + 1), 1),
        (H200, Grid(1, 32, shared=227 * 1024), 1),
        # a block that nothing can hold
        (H200, Grid(1, 1056), 0),
        (H200, Grid(1, 1024, registers=65), 0),
        (H200, Grid(1, 32, registers=256), 0),
        (H200, Grid(1, 32, shared=228 * 1024), 0),
    ],
)
def test_blocks_on_an_sm(device: Device, grid: Grid, blocks: int) -> None:
    assert grid.per_sm(device) == blocks
    assert grid.fits(device) == (blocks > 0)


def test_waves_fill_the_device() -> None:
    grid = Grid(300, 256, shared=200 * 1024)
    assert grid.at_once(H200) == 132
    assert grid.waves(H200) == 3
    assert grid.wave_sizes(H200) == [(2, 132), (1, 36)]
    assert Grid(264, 256, shared=200 * 1024).wave_sizes(H200) == [(2, 132)]
    with pytest.raises(ValueError, match="expected blocks that fit rtx3090"):
        grid.waves(RTX3090)


def test_a_device_of_unknown_limits_cannot_be_filled() -> None:
    with pytest.raises(ValueError, match="limits are known; got 'cpu'"):
        Grid(1, 32).per_sm(Device.named("cpu"))


@pytest.mark.parametrize(
    "limit",
    [
        "threads_per_sm",
        "threads_per_block",
        "shared_per_sm",
        "shared_per_block",
        "registers_per_sm",
        "registers_per_thread",
    ],
)
def test_one_unknown_limit_is_told_too(limit: str) -> None:
    """Taken for 0, it would say in silence that nothing fits."""
    with pytest.raises(ValueError, match="limits are known; got 'h200'"):
        Grid(1, 32).per_sm(replace(H200, **{limit: None}))


def test_a_full_device_is_bound_as_a_whole_and_few_blocks_by_their_sms() -> None:
    full, few = Grid(132, 256, shared=200 * 1024), Grid(8, 256, shared=200 * 1024)
    whole = Prediction.of(H200, 1e9, 1e12)
    assert Prediction.of(H200, 1e9, 1e12, full).memory == pytest.approx(whole.memory)
    assert Prediction.of(H200, 1e9, 1e12, full).arithmetic == pytest.approx(whole.arithmetic)
    assert Prediction.of(H200, 1e9, 0, few).memory == pytest.approx(1e9 / 8 / H200.sm_bandwidth)
    assert Prediction.of(H200, 0, 1e12, few).arithmetic == pytest.approx(whole.arithmetic * 132 / 8)


def test_a_last_wave_that_is_almost_empty_costs() -> None:
    """133 equal blocks on 132 SMs take two turns of arithmetic and of the serial chain."""
    one, two = Grid(132, 256, shared=200 * 1024), Grid(133, 256, shared=200 * 1024)
    ops = 1e12
    first = Prediction.of(H200, 0, ops, one, serial=1e-3)
    second = Prediction.of(H200, 0, ops * 133 / 132, two, serial=1e-3)
    assert second.arithmetic == pytest.approx(2 * first.arithmetic)
    assert (first.serial, second.serial) == pytest.approx((1e-3, 2e-3))


def test_no_blocks_cost_a_launch() -> None:
    assert Prediction.of(H200, 0, 0, Grid(0, 256)).seconds == pytest.approx(2e-6)


def test_launches_one_after_another_add_up() -> None:
    """One bound by memory and one by arithmetic do not overlap with each other."""
    memory, arithmetic = Prediction.of(H200, 1e9, 0), Prediction.of(H200, 0, 1e12)
    both = memory.then(arithmetic)
    assert both.seconds == pytest.approx(memory.seconds + arithmetic.seconds)
    assert both.then(memory).seconds == pytest.approx(2 * memory.seconds + arithmetic.seconds)
    assert both.apart == pytest.approx(min(memory.memory, arithmetic.arithmetic))
    assert both.launch == pytest.approx(4e-6)


def test_a_candidate_of_two_launches_carries_both_costs_and_the_second_grid() -> None:
    plan = Plan("triton", (("chunk", 64),))
    first = Candidate.of(plan, H200, Grid(512, 128), 10**6, 10**9)
    second = Candidate.of(plan, H200, Grid(128, 256, 168, 4096), 2 * 10**6, 10**9)
    both = second.after(first)
    assert both.seconds == pytest.approx(first.seconds + second.seconds)
    assert (both.moved, both.operations) == (3 * 10**6, 2 * 10**9)
    assert (both.blocks, both.registers, both.shared) == (128, 168, 4096)


def test_ranked_candidates_come_fastest_first_and_once() -> None:
    def made(chunk: int, seconds: float) -> Candidate:
        return Candidate(Plan("triton", (("chunk", chunk),)), Prediction(seconds, 0))

    given = [made(1, 3.0), made(2, 1.0), made(3, 2.0), made(4, 1.0), made(2, 0.5)]
    assert [each.plan["chunk"] for each in ranked(given)] == [2, 4, 3, 1]
    assert [each.plan["chunk"] for each in ranked(given, keep=2)] == [2, 4]
    assert ranked([]) == ()
