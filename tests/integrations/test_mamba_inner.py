"""mamba_ssm's mamba_inner_fn, held against its equations a token at a time in float64."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.integrations.mamba_ssm import mamba_inner_fn

B, D, T, N, W, RANK, OUT = 2, 6, 7, 4, 3, 5, 3


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def arguments(batch=B, D=D, T=T, N=N, rank=RANK, out=OUT, fixed=()):
    """All that has no default, and D, delta_bias and the fixed B or C."""
    given = {
        "xz": drawn(batch, 2 * D, T), "conv1d_weight": drawn(D, 1, W), "conv1d_bias": drawn(D),
        "x_proj_weight": drawn(rank + (2 - len(fixed)) * N, D) / D**0.5, "delta_proj_weight": drawn(D, rank),
        "out_proj_weight": drawn(out, D), "out_proj_bias": drawn(out), "A": -drawn(D, N).exp(), "D": drawn(D),
        "delta_bias": drawn(D),
    }  # fmt: skip
    return given | {name: drawn(batch, N, T) for name in fixed}


EXTRAS = {
    "B_proj_bias": (N,), "C_proj_bias": (N,), "b_rms_weight": (N,), "c_rms_weight": (N,), "dt_rms_weight": (D,),
}  # fmt: skip


def normed(x, weight, eps):
    return x if weight is None else x * weight / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def stepped(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None,
    C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, b_rms_weight=None,
    c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6,
):  # fmt: skip
    (x, z), taps = xz.double().chunk(2, 1), conv1d_weight.shape[2]
    padded, rank, states = F.pad(x, (taps - 1, 0)), delta_proj_weight.shape[1], A.shape[1]
    state, found = xz.new_zeros(len(xz), *A.shape, dtype=torch.float64), []
    for t in range(xz.shape[2]):
        u = (padded[:, :, t : t + taps] * conv1d_weight[:, 0].double()).sum(-1)
        u = F.silu(u if conv1d_bias is None else u + conv1d_bias)
        made = u @ x_proj_weight.double().T
        delta = normed(made[:, :rank] @ delta_proj_weight.double().T, dt_rms_weight, b_c_dt_rms_eps)
        delta = delta if delta_bias is None else delta + delta_bias
        delta = F.softplus(delta) if delta_softplus else delta
        write, read = made[:, rank : rank + states], made[:, made.shape[1] - states :]
        write = write if B_proj_bias is None else write + B_proj_bias
        read = read if C_proj_bias is None else read + C_proj_bias
        write, read = normed(write, b_rms_weight, b_c_dt_rms_eps), normed(read, c_rms_weight, b_c_dt_rms_eps)
        write, read = write if B is None else B[..., t].double(), read if C is None else C[..., t].double()
        state = torch.exp(delta[..., None] * A) * state + (delta * u)[..., None] * write[:, None]
        y = (state * read[:, None]).sum(-1)
        y = (y if D is None else y + D * u) * F.silu(z[:, :, t])
        found.append(y @ out_proj_weight.double().T + (0 if out_proj_bias is None else out_proj_bias))
    return torch.stack(found, 1)


def assert_close(found, right, tolerance=1e-9):
    torch.testing.assert_close(found.double(), right.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fixed", [(), ("B",), ("C",), ("B", "C")])
@pytest.mark.parametrize("softplus", [True, False])
def test_outputs_and_gradients(fixed, softplus):
    given = {name: x.requires_grad_() for name, x in arguments(fixed=fixed).items()}
    given["delta_bias"] = (given["delta_bias"].detach().abs() + 1).requires_grad_()
    options = {"delta_softplus": softplus}
    if not softplus:
        # steps as they are have to be positive, or states grow
        given["x_proj_weight"] = (given["x_proj_weight"].detach() * 0.01).requires_grad_()
    found, right = mamba_inner_fn(**given, **options), stepped(**given, **options)
    assert_close(found, right)
    grads = [torch.autograd.grad(x.sin().sum(), list(given.values())) for x in (found, right)]
    for got, wanted in zip(*grads, strict=True):
        assert_close(got, wanted)


def test_biases_and_norms_of_what_is_made():
    given = arguments() | {name: drawn(*shape) for name, shape in EXTRAS.items()}
    given = {name: x.requires_grad_() for name, x in given.items()}
    found, right = mamba_inner_fn(**given, b_c_dt_rms_eps=0.1), stepped(**given, b_c_dt_rms_eps=0.1)
    assert_close(found, right)
    grads = [torch.autograd.grad(x.sin().sum(), list(given.values())) for x in (found, right)]
    for got, wanted in zip(*grads, strict=True):
        assert_close(got, wanted)


def test_what_may_be_left_out():
    given = arguments() | {"conv1d_bias": None, "out_proj_bias": None, "D": None, "delta_bias": None}
    assert_close(mamba_inner_fn(**given), stepped(**given))


def test_no_token_at_all():
    assert mamba_inner_fn(**arguments(T=0)).shape == (B, 0, OUT)


def test_sizes_of_the_package_s_own_test():
    """By place, in float32 beside float32 weights."""
    given = {name: x.float() for name, x in arguments(2, 768, 128, 8, 48, 384).items()}
    given["A"], given["conv1d_weight"] = -0.5 * torch.rand(768, 8), given["conv1d_weight"] / 2
    for name in ("x_proj_weight", "delta_proj_weight", "out_proj_weight"):
        given[name] /= given[name].shape[1] ** 0.5
    *placed, skip, bias = given.values()
    found = mamba_inner_fn(*placed, None, None, skip, bias, None, None, True, 0)
    assert found.dtype == torch.float32
    assert_close(found, stepped(**given), 2e-4)


def test_16_bits():
    given = arguments()
    narrow = ("xz", "x_proj_weight", "delta_proj_weight", "out_proj_weight")
    given = {name: x.bfloat16() if name in narrow else x.float() for name, x in given.items()}
    found = mamba_inner_fn(**given)
    assert found.dtype == torch.bfloat16
    right = stepped(**given)
    assert (found.double() - right).norm() < 2e-2 * right.norm()


def test_what_is_not_served():
    given = arguments()
    for wrong, message in (
        ({"A": given["A"].to(torch.complex64)}, "A: expected a floating-point dtype; got torch.complex64"),
        ({"xz": given["xz"][:, 1:]}, r"xz: expected shape \[B, 2D=12, T\]; got \[2, 11, 7\]"),
        ({"conv1d_weight": drawn(D, W)}, r"conv1d_weight: expected shape \[D=6, 1=1, W\]; got \[6, 3\]"),
        ({"x_proj_weight": drawn(RANK, D)}, r"x_proj_weight: expected shape \[rank\+N\+N=13, D=6\]; got \[5, 6\]"),
        ({"B": drawn(B, N, T)}, r"x_proj_weight: expected shape \[rank\+N\+N=9, D=6\]"),
        ({"B": drawn(D, N), "x_proj_weight": drawn(RANK + N, D)}, r"B: expected shape .*; got \[6, 4\]"),
        ({"B": drawn(B, N, T), "B_proj_bias": drawn(N)}, "B_proj_bias: expected None beside B"),
        ({"C": drawn(B, N, T), "c_rms_weight": drawn(N)}, "c_rms_weight: expected None beside C"),
        ({"checkpoint_lvl": 2}, "checkpoint_lvl: expected 0 or 1; got 2"),
        ({"delta_softplus": 1}, "delta_softplus: expected a bool"),
        ({"out_proj_weight": given["out_proj_weight"].float()}, r"out_proj_weight: expected torch\.float64"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            mamba_inner_fn(**given | wrong)
