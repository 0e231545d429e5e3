"""The stand-in for Metal sees the faults that it is there to see: each is planted in a kernel, and found."""

import shutil
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from holdfast.mlx import get_or_build_kernel, gla
from holdfast.mlx.kernel import SOURCES, Kernel
from mlx_support.cases import SCANS
from mlx_support.cpu import ShimError
from mlx_support.oracle import assert_close


def plant(monkeypatch, folder, name, old, new):
    """gla_scan with one line of its kernels changed."""
    shutil.copytree(SOURCES, folder / "metal")
    path = folder / "metal" / f"{name}.metal"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    for kernel in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(gla, kernel, replace(getattr(gla, kernel), folder=folder / "metal"))


BARRIER = "      threadgroup_barrier(mem_flags::mem_threadgroup);\n"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        pytest.param("gla_backward", BARRIER, "", id="no barrier"),
        pytest.param("gla_backward", "[t % 2]", "[0]", id="one buffer"),
        pytest.param("tile", "x += simd_shuffle_xor(x, mask);", "if (mask != 4) x += simd_shuffle_xor(x, mask);",
                     id="a sum that leaves lanes out"),
        pytest.param("gla_backward", "store_columns(columns, dv,", "if (t > 3) store_columns(columns, dv,",
                     id="an output left unwritten"),
        pytest.param("checkpoint", "place = segments + parts - 1 + in_part - 1;", "place = segments + parts - 1;",
                     id="two states in one slot"),
    ],
)  # fmt: skip
def test_a_wrong_number_is_seen(metal, monkeypatch, tmp_path, name, old, new):
    plant(monkeypatch, tmp_path, name, old, new)
    case = SCANS["gla"](B=1, L=21, H=1, K=16, V=64)
    found = case.run()
    with pytest.raises(AssertionError, match="exceed"):
        assert_close(found, case.oracle(), 2e-5)


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        pytest.param("gla_backward", BARRIER, f"      if (own == 0) {{ {BARRIER.strip()} }}\n", "diverge at a barrier",
                     id="a barrier for some simdgroups"),
        pytest.param("gla_backward", "gate_grad = simd_sum(", "if (lane.index < 7) gate_grad = simd_sum(",
                     "lanes of a simdgroup diverge", id="a sum for some lanes"),
        pytest.param("tile", "if (lane.index % R == j % R && lane.has_column(j))", "if (lane.index % R == j % R)",
                     "writes outside of", id="columns past the end"),
        pytest.param("gla_backward", "[2][SG][SUMS][SG > 1 ? R * RPL : 1]", "[2][SG][SUMS][80 * R * RPL]",
                     "bytes of threadgroup memory", id="more memory than a threadgroup has"),
    ],
)  # fmt: skip
def test_a_fault_is_reported(metal, monkeypatch, tmp_path, name, old, new, complaint):
    plant(monkeypatch, tmp_path, name, old, new)
    case = SCANS["gla"](B=1, L=5, H=1, K=16, V=62)
    with pytest.raises(ShimError, match=complaint):
        case.run()


def run_body(metal, folder, body, x, threads):
    (folder / "trial.metal").write_text(body)
    kernel = Kernel("trial", ("x",), ("y",), folder=folder)
    (y,) = kernel([x], {"T": x.dtype}, (threads, 1, 1), (64, 1, 1), [((threads,), x.dtype)])
    return np.array(y.astype(mx.float32))


def test_simdgroup_operations(metal, tmp_path):
    body = """
    uint i = thread_position_in_grid.x;
    y[i] = static_cast<T>(simd_sum(float(x[i])) + simd_shuffle_xor(float(x[i]), 5));
    """
    found = run_body(metal, tmp_path, body, mx.arange(64, dtype=mx.float32), 64)
    lane = np.arange(64)
    np.testing.assert_array_equal(found, lane.reshape(2, 32).sum(1).repeat(32) + (lane ^ 5))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rounding_to_16_bits_is_mlxs(metal, tmp_path, dtype):
    ties = [0, -0.0, np.inf, -np.inf, 65519.9, 65520, 1 + 2**-8, 1 + 3 * 2**-8, 2**-25, 1.5 * 2**-24]
    values = np.concatenate(
        [np.random.default_rng(0).standard_normal(1900) * 10.0 ** np.arange(-38, 38).repeat(25), ties]
    )
    wide = mx.array(values.astype(np.float32))
    (tmp_path / "trial.metal").write_text("uint i = thread_position_in_grid.x; y[i] = static_cast<T>(x[i]);")
    kernel = Kernel("trial", ("x",), ("y",), folder=tmp_path)
    (found,) = kernel([wide], {"T": dtype}, (wide.size, 1, 1), (32, 1, 1), [(wide.shape, dtype)])
    assert mx.array_equal(found, wide.astype(dtype))


def test_a_kernel_of_a_programs_own(metal):
    """get_or_build_kernel builds one for each distinct set of arguments."""
    source = "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];"
    kernel = get_or_build_kernel("twice", ["x"], ["y"], source)
    assert get_or_build_kernel("twice", ["x"], ["y"], source) is kernel
    assert get_or_build_kernel("twice", ["x"], ["y"], source, header="// other\n") is not kernel
    x = mx.arange(70, dtype=mx.float32)
    launch = {"grid": (70, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(70,)], "output_dtypes": [x.dtype]}
    (y,) = kernel(inputs=[x], **launch)
    assert mx.array_equal(y, 2 * x)
