"""A bounded slice of the fuzzer's scenarios on an NVIDIA GPU."""

import pytest

from holdfast.fuzz.check import begin, check
from holdfast.fuzz.draw import draw
from holdfast.fuzz.workers import Pool, default_workers

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
SEED, COUNT = 18, 60


def test_a_slice_of_scenarios_is_right():
    # inductor's compiler alone would take as long as all others
    drawn = (s for s in (draw(SEED, index, "cuda") for index in range(2 * COUNT)) if s.mode != "compile")
    lines = [s.line() for s, _ in zip(drawn, range(COUNT), strict=False)]
    rows = list(Pool(min(8, default_workers("cuda")), begin, check).rows(lines))
    assert len(rows) == COUNT
    assert [f'{row.status}: {row.detail}: "{row.line}"' for row in rows if row.failed] == []
    assert sum(row.tensors for row in rows) > 5 * COUNT
