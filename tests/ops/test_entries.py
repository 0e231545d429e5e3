"""Room for the states that a scan leaves for its backward pass: on a GPU, of what kernels take, and for no more."""

import pytest
import torch

from holdfast.ops import diagonal, selective


class There:
    """A tensor [B, T, D] of a GPU that need not be here."""

    def __init__(self, dtype=torch.bfloat16, is_cuda=True, B=3, T=70, D=5):
        self.shape, self.dtype, self.is_cuda = (B, T, D), dtype, is_cuda

    def new_empty(self, *shape, dtype):
        return torch.empty(shape, dtype=dtype)


RATES = torch.empty(5, 7)
OFFSETS = torch.tensor([0, 10, 20, 70, 70])


def rows(x, cu_seqlens=None, grad=True):
    """Of the diagonal and the selective family."""
    of_diagonal, of_selective = (
        diagonal.entries_of(x, cu_seqlens, grad),
        selective.entries_of(x, RATES, cu_seqlens, grad),
    )
    assert (of_diagonal.dtype, of_selective.dtype) == (torch.float32, torch.float32)
    assert (of_diagonal.shape[1:], of_selective.shape[1:]) == ((5,), (7, 5))
    return len(of_diagonal), len(of_selective)


def test_stretches_of_each_sequence():
    assert (diagonal.ENTRY_STEPS, selective.ENTRY_STEPS) == (32, 16)
    assert rows(There()) == (3 * 70 // 32 + 3, 3 * 70 // 16 + 2 * 3)
    assert rows(There(B=1), OFFSETS) == (70 // 32 + 4, 70 // 16 + 2 * 4)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"grad": False}, (0, 0)),
        ({"x": There(is_cuda=False)}, (0, 0)),
        # the diagonal family's output is its state, and exact
        ({"x": There(torch.float32)}, (0, 13 + 6)),
        ({"x": There(torch.float64)}, (0, 0)),
        ({"x": There(torch.float16)}, (6 + 3, 13 + 6)),
    ],
)
def test_none_where_none_are_read(given, kept):
    assert rows(**{"x": There()} | given) == kept
