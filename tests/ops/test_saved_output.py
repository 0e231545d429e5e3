"""What a matrix backend's forward pass saves comes to its backward pass, with the output; and nothing without."""

import pytest
import torch

from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.kernels.matrix.variants import BackendVariants, SavedShape
from holdfast.kernels.select import forget
from holdfast.ops import matrix
from holdfast.recurrences.definition import MatrixCall


class Saving(Chunked):
    """Saves a number for each key and value. serves: sizes B and T, if not all."""

    name = "saving"
    uses_forward_output = True

    def __init__(self, saves=True, serves=None):
        self.saves, self.serves, self.came = saves, serves, []

    def reject(self, problem, device):
        return None if self.serves in (None, (problem["B"], problem["T"])) else "others"

    def saved_shape(self, problem):
        assert isinstance(problem["K"], int)
        return SavedShape((problem["K"], problem["V"]), torch.float64) if self.saves else None

    def forward(self, plan, call, cu_seqlens):
        o, final = super().forward(plan, call, cu_seqlens)
        return (o, final, torch.full((6, 5), 7.0, dtype=torch.float64)) if self.saves else (o, final)

    def backward(self, plan, call, cu_seqlens, grad_o, grad_final, *made):
        self.came.append(made)
        return super().backward(plan, call, cu_seqlens, grad_o, grad_final)


@pytest.fixture
def call():
    forget()
    draw = torch.Generator().manual_seed(0)
    yield MatrixCall(*(torch.randn(2, 9, 3, n, generator=draw, requires_grad=True) for n in (6, 6, 5)))
    forget()


def both_passes(call, backend=""):
    o, _, saved = matrix.matrix_forward(*call, None, "simple_gla", True, backend)
    o.sum().backward()
    return o, saved


def test_it_comes_with_the_output(call, monkeypatch):
    saving = Saving()
    monkeypatch.setattr(matrix, "BACKENDS", (BackendVariants(saving),))
    o, _ = both_passes(call)
    ((first, third),) = saving.came
    assert torch.equal(first, o)
    assert torch.equal(third, torch.full((6, 5), 7.0, dtype=torch.float64))
    # a layer's own, which has only the one of the two
    do = torch.ones_like(call.v)
    for made in ((o.detach(), None), (None, third), (o.detach(), torch.empty(0))):
        matrix.write_gradients(matrix.GradRoom(), call, None, "simple_gla", "", (do, None), made)
        assert saving.came[-1] == ()


def test_nothing_comes_of_a_backend_that_saves_nothing(call, monkeypatch):
    nothing = Saving(saves=False)
    monkeypatch.setattr(matrix, "BACKENDS", (BackendVariants(nothing),))
    o, _, saved = matrix.matrix_forward(*call, None, "simple_gla", True, "")
    assert saved.shape == (0,)
    # nor is the output held for it
    assert o.grad_fn.saved_tensors[-2:] == (None, None)
    o.sum().backward()
    assert nothing.came == [()]


def test_a_graph_is_told_of_it_whichever_backend_then_runs(call, monkeypatch):
    """Zeros in the shape that a backend which serves such a call of one token would have saved."""
    saving = Saving(serves=(1, 1))
    monkeypatch.setattr(matrix, "BACKENDS", (BackendVariants(saving), Chunked()))
    _, saved = both_passes(call)
    assert torch.equal(saved, torch.zeros(6, 5, dtype=torch.float64))
    assert saving.came == []
    assert both_passes(call, "chunked")[1].shape == (0,)
    told = matrix.fake_of(call, None, "simple_gla", True, "")[2]
    assert (told.shape, told.dtype) == (saved.shape, saved.dtype)
    assert matrix.fake_of(call, None, "simple_gla", True, "saving")[2].shape == saved.shape
    assert matrix.fake_of(call, None, "simple_gla", True, "chunked")[2].shape == (0,)
