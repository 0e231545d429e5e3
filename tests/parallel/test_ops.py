"""Every linear recurrence over ranks equals one process: outputs, states and gradients, however the tokens are cut."""

import pytest
import torch

from holdfast.recurrences import RECURRENCES
from parallel_support.op_cases import Setting, op_equals_one_process

LINEAR = [name for name, recurrence in RECURRENCES.items() if recurrence.family != "dense"]

# by the number of ranks; 37 tokens
UNEVEN = {2: (23, 14), 4: (9, 3, 20, 5)}
EMPTY = {2: (0, 11), 4: (6, 0, 0, 5)}
FEWER = {2: (0, 1), 4: (1, 0, 1, 0)}
# sequences that lie within a part, end where one ends, run over one boundary and over all; empty ones at the ends and
# between
PACKED = (0, 0, 4, 9, 9, 34, 37, 37)
EVEN = {2: (12, 8), 4: (4, 10, 2, 6)}


@pytest.mark.parametrize("name", LINEAR)
def test_uneven_parts(ranks, name):
    ranks.run(op_equals_one_process, name, Setting(UNEVEN[ranks.size]), 1e-10, torch.float64)


@pytest.mark.parametrize("name", LINEAR)
def test_packed_sequences_over_boundaries(ranks, name):
    setting = Setting(UNEVEN[ranks.size], bounds=PACKED)
    ranks.run(op_equals_one_process, name, setting, 1e-10, torch.float64)
