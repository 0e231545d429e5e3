"""Over ranks an op is as exact as in one process: at most twice the error of the same dtype, in both passes."""

import pytest
import torch

from holdfast.recurrences import RECURRENCES
from parallel_support.op_cases import Setting
from parallel_support.precision_cases import gradients_that_spans_share_are_rounded_once, op_is_as_exact_as_one_process

LINEAR = [name for name, recurrence in RECURRENCES.items() if recurrence.family in ("matrix", "diagonal")]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_half_and_single_precision(two_ranks, name, dtype):
    two_ranks.run(op_is_as_exact_as_one_process, name, Setting((70, 58)), dtype, "cpu")


def test_gradients_that_spans_share_are_rounded_once(two_ranks):
    two_ranks.run(gradients_that_spans_share_are_rounded_once, Setting((64, 64), layout="zigzag"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_two_processes_share_a_gpu(two_ranks, name, dtype, layout):
    """Over gloo, which takes tensors on a GPU too: NCCL wants one for each process."""
    setting = Setting((260, 170), layout=layout)
    two_ranks.run(op_is_as_exact_as_one_process, name, setting, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["simple_gla", "mlstm", "gated_delta_rule", "rglru"])
def test_an_empty_part_on_a_gpu(two_ranks, name):
    two_ranks.run(op_is_as_exact_as_one_process, name, Setting((0, 65)), torch.float32, "cuda")
