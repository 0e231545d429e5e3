"""The op between the projections of a KDA layer: what its parts make; packed, compiled, under autocast, in kernels."""

import pytest
import torch

from holdfast.ops.kda_layer import _op
from ops import kda_layers
from ops import layer_checks as checks
from ops.delta_layers import same, values_and_grads
from ops.kda_layers import TENSORS, composed, example, fused

SIZES = {
    "usual": {},
    "bounded": {"bound": -0.5},
    "odd": {"K": 24, "V": 7, "Hq": 3, "H": 3, "W": 2},
    "one tap": {"W": 1, "T": 5},
    "no state": {"state": False},
    "nothing unread": {"rest": 0, "state": False},
    "packed": {"lengths": (5, 1, 0, 9), "bound": -5.0},
    "packed, no state": {"lengths": (0, 3, 70), "state": False},
    "one token": {"T": 1},
    "no token": {"T": 0},
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_equals_its_parts(sizes, allow_neg_eigval):
    tensors, rest = example(**SIZES[sizes])
    got, right = (values_and_grads(run, tensors, rest, allow_neg_eigval=allow_neg_eigval) for run in (fused, composed))
    same(got, right, 1e-11)
    unread = got["dpacked"].shape[2] - (got["dpacked"].abs().sum((0, 1)) > 0).sum()
    assert SIZES[sizes].get("T") in (0, 1) or unread == SIZES[sizes].get("rest", 3)


@pytest.mark.parametrize("unused", [("y",), ("state", "tail_after"), ("y", "tail_after")])
def test_results_that_nothing_is_made_of(unused):
    tensors, rest = example()
    got, right = (values_and_grads(run, tensors, rest, unused=unused) for run in (fused, composed))
    same(got, right, 1e-11)


def test_gradients_by_differences():
    tensors, rest = example(B=1, T=3, Hq=1, H=2, K=2, V=2, W=2, rest=1)
    given = [tensors[name].requires_grad_() for name in TENSORS]
    assert torch.autograd.gradcheck(lambda *x: fused(dict(zip(TENSORS, x, strict=True)), **rest), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_near_to_float64_as_its_parts(dtype):
    checks.assert_as_near_as_parts(kda_layers, dtype, range(4), {"T": 20})


def test_autocast_leaves_the_projections_dtype():
    checks.assert_autocast_leaves_the_projections_dtype(kda_layers)


def test_no_sequence_sees_another():
    checks.assert_no_sequence_sees_another(kda_layers)


@pytest.mark.parametrize("lengths", [(3, 0, 6), pytest.param(None, marks=pytest.mark.slow)])
def test_opcheck(lengths):
    tensors, rest = example(lengths=lengths, dtype=torch.float32)
    given = [x.requires_grad_() for x in tensors.values()]
    sizes = (rest["query_heads"], rest["key_dim"], -5.0 if lengths else None, True, 1e-5, rest["cu_seqlens"])
    torch.library.opcheck(_op, (*given, *sizes, True, ""))


@pytest.mark.parametrize("sizes", ["usual", "packed, no state", "no token"])
def test_fakes_say_what_comes(sizes):
    ops = {"kda_layer_forward", "kda_layer_backward"}
    checks.assert_fakes_say_what_comes(kda_layers, SIZES[sizes], ops)


def test_activation_checkpointing():
    checks.assert_checkpointing_changes_nothing(kda_layers)


def test_a_second_derivative_is_refused():
    tensors, rest = example(T=3)
    packed = tensors["packed"].requires_grad_()
    (grad,) = torch.autograd.grad(fused(tensors, **rest)[0].sum(), packed, create_graph=True)
    with pytest.raises(NotImplementedError, match="kda_layer_forward: expected one differentiation"):
        grad.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, (5, 0, 1, 300, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype, lengths):
    """Recorded, replayed and the same bit for bit; as near to float64 as its parts, over all that a layer has."""
    sizes = {"T": 376, "Hq": 2, "H": 4, "K": 64, "V": 64, "rest": 8, "lengths": lengths, "bound": -5.0}
    sizes = sizes if lengths else sizes | {"bound": None}
    checks.assert_as_near_as_parts(kda_layers, dtype, range(3), sizes, "cuda", runs=5, floor=2e-5)
