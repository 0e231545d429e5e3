"""What the Metal sources promise beyond right numbers: the same bits, few states kept, one compilation for any B, L."""

import mlx.core as mx
import numpy as np
import pytest

import holdfast.mlx as hm
from holdfast.mlx import tile
from holdfast.mlx.memory import history_bytes, kept_bytes, partial_bytes
from holdfast.mlx.tile import Tile, kept_states, part_of
from mlx_support.cases import SCANS
from mlx_support.oracle import assert_close

every_scan = pytest.mark.parametrize("name", SCANS)
SEG, L = 16, 37


@pytest.mark.parametrize(
    "sizes",
    [
        ("gla", {}),
        ("gla", {"K": 37, "V": 70}),
        ("ssd", {}),
        ("ssd", {"P": 70, "N": 37}),
        ("gated_delta", {"G": 1}),
        ("kda", {"G": 1, "K": 37, "V": 70}),
    ],
)
@pytest.mark.parametrize("seg", [SEG, 13, 5])
def test_states_are_recomputed_bit_for_bit(metal, sizes, seg):
    """Every state left in the backward pass's memory, on each level, is the forward pass's own, bit for bit."""
    name, sizes = sizes
    case = SCANS[name](B=1, L=L, H=1, **sizes, **({"G": 1} if name == "ssd" else {}))
    case.run(seg=seg)
    (backward,) = metal.named(case.launched[1])
    kept = backward.outputs["kept"]
    part = part_of(seg)
    assert kept.shape[1] == kept_states(L, seg)
    # levels from the top: every segment, then the parts and tokens of the first segment, which comes last
    tokens = [*range(0, L, seg), *range(part, seg, part), *range(1, part)]
    assert len(tokens) == kept.shape[1]
    for slot, t in enumerate(tokens):
        state = case.scan(*case.tokens(slice(t)), initial_state=case.state)[1]
        rows_first = state[0, 0].T if name == "ssd" else state[0, 0]
        assert np.array_equal(unpacked(np.array(kept[:, slot]), *rows_first.shape), np.array(rows_first))


def unpacked(held, K, V):
    """[simdgroups, elements of a simdgroup], as the lanes of a tile hold a state, -> [K, V]."""
    tile = Tile.backward(K, V)
    column_lanes = 32 // tile.R
    # [simdgroup, i, j, column lane, row lane]: i and the row lane make the row, the others the column
    held = held.reshape(-1, tile.RPL, tile.CPL, column_lanes, tile.R)
    held = held.transpose(1, 4, 0, 2, 3).reshape(tile.RPL * tile.R, -1)
    assert not held[K:].any()
    assert not held[:, V:].any()
    return held[:K, :V]


@every_scan
def test_runs_repeat_bit_for_bit_in_any_order(metal, name):
    """Simdgroups and lanes in another order give the same bits: no result depends on who comes first."""
    found = []
    for seed in (1, 2, 3):
        metal.seed = seed
        mx.random.seed(5)
        found.append(SCANS[name]().run(seg=SEG))
    for part in ("values", "grads"):
        for first, *others in zip(*(f[part] for f in found), strict=True):
            assert all(mx.array_equal(first, other) for other in others)


@every_scan
def test_another_batch_or_length_compiles_nothing_new(metal, name):
    for B, length in ((2, 37), (1, 40), (3, 16), (2, 5)):
        SCANS[name](B=B, L=length).run(seg=SEG)
    assert len({launch.source for launch in metal.launches}) == 2


@pytest.mark.parametrize(("name", "V"), [("gla", 70), ("gated_delta", 70), ("kda", 3)])
def test_a_forward_pass_has_a_threadgroup_a_simdgroup(metal, name, V):
    """And no more of them than have columns."""
    case = SCANS[name](B=1, L=3, H=2, K=16, V=V)
    case.scan(*case.inputs)
    (forward,) = metal.launches
    tile = Tile.forward(16, V) if name == "gla" else Tile.backward(16, V)
    assert forward.threadgroup == (32, 1, 1)
    assert forward.grid == (32 * -(-V // (32 // tile.R * tile.CPL)), 2, 1)


@every_scan
def test_nothing_is_kept_where_no_gradient_is_wanted(metal, name):
    case = SCANS[name]()
    case.scan(*case.inputs, initial_state=case.state)
    (forward,) = metal.launches
    assert set(forward.outputs) == {"y", "last"}


@pytest.mark.parametrize("name", ["rglru", "rotlru"])
def test_diagonal_scans_keep_their_output_alone(metal, name):
    """The backward pass writes gradients and nothing else."""
    case = SCANS[name]()
    case.run()
    (backward,) = metal.named(f"{name}_backward")
    written = sum(x.nbytes for x in backward.outputs.values())
    assert written == sum(x.nbytes for x in [*case.inputs, case.state])


# B = 3 and H = 12 in the document: every term is proportional to both
SHAPES = {
    "ssd": {"B": 1, "L": 512, "H": 1, "G": 1, "P": 64, "N": 16},
    "gla": {"B": 1, "L": 512, "H": 1, "K": 64, "V": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_memory_at_the_documents_shapes(metal, name):
    """Full history keeps at least 18 times what the scan keeps, by the formula and by the bytes that are allocated."""
    case = SCANS[name](**SHAPES[name])
    case.run()
    kept, parts = metal.allocated("kept"), metal.allocated("dA")
    metal.launches.clear()
    if name == "ssd":
        u, delta, B, C, A = case.inputs
        wide = [u[:, :, 0], mx.repeat(delta, 64, axis=2), B[:, :, 0], C[:, :, 0], mx.repeat(A, 64, axis=0)]
        mx.eval(mx.grad(lambda *xs: hm.selective_scan_metal(*xs).sum(), argnums=[0, 1, 2, 3, 4])(*wide))
        history = metal.allocated("states")
    else:
        mx.eval(mx.grad(lambda *xs: hm.gla_scan_metal(*xs).sum(), argnums=[0, 1, 2, 3])(*case.inputs))
        history = metal.allocated("kept")
    K, V = (16, 64) if name == "ssd" else (64, 64)
    assert history in (512 * K * V * 4, 513 * K * V * 4)
    assert kept == kept_bytes(1, 512, 1, K, V)
    assert history / (kept + parts) >= 18
    # the formula at the document's own batch and heads
    assert history_bytes(3, 512, 12, K, V) / kept_bytes(3, 512, 12, K, V) >= 18


@pytest.mark.parametrize(
    ("name", "sizes", "blocks"),
    [("gla", {"H": 3, "K": 37, "V": 150}, 3), ("gla", {"H": 3, "K": 65, "V": 70, "vector": True}, 3),
     ("ssd", {"H": 4, "P": 150, "N": 37}, 3), ("ssd", {"H": 4, "P": 100, "N": 130}, 5)],
)  # fmt: skip
@pytest.mark.parametrize("threadgroups", [1, 8, 80])
def test_blocks_of_a_large_head_in_turn(metal, monkeypatch, name, sizes, blocks, threadgroups):
    """However many threadgroups share a head, the gradients are right; memory is that of the threadgroups at work."""
    monkeypatch.setattr(tile, "THREADGROUPS", threadgroups)
    case = SCANS[name](B=1, L=11, **sizes)
    K, V = (sizes.get("N") or sizes["K"], sizes.get("P") or sizes["V"])
    assert Tile.backward(K, V).blocks == blocks
    for inputs in (case, case.cast(mx.bfloat16)):
        found = inputs.run()
        limit = 2e-5 if inputs is case else 2**-7
        assert_close(found, inputs.oracle(), limit)
    backward = metal.named(f"{name}_backward")[0]
    assert backward.outputs["kept"].nbytes == kept_bytes(1, 11, sizes["H"], K, V)
    sums = ("dq", "dk") if name == "gla" else ("dB", "dC")
    assert sum(backward.outputs[key].nbytes for key in sums) == partial_bytes(1, 11, sizes["H"], K, V)
    assert (threadgroups == 1) == (backward.outputs[sums[0]].shape[0] == 1)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gla", {"K": 1345, "V": 3}),
        ("gla", {"K": 1400, "V": 5, "vector": True}),
        ("ssd", {"N": 2049, "P": 3, "G": 1}),
        ("kda", {"G": 1, "K": 1345, "V": 3}),
    ],
)
def test_a_state_too_tall_for_threadgroup_memory(metal, name, sizes):
    """A lone simdgroup exchanges nothing; the stand-in refuses more than the 32 KiB of an Apple GPU."""
    case = SCANS[name](B=1, L=5, H=1, **sizes)
    assert_close(case.run(), case.oracle(), 2e-5)


def test_a_selective_state_too_tall_for_threadgroup_memory(metal):
    D, N = 3, 2049
    u, rows, rates = mx.random.normal((1, 4, D)), mx.random.normal((1, 4, N)), -mx.random.uniform(0, 1, (D, N))
    inputs = [u, mx.abs(u), rows, rows + 1, rates]
    args = {"grad_argnums": range(5), "arg_names": "abcde", "verbose": False, "y_tol": 1e-2}
    assert hm.parity_check(hm.selective_scan_metal, hm.selective_scan_chunked, inputs, **args)[0]


def test_memory_of_a_large_head():
    """K = V = 128 at the document's B, L and H: states and partial sums together."""
    sizes = (3, 512, 12, 128, 128)
    assert history_bytes(*sizes) / (kept_bytes(*sizes) + partial_bytes(*sizes)) >= 17


def test_parts_deal_blocks_out_evenly():
    for K, V in ((64, 64), (128, 128), (256, 256), (65, 1000)):
        shape = Tile.backward(K, V)
        for heads in (1, 5, 36, 100, 1000):
            parts = shape.parts(heads, 1)
            assert 1 <= parts <= shape.blocks
            # as many passes as it takes to need no more than fill the GPU, and no fewer threadgroups than those need
            passes = -(-shape.blocks // parts)
            assert parts == -(-shape.blocks // passes)
            assert parts <= -(-tile.THREADGROUPS // heads)
