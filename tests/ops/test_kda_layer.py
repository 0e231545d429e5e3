"""The op between the projections of a KDA layer: what its parts make; packed, compiled, under autocast, in kernels."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from holdfast.ops.kda_layer import _op
from ops.delta_layers import same, values_and_grads
from ops.kda_layers import TENSORS, composed, example, fused
from parity import relative_error
from test_strides import Compared

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
    """Over several draws: of A_log's gradient a head has one number, whose error in one draw says little."""
    assert_as_near(dtype, range(4), {"T": 20})


def assert_as_near(dtype, seeds, sizes, device="cpu", runs=1):
    """runs: how often the op runs, to the same bits."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        tensors, rest = example(**sizes, dtype=dtype, device=device, seed=seed)
        exact = values_and_grads(fused, tensors, rest, dtype=torch.float64)
        got, *again = (values_and_grads(fused, tensors, rest) for _ in range(runs))
        theirs = values_and_grads(composed, tensors, rest)
        for name, x in exact.items():
            assert got[name].dtype == theirs[name].dtype
            assert all(torch.equal(got[name], each[name]) for each in again), name
            pair = tuple(relative_error(found[name].double(), x) for found in (got, theirs))
            errors.setdefault(name, []).append(pair)
    for name, pairs in errors.items():
        mine, by_parts = torch.tensor(pairs).square().mean(0).sqrt().tolist()
        assert mine <= max(2 * by_parts, 1e-6 if device == "cpu" else 2e-5), (name, mine, by_parts)


def test_autocast_leaves_the_projections_dtype():
    tensors, rest = example(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        got = values_and_grads(fused, tensors, rest)
    right = values_and_grads(fused, tensors, rest)
    assert all(torch.equal(got[name], x) for name, x in right.items())


def test_no_sequence_sees_another():
    tensors, rest = example(lengths=(5, 30, 4))
    clean = values_and_grads(fused, tensors, rest)
    tensors["packed"][:, :5], tensors["packed"][:, 35:] = torch.nan, torch.nan
    tensors["tail"][::2], tensors["initial_state"][::2] = torch.nan, torch.nan
    spoilt = values_and_grads(fused, tensors, rest)
    assert spoilt["y"][:, :5].isnan().all()
    for name in ("y", "dpacked"):
        assert torch.equal(clean[name][:, 5:35], spoilt[name][:, 5:35]), name
    for name in ("state", "tail_after", "dinitial_state", "dtail"):
        assert torch.equal(clean[name][1], spoilt[name][1]), name


@pytest.mark.parametrize("lengths", [(3, 0, 6), pytest.param(None, marks=pytest.mark.slow)])
def test_opcheck(lengths):
    tensors, rest = example(lengths=lengths, dtype=torch.float32)
    given = [x.requires_grad_() for x in tensors.values()]
    sizes = (rest["query_heads"], rest["key_dim"], -5.0 if lengths else None, True, 1e-5, rest["cu_seqlens"])
    torch.library.opcheck(_op, (*given, *sizes, True, ""))


@pytest.mark.parametrize("sizes", ["usual", "packed, no state", "no token"])
def test_fakes_say_what_comes(sizes):
    """Of a projection with other strides too."""
    tensors, rest = example(**SIZES[sizes], dtype=torch.bfloat16)
    tensors["packed"] = tensors["packed"].transpose(0, 1).contiguous().transpose(0, 1)
    with Compared() as compared:
        values_and_grads(fused, tensors, rest)
        values_and_grads(fused, tensors, rest, unused=("state", "tail_after"))
    assert compared.wrong == []
    assert {"kda_layer_forward", "kda_layer_backward"} <= compared.seen


def test_activation_checkpointing():
    tensors, rest = example()

    def again(given, **options):
        return checkpoint(
            lambda *x: fused(dict(zip(TENSORS, x, strict=True)), **options), *given.values(), use_reentrant=False
        )

    got, right = (values_and_grads(run, tensors, rest) for run in (again, fused))
    assert all(torch.equal(got[name], x) for name, x in right.items())


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, (5, 0, 1, 300, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype, lengths):
    """Recorded, replayed and the same bit for bit; as near to float64 as its parts, over all that a layer has."""
    sizes = {"T": 376, "Hq": 2, "H": 4, "K": 64, "V": 64, "rest": 8, "lengths": lengths, "bound": -5.0}
    assert_as_near(dtype, range(3), sizes if lengths else sizes | {"bound": None}, "cuda", runs=5)
