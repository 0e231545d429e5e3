"""The launch between segments: what its blocks hold, whose number the recorded plans do not show."""

import pytest

from holdfast.planner import Device, Problem
from holdfast.planner.models.matrix.scalar_decay import hopper as model

H200 = Device.named("h200")


def composition(segment_chunks, passes=1, K=128, V=64, T=64 * 64):
    sizes = (("B", 2), ("T", T), ("H", 3), ("Hq", 3), ("K", K), ("V", V))
    return model._composition(Problem("simple_gla", "matrix", "bfloat16", sizes), H200, segment_chunks, passes)


@pytest.mark.parametrize(("segment_chunks", "tokens"), [(15, 64), (16, 128), (17, 64), (18, 128)])
def test_long_segments_of_an_even_number_of_chunks_take_two_at_a_time(segment_chunks, tokens):
    """Keys and values of three stages in two bytes, a decay of each token in four, and scratch."""
    assert composition(segment_chunks).shared == 3 * (2 * tokens * (128 + 64) + 4 * tokens) + 512


def test_one_segment_has_none_and_backward_every_segment_is_composed():
    assert composition(64) is None
    assert composition(63) is not None
    # four segments: the last one's state is not needed forward; backward states and gradients of all are
    assert composition(16).blocks == 2 * 3 * 3
    assert composition(16).prediction.launch == pytest.approx(2e-6)
    backward = composition(16, passes=2)
    assert backward.prediction.launch == pytest.approx(4e-6)
    states = 2 * 4 * 2 * 3 * 4 * 128 * 64
    assert backward.moved == 2 * states + 2 * 2 * 6 * 4096 * (128 + 64) + states
