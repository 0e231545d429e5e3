"""What Hopper prepares of KDA's chunks, against a computation in float64: on the emulator, and compiled for no GPU."""

from itertools import pairwise

import pytest
import torch

from holdfast.kernels.matrix.vector_decay.saved import Chunks, SavedChunks
from holdfast.planner import Device, Grid, Plan, Problem
from holdfast.planner.models.matrix.vector_decay import delta
from kernels.matrix.scalar_decay.triton.parity import moved
from kernels.matrix.vector_decay.triton.delta.parity import example
from kernels.matrix.vector_decay.triton.parity import LIMITS
from parity import relative_error

CHUNK = 64
H200 = Device.named("h200")
PLAN = Plan("triton")
# a sequence of no token, one of one, a whole chunk, and one with a tail
PACKED = (0, 0, 1, 65, 150)


def chunks_of(call, packed):
    """Of each chunk its slot, its batch row, its first token and the one behind its last."""
    batch, length = call.v.shape[:2]
    if packed:
        rows = [(0, first, end, first // CHUNK + n) for n, (first, end) in enumerate(pairwise(packed))]
    else:
        rows = [(b, 0, length, b * -(-length // CHUNK)) for b in range(batch)]
    for b, first, end, slot in rows:
        for i, start in enumerate(range(first, end, CHUNK)):
            yield slot + i, b, start, min(start + CHUNK, end)


def exact(call, packed, slots):
    """q_in, k_in, k_out, chunk_decay, scores and pairs in float64, sums of log decays one pair at a time.

    NaN where there is nothing.
    """
    group = call.v.shape[2] // call.q.shape[2]
    q, k = (x.double().repeat_interleave(group, 2) for x in (call.q, call.k))
    g = call.g.double()
    shape, keys = call.v.shape[:3], call.k.shape[3]
    sizes = ((*shape, keys),) * 3 + ((slots, shape[2], keys), (*shape, CHUNK), (*shape, CHUNK))
    found = tuple(torch.full(size, torch.nan, dtype=torch.float64) for size in sizes)
    q_in, k_in, k_out, chunk_decay, scores, pairs = found
    for slot, b, start, end in chunks_of(call, packed):
        here = slice(start, end)
        from_start = g[b, here].cumsum(0)
        q_in[b, here] = call.scale * q[b, here] * from_start.exp()
        k_in[b, here] = k[b, here] * from_start.exp()
        chunk_decay[slot] = from_start[-1].exp()
        scores[b, here] = pairs[b, here] = 0.0
        for s in range(start, end):
            # a sum of -inf that starts behind it is found without it
            after = torch.cat((torch.zeros_like(g[b, :1]), g[b, s + 1 : end])).cumsum(0).exp()
            k_out[b, s] = k[b, s] * after[-1]
            decayed = k[b, s] * after
            scores[b, s:end, :, s - start] = call.scale * (q[b, s:end] * decayed).sum(-1)
            pairs[b, s + 1 : end, :, s - start] = (k[b, s + 1 : end] * decayed[1:]).sum(-1)
    return found


def prepared(call, packed, device="cpu"):
    from holdfast.kernels.matrix.vector_decay.hopper.delta import launch

    saved = SavedChunks(*call.v.shape[:3], call.k.shape[3], len(packed) - 1 if packed else None, call.v.dtype)
    cu_seqlens = torch.tensor(packed, dtype=torch.int32, device=device) if packed else None
    there = moved(call, device)
    found = saved.chunks(saved.empty(there.v.device))
    launch.run_prepare(there.q, there.k, there.g, call.scale, found, saved.slots, cu_seqlens)
    return Chunks(*(x.cpu() for x in found)), exact(call, packed, saved.slots)


@pytest.fixture
def unwritten():
    """Memory that is not written stays NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def on_cpu(unwritten, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    import gluon_partitions_emulator
    from holdfast.kernels.matrix.vector_decay.hopper.delta import launch

    monkeypatch.setattr(launch, "launch", gluon_partitions_emulator.launch)


def assert_right(call, packed=None, device="cpu"):
    found, right = prepared(call, packed, device)
    assert found.inverse.isnan().all(), "another launch fills it"
    for name, mine, truth in zip(found._fields[:6], found[:6], right, strict=True):
        assert mine.dtype == (torch.float32 if name in ("decay", "pairs") else call.v.dtype), name
        assert torch.equal(mine.isnan(), truth.isnan()), f"{name} is not written where it has to be, and there alone"
        assert relative_error(mine.double().nan_to_num(), truth.nan_to_num()) <= LIMITS[call.v.dtype], name


@pytest.mark.parametrize(
    "sizes",
    [
        {"B": 2, "T": 128, "K": 128},
        {"T": 70, "H": 2, "Hq": 1, "K": 64},
        {"T": 130, "H": 2, "Hq": 1, "K": 40, "dtype": torch.float16},
        {"T": 1, "K": 128},
        {"T": 100, "K": 128, "g": "channels"},
        {"T": 100, "K": 64, "g": "strong"},
        {"T": 130, "K": 72, "g": "resets", "dtype": torch.float16},
        {"T": 100, "K": 64, "g": "weak", "decays": torch.bfloat16},
    ],
)
def test_right_on_the_emulator(on_cpu, sizes):
    assert_right(example(**{"V": 64, "dtype": torch.bfloat16} | sizes))


@pytest.mark.parametrize("sizes", [{"K": 128}, {"H": 2, "K": 72, "g": "resets"}])
def test_packed_sequences_on_the_emulator(on_cpu, sizes):
    assert_right(example(**sizes, T=PACKED[-1], V=64, dtype=torch.float16, packed=PACKED), PACKED)


def test_nan_stays_in_its_sequence_on_the_emulator(on_cpu):
    offsets = (0, 40, 130)
    call = example(T=130, K=64, V=64, dtype=torch.float16, packed=offsets)
    right, _ = prepared(call, offsets)
    for x in (call.q, call.k, call.g):
        x[:, 40:] = torch.nan
    found, _ = prepared(call, offsets)
    for name in ("q_in", "k_in", "k_out", "scores", "pairs"):
        assert torch.equal(getattr(found, name)[:, :40], getattr(right, name)[:, :40]), name
    assert torch.equal(found.decay[0], right.decay[0])


def test_a_strong_decays_channels_stand_beside_mild_ones_on_the_emulator(on_cpu):
    """Channel by channel, numbers of e^-50 too."""
    call = example(T=64, K=64, V=64, dtype=torch.bfloat16, g="channels")
    found, right = prepared(call, None)
    for name in ("q_in", "k_in", "k_out"):
        mine, truth = (x[0, :, 0].double() for x in (getattr(found, name), right[found._fields.index(name)]))
        saved = truth.abs() > 1e-30
        assert saved.sum() > 64
        assert ((mine - truth).abs() <= 2.0**-7 * truth.abs())[saved].all(), name


def problem(K):
    sizes = {"B": 4, "T": 4096, "H": 32, "Hq": 32, "K": K, "V": 128}
    return Problem.of("kda", "matrix", "bfloat16", sizes, {"decay=vector": True, "delta": True})


@pytest.mark.sizes("K", "packed", "dtype")
@pytest.mark.parametrize(
    ("K", "packed", "dtype"),
    [
        (128, None, torch.bfloat16),
        (64, None, torch.bfloat16),
        (128, PACKED, torch.bfloat16),
        (40, PACKED, torch.float16),
        (128, None, torch.float16),
    ],
)
def test_it_compiles_and_two_blocks_share_an_sm(K, packed, dtype, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import compile_launch, recorded, specialised
    from holdfast.kernels.matrix.vector_decay.hopper.delta import launch

    launches = recorded(monkeypatch, launch)
    prepared(example(T=PACKED[-1], K=K, V=64, dtype=dtype, packed=packed), packed)
    assert specialised(launches[0]) == []
    made = compile_launch(launches[0])
    planned = delta.prepared_on_hopper(problem(K), H200, PLAN)
    assert made.shared <= planned.shared
    assert launches[0].registers == planned.registers == 128
    assert "wgmma.mma_async" in made.ptx
    # nine products of a warp's tokens in 64 columns: the loop over these is not unrolled
    assert made.ptx.count("mma.sync") == 9 * 4
    assert "serialized" not in made.notes, "a product waits for the one before it"
    assert made.spilled <= (8 if K > 64 else 32)
    # of the loop over columns, which 64 have no need of
    assert K <= 64 or len(made.reloaded) <= 2


def test_it_is_planned_by_its_bytes():
    planned = delta.prepared_on_hopper(problem(128), H200, PLAN)
    # q, k, g of two, q and k decayed from the start, k decayed to the end; scores, and pairs of twice the width
    unit = 2 * 4 * 4096 * 32 * 128
    assert planned.moved == pytest.approx((2 + 2 + 3 + 0.5 + 1) * unit, rel=0.01)
    assert Grid(planned.blocks, 256, planned.registers, planned.shared).per_sm(H200) == 2
    # as benchmarks/kda_launches.py measured it on an H100
    assert planned.seconds == pytest.approx(0.72e-3, rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "packed"),
    [
        ({"B": 2, "T": 1000, "H": 4, "Hq": 2, "K": 128, "dtype": torch.bfloat16}, None),
        ({"T": 700, "H": 3, "K": 64, "g": "channels"}, None),
        ({"T": 300, "H": 3, "K": 40, "g": "resets"}, (0, 0, 1, 65, 193, 300)),
        ({"T": 300, "H": 2, "K": 128, "g": "strong", "dtype": torch.bfloat16}, (0, 30, 129, 300)),
    ],
)
def test_right(unwritten, sizes, packed):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is for Hopper")
    assert_right(example(**{"V": 64, "dtype": torch.float16, "packed": packed} | sizes), packed, "cuda")
