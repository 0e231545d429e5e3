"""What --runners takes."""

import pytest

from holdfast.cli.bench.case import Case
from holdfast.cli.bench.selection import Selection, runners_of

LSTM = Case("lstm", (("B", 16), ("T", 4), ("H", 1), ("D", 8)), "float32", "fwd", "lstm: batch")
SCAN = Case("rglru", (("B", 1), ("T", 4), ("D", 8)))


@pytest.mark.parametrize(
    ("text", "runner", "case", "taken"),
    [
        ("", "fla chunk", LSTM, True),
        ("holdfast", "holdfast loop", LSTM, True),
        ("holdfast", "fla chunk", LSTM, False),
        ("fla chunk", "fla chunk", LSTM, True),
        ("fla chunk", "fla fused_recurrent", LSTM, False),
        ("-holdfast reference", "holdfast reference", LSTM, False),
        ("-holdfast reference", "fla chunk", LSTM, True),
        ("holdfast, -holdfast reference", "holdfast reference", LSTM, False),
        ("holdfast, -holdfast reference", "holdfast loop", LSTM, True),
        ("holdfast, -holdfast reference", "fla chunk", LSTM, False),
        ("flashrnn@B16 T4, torch.nn", "flashrnn cuda_fused", LSTM, True),
        ("flashrnn@B8, torch.nn", "flashrnn cuda_fused", LSTM, False),
        ("flashrnn@lstm: batch", "flashrnn cuda_fused", LSTM, True),
        ("-holdfast reference@T4096", "holdfast reference", LSTM, True),
    ],
)
def test_a_runner_is_taken_or_not(text, runner, case, taken):
    assert Selection.of(text).takes(runner, case) is taken


def test_runners_are_backends_then_peers():
    names = [runner.name for runner in runners_of(SCAN)]
    assert names.index("holdfast chunked") < names.index("accelerated-scan warp")
    assert [runner.name for runner in runners_of(SCAN, Selection.of("-holdfast,-torch.compile"))] == [
        "accelerated-scan warp",
        "accelerated-scan scalar",
    ]


def test_an_unknown_name_is_a_value_error():
    Selection.of("holdfast,-holdfast reference,fla@T4").check([SCAN], "--runners")
    with pytest.raises(ValueError, match=r"--counters: expected some of .* got 'flaa'"):
        Selection.of("flaa@T4").check([SCAN], "--counters")


def test_a_backend_of_another_op_may_be_left_out_but_not_asked_for():
    Selection.of("-holdfast fused").check([SCAN], "--runners")
    with pytest.raises(ValueError, match="got 'holdfast fused'"):
        Selection.of("holdfast fused").check([SCAN], "--runners")
    with pytest.raises(ValueError, match="got 'holdfast fsued'"):
        Selection.of("-holdfast fsued").check([SCAN], "--runners")
