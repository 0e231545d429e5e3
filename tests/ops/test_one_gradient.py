"""One argument alone may want a gradient: it gets the one that it gets beside the others."""

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from every_call import CALLS, PARTS
from parity import leaves


@pytest.mark.parametrize("name", CALLS | PARTS)
def test_the_gradient_of_one_argument_alone(name):
    call = (CALLS | PARTS)[name]
    given, shape = tree_flatten(call.arguments(torch.float32))

    def grads(wanted):
        tensors = [x.detach().requires_grad_(n in wanted) for n, x in enumerate(given)]
        results = [x for x in leaves(call(tree_unflatten(tensors, shape))) if x.requires_grad]
        ones = [torch.cos(torch.arange(1.0, x.numel() + 1)).view_as(x).to(x.dtype) for x in results]
        found = torch.autograd.grad(results, [tensors[n] for n in wanted], ones, allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    floats = [n for n, x in enumerate(given) if x.is_floating_point()]
    together = grads(floats)
    for n in floats:
        torch.testing.assert_close(grads([n])[n], together[n], rtol=1e-5, atol=1e-6)
