"""The fewest bytes and operations of a call, by hand."""

import pytest

from holdfast.planner import Device, Problem, floor


def of(family, dtype, traits=(), op="some op", **sizes):
    return Problem.of(op, family, dtype, sizes, dict.fromkeys(traits, True))


@pytest.mark.parametrize(
    ("problem", "inputs", "output", "state", "operations"),
    [
        # q, k of 2 heads, v and o of 4; every step: decay and read of a 16 x 8 state
        (
            of("matrix", "bfloat16", B=3, T=5, H=4, Hq=2, K=16, V=8),
            15 * (2 * 2 * 16 + 4 * 8) * 2,
            15 * 32 * 2,
            3 * 4 * 128 * 4,
            15 * 4 * 128 * 4,
        ),
        # a scalar decay and a write strength, float32, of each step and head
        (
            of("matrix", "float16", ("decay=scalar", "beta"), B=1, T=2, H=3, Hq=3, K=4, V=4),
            2 * 3 * (12 * 2 + 8),
            2 * 3 * 4 * 2,
            3 * 16 * 4,
            6 * 16 * 4,
        ),
        # a vector decay; the delta write also multiplies the state with k
        (
            of("matrix", "float32", ("decay=vector", "delta"), B=1, T=2, H=3, Hq=3, K=4, V=4),
            6 * 16 * 4,
            6 * 4 * 4,
            3 * 16 * 4,
            6 * 16 * 6,
        ),
        # one more column of the state
        (
            of("matrix", "float64", ("normalizer",), B=1, T=2, H=1, Hq=1, K=4, V=4),
            2 * 12 * 8,
            2 * 4 * 8,
            4 * 5 * 8,
            2 * 20 * 4,
        ),
        (of("diagonal", "bfloat16", B=2, T=3, D=5), 30 * 4, 30 * 2, 10 * 4, 30 * 2),
        (of("diagonal", "bfloat16", ("wide_gate", "complex"), B=2, T=3, D=6), 36 * 6, 36 * 2, 12 * 4, 36 * 4),
        # R and b once
        (
            of("dense", "float32", B=2, T=3, H=2, D=4, S=2, G=4, Gi=4, Gr=4),
            4 * (6 * 32 + 128 + 32),
            6 * 8 * 4,
            2 * 2 * 8 * 4,
            2 * 6 * 128,
        ),
        (
            of("dense", "float32", ("reset",), B=2, T=3, H=2, D=4, S=1, G=4, Gi=3, Gr=3),
            4 * (6 * 24 + 96 + 32) + 6,
            6 * 8 * 4,
            2 * 8 * 4,
            2 * 6 * 96,
        ),
        (
            of("diagonal", "bfloat16", ("decay=scalar",), "inter_chunk_scan", B=1, G=2, H=3, K=4, V=5),
            120 * 2 + 6 * 4,
            120 * 2,
            60 * 4,
            120 * 2,
        ),
        (
            of("diagonal", "bfloat16", ("decay=vector", "low_rank"), "inter_chunk_scan", B=1, G=2, H=3, K=4, V=5, r=7),
            120 * 2 + 24 * 4 + 2 * 168 * 2,
            120 * 2,
            60 * 4,
            120 * 30,
        ),
        (
            of(
                "matrix",
                "bfloat16",
                ("decay=scalar", "states", "gate=silu"),
                "intra_chunk",
                B=1,
                T=5,
                H=2,
                Hq=1,
                K=4,
                V=6,
                C=4,
            ),
            2 * (5 * (8 + 24) + 2 * 48) + 4 * 10,
            2 * 60,
            0,
            10 * (4 * 10 + 48),
        ),
    ],
)
def test_by_hand(problem, inputs, output, state, operations):
    forward, backward = floor(problem, "forward"), floor(problem, "backward")
    assert (forward.moved, forward.operations) == (inputs + output, operations)
    assert (backward.moved, backward.operations) == (2 * inputs + output, 2 * operations)
    assert floor(problem, "forward", state=True).moved == inputs + output + 2 * state
    assert floor(problem, "backward", state=True).moved == 2 * inputs + output + 3 * state


def test_seconds_are_those_of_a_copy():
    """Proposal 039's shape: four tensors of 128 MiB, 0.126 ms on an H200."""
    problem = of("matrix", "bfloat16", B=4, T=4096, H=32, Hq=32, K=128, V=128)
    assert floor(problem, "forward").seconds(Device.named("h200")) == pytest.approx(0.126e-3, rel=0.01)
    assert floor(problem, "forward").seconds(Device.named("cpu")) is None


def test_a_dtype_that_no_op_takes():
    with pytest.raises(ValueError, match=r"dtype: expected one of float64, .*; got 'int8'"):
        floor(of("diagonal", "int8", B=1, T=1, D=1), "forward")
