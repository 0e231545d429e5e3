"""Mixers and recurrent layers whose heads ranks share equal one process."""

import pytest

from holdfast.parallel.sections import Sections, routes
from parallel_support import tensor_cases as cases

ALL = [*cases.MIXERS, *cases.STACKS]
# each way of cutting a weight
SOME = ["GLA", "Mamba2, one group", "GatedDeltaNet, one key head"]


@pytest.mark.parametrize("name", ALL)
def test_modules(two_ranks, name):
    two_ranks.run(cases.module_equals_one_process, name, False)


@pytest.mark.parametrize("name", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in ALL])
def test_modules_over_four_ranks(four_ranks, name):
    four_ranks.run(cases.module_equals_one_process, name, False)


@pytest.mark.parametrize("name", cases.MIXERS)
def test_packed_sequences(two_ranks, name):
    two_ranks.run(cases.module_equals_one_process, name, True)


@pytest.mark.parametrize("name", cases.MIXERS)
def test_decoding(two_ranks, name):
    two_ranks.run(cases.step_equals_one_process, name)


@pytest.mark.parametrize("name", ["GLA", "GatedDeltaNet", "MLSTM"])
def test_a_pass_exchanges_weights_once_and_sums_once(two_ranks, name):
    two_ranks.run(cases.one_exchange_and_one_sum_a_pass, name)


def test_a_plan_beside_others_with_tokens_over_the_ranks(ranks):
    ranks.run(cases.a_plan_beside_others)


@pytest.mark.parametrize("name", ["Mamba2, one group", "LSTM", "RetNet"])
def test_a_copy_is_over_the_same_ranks(two_ranks, name):
    two_ranks.run(cases.a_copy_is_over_the_same_ranks, name)


def test_weights_are_the_first_ranks(two_ranks):
    two_ranks.run(cases.weights_are_the_first_ranks)


def test_what_cannot_be_shared_is_named_and_left(ranks):
    ranks.run(cases.refuses)


def test_ops_refuse_distributed_tensors(two_ranks):
    two_ranks.run(cases.ops_refuse_distributed_tensors)


@pytest.mark.parametrize(
    "sections",
    [Sections((8, 4, 4), (4, 4, 4)), Sections((12, 8, 8), (4, 1, 2), 16), Sections((8, 3), (8, 1), 16)],
    ids=str,
)
@pytest.mark.parametrize(("rows", "ranks"), [(32, 1), (32, 2), (35, 2), (32, 4), (35, 4)])
def test_routes_bring_each_rank_the_rows_of_its_heads(sections, rows, ranks):
    way = routes(sections, rows, ranks)
    held = [list(range(rows))[sum(way.held[:n]) : sum(way.held[: n + 1])] for n in range(ranks)]
    assert [row for part in held for row in part] == list(range(rows))
    for rank in range(ranks):
        came = [row for n in range(ranks) for start, end in way.pieces[n][rank] for row in held[n][start:end]]
        expected, start = [], 0
        for width, heads in zip(sections.widths, sections.heads, strict=True):
            # the heads of a rank, of fewer heads than ranks the one that it shares
            count = max(1, heads // ranks)
            first = rank * heads // ranks
            of_head = width // heads
            expected += range(start + first * of_head, start + (first + count) * of_head)
            start += width
        assert came == expected
        assert len(came) <= way.local < len(came) + sections.piece
        assert way.local % sections.piece == 0
