"""Models that train over ranks, beside what PyTorch brings for it."""

import pytest

from parallel_support import training_cases as cases
from parallel_support.op_cases import Setting


def test_activation_checkpointing_exchanges_again(two_ranks):
    two_ranks.run(cases.checkpointed_equals_one_process, Setting((7, 4)))


@pytest.mark.parametrize("data", [2, 1], ids=["data parallel", "context parallel"])
def test_fsdp_trains_as_one_process(two_ranks, data):
    two_ranks.run(cases.fsdp_trains_as_one_process, data)


@pytest.mark.slow
def test_fsdp_over_a_mesh_of_data_and_context(four_ranks):
    four_ranks.run(cases.fsdp_trains_as_one_process, 2)


def test_fsdp_in_mixed_precision(two_ranks):
    two_ranks.run(cases.fsdp_keeps_gates_in_float32)


@pytest.mark.slow
def test_a_compiled_mixer_over_ranks(two_ranks):
    two_ranks.run(cases.compiled_equals_eager)
