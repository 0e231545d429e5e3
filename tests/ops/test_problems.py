"""What planning is told of a call: its sizes by their axes, and the traits that it has, of every family."""

import pytest
import torch

from holdfast.kernels.chunk.inter.call import InterChunkCall
from holdfast.kernels.chunk.intra.call import IntraChunkCall
from holdfast.kernels.conv.call import ConvCall
from holdfast.kernels.norm.call import GatedNormCall
from holdfast.ops import dense, diagonal, matrix
from holdfast.recurrences.definition import DenseCall, DiagonalCall, MatrixCall
from holdfast.recurrences.lstm import lstm
from ops.test_selection import tensor

HALF = torch.bfloat16
OFFSETS = tensor(4, dtype=torch.int32)


def module(name):
    # holdfast.ops has the function under the module's name
    from importlib import import_module

    return import_module(f"holdfast.ops.{name}")


def of_matrix(packed, grad, g=None, beta=None, stabilizer=None, delta=False):
    call = MatrixCall(tensor(2, 5, 3, 7), tensor(2, 5, 3, 7), tensor(2, 5, 6, 11), g, beta, stabilizer, delta=delta)
    return matrix.problem("gla", call, packed, grad)


def of_dense(packed, grad, clip=None, cut=False, **given):
    x, R = tensor(2, 5, 4, 3, 7), tensor(4, 3, 7, 7)
    call = DenseCall(lstm, x, R, **given, recurrent_grad_clip=clip, cut_recurrent_grad=cut)
    return dense.problem("lstm", call, packed, grad)


def of_diagonal(packed, grad, a=HALF, theta=None):
    angles = None if theta is None else tensor(2, 5, 7, dtype=theta)
    return diagonal.problem(
        "rotlru", DiagonalCall(tensor(2, 5, 14, dtype=a), tensor(2, 5, 14, dtype=HALF), angles), packed, grad
    )


def of_conv(packed, grad, bias=None, heads=0, head_dim=0):
    call = ConvCall(tensor(2, 5, 14), tensor(14, 3), bias, heads=heads, head_dim=head_dim)
    return module("causal_conv1d").problem(call, packed, grad)


def of_norm(packed, grad, **given):
    return module("gated_rms_norm").problem(GatedNormCall(tensor(2, 5, 3, 7), **given), grad)


def of_intra(packed, grad, dtype=HALF, **given):
    q, v = tensor(2, 5, 3, 7, dtype=dtype), tensor(2, 5, 6, 11, dtype=dtype)
    return module("intra_chunk").problem(IntraChunkCall(q, q, v, **{"chunk_size": 16} | given), grad)


def of_inter(packed, grad, decay=3, rank=0):
    states, per = tensor(2, 5, 3, 7, 11), tensor(*(2, 5, 3, 7)[:decay])
    factor = tensor(2, 5, 3, 7, rank) if rank else None
    return module("inter_chunk_scan").problem(InterChunkCall(states, per, factor, factor), packed, grad)


SIZES = {
    of_matrix: {"B": 2, "T": 5, "H": 6, "Hq": 3, "K": 7, "V": 11},
    of_dense: {"B": 2, "T": 5, "H": 3, "D": 7, "S": 2, "G": 4, "Gi": 4, "Gr": 4},
    of_diagonal: {"B": 2, "T": 5, "D": 14},
    of_conv: {"B": 2, "T": 5, "D": 14, "W": 3},
    of_norm: {"B": 2, "T": 5, "H": 3, "D": 7, "G": 1},
    of_intra: {"B": 2, "T": 5, "H": 6, "Hq": 3, "K": 7, "V": 11, "C": 16},
    of_inter: {"B": 2, "G": 5, "H": 3, "K": 7, "V": 11},
}
STATES = tensor(2, 1, 6, 7, 11)


@pytest.mark.parametrize(
    ("of", "given", "sizes", "traits"),
    [
        (of_matrix, {}, {}, ()),
        (of_matrix, {"g": tensor(2, 5, 6)}, {}, ("decay=scalar",)),
        (of_matrix, {"g": tensor(2, 5, 6, 7)}, {}, ("decay=vector",)),
        (of_matrix, {"beta": tensor(2, 5, 6)}, {}, ("beta",)),
        (of_matrix, {"delta": True}, {}, ("delta",)),
        (of_matrix, {"stabilizer": tensor(2, 5, 6)}, {}, ("normalizer",)),
        (of_dense, {}, {}, ()),
        (of_dense, {"reset": tensor(2, 5)}, {}, ("reset",)),
        (of_dense, {"clip": 0.0}, {}, ("recurrent_grad_clip",)),
        (of_dense, {"cut": True}, {}, ("cut_recurrent_grad",)),
        (of_dense, {"b": tensor(4, 3, 7)}, {}, ()),
        # of a batch it makes no difference
        (of_dense, {"initial_state": tensor(2, 2, 3, 7)}, {}, ()),
        (of_diagonal, {}, {}, ()),
        (of_diagonal, {"a": torch.float32}, {}, ("wide_gate",)),
        (of_diagonal, {"theta": HALF}, {}, ("complex",)),
        (of_diagonal, {"theta": torch.float32}, {}, ("complex", "wide_gate")),
        (of_conv, {}, {}, ()),
        (of_conv, {"bias": tensor(14)}, {}, ("bias",)),
        (of_conv, {"heads": 1, "head_dim": 4}, {"H": 1, "K": 4}, ("heads",)),
        (of_norm, {}, {}, ()),
        (of_norm, {"gate": tensor(2, 5, 3, 7)}, {}, ("gate",)),
        (of_norm, {"weight": tensor(7)}, {}, ("weight",)),
        (of_norm, {"weight": tensor(3, 7)}, {"G": 3}, ("weight",)),
        (of_intra, {}, {}, ()),
        (of_intra, {"g": tensor(2, 5, 6)}, {}, ("decay=scalar",)),
        (of_intra, {"states": STATES}, {}, ("states", "mixed_states")),
        (of_intra, {"states": STATES, "dtype": torch.float32}, {}, ("states",)),
        (of_intra, {"gate": tensor(2, 5, 6, 11)}, {}, ("gate=silu",)),
        (of_intra, {"gate": tensor(2, 5, 6, 11), "gate_activation": "sigmoid"}, {}, ("gate=sigmoid",)),
        (of_inter, {}, {}, ("decay=scalar",)),
        (of_inter, {"decay": 4}, {}, ("decay=vector",)),
        (of_inter, {"rank": 2}, {"r": 2}, ("decay=scalar", "low_rank")),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_sizes_and_traits(of, given, sizes, traits, grad):
    found = of(None, grad, **given)
    always = {f"cell={lstm.key}"} if of is of_dense else set()
    assert dict(found.sizes) == SIZES[of] | sizes
    assert found.traits == {*traits, *always, *(["needs_grad"] if grad else [])}


@pytest.mark.parametrize("of", [of_matrix, of_dense, of_diagonal, of_conv, of_inter])
def test_packed_sequences_are_told_of(of):
    found = of(OFFSETS, False)
    assert found.traits - of(None, False).traits == {"varlen"}
    assert dict(found.sizes) == SIZES[of] | ({"N": 3} if of in (of_matrix, of_conv) else {})


def test_an_initial_state_counts_where_sequences_are_packed():
    assert "initial_state" in of_dense(OFFSETS, False, initial_state=tensor(2, 3, 3, 7)).traits
    assert "initial_state" not in of_dense(OFFSETS, False).traits
