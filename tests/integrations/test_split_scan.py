"""mamba_ssm's mamba_split_conv1d_scan_combined, held against its parts, each tested by itself."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.integrations.causal_conv1d import causal_conv1d_fn
from holdfast.integrations.mamba_ssm import RMSNormGated, mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined

BATCH, T, H, P, G, N, W, M, OUT = 2, 6, 4, 3, 2, 5, 4, 7, 8
INNER, READ = H * P, G * N


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float32)


def arguments(beside=0):
    given = {"zxbcdt": drawn(BATCH, T, 2 * beside + 2 * INNER + 2 * READ + H)}
    given |= {"conv1d_weight": drawn(INNER + 2 * READ, W), "conv1d_bias": drawn(INNER + 2 * READ)}
    return given | {"dt_bias": drawn(H), "A": -drawn(H).exp(), "D": drawn(H, P), "chunk_size": 4, "ngroups": G}


def parts(given, seq_idx=None):
    """The gated product, z [batch, T, H P], and what the scan is given, z aside."""
    zxbcdt = given["zxbcdt"]
    beside = zxbcdt.shape[2] - 2 * INNER - 2 * READ - H
    product, z, mixed, dt = zxbcdt.split([beside, INNER, INNER + 2 * READ, H], -1)
    mixed = causal_conv1d_fn(mixed.mT, given["conv1d_weight"], given["conv1d_bias"], seq_idx, activation="silu").mT
    x, b, c = mixed.split([INNER, READ, READ], -1)
    b, c = (part.reshape(BATCH, T, G, N) for part in (b, c))
    scan = {"x": x.reshape(BATCH, T, H, P), "dt": dt, "A": given["A"], "B": b, "C": c, "chunk_size": 4}
    scan |= {"D": given["D"], "dt_bias": given["dt_bias"], "dt_softplus": True, "seq_idx": seq_idx}
    first, second = product.chunk(2, -1)
    return F.silu(first) * second, z, scan


def test_gated_by_the_scan():
    given, before = arguments(), drawn(BATCH, H, P, N)
    _, z, scan = parts(given)
    options = {"initial_states": before, "return_final_states": True, "dt_limit": (0.1, 2.0)}
    y, state = mamba_chunk_scan_combined(**scan, z=z.unflatten(-1, (H, P)), **options)
    found, last = mamba_split_conv1d_scan_combined(**given, **options)
    torch.testing.assert_close(found, y.flatten(-2))
    torch.testing.assert_close(last, state)
    y = mamba_split_conv1d_scan_combined(**given | {"D": given["D"][:, 0]}, headdim=P)
    right = mamba_chunk_scan_combined(**scan | {"D": given["D"][:, 0]}, z=z.unflatten(-1, (H, P)))
    torch.testing.assert_close(y, right.flatten(-2))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("beside", [0, M])
def test_normalised_and_projected(first, beside):
    given = arguments(beside)
    norm = RMSNormGated(INNER, 1e-6, INNER // G, first)
    norm.weight.data = drawn(INNER)
    weight, bias = drawn(OUT, beside + INNER), drawn(OUT)
    numbers = torch.tensor([[0, 0, 1, 1, 1, 2], [1, 1, 1, 1, 3, -1]])
    product, z, scan = parts(given, numbers)
    y = torch.cat([product, norm(mamba_chunk_scan_combined(**scan).flatten(-2), z)], -1)
    normalised = {"rmsnorm_weight": norm.weight.data, "norm_before_gate": first, "seq_idx": numbers}
    torch.testing.assert_close(mamba_split_conv1d_scan_combined(**given, **normalised), y)
    found = mamba_split_conv1d_scan_combined(**given, **normalised, outproj_weight=weight, outproj_bias=bias)
    torch.testing.assert_close(found, y @ weight.mT + bias, rtol=1e-5, atol=1e-5)


def test_gradients_of_all_tensors():
    given = arguments(M) | {"rmsnorm_weight": drawn(INNER), "outproj_weight": drawn(OUT, M + INNER)}
    leaves = [x.requires_grad_() for x in given.values() if isinstance(x, torch.Tensor)]
    grads = torch.autograd.grad(mamba_split_conv1d_scan_combined(**given).sin().sum(), leaves)
    assert all(torch.isfinite(grad).all() and grad.any() for grad in grads)


def test_what_is_not_served():
    given = arguments()
    for wrong, message in (
        ({"D": drawn(H)}, "headdim: expected beside D"),
        ({"headdim": P + 1}, "headdim: expected P = 3, as D has; got 4"),
        ({"D": drawn(1, H, P)}, r"D: expected shape \[H\] or \[H, P\]"),
        ({"ngroups": 3}, r"conv1d_weight: expected H P \+ 2 G N = 12 \+ 6 N channels; got 32"),
        ({"ngroups": 0}, r"conv1d_weight: expected H P \+ 2 G N = 12 \+ 0 N channels; got 32"),
        ({"conv1d_weight": drawn(INNER, W)}, r"conv1d_weight: expected H P \+ 2 G N = 12 \+ 4 N channels; got 12"),
        ({"zxbcdt": drawn(BATCH, T, 49)}, r"zxbcdt: expected shape \[batch, T, 2 M \+ 48\]; got \[2, 6, 49\]"),
        ({"outproj_bias": drawn(OUT)}, "outproj_bias: expected outproj_weight beside it"),
        ({"rmsnorm_weight": drawn(P)}, r"rmsnorm_weight: expected shape \[12\]; got \[3\]"),
        ({"activation": "gelu"}, "activation: expected"),
        ({"dt_softplus": True}, "dt_softplus"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            mamba_split_conv1d_scan_combined(**given | wrong)
