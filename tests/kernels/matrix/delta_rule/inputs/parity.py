"""The kernels of the delta rules' inputs against their PyTorch form in float64."""

import torch

from holdfast.kernels.matrix.delta_rule.inputs import triton as kernels
from holdfast.recurrences.delta_rule import prepared
from parity import relative_error

NAMES = ("q", "k", "g", "beta", "A_log", "dt_bias")


def example(B=2, T=7, Hq=2, H=4, D=20, dtype=torch.float32, gates=torch.float32, without=(), device="cpu"):
    """q and k as halves of one projection, g and beta of another. without: names of inputs that are None."""
    draw = torch.Generator().manual_seed(D)

    def normal(*shape, dtype):
        return torch.randn(shape, generator=draw).to(dtype).to(device)

    q, k = normal(B, T, 2 * Hq * D, dtype=dtype).unflatten(-1, (2, Hq, D)).unbind(2)
    g, beta = (3 * normal(B, T, 2 * H, dtype=gates)).chunk(2, -1)
    found = dict(zip(NAMES, (q, k, g, beta, *(normal(H, dtype=torch.float32) for _ in range(2))), strict=True))
    return tuple(None if name in without else x for name, x in found.items())


def plain(inputs, norm, largest, dtype=None):
    """The PyTorch form's results and gradients of the sum of their products with `weights`."""
    leaves = [None if x is None else x.to(dtype or x.dtype).detach().requires_grad_() for x in inputs]
    q, k, g, beta, rate, bias = leaves
    made = prepared(q, k, g, q.new_zeros(1) if beta is None else beta, rate, bias, norm, beta is not None, largest == 2)
    asked = (norm, norm, g is not None, beta is not None)
    made = [x if wanted else None for x, wanted in zip(made, asked, strict=True)]
    weights = weights_of(made)
    loss = sum((x * w.to(x.dtype)).sum() for x, w in zip(made, weights, strict=True) if x is not None)
    used = [x for x in leaves if x is not None]
    grads = iter(torch.autograd.grad(loss, used, allow_unused=True))
    return made, [None if x is None else next(grads) for x in leaves]


def weights_of(made):
    draw = torch.Generator().manual_seed(1)
    return [None if x is None else torch.randn(x.shape, generator=draw).to(x) for x in made]


def check(inputs, norm=True, largest=1.0):
    """At most twice the error of the PyTorch form in the same dtypes, whose one rounding of a float32 is the same."""
    right, same = plain(inputs, norm, largest, torch.float64), plain(inputs, norm, largest)
    made = kernels.run_forward(inputs, norm, largest)
    # the gradient of a query arrives as a view of heads in another order
    weights = [None if w is None else w.transpose(1, 2).contiguous().transpose(1, 2) for w in weights_of(made)]
    grads = kernels.run_backward(inputs, norm, largest, weights)
    floors = {torch.float32: 1e-6, torch.float16: 0.0, torch.bfloat16: 0.0}
    for got, exact, theirs in zip((*made, *grads), (*right[0], *right[1]), (*same[0], *same[1]), strict=True):
        assert (got is None) == (exact is None)
        if got is None:
            continue
        assert got.dtype == theirs.dtype
        assert got.shape == theirs.shape
        assert got.is_contiguous()
        if got.numel():
            mine, by_torch = (relative_error(x.double(), exact) for x in (got, theirs))
            assert mine <= max(2 * by_torch, floors[got.dtype]), (mine, by_torch)


def check_packed(inputs, largest=1.0):
    """Gradients of g and beta in a wider tensor, and zeros behind them."""
    g, beta = inputs[2:4]
    made = kernels.run_forward(inputs, False, largest)
    grads = weights_of(made)
    heads = beta.shape[2]
    wide = beta.new_full((*beta.shape[:2], 2 * heads + 9), torch.nan)
    into = None if g is None else wide[..., 2 : heads + 2], wide[..., heads + 2 : -2]
    found = kernels.run_backward(inputs, False, largest, grads, into)
    alone = kernels.run_backward(inputs, False, largest, grads)
    assert found[2] is into[0]
    assert found[3] is into[1]
    assert g is None or torch.equal(into[0], alone[2])
    assert torch.equal(into[1][..., :heads], alone[3])
    assert not into[1][..., heads:].any()
    assert wide[..., -2:].isnan().all()
    for got, right in zip(found[4:], alone[4:], strict=True):
        assert right is None or torch.equal(got, right)


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    check(example())
    check(example(H=3, Hq=3, D=33, T=70), largest=2.0)
    check(example(without=("dt_bias",), dtype=torch.float16, gates=torch.float16))
    check(example(without=("g", "A_log", "dt_bias")))
    check(example(without=("beta",), T=1))
    check(example(without=("g", "beta", "A_log", "dt_bias"), D=128))
    check(example(), norm=False)
    # of a length that what is added to its square counts beside, and of none
    q, k, *rest = example()
    check((1e-4 * q, k * torch.tensor([0.0, 1e-3])[:, None], *rest))
    check(example(T=0))
    check_packed(example(T=9, H=3))
    check_packed(example(without=("g", "A_log", "dt_bias"), dtype=torch.float16, gates=torch.float16), largest=2.0)
    check_packed(example(T=0))
    print("all checked")
