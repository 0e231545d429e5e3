"""Cells printed as C++, run by a host compiler, against the graphs that they were printed from."""

import ctypes
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F

from holdfast.kernels.dense.codegen import cpp, expression
from holdfast.kernels.dense.cuda.assemble import _read
from holdfast.recurrences import cell
from holdfast.recurrences.elman import elman, elman_relu
from holdfast.recurrences.gru import gru
from holdfast.recurrences.lstm import lstm
from holdfast.recurrences.slstm import slstm

compiler = shutil.which("g++")
needs_compiler = pytest.mark.skipif(compiler is None, reason="needs g++ to run the printed C++ (apt install g++)")


@cell(states=("h", "a", "b", "c", "d", "e"), gates=("p", "q", "r", "s", "t", "u", "v", "w"))
def widest(s, g):
    """As many states and gates as fit, and one of most operations."""
    a = torch.where(g.p > s.a, torch.maximum(g.q, s.b), torch.minimum(g.q, s.c)).clamp(-2, 2)
    b = F.softplus(g.r) * torch.exp(-s.d.abs()) / (1 + s.e**2)
    c = torch.log1p(g.s**2) + torch.sqrt(g.t.abs() + 0.5) - torch.rsqrt(1 + g.u.square())
    d = F.leaky_relu(g.v) + F.elu(g.w) + F.silu(s.c) + F.gelu(s.b)
    e = torch.sin(s.a) * torch.erf(g.p) + torch.sign(g.q) * torch.floor(g.r) + F.softsign(g.s)
    alive = (g.t > 0) & ~(g.u < -1)
    return {
        "h": torch.tanh(a + d) * torch.sigmoid(b),
        "a": a,
        "b": b,
        "c": c,
        "d": d,
        "e": torch.where(alive, e, 0.5 * s.e),
    }


@cell(states=("a", "b", "c", "d"), gates=("p", "q"))
def of_two(s, g):
    """Functions of two numbers that are not alike."""
    return {
        "a": torch.atan2(g.p, g.q.abs() + 0.1),
        "b": torch.copysign(s.b, s.c) - torch.maximum(s.a, g.q),
        "c": torch.rsub(g.p, s.c) + torch.minimum(s.b, s.d),
        "d": torch.fmod(s.d, g.q.detach().abs() + 2) * 0.5,
    }


CELLS = [elman, elman_relu, lstm, gru, slstm, widest, of_two]
every_cell = pytest.mark.parametrize("which", CELLS, ids=lambda c: c.name)


def build(text, folder, name):
    """The C++ text as a loaded library."""
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text)
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def on_host(which, folder):
    """(forward, backward) of a printed cell on rows of float32."""
    states, gates = len(which.states), len(which.gates)
    loops = f"""
extern "C" void forward(int n, const float (*s)[{states}], const float (*g)[{gates}], float (*out)[{states}]) {{
    for (int i = 0; i < n; i++) cell_forward(s[i], g[i], out[i]);
}}
extern "C" void backward(int n, const float (*s)[{states}], const float (*g)[{gates}], const float (*d)[{states}],
                         float (*ds)[{states}], float (*dg)[{gates}]) {{
    for (int i = 0; i < n; i++) cell_backward(s[i], g[i], d[i], ds[i], dg[i]);
}}
"""
    text = "constexpr bool BFLOAT16 = true;\n" + _read("functions.cuh") + cpp.constants(which) + cpp.functions(which)
    library = build(text + loops, folder, which.name)

    def call(name, *tensors):
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
        getattr(library, name)(ctypes.c_int(len(tensors[0])), *pointers)

    def forward(s, g):
        out = torch.full_like(s, float("nan"))
        call("forward", s, g, out)
        return out

    def backward(s, g, d):
        ds, dg = torch.full_like(s, float("nan")), torch.full_like(g, float("nan"))
        call("backward", s, g, d, ds, dg)
        return ds, dg

    return forward, backward


def exact(which, s, g, d):
    """New states and gradients in float64."""
    s, g = s.double().requires_grad_(), g.double().requires_grad_()
    out = torch.stack(which.step(s.unbind(1), g.unbind(1)), 1)
    return out.detach(), *torch.autograd.grad(out, (s, g), d.double(), materialize_grads=True)


@needs_compiler
@every_cell
@pytest.mark.parametrize("scale", [0.001, 1.0, 8.0])
def test_printed_cells_compute_what_the_function_does(which, scale, tmp_path):
    n = 4000
    s, g, d = (scale * torch.randn(n, k) for k in (len(which.states), len(which.gates), len(which.states)))
    if which is slstm:
        s[:, 2] = s[:, 2].abs() + 1
        s[: n // 10, 2] = 0
    forward, backward = on_host(which, tmp_path)
    right = exact(which, s, g, d)
    plain = torch.stack(which.step(s.unbind(1), g.unbind(1)), 1)
    for got, want, column in zip(forward(s, g).T, right[0].T, plain.T, strict=True):
        # within float32 rounding of the operations on the way: a few times what PyTorch's own make of it
        bound = 4 * (column - want).abs() + 4e-6 * want.abs() + 1e-7 * scale
        assert ((got - want).abs() <= bound).all()
    for got, want in zip(backward(s, g, d), right[1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-6 * max(scale, 1) * float(want.abs().max()))


@needs_compiler
def test_nan_and_infinity_go_through_as_in_pytorch(tmp_path):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 100.0, -100.0, 0.0])
    s = torch.cartesian_prod(special, special)
    g = torch.zeros(len(s), 4)
    g[:, 0], g[:, 2] = s[:, 0], s[:, 1]
    forward, _ = on_host(lstm, tmp_path)
    right = torch.stack(lstm.step(s.unbind(1), g.unbind(1)), 1)
    torch.testing.assert_close(forward(s, g), right, rtol=1e-5, atol=1e-6, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "function", "bound"),
    [("hf_tanh", torch.tanh, 2e-6), ("hf_sigmoid", torch.sigmoid, 1e-6), ("hf_exp", torch.exp, 5e-7)],
)
def test_functions_keep_their_stated_relative_error(name, function, bound, tmp_path):
    loop = (
        f'extern "C" void run(int n, const float* x, float* y) {{ for (int i = 0; i < n; i++) y[i] = {name}(x[i]); }}'
    )
    library = build("constexpr bool BFLOAT16 = true;\n" + _read("functions.cuh") + loop, tmp_path, name)
    small = torch.logspace(-30, 1.2, 20001)
    x = torch.cat([small, -small, torch.linspace(-16, 16, 20001)])
    y = torch.empty_like(x)
    library.run(ctypes.c_int(len(x)), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()))
    right = function(x.double())
    assert ((y - right).abs() / right.abs()).max() <= bound


@every_cell
def test_what_is_computed_twice_is_printed_once(which):
    lines = cpp.functions(which).splitlines()
    for start in ("cell_forward", "cell_backward"):
        first = next(k for k, line in enumerate(lines) if start in line)
        body = lines[first : lines.index("}", first)]
        values = [line.split(" = ", 1)[1] for line in body if line.strip().startswith("const ")]
        assert len(values) == len(set(values))


def test_old_states_that_the_backward_pass_does_not_read_are_known():
    assert cpp.old_states(lstm) == (False, True)
    assert cpp.old_states(gru) == (True,)
    assert cpp.old_states(slstm) == (False, True, True, True)


def test_cells_that_compare_are_known():
    assert [cpp.compares(which) for which in CELLS] == [False, True, False, False, True, True, True]

    @cell(states=("h",), gates=("z",))
    def stairs(s, g):
        return {"h": s.h * torch.floor(g.z)}

    assert cpp.compares(stairs)


def test_a_tanh_that_only_the_rounded_output_sees_may_be_fast():
    def fast(which):
        return cpp.functions(which).split("cell_backward")[0].count("hf_tanh_before_rounding")

    # lstm's tanh(z) goes into c, which is carried on in float32; gru carries h itself
    assert [fast(which) for which in (elman, lstm, gru, slstm)] == [1, 1, 0, 0]


def test_an_operation_without_a_form_is_named():
    @cell(states=("h",), gates=("z",))
    def bessel(s, g):
        return {"h": torch.special.bessel_j0(g.z)}

    @cell(states=("h",), gates=("z",))
    def halves(s, g):
        return {"h": g.z.half().float()}

    assert "bessel_j0" in cpp.unprintable(bessel)
    assert "torch.float16" in cpp.unprintable(halves)
    with pytest.raises(expression.Unprintable):
        cpp.functions(halves)
    assert cpp.unprintable(lstm) is None
