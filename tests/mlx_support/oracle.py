"""The scans in float64, a token at a time, differentiated by torch: written from the equations, not from the code."""

import mlx.core as mx
import numpy as np
import torch


def rglru(a, x, h):
    ys = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1), h


def rotlru(a, cs, sn, x, h):
    turned = torch.complex(cs, sn) * a
    z, zs = torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous()), []
    drive = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    for t in range(x.shape[1]):
        z = turned[:, t] * z + drive[:, t]
        zs.append(z)
    return torch.view_as_real(torch.stack(zs, 1)).flatten(-2), torch.view_as_real(z).flatten(-2)


def gla(q, k, v, gates, S):
    gates = gates[..., None] if gates.ndim == 3 else gates
    ys = []
    for t in range(v.shape[1]):
        S = gates[:, t, :, :, None] * S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(ys, 1), S


def delta(q, k, v, gates, beta, S):
    gates = gates[..., None] if gates.ndim == 3 else gates
    each = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(each, 2), k.repeat_interleave(each, 2)
    ys = []
    for t in range(v.shape[1]):
        S = gates[:, t, :, :, None] * S
        missing = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * missing)
        ys.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(ys, 1), S


def ssd(u, delta, B, C, A, S):
    each = u.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(each, 2), C.repeat_interleave(each, 2)
    ys = []
    for t in range(u.shape[1]):
        d = delta[:, t, :, None, None]
        S = torch.exp(d * A[:, None, :]) * S + torch.einsum("bhp,bhn->bhpn", u[:, t], B[:, t]) * d
        ys.append(torch.einsum("bhpn,bhn->bhp", S, C[:, t]))
    return torch.stack(ys, 1), S


def selective(u, delta, B, C, A, h):
    ys = []
    for t in range(u.shape[1]):
        d = delta[:, t, :, None]
        h = torch.exp(d * A) * h + d * u[:, t, :, None] * B[:, t, None]
        ys.append((h * C[:, t, None]).sum(-1))
    return torch.stack(ys, 1), h


def exact(function, inputs, state, weights) -> dict[str, list[np.ndarray]]:
    """y, the final state and the gradients of sum(weights * both), in float64 on the same numbers."""
    given = [torch.tensor(np.array(x.astype(mx.float32)), dtype=torch.float64, requires_grad=True) for x in inputs]
    given.append(torch.tensor(np.array(state), dtype=torch.float64, requires_grad=True))
    found = function(*given)
    loss = sum((torch.tensor(np.array(w.astype(mx.float32))) * x).sum() for w, x in zip(weights, found, strict=True))
    grads = torch.autograd.grad(loss, given)
    return {"values": [x.detach().numpy() for x in found], "grads": [g.numpy() for g in grads]}


def ours(function, inputs, state, weights) -> dict[str, list[mx.array]]:
    """The same of function(*inputs, initial_state=state) -> (y, final state), by mlx."""

    def loss(*given):
        found = function(*given[:-1], initial_state=given[-1])
        return sum((w * x).sum() for w, x in zip(weights, found, strict=True)), found

    (_, values), grads = mx.value_and_grad(loss, argnums=list(range(len(inputs) + 1)))(*inputs, state)
    return {"values": list(values), "grads": list(grads)}


def relative_error(got: mx.array, exact: np.ndarray) -> float:
    """Largest difference, relative to the largest value. NaN or inf give inf."""
    got = np.array(got.astype(mx.float32), np.float64)
    assert got.shape == exact.shape, (got.shape, exact.shape)
    if not np.isfinite(got).all():
        return np.inf
    return float(np.abs(got - exact).max() / max(np.abs(exact).max(), 1e-30)) if exact.size else 0.0


def assert_close(got, exact, limit) -> None:
    errors = {
        part: [relative_error(x, y) for x, y in zip(got[part], exact[part], strict=True)]
        for part in ("values", "grads")
    }
    assert all(e <= limit for found in errors.values() for e in found), f"relative errors {errors} exceed {limit}"
