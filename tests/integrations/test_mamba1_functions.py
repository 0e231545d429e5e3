"""mamba_ssm's selective_scan_fn and selective_state_update, held against the scan a token at a time."""

import pytest
import torch
import torch.nn.functional as F

from holdfast import ops
from holdfast.integrations.mamba_ssm import selective_scan_fn, selective_state_update

B, D, T, N, G, H, P = 2, 6, 5, 7, 2, 4, 3


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float32)


def token(state, x, dt, A, b, c, D=None, z=None, dt_bias=None, dt_softplus=False):
    """One token of channels in float64: x, dt, z [B, D], state [B, D, N], b and c [B, D, N] -> (y [B, D], state)."""
    state, x, dt, A, b, c = (each.double() for each in (state, x, dt, A, b, c))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    state = torch.exp(dt[..., None] * A) * state + dt[..., None] * b * x[..., None]
    y = (state * c).sum(-1)
    y = y if D is None else y + D * x
    return y if z is None else y * F.silu(z.double()), state


def assert_close(found, right):
    torch.testing.assert_close(found.double(), right.double(), rtol=5e-6, atol=5e-6)


def of_all_channels(x):
    """B or C [B, N, ...] or [B, G, N, ...] with the D channels' own."""
    x = x if x.dim() == 4 else x[:, None]
    return x.repeat_interleave(D // x.shape[1], 1)


def scanned(u, delta, A, b, c, *rest, softplus=False):
    skip, z, bias = rest
    state, y = torch.zeros(B, D, N), []
    b, c = of_all_channels(b), of_all_channels(c)
    for t in range(T):
        gate = None if z is None else z[..., t]
        now, state = token(state, u[..., t], delta[..., t], A, b[..., t], c[..., t], skip, gate, bias, softplus)
        y.append(now)
    return torch.stack(y, -1), state


def scan_arguments(grouped, whole):
    reads = (B, G, N, T) if grouped else (B, N, T)
    given = [drawn(B, D, T), drawn(B, D, T).sigmoid(), -drawn(D, N).exp(), drawn(*reads), drawn(*reads)]
    return given + ([drawn(D), drawn(B, D, T), drawn(D)] if whole else [None, None, None])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_scan(grouped, whole):
    given = scan_arguments(grouped, whole)
    y, state = selective_scan_fn(*given, whole, True)
    right, last = scanned(*given, softplus=whole)
    assert_close(y, right)
    assert_close(state, last)
    assert torch.equal(selective_scan_fn(*given, delta_softplus=whole), y)


@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_a_scan(grouped):
    leaves = [x.double().requires_grad_() for x in scan_arguments(grouped, True)]
    found, right = selective_scan_fn(*leaves, True, True), scanned(*leaves, softplus=True)
    grads = [torch.autograd.grad(y.sin().sum() + state.cos().sum(), leaves) for y, state in (found, right)]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_scans_that_are_not_served():
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    given = dict(zip(names, scan_arguments(False, True), strict=True))
    for wrong, message in (
        ({"B": drawn(D, N)}, r"B: expected shape \[B=2, G, N=7, T=5\] or \[B=2, N=7, T=5\]; got \[6, 7\]"),
        ({"A": torch.complex(drawn(D, N), drawn(D, N))}, "A: expected a floating-point dtype; got torch.complex64"),
        ({"C": given["C"].bfloat16()}, "C: expected torch.float32, as the other inputs have"),
        ({"delta_softplus": 1}, "delta_softplus: expected a bool"),
        ({"return_last_state": None}, "return_last_state: expected a bool"),
        ({"delta_softmax": True}, "delta_softmax"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            selective_scan_fn(**given | wrong)


def update_arguments(heads, batch=B):
    """state, x, dt, A, B, C, D, z, dt_bias."""
    channels = (H, P) if heads else (D,)
    reads = (batch, G, N) if heads else (batch, N)
    first = [drawn(batch, *channels, N), drawn(batch, *channels), drawn(batch, *channels), -drawn(*channels, N).exp()]
    return [*first, drawn(*reads), drawn(*reads), drawn(*channels), drawn(batch, *channels), drawn(*channels)]


def updated(heads, state, x, dt, A, b, c, skip, z, bias, softplus):
    if not heads:
        b, c = (each[:, None].expand(-1, D, -1) for each in (b, c))
        return token(state, x, dt, A, b, c, skip, z, bias, softplus)
    b, c = (each.repeat_interleave(H * P // G, 1) for each in (b, c))
    flat = [None if each is None else each.flatten(1, 2) for each in (state, x, dt)]
    skip, bias = (None if each is None else each.flatten() for each in (skip, bias))
    z = None if z is None else z.flatten(1, 2)
    y, state = token(*flat, A.flatten(0, 1), b, c, skip, z, bias, softplus)
    return y.view(-1, H, P), state.view(-1, H, P, N)


def tied(state, x, dt, A, *rest):
    """With one number a head, expanded as Mamba-2's layer does; and D so."""
    b, c, skip, z, bias = rest
    dt, A = dt[..., :1].expand(-1, -1, P), A[:, :1, :1].expand(-1, P, N)
    return [state, x, dt, A, b, c, skip[:, :1].expand(-1, P), z, bias[:, :1].expand(-1, P)]


@pytest.mark.parametrize("layout", ["channels", "heads", "tied", "tied, turned round"])
@pytest.mark.parametrize("whole", [False, True])
def test_update(layout, whole, monkeypatch):
    heads = layout != "channels"
    given = update_arguments(heads)
    given = tied(*given) if "tied" in layout else given
    if not whole:
        given[6:] = [None, None, None]
    if "turned" in layout:
        given[0] = given[0].mT.contiguous().mT
    right, after = updated(heads, *given, whole)
    place, stepped = given[0].data_ptr(), []
    for name in ("step", "pooled_step"):
        run = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda op, *a, run=run, **named: stepped.append(op) or run(op, *a, **named))
    y = selective_state_update(*given, dt_softplus=whole)
    assert_close(y, right)
    assert_close(given[0], after)
    assert y.shape == given[1].shape
    assert given[0].data_ptr() == place
    assert stepped == ["ssd" if "tied" in layout else "mamba1"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_update_of_a_state_of_another_dtype(dtype):
    given = update_arguments(True)
    given[0] = given[0].to(dtype)
    right, after = updated(True, *given, True)
    assert_close(selective_state_update(*given, True), right)
    torch.testing.assert_close(given[0], after.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [[3, 1, 0], [-1, 4, 0], [-1, -1, -1]])
@pytest.mark.parametrize("layout", ["channels", "heads", "tied"])
def test_update_of_rows_of_a_pool(rows, layout):
    heads = layout != "channels"
    given = update_arguments(heads, len(rows))
    given = tied(*given) if layout == "tied" else given
    pool = drawn(5, *given[0].shape[1:])
    before = pool.clone()
    y = selective_state_update(pool, *given[1:], True, torch.tensor(rows, dtype=torch.int32))
    right, after = updated(heads, before[[max(row, 0) for row in rows]], *given[1:], True)
    for b, row in enumerate(rows):
        if row < 0:
            assert (y[b] == 0).all()
        else:
            assert_close(y[b], right[b])
            assert_close(pool[row], after[b])
    others = [row for row in range(5) if row not in rows]
    assert torch.equal(pool[others], before[others])


def test_updates_that_are_not_served():
    names = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    given = dict(zip(names, update_arguments(True), strict=True))
    for wrong, message in (
        ({"A": given["A"][:, 0, 0]}, r"A: expected shape \[H=4, P=3, N=7\]; got \[4\]"),
        ({"B": given["B"][:, 0]}, r"B: expected shape \[B=2, G, N=7\]; got \[2, 7\]"),
        ({"B": drawn(B, 3, N), "C": drawn(B, 3, N)}, "expected G to divide H; got G = 3, H = 4"),
        ({"state": drawn(B + 1, H, P, N)}, r"state: expected shape \[B=2, H=4, P=3, N\]; got \[3, 4, 3, 7\]"),
        ({"state_batch_indices": torch.zeros(B)}, "state_batch_indices: expected a tensor of torch.int32"),
        ({"dt_softplus": 1}, "dt_softplus: expected a bool"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            selective_state_update(**given | wrong)
