"""One allocation for what a replay's launches pass on: small, and no two pieces overlap while both are in use."""

import random
from types import SimpleNamespace

import pytest
import torch

from holdfast.kernels.runtime.replay import arena
from holdfast.kernels.runtime.replay.recording import Allocation, Launch

CPU = torch.device("cpu")


def allocation(slot, count):
    return Allocation(slot, (count,), (1,), torch.float32, CPU)


def launch(*slots, offset=0):
    made = object.__new__(Launch)
    made.parts = [(slot, offset) for slot in slots]
    made.outputs, made.changes = [], True
    return made


def places(steps, number):
    """Where a launch's pointers point, by its number."""
    launches = [step for step in steps if isinstance(step, Launch)]
    return launches[number].parts


def sizes(steps):
    return [step.shape[0] for step in steps if isinstance(step, Allocation)]


def test_what_is_done_with_makes_place():
    steps = [allocation(n, 100) for n in range(1, 5)]
    chain = [step for n, made in enumerate(steps) for step in (made, launch(n, n + 1))] + [launch(4, 9)]
    found = arena.pack_arena(chain, {9})
    # 400 bytes take 512; two are in use at a time
    assert sizes(found) == [1024]
    assert [places(found, n) for n in range(5)] == [
        [(0, 0), (1, 0)], [(1, 0), (1, 512)], [(1, 512), (1, 0)], [(1, 0), (1, 512)], [(1, 512), (9, 0)],
    ]  # fmt: skip


def test_what_others_see_stays_apart():
    operation = SimpleNamespace(reads=[3], outputs=[5], changes=False)
    steps = [*[allocation(n, 10) for n in (1, 2, 3, 4)], launch(0, 1, 2, 3, 4, offset=8), operation]
    found = arena.pack_arena(steps, {4, 5})
    assert sizes(found) == [1024, 10, 10]
    assert places(found, 0) == [(0, 8), (1, 8), (1, 520), (3, 8), (4, 8)]
    assert arena.pack_arena(steps, {1, 4, 5}) == steps


@pytest.mark.parametrize("seed", range(20))
def test_pieces_in_use_at_once_do_not_overlap(seed):
    draw = random.Random(seed)
    count, steps, alive, bytes_of = 0, [], [], {}
    for _ in range(30):
        if draw.random() < 0.5 or not alive:
            count += 1
            steps.append(allocation(count, draw.randint(0, 700)))
            bytes_of[count] = 4 * steps[-1].shape[0]
            alive.append(count)
        else:
            steps.append(launch(*draw.sample(alive, draw.randint(1, len(alive)))))
            if draw.random() < 0.5:
                alive.pop(draw.randrange(len(alive)))
    found = arena.pack_arena(steps, set())
    uses = {}
    for n, step in enumerate(step for step in steps if isinstance(step, Launch)):
        for slot, (_, start) in zip(step.reads, places(found, n), strict=True):
            uses.setdefault(slot, (start, []))[1].append(n)
            assert uses[slot][0] == start
    size = max(sizes(found))
    for slot, (start, at) in uses.items():
        assert start % arena.ALIGNMENT == 0
        assert start + bytes_of[slot] <= size
        for other, (begin, when) in uses.items():
            apart = start + bytes_of[slot] <= begin or begin + bytes_of[other] <= start
            assert slot == other or apart or max(at) < min(when) or max(when) < min(at)
