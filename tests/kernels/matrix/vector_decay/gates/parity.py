"""The kernels of KDA's gate against its PyTorch form in float64."""

import torch

from holdfast.kernels.matrix.vector_decay.gates import launch as kernels
from holdfast.recurrences.kda import log_decay
from parity import relative_error

NAMES = ("x", "A_log", "dt_bias")


def example(B=2, T=7, H=3, K=20, dtype=torch.float32, without=(), size=3.0, device="cpu"):
    """x a part of a wider projection. without: names of inputs that are None."""
    draw = torch.Generator().manual_seed(K)
    wide = size * torch.randn(B, T, H * K + 16, generator=draw)
    x = wide.to(device, dtype)[..., 16:].unflatten(-1, (H, K))
    A_log, dt_bias = (torch.randn(shape, generator=draw).to(device) for shape in ((H,), (H, K)))
    found = dict(zip(NAMES, (x, A_log, dt_bias), strict=True))
    return tuple(None if name in without else x for name, x in found.items())


def plain(inputs, bound, dtype=None):
    """The PyTorch form's log decay, and its gradients of the sum of the products with `weights`."""
    leaves = [None if x is None else x.to(dtype or x.dtype).detach().requires_grad_() for x in inputs]
    made = log_decay(*leaves, bound)
    used = [x for x in leaves if x is not None]
    grads = iter(torch.autograd.grad((made * weights(made)).sum(), used))
    return [made, *(None if x is None else next(grads) for x in leaves)]


def weights(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)


def check(inputs, bound=None):
    """At most twice the error of the PyTorch form in the same dtypes, whose one rounding of a float32 is the same."""
    right, same = plain(inputs, bound, torch.float64), plain(inputs, bound)
    made = kernels.run_forward(*inputs, bound)
    # a gradient arrives as it lies, heads before tokens say
    dg = weights(made).transpose(1, 2).contiguous().transpose(1, 2)
    found = [made, *kernels.run_backward(*inputs, bound, dg)]
    for got, exact, theirs in zip(found, right, same, strict=True):
        assert (got is None) == (exact is None)
        if got is None:
            continue
        assert (got.dtype, got.shape, got.is_contiguous()) == (theirs.dtype, theirs.shape, True)
        if got.numel():
            mine, by_torch = (relative_error(x.double(), exact) for x in (got, theirs))
            assert mine <= max(2 * by_torch, 1e-6), (mine, by_torch)


def check_ends(device="cpu"):
    """Gates that are shut or wide open: the numbers of the PyTorch form, and no NaN."""
    x = torch.tensor([-torch.inf, -1e4, 1e4, 200.0], device=device).view(1, 4, 1, 1)
    A_log = torch.zeros(1, device=device)
    for bound in (None, -5.0):
        made = kernels.run_forward(x, A_log, None, bound)
        assert torch.equal(made, log_decay(x, A_log, None, bound))
        dx, dA_log, _ = kernels.run_backward(x, A_log, None, bound, torch.ones_like(x))
        assert dx.isfinite().all()
        assert dA_log.isfinite().all()


def interpreted():
    """What the interpreter has time for; memory that a kernel leaves unwritten is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    for bound in (None, -5.0):
        check(example(), bound)
        check(example(T=70, H=1, K=33, without=("dt_bias",)), bound)
        check(example(K=64, dtype=torch.float16, size=20.0), bound)
        check(example(T=0), bound)
    check(example(without=("A_log",)), -0.5)
    check(example(B=1, T=1, without=("A_log", "dt_bias"), dtype=torch.bfloat16), -5.0)
    check_ends()
    print("all checked")
