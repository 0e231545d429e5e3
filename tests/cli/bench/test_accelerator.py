"""The cut of the suites for an accelerator names cases and runners that there are."""

import importlib.util
from pathlib import Path

import pytest

from holdfast.cli.bench.case import Case
from holdfast.cli.bench.selection import Selection, runners_of
from holdfast.cli.bench.suites import SUITES

PATH = Path(__file__).parents[3] / "benchmarks" / "accelerator.py"


@pytest.fixture(scope="module")
def cut():
    spec = importlib.util.spec_from_file_location("accelerator", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chosen(cut) -> list[Case]:
    cases = [case for suite in cut.SUITES for case in SUITES[suite].cases()]
    return [case for case in cases if any(text in f"{case.label}: {case}" for text in cut.CASES)]


def test_every_text_is_in_a_case_and_every_suite_has_one(cut):
    for suite in cut.SUITES:
        assert any(case in chosen(cut) for case in SUITES[suite].cases())
    for text in cut.CASES:
        assert any(text in f"{case.label}: {case}" for case in chosen(cut)), text


def test_no_text_holds_a_comma(cut):
    assert not [text for text in (*cut.CASES, *cut.RUNNERS, *cut.COUNTERS) if "," in text]


def test_every_runner_is_known_and_every_exclusion_excludes(cut):
    cases = chosen(cut)
    for name, items in (("--runners", cut.RUNNERS), ("--counters", cut.COUNTERS)):
        Selection.of(",".join(items)).check(cases, name)
    for item in cut.RUNNERS:
        alone = Selection.of(item)
        assert any(not alone.takes(runner.name, case) for case in cases for runner in runners_of(case)), item


def test_counters_are_of_runners_that_are_measured(cut):
    wanted = Selection.of(",".join(cut.RUNNERS))
    measured = [(runner.name, case) for case in chosen(cut) for runner in runners_of(case, wanted)]
    for item in cut.COUNTERS:
        assert any(Selection.of(item).takes(*each) for each in measured), item


@pytest.mark.parametrize(
    ("text", "runner"),
    [
        ("lstm B16 T1024 H12 D64 bfloat16 fwd", "flashrnn cuda_fused"),
        ("lstm B16 T1024 H1 D768 bfloat16 fwd+bwd", "flashrnn cuda_fused"),
        ("simple_gla B4 T4096 H32 K128 V128 bfloat16 fwd+bwd", "fla chunk"),
        ("gated_delta_rule B4 T4096 H32 K128 V128 bfloat16 fwd+bwd", "fla chunk"),
        ("mlstm gating=sigmoid B4 T4096 H32 K128 V128 bfloat16 fwd+bwd", "mlstm_kernels xl_chunk"),
        ("ssd B4 T4096 H32 K128 V128 bfloat16 fwd+bwd", "mamba_ssm ssd"),
        ("inter_chunk_scan B4 G64 H16 K64 V64 bfloat16 fwd", "mamba_ssm state passing"),
        ("hgrn B8 T4096 D2048 bfloat16 fwd+bwd", "fla chunk"),
        ("gla B32 T1 H32 K128 V128 bfloat16 fwd with state", "fla fused_recurrent"),
        ("ssd B32 T1 H32 K128 V128 bfloat16 fwd with state", "mamba_ssm state update"),
        ("intra_chunk B16 T64 H12 K64 V64 C64 float16 fwd", "torch separate kernels"),
    ],
)
def test_the_peers_that_decide_are_in_it(cut, text, runner):
    wanted = Selection.of(",".join(cut.RUNNERS))
    (case, *_) = [case for case in chosen(cut) if str(case) == text]
    assert runner in [each.name for each in runners_of(case, wanted)]
