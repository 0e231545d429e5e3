"""Activation checkpointing around every op: the same outputs and gradients as without it."""

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from every_call import CALLS, FUSED, PARTS
from fused_on_cpu import fused_on_cpu
from parity import leaves

ways = pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])


def results(name, around, device):
    """Outputs and gradients of a call in float32, which `around` makes."""
    call = (CALLS | PARTS)[name]
    flat, structure = tree_flatten(call.arguments(torch.float32, device=device))
    given = [x.requires_grad_() for x in flat if x.is_floating_point()]
    made = around(lambda *tensors: tuple(leaves(call(tree_unflatten(tensors, structure)))), *flat)
    # one backward pass into the leaves, which is all that a reentrant checkpoint has
    sum((n + 1.5) * x.square().sum() for n, x in enumerate(made)).backward()
    return [*made, *(x.grad for x in given)]


def check(name, reentrant, device="cpu"):
    expected = results(name, lambda run, *tensors: run(*tensors), device)
    got = results(name, partial(checkpoint, use_reentrant=reentrant), device)
    for x, y in zip(got, expected, strict=True):
        assert x is y is None or torch.equal(x, y)


@ways
@pytest.mark.parametrize("name", CALLS)
def test_a_checkpoint_changes_nothing(name, reentrant):
    check(name, reentrant)


@ways
@pytest.mark.parametrize("name", FUSED)
def test_with_inputs_prepared_by_a_kernel(name, reentrant):
    with fused_on_cpu():
        check(name, reentrant)


@pytest.mark.parametrize("name", [*CALLS, *PARTS])
def test_hooks_see_nothing_of_what_a_backward_pass_differentiates(name):
    """A first call on a GPU makes a dry run of its backward pass within the forward pass, which a checkpoint counts."""
    call = (CALLS | PARTS)[name]
    arguments = call.arguments(torch.float32)
    for x in leaves(arguments):
        if x.is_floating_point():
            x.requires_grad_()
    made, seen = leaves(call(arguments)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        sums = [x.square().sum() for x in made]
        before = len(seen)
        sum(sums).backward()
    assert before
    assert len(seen) == before


@pytest.mark.gpu
@ways
@pytest.mark.parametrize("name", [*CALLS, *PARTS])
def test_on_a_gpu(name, reentrant):
    check(name, reentrant, "cuda")
