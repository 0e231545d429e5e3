"""Ranks with a GPU each, over NCCL: ops that share a sequence, and a language model that trains."""

from collections.abc import Iterator

import pytest
import torch

from holdfast.recurrences import RECURRENCES
from parallel_support.op_cases import Setting
from parallel_support.pool import Pool
from parallel_support.precision_cases import op_is_as_exact_as_one_process

LINEAR = [name for name, recurrence in RECURRENCES.items() if recurrence.family in ("matrix", "diagonal")]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.fixture(scope="module")
def gpus() -> Iterator[Pool]:
    # what a first call compiles takes a while
    pool = Pool(2, patience=180, backend="nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_an_op_is_as_exact_as_one_process(gpus, name, layout):
    gpus.run(op_is_as_exact_as_one_process, name, Setting((260, 170), layout=layout), torch.bfloat16, "cuda")


def test_an_empty_part(gpus):
    gpus.run(op_is_as_exact_as_one_process, "gated_delta_rule", Setting((0, 65)), torch.bfloat16, "cuda")
