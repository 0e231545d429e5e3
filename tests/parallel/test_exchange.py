"""What ranks exchange: states only, however long the text; clear errors where they differ or one is gone."""

import time

import pytest

from holdfast.recurrences import RECURRENCES
from parallel_support import exchange_cases as cases
from parallel_support.pool import Pool

LINEAR = [name for name, recurrence in RECURRENCES.items() if recurrence.family in ("matrix", "diagonal")]
# float32 numbers of B 2, H 4, K 3, V 5, D 6
STATE = {"mlstm": 2 * 4 * (3 * 5 + 3 + 1), "rglru": 2 * 6, "rotlru": 2 * 6, "hgrn": 2 * 6}
TRANSITION = {"delta_rule": 2 * 4 * 3 * 3, "gated_delta_rule": 2 * 4 * 3 * 3}


@pytest.mark.parametrize("name", LINEAR)
def test_a_pass_exchanges_states_once_whatever_the_length(ranks, name):
    short, long = (ranks.run(cases.traffic_of_op, name, length) for length in (3, 100))
    assert short == long
    assert len(set(short)) == 1
    (forward, backward), size = short[0], ranks.size
    state = 4 * STATE.get(name, 2 * 4 * 3 * 5)
    transition = 4 * TRANSITION.get(name, 0)
    assert size * (state + transition) <= forward[0] <= size * (2 * state + transition)
    # the gradients of all that was sent, and nothing about sizes
    assert backward == (forward[0], 0, 1)
    assert forward[1:] == (size * 8 * 8, 2)


def test_a_mixer_exchanges_states_and_the_convolutions_inputs(two_ranks):
    short, long = (two_ranks.run(cases.traffic_of_model, "GatedDeltaNet", length)[0] for length in (4, 64))
    assert short == long
    # heads of K 4, V 8; 8 bytes; both passes; B 2
    state, transition, taps = 4 * 4 * 8, 4 * 4 * 4, 3 * (2 * 2 * 4 + 4 * 8) + 1
    assert short == 2 * 8 * 2 * 2 * (state + transition + taps)


def test_what_differs_between_ranks_is_named(two_ranks):
    two_ranks.run(cases.refuses_what_differs)


def test_groups_that_cannot_serve_are_named(two_ranks):
    two_ranks.run(cases.refuses_groups)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_killed_rank_ends_the_others_with_one_message(when):
    # a rank may wait for another that has failed and not for the one that was killed
    pool = Pool(3, ends=True)
    start = time.monotonic()
    try:
        *left, killed = pool.outcomes(cases.dies, when)
    finally:
        pool.close()
    assert killed == (False, "gone")
    assert time.monotonic() - start < 45
    for rank, (good, said) in enumerate(left):
        assert not good
        assert f"RuntimeError: simple_gla: rank {rank} of 3 could not exchange" in said
        assert "one of them has ended" in said


def test_a_rank_that_waits_elsewhere_runs_into_the_groups_timeout():
    pool = Pool(2, patience=3)
    try:
        (good, said), (other, _) = pool.outcomes(cases.stays_away)
    finally:
        pool.close()
    assert other
    assert not good
    assert "RuntimeError: simple_gla: rank 0 of 2 could not exchange sizes with the others" in said
