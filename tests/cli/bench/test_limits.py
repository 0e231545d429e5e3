"""Numbers that records compare by: with others, rows of one suite would say other things under the same name."""

from holdfast.cli.bench import case, cold, counters, measure
from holdfast.cli.bench.models import check, decoding, host, live, training


def test_what_counts_as_right():
    assert measure.LIMITS == {"float64": 1e-10, "float32": 1e-4, "bfloat16": 1.5e-2, "float16": 5e-3}
    assert training.LOSS_LIMIT == 1e-2


def test_up_to_what_size_results_are_compared_step_by_step():
    assert case.ORACLE_BUDGET == {"cpu": 2**23, "cuda": 2**27}
    assert case.IN_CHUNKS_BUDGET == {"cpu": 0, "cuda": 2**29}
    assert case.MOST_STEPS == 1024
    assert (check.PREFIX, decoding.PREFIX) == (16, 16)


def test_how_often_and_how_long_something_runs():
    assert training.WARM_UP == {"cpu": 2, "cuda": 8}
    assert (training.LEAST, training.MOST) == (5, 12)
    assert (live.SECONDS, host.CALLS) == (0.2, 5)
    assert (cold.LIMIT_S, counters.LIMIT_S, counters.SWEEP_BYTES) == (240.0, 120.0, 2**28)
