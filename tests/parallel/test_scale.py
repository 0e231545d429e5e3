"""The model of scale beside what ranks send: the bytes of states, of shards and of channels."""

import pytest

from holdfast.cli.scale import message_bytes, rows_exchanged
from holdfast.parallel import Sections
from holdfast.planner.layouts import activation_bytes, reduced, state_bytes, weight_bytes
from holdfast.recurrences import RECURRENCES, Sizes
from parallel_support import exchange_cases as cases

LINEAR = [name for name, recurrence in RECURRENCES.items() if recurrence.family in ("matrix", "diagonal")]


def sent(counted, ranks):
    """Of what all ranks have after a collective, what each sent."""
    return counted * (ranks - 1) / ranks


@pytest.mark.parametrize("name", LINEAR)
def test_states_of_context_parallelism(ranks, name):
    forward, backward = ranks.run(cases.traffic_of_op, name, 20)[0]
    message = message_bytes(name, Sizes(2, 20, H=4, K=3, V=5, D=6, Hq=2), "float32")
    assert state_bytes(message, ranks.size) == sent(forward[0] + backward[0], ranks.size)


def test_weights_of_fsdp(ranks):
    weights, counted = ranks.run(cases.traffic_of_fsdp)[0]
    assert weight_bytes(weights, ranks.size) == sent(counted, ranks.size)


def test_rows_of_packed_weights(ranks):
    for rank, (widths, heads, rows) in enumerate(ranks.run(cases.rows_that_change_hands)):
        sections = Sections(tuple(widths), len(widths) * (heads,))
        assert rows_exchanged(sections, rank, ranks.size) == rows > 0


def test_sums_of_channels(ranks):
    (counts,) = {tuple(found.items()) for found in ranks.run(cases.sums_of_a_cut_mlp)}
    assert counts == (("c10d_functional.all_reduce", 2),)
    # the mixer's as many
    assert activation_bytes(3, 8, 4, ranks.size) == 2 * 2 * reduced(3 * 8 * 4, ranks.size)
