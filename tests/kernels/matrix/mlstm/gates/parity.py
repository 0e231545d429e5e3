"""mLSTM's gates against the PyTorch mapping in float64: interpreted and on a GPU."""

import torch

from holdfast.kernels.matrix.mlstm.gates import launch as kernel
from holdfast.recurrences.mlstm import gates
from layouts import view_of
from parity import relative_error


def check(B=2, T=37, H=3, packed=None, exponential=True, dtype=torch.float32, strength=1.0, device="cpu"):
    draw = torch.Generator().manual_seed(T)
    i, f = (strength * torch.randn(B, T, H, generator=draw) for _ in range(2))
    sequences = len(packed) - 1 if packed else B
    m = torch.randn(sequences, H, generator=draw).to(device)
    # of unlike strides
    i, f = view_of(i.to(device, dtype), 0), view_of((f + 2).to(device, dtype), 2)
    # offsets may be a view
    cu_seqlens = torch.tensor(packed, device=device).repeat_interleave(2)[::2] if packed else None
    leaves = [x.double().requires_grad_() for x in (i, f, m)]
    exact = gates(*leaves, cu_seqlens, exponential, torch.float64)
    found = kernel.forward(i, f, m, cu_seqlens, exponential)
    cotangents = [torch.randn(x.shape, generator=draw).to(device) for x in found]
    total = sum((x * y.double()).sum() for x, y in zip(exact, cotangents, strict=True))
    grads = torch.autograd.grad(total, leaves)
    got = [*found, *kernel.backward(i, f, m, cu_seqlens, exponential, *found[:2], kernel.Cotangents(*cotangents))]
    errors = [relative_error(x.double(), y) for x, y in zip(got, [*exact, *grads], strict=True)]
    limits = [1e-6] * 4 + [2.0**-7 if dtype == torch.bfloat16 else 1e-6] * 2 + [1e-6]
    case = (B, T, H, packed, exponential, dtype, strength)
    assert all(error <= limit for error, limit in zip(errors, limits, strict=True)), (case, errors)
    print(case, [f"{error:.0e}" for error in errors])


def interpreted():
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    kernel.SEGMENT, kernel.THREADS, kernel.HEADS, kernel.TILES = 4, 8, 2, 2
    check()
    check(exponential=False)
    check(B=1, packed=(0, 0, 5, 37, 37))
    check(B=1, T=70, packed=(0, 0, 1, 2, 5, 37, 37, 58, 70))
    check(B=1, packed=(0, 0, 5, 37, 37), exponential=False)
    check(strength=20.0)
    check(T=1)
    check(T=0)
    check(T=0, exponential=False)
    equal_arguments_share_the_gradient()
    nan_shows()
    nan_stays_in_its_sequence()
    # as many tokens a tile, with all heads in a program: the interpreter takes its time by programs
    kernel.THREADS, kernel.HEADS = 128, 32
    nan_passes_no_end_within_a_tile()


def equal_arguments_share_the_gradient(device="cpu"):
    """From the second token on log f is 0 to rounding and i what it was: m_t is the maximum of two equal numbers."""
    i, f = torch.full((2, 37, 3), 0.5, device=device), torch.full((2, 37, 3), 200.0, device=device)
    leaves = [x.double().requires_grad_() for x in (i, f)]
    m, exact = torch.zeros(2, 3, dtype=torch.float64, device=device), []
    for here, log_f in zip(leaves[0].unbind(1), torch.nn.functional.logsigmoid(leaves[1]).unbind(1), strict=True):
        before, m = m, torch.maximum(log_f + m, here)
        exact.append((log_f + (before - m).detach(), (here - m.detach()).exp(), m))
    exact = [torch.stack(x, 1) for x in zip(*exact, strict=True)]
    found = kernel.forward(i, f, None, None, True)
    assert all(relative_error(x.double(), y) <= 1e-6 for x, y in zip(found, exact, strict=False))
    draw = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(i.shape, generator=draw).to(device) for _ in exact]
    total = sum((x * y.double()).sum() for x, y in zip(exact, cotangents, strict=True))
    # a gradient of f is less than any float32
    (right,) = torch.autograd.grad(total, leaves[:1])
    di, _, _ = kernel.backward(i, f, None, None, True, *found[:2], kernel.Cotangents(*cotangents, None))
    assert relative_error(di.double(), right) <= 1e-6


def nan_shows(T=37, device="cpu"):
    """A NaN of f is in all that follows, one of i in its own token's strength, and so in all states that follow."""
    i, f = (torch.zeros(1, T, 2, device=device) for _ in range(2))
    i[0, 20, 0] = f[0, 3, 1] = torch.nan
    g, beta, m, last = kernel.forward(i, f, None, None, True)
    assert beta[0, 20, 0].isnan()
    assert not beta[0, :20, 0].isnan().any()
    assert all(x[0, 3:, 1].isnan().all() and not x[0, :3].isnan().any() for x in (g, beta, m))
    assert last[0, 1].isnan()


def nan_stays_in_its_sequence(device="cpu"):
    i, f = (torch.zeros(1, 100, 2, device=device) for _ in range(2))
    f[0, 20] = torch.nan
    cu_seqlens = torch.tensor([0, 7, 33, 100], device=device)
    found = kernel.forward(i, f, None, cu_seqlens, True)
    inside = torch.zeros(100, dtype=torch.bool, device=device)
    inside[20:33] = True
    assert all((x[0].isnan() == inside[:, None]).all() for x in found[:3])
    assert found[3].isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
    dm = torch.zeros_like(i)
    dm[0, 20] = torch.nan
    kept = kernel.forward(i, torch.zeros_like(f), None, cu_seqlens, True)[:2]
    cotangents = kernel.Cotangents(torch.ones_like(i), torch.ones_like(i), dm, None)
    di, df, _ = kernel.backward(i, f, None, cu_seqlens, True, *kept, cotangents)
    inside[7:20], inside[21:] = True, False
    assert all(x[0, 20].isnan().any() and not x[0, ~inside].isnan().any() for x in (di, df))


def nan_passes_no_end_within_a_tile(device="cpu"):
    """One NaN a head, at the first and the last token of each sequence, of a few tokens each: what is next to it in a
    segment, a tile or the next tile is another's, and is what it would be without it."""
    offsets = [0, 1, 2, 5, 5, 9, 13, 15, 21, 25, 29, 34]
    spoilt = sorted(set(offsets[:-1]) | {t - 1 for t in offsets[1:]})
    T, H, sequences = offsets[-1], len(spoilt), len(offsets) - 1
    cu_seqlens = torch.tensor(offsets, device=device)
    draw = torch.Generator().manual_seed(0)
    i, f, dg, dbeta, dm = (torch.randn(1, T, H, generator=draw).to(device) for _ in range(5))
    m, dlast = (torch.randn(sequences, H, generator=draw).to(device) for _ in range(2))
    place = torch.zeros(1, T, H, dtype=torch.bool, device=device)
    place[0, spoilt, range(H)] = True
    # of each head, the sequence with its NaN, and that one's tokens
    of_token = torch.bucketize(torch.arange(T, device=device), cu_seqlens[1:], right=True)
    own = torch.arange(sequences, device=device)[:, None] == of_token[spoilt][None, :]
    inside = own[of_token][None]

    def assert_only_there(bad, good):
        for x, y in zip(bad, good, strict=True):
            there = inside if x.dim() == 3 else own
            assert torch.equal(x.masked_fill(there, 0), y.masked_fill(there, 0))
        assert all(torch.stack([x.isnan() & inside for x in bad if x.dim() == 3]).sum((0, 1, 2)) > 0)

    good = kernel.forward(i, f, m, cu_seqlens, True)
    for given in ((i.masked_fill(place, torch.nan), f), (i, f.masked_fill(place, torch.nan))):
        assert_only_there(kernel.forward(*given, m, cu_seqlens, True), good)
    right = kernel.backward(i, f, m, cu_seqlens, True, *good[:2], kernel.Cotangents(dg, dbeta, dm, dlast))
    cotangents = dg, dbeta, dm, dlast
    for n, x in enumerate(cotangents):
        x = x.masked_fill(place if x.dim() == 3 else own, torch.nan)
        given = (*cotangents[:n], x, *cotangents[n + 1 :])
        bad = kernel.backward(i, f, m, cu_seqlens, True, *good[:2], kernel.Cotangents(*given))
        assert_only_there(bad, right)
