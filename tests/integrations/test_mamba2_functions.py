"""mamba_ssm's mamba_chunk_scan_combined, held against the scan a token at a time."""

import math

import pytest
import torch
import torch.nn.functional as F

from holdfast.integrations.mamba_ssm import mamba_chunk_scan_combined

B, T, H, P, G, N = 2, 7, 4, 3, 2, 5


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float32)


def arguments(batch=B, length=T, whole=True):
    given = {"x": drawn(batch, length, H, P), "dt": drawn(batch, length, H), "A": -drawn(H).exp()}
    given |= {"B": drawn(batch, length, G, N), "C": drawn(batch, length, G, N)}
    if whole:
        given |= {"D": drawn(H, P), "z": drawn(batch, length, H, P), "dt_bias": drawn(H)}
    return given


def stepped(
    x, dt, A, b, c, D=None, z=None, dt_bias=None, before=None, numbers=None, softplus=False, limit=(0, math.inf)
):
    """y [batch, T, H, P] in float64, and the states [batch, T, H, P, N] after each token."""
    dt = dt.double() if dt_bias is None else dt.double() + dt_bias
    dt = (F.softplus(dt) if softplus else dt).clamp(*limit)
    b, c = (each.double().repeat_interleave(H // G, 2) for each in (b, c))
    batch, length = x.shape[:2]
    y, states = [], []
    state = torch.zeros(batch, H, P, N, dtype=torch.float64) if before is None else before.double()
    last = torch.zeros(batch)
    for t in range(length):
        if numbers is not None:
            # sequence 0 goes on with the states before
            state = torch.where((numbers[:, t] == last).view(-1, 1, 1, 1), state, 0)
            last = numbers[:, t]
        step = dt[:, t, :, None, None]
        state = torch.exp(step * A[:, None, None]) * state + step * x[:, t, ..., None] * b[:, t, :, None]
        now = (state * c[:, t, :, None]).sum(-1)
        now = now if D is None else now + (D if D.dim() == 2 else D[:, None]) * x[:, t]
        y.append(now if z is None else now * F.silu(z[:, t].double()))
        states.append(state)
    return torch.stack(y, 1), torch.stack(states, 1)


def right(given, **more):
    names = {"B": "b", "C": "c"}
    return stepped(**{names.get(name, name): x for name, x in given.items()}, **more)


def assert_close(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.1, 0.9), (-math.inf, math.inf)])
def test_scan(whole, softplus, limit):
    """Without a softplus the default limit counts too: step sizes are at least 0."""
    given = arguments(whole=whole)
    y = mamba_chunk_scan_combined(**given, chunk_size=4, dt_softplus=softplus, dt_limit=limit)
    assert_close(y, right(given, softplus=softplus, limit=limit)[0])


def test_a_skip_weight_a_head():
    given = arguments() | {"D": drawn(H)}
    assert_close(mamba_chunk_scan_combined(**given, chunk_size=4), right(given)[0])


@pytest.mark.parametrize("length", [0, 1, T])
def test_states(length):
    given, before = arguments(length=length), drawn(B, H, P, N)
    y, state = mamba_chunk_scan_combined(
        **given, chunk_size=4, initial_states=before, dt_softplus=True, return_final_states=True
    )
    if length:
        expected, states = right(given, before=before, softplus=True)
        assert_close(y, expected)
        assert_close(state, states[:, -1])
    else:
        assert torch.equal(state, before)
    assert state.dtype == torch.float32


@pytest.mark.parametrize("numbers", [None, torch.tensor([[0, 0, 1, 1], [2, 2, 2, 3]])])
def test_gradients(numbers):
    given = {name: x.double().requires_grad_() for name, x in arguments(length=4).items()}
    before = drawn(B, H, P, N).double().requires_grad_()
    options = {"dt_softplus": True, "dt_limit": (0.0, 1.5), "return_final_states": True}
    found = mamba_chunk_scan_combined(**given, chunk_size=4, initial_states=before, seq_idx=numbers, **options)
    y, states = right(given, before=before, numbers=numbers, softplus=True, limit=(0.0, 1.5))
    leaves = (before, *given.values())
    grads = [torch.autograd.grad(y.sin().sum() + last.cos().sum(), leaves) for y, last in (found, (y, states[:, -1]))]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


NUMBERS = torch.tensor([[0, 0, 1, 1, 1, 4, -1], [3, 4, 4, 4, 4, 5, 5]], dtype=torch.int32)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("has_states", [False, True])
def test_numbered_sequences(rows, has_states):
    given, seq_idx = arguments(batch=rows), NUMBERS[:rows]
    before = drawn(rows, H, P, N) if has_states else None
    expected, states = right(given, before=before, numbers=seq_idx, softplus=True)
    y, last = mamba_chunk_scan_combined(
        **given, chunk_size=4, initial_states=before, seq_idx=seq_idx, dt_softplus=True, return_final_states=True
    )
    assert_close(y, expected)
    assert_close(last, states[:, -1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_states_of_sequences(dtype):
    given = arguments(batch=1)
    # an empty one at the start, in the middle and at the end
    offsets = torch.tensor([0, 0, 2, 2, 6, 7, 7], dtype=dtype)
    seq_idx = torch.tensor([[1, 1, 3, 3, 3, 3, 4]])
    expected, states = right(given, numbers=seq_idx, softplus=True)
    options = {"chunk_size": 4, "seq_idx": seq_idx, "cu_seqlens": offsets, "dt_softplus": True}
    y, last, each = mamba_chunk_scan_combined(**given, **options, return_final_states=True, return_varlen_states=True)
    assert_close(y, expected)
    assert_close(last, states[:, -1])
    empty = torch.zeros_like(states[0, 0])
    assert_close(each, torch.stack([empty, states[0, 1], empty, states[0, 5], states[0, 6], empty]))
    _, alone = mamba_chunk_scan_combined(**given, **options, return_varlen_states=True)
    assert torch.equal(alone, each)
    assert torch.equal(mamba_chunk_scan_combined(**given, **options), y)


def test_what_is_not_served():
    given, one = arguments(), arguments(batch=1)
    offsets = torch.tensor([0, 3, 7])
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    for tensors, wrong, message in (
        (one, {"cu_seqlens": offsets}, "seq_idx: expected beside cu_seqlens"),
        (one, {"return_varlen_states": True}, "cu_seqlens: expected offsets beside return_varlen_states=True"),
        (one, {"cu_seqlens": offsets, "seq_idx": 1 - numbers}, "seq_idx: expected numbers that rise"),
        (one, {"cu_seqlens": offsets + 1, "seq_idx": numbers}, "cu_seqlens: expected the offsets of seq_idx"),
        (given, {"cu_seqlens": offsets, "seq_idx": NUMBERS}, "cu_seqlens: expected packed inputs with B = 1"),
        (given, {"seq_idx": numbers}, r"seq_idx: expected shape \[B=2, T=7\]; got \[1, 7\]"),
        (given, {"dt_limit": 3}, "dt_limit: expected two numbers; got 3"),
        (given, {"dt_limit": (0.0, math.nan)}, "dt_limit: expected two numbers"),
        (given, {"dt_limit": ("0", 1)}, "dt_limit: expected two numbers"),
        (given, {"dt_limit": (1, 0)}, "dt_limit: expected the lower number first"),
        (given, {"initial_states": drawn(B, H, N, P)}, r"initial_states: expected shape \[B=2, H=4, P=3, N=5\]"),
        (given, {"chunk_size": 0}, "chunk_size: expected a positive int; got 0"),
        (given, {"state_dtype": "float32"}, "state_dtype: expected a dtype or None; got str"),
        (given, {"A": drawn(H, N)}, r"A: expected shape \[H=4\]; got \[4, 5\]"),
        (given, {"chunksize": 3}, "chunksize"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            mamba_chunk_scan_combined(**{"chunk_size": 4} | tensors | wrong)
    empty = arguments(length=0)
    with pytest.raises(ValueError, match=r"seq_idx: expected tokens to number; got shape \[2, 0\]"):
        mamba_chunk_scan_combined(**empty, chunk_size=4, seq_idx=NUMBERS[:, :0])
