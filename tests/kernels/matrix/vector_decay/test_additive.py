"""The gradients that the delta rule takes from vector decay's kernels, against autograd in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from holdfast.kernels.matrix.vector_decay import additive
from holdfast.kernels.matrix.vector_decay.additive import ChunkGradients
from holdfast.kernels.matrix.vector_decay.hopper.backend import saved_sizes
from interpreted import interpret
from kernels.lib.triton.group_sums_on_cpu import sums_by_torch
from kernels.matrix.vector_decay.triton.parity import example, plan
from parity import relative_error

CHUNK = 64
PACKED = (0, 10, 10, 80)
SIZES = {
    "whole chunks": ({"T": 128, "K": 64, "V": 64}, None),
    # a state reaches to the end of the chunk
    "weak decays": ({"T": 128, "K": 64, "V": 64, "g": "weak"}, None),
    "tails, grouped, no tile's widths": ({"B": 2, "T": 70, "H": 2, "Hq": 1, "K": 72, "V": 40}, None),
    "packed": ({"T": 80, "K": 64, "V": 64}, PACKED),
    "strong decays among mild ones": ({"T": 70, "K": 64, "V": 64, "g": "channels"}, None),
    "rapid decays": ({"T": 70, "K": 64, "V": 64, "g": "rapid"}, None),
    "resets": ({"T": 70, "K": 64, "V": 64, "g": "resets"}, None),
}


def passes(call, packed):
    """Of the delta rule, step by step in float64: u, do, dv, states {slot: [H, V, K]} and their gradients, and what
    autograd has for q, k, g, and an erase key."""
    q, k, v, g, beta = (x.double().requires_grad_() for x in call[:5])
    e = k if call.e is None else call.e.double().requires_grad_()
    batch, T, H, V = v.shape
    group, K = H // q.shape[2], q.shape[3]
    rows = [(b, 0, T, b * -(-T // CHUNK)) for b in range(batch)]
    if packed:
        rows = [(0, a, b, a // CHUNK + n) for n, (a, b) in enumerate(pairwise(packed))]
    us, os, befores, afters = torch.zeros(batch, T, H, V), torch.zeros(batch, T, H, V), {}, {}
    us, os = us.double(), os.double()
    for b, first, end, slot in rows:
        S = torch.zeros(H, K, V, dtype=torch.float64)
        for t in range(first, end):
            if (t - first) % CHUNK == 0:
                if t > first:
                    # a node of its own: what later chunks alone give it
                    S = S * 1.0
                    S.retain_grad()
                    afters[slot + (t - first) // CHUNK - 1] = S
                befores[slot + (t - first) // CHUNK] = S.detach()
            decayed = g[b, t].exp()[..., None] * S
            key = k[b, t].repeat_interleave(group, 0)
            erase = e[b, t].repeat_interleave(H // e.shape[2], 0)
            x = v[b, t] - torch.einsum("hkv,hk->hv", S if call.erase_before_decay else decayed, erase)
            u = beta[b, t][:, None] * x
            us[b, t] = u.detach()
            S = decayed + key[..., None] * u[:, None]
            os[b, t] = call.scale * torch.einsum("hkv,hk->hv", S, q[b, t].repeat_interleave(group, 0))
    do = torch.randn(os.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    do = do.to(call.v.dtype).double()
    os.backward(do)
    dstates = {at: afters[at].grad if at in afters else torch.zeros_like(S) for at, S in befores.items()}
    states, dstates = ({at: x.mT for at, x in found.items()} for found in (befores, dstates))
    grads = (q.grad, k.grad, g.grad, *(() if call.e is None else (e.grad,)))
    return us, do, v.grad, states, dstates, grads


def filled(states, like, tiled, shape, packed):
    """Memory of the states of all chunks, [V, K] each, as kernels have them; NaN where there is none."""
    H, V, K = next(iter(states.values())).shape
    if not tiled:
        found = torch.full((max(states) + 1, H, V, K), torch.nan, dtype=like.dtype)
        for at, S in states.items():
            found[at] = S
        return found
    sizes = saved_sizes(shape, K, len(packed) - 1 if packed else None)
    found = torch.zeros(sizes, dtype=like.dtype).view(-1, CHUNK, H, -(-K // 64), -(-V // 64), 64)
    for at, S in states.items():
        padded = F.pad(S, (0, -K % 64, 0, -V % 64)).view(H, -(-V // 64), 64, -(-K // 64), 64)
        found[at] = padded.permute(2, 0, 3, 1, 4)
    return found.view(sizes)


# what reads before a write: keys, erase keys, or these before the decay
READERS = ("k", "e", "e before the decay")
every_reader = pytest.mark.parametrize("reader", READERS)


def check(name, reader, dtype, tiled, limit):
    sizes, packed = SIZES[name]
    call = example(**sizes, dtype=dtype, state=False)
    call = call._replace(k=F.normalize(call.k.float(), dim=-1).to(dtype), delta=True)
    if reader != "k":
        gate = torch.rand(call.g.shape, generator=torch.Generator().manual_seed(6)).to(dtype)
        e = call.k.repeat_interleave(call.g.shape[2] // call.k.shape[2], 2) * gate
        call = call._replace(e=e, erase_before_decay=reader == READERS[2])
    *values, states, dstates, right = passes(call, packed)
    u, do, dv = (x.to(dtype) for x in values)
    states, dstates = (filled(x, call.v, tiled, call.v.shape, packed) for x in (states, dstates))
    gradients = ChunkGradients(call, torch.tensor(packed) if packed else None, tiled)
    found = gradients.find(u, do, dv, states, dstates, plan())
    errors = [relative_error(x.double(), y) for x, y in zip(found, right, strict=True)]
    assert max(errors) <= limit, (name, reader, errors)


def interpreted():
    for name in SIZES:
        for reader in READERS:
            check(name, reader, torch.float32, False, 1e-6)
    print("all checked")


@pytest.mark.slow
def test_by_triton():
    assert "all checked" in interpret("kernels.matrix.vector_decay.test_additive", "interpreted", seconds=300)


@every_reader
@pytest.mark.parametrize("name", SIZES)
def test_by_hopper(name, reader, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    import gluon_partitions_emulator
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_launch

    monkeypatch.setattr(hopper_launch, "launch", gluon_partitions_emulator.launch)
    sums_by_torch(monkeypatch)
    monkeypatch.setattr(additive, "ungroup", grouped_by_torch)
    check(name, reader, torch.float16, True, 2.0**-10)


def grouped_by_torch(dq, dk, heads):
    return tuple(x.unflatten(2, (heads, -1)).sum(3) for x in (dq, dk))


@pytest.mark.slow
@pytest.mark.sizes("reader")
@every_reader
def test_keys_that_read_compile(reader, monkeypatch):
    """The second launch of Hopper's gradients."""
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import compile_launch, recorded
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_launch

    launches = recorded(monkeypatch, hopper_launch)
    call = example(T=128, K=128, V=128, dtype=torch.bfloat16, state=False)
    monkeypatch.setattr(additive, "ungroup", grouped_by_torch)
    call = call._replace(e=None if reader == "k" else call.k, erase_before_decay=reader == READERS[2])
    gradients = ChunkGradients(call, None, True)
    states, dstates = (gradients.room_for_states(2) for _ in range(2))
    gradients.find(call.v, call.v, call.v, states, dstates, plan())
    made = compile_launch(launches[-1])
    assert (launches[-1].arguments[7] is None) == (reader == "k")
    assert launches[-1].constants["BEFORE_DECAY"] == (reader == READERS[2])
    assert made.shared <= 113 * 1024
    assert made.spilled <= 160
