"""Models whose heads ranks share, beside what PyTorch brings for training them."""

import pytest

from parallel_support import mesh_cases as cases
from parallel_support.tensor_cases import MIXERS

LINEAR = tuple(name for name in MIXERS if name != "SLSTM")


def test_fsdp_and_checkpoints(four_ranks, tmp_path):
    four_ranks.run(cases.fsdp_and_checkpoints, ("Mamba2, one group",), str(tmp_path))


@pytest.mark.slow
def test_fsdp_and_checkpoints_of_every_mixer(four_ranks, tmp_path):
    four_ranks.run(cases.fsdp_and_checkpoints, tuple(MIXERS), str(tmp_path))


def test_parts_of_sequences_and_of_heads(four_ranks):
    four_ranks.run(cases.data_sequence_and_heads, ("RetNet",), True)


@pytest.mark.slow
@pytest.mark.parametrize("heads_first", [True, False])
def test_parts_of_sequences_and_of_heads_of_every_mixer(four_ranks, heads_first):
    four_ranks.run(cases.data_sequence_and_heads, LINEAR, heads_first)


def test_mixed_precision(four_ranks):
    four_ranks.run(cases.mixed_precision)


def test_a_part_of_a_mixer_is_not_cut_alone(four_ranks):
    four_ranks.run(cases.a_part_of_a_mixer_is_not_cut_alone)


@pytest.mark.slow
def test_a_compiled_model(two_ranks):
    two_ranks.run(cases.compiled_equals_one_process, "RGLRU", "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_a_compiled_model_of_every_mixer(two_ranks, name):
    two_ranks.run(cases.compiled_equals_one_process, name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GatedDeltaNet", "GLA"])
def test_a_model_compiled_by_inductor(two_ranks, name):
    two_ranks.run(cases.compiled_equals_one_process, name, "inductor")


@pytest.mark.slow
def test_compiled_blocks_computed_twice_over_parts(four_ranks):
    four_ranks.run(cases.all_together, "GatedDeltaNet")
