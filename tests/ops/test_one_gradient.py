"""One argument alone may want a gradient: it gets the one that it gets beside the others."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from every_call import CALLS, PARTS, SIZES
from parity import leaves

FEW = replace(SIZES, B=1, T=2)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", CALLS | PARTS)
def test_the_gradient_of_one_argument_alone(name):
    call = (CALLS | PARTS)[name]
    given, shape = tree_flatten(call.arguments(torch.float32, sizes=FEW))

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


class Planned(TorchDispatchMode):
    """What the ops that run are told of a backward pass that may follow."""

    def __init__(self):
        super().__init__()
        self.told = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        names = [argument.name for argument in op._schema.arguments]
        if op.namespace == "holdfast" and "grad" in names:
            self.told.add(args[names.index("grad")])
        return op(*args, **(kwargs or {}))


# arguments that the op is not given: the stabiliser's and the normaliser's start without them, what is added behind it
APART = {"mlstm, sigmoid": (5,), "mlstm, sigmoid, not normalised": (4, 5), "ssd with a rate a channel": (5, 6)}


# what has no backend to choose is told nothing
@pytest.mark.parametrize("name", [name for name in CALLS if name not in PARTS])
def test_a_backward_pass_is_planned_for_if_any_argument_wants_a_gradient(name):
    given, shape = tree_flatten(CALLS[name].arguments(torch.float32, sizes=FEW))
    floats = [n for n, x in enumerate(given) if x.is_floating_point()]
    for wanted in (None, *floats):
        with Planned() as planned:
            CALLS[name](tree_unflatten([x.detach().requires_grad_(n == wanted) for n, x in enumerate(given)], shape))
        assert planned.told == {wanted is not None and wanted not in APART.get(name, ())}, wanted
