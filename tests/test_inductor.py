"""torch.compile with Inductor, as users run it, forward and backward: one graph that serves other lengths and batches.

Other tests of compiled calls use aot_eager, which lays out and fuses nothing and takes a tenth of the time.
"""

import shutil

import pytest
import torch
from torch._functorch import config as functorch
from torch._inductor import config as inductor

import holdfast
from every_call import CALLS, SIZES
from holdfast.nn import (
    GLA,
    GRU,
    KDA,
    LSTM,
    MLSTM,
    RGLRU,
    RNN,
    RWKV7,
    SLSTM,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    Mamba,
    Mamba2,
    RetNet,
    RotLRU,
)
from holdfast.nn.short_convolution import ShortConvolution
from holdfast.recurrences import Sizes
from parity import assert_close, leaves, with_grad

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")

MIXERS = {
    "GLA": lambda: GLA(8, 2),
    "RetNet": lambda: RetNet(8, 2),
    "Mamba": lambda: Mamba(8, d_state=4),
    "Mamba2": lambda: Mamba2(8, 4, d_state=4, n_groups=2),
    "MLSTM": lambda: MLSTM(8, 2),
    "DeltaNet": lambda: DeltaNet(8, 2, allow_neg_eigval=True),
    "GatedDeltaNet": lambda: GatedDeltaNet(8, 2, num_v_heads=4),
    "GatedDeltaProduct": lambda: GatedDeltaProduct(8, 2),
    "KDA": lambda: KDA(8, 2, num_v_heads=4),
    "RWKV7": lambda: RWKV7(8, 2),
    "RGLRU": lambda: RGLRU(8, 2),
    "RotLRU": lambda: RotLRU(8, 2),
    "SLSTM": lambda: SLSTM(8, 2),
}
LAYERS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}
# batches and lengths: the first call's graph is for its own, the second's for any, so the third compiles nothing
SHAPES = ((2, 8), (3, 9), (5, 16))
# sizes that no other axis has, which the first graph would take for the same: it serves the others too
OF_NO_OTHER_AXIS = ((6, 10), (5, 8), (9, 16))
# of mLSTM, whose graph holds log2(T) rounds: one that is a power of two, and one that is not
OF_ONE_LENGTH = ((2, 4), (3, 5))
OFFSETS = ((0, 3, 8), (0, 4, 7, 9), (0, 2, 2, 9, 16))


@pytest.fixture(autouse=True)
def fresh(request):
    """Loops of single numbers: of vectors g++ takes half as long again, and strides and graphs are the same. So nobody
    asks which vectors there are, for which g++ and Python try each kind.

    No caches of graphs: no test compiles what another has, and to look each up takes a tenth of the time. Headers are
    compiled ahead for the slow tests, which are many: it takes as long as some ten kernels.
    """
    torch._dynamo.reset()
    is_one_of_many = request.node.get_closest_marker("slow") is not None
    config = {
        "cpp.simdlen": 1,
        "cpp.vec_isa_ok": False,
        "fx_graph_cache": False,
        "cpp_cache_precompile_headers": is_one_of_many,
    }
    with inductor.patch(config), functorch.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def check(name, run, compiled, cases, parameters=(), graphs=2):
    """Values and gradients of every case, of the parameters' too, are those of the call that is not compiled.

    graphs: at most so many, of which the last serves all further cases."""
    for n, case in enumerate(cases[:2] if is_of_one_length(name) else cases):
        with torch._dynamo.config.patch(error_on_recompile=n >= graphs):
            got = results(compiled, case, parameters)
        assert_close(got, results(run, case, parameters), 1e-5)


def is_of_one_length(name):
    """On a CPU mLSTM's stabiliser takes log2(T) rounds of PyTorch's operations, which a graph holds for its own T."""
    return name.lower().startswith("mlstm")


def results(run, arguments, parameters):
    arguments = with_grad(arguments)
    made = leaves(run(**arguments))
    loss = sum((n + 1.5) * x.square().sum() for n, x in enumerate(made))
    grads = torch.autograd.grad(loss, [*leaves(arguments), *parameters], allow_unused=True, materialize_grads=True)
    return [x.detach().double() for x in (*made, *grads)]


def packed(offsets):
    x, cu_seqlens = torch.randn(1, offsets[-1], 8), torch.tensor(offsets)
    return {"x": x, "cu_seqlens": cu_seqlens}


@pytest.mark.slow
def test_a_short_convolution_before_an_op_compiles_for_any_length():
    """A convolution of symbolic length, beside views of four axes that are kept for the backward pass."""
    conv, proj = ShortConvolution(8), torch.nn.Linear(8, 8)

    def run(x):
        y, _ = conv(x)
        return holdfast.gated_rms_norm(y.unflatten(-1, (2, 4)), proj(x).unflatten(-1, (2, 4)))

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    parameters = [*conv.parameters(), *proj.parameters()]
    check("conv", run, compiled, [{"x": torch.randn(*shape, 8)} for shape in SHAPES], parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("kind", ["batches", "packed"])
def test_mixers(name, kind):
    mixer = MIXERS[name]()
    if kind == "packed":
        cases = [packed(offsets) for offsets in OFFSETS]
    else:
        shapes = OF_ONE_LENGTH if is_of_one_length(name) else SHAPES
        cases = [{"x": torch.randn(*shape, 8)} for shape in shapes]
    check(name, mixer, torch.compile(mixer, fullgraph=True), cases, list(mixer.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    layer = LAYERS[name](8, 8, num_layers=2, batch_first=True)
    cases = [{"input": torch.randn(*shape, 8)} for shape in SHAPES]
    check(name, layer, torch.compile(layer, fullgraph=True), cases, list(layer.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_ops(name):
    call = CALLS[name]
    cases = []
    for seed, (B, T) in enumerate(OF_ONE_LENGTH if is_of_one_length(name) else OF_NO_OTHER_AXIS):
        sizes = Sizes(B=B, T=T, H=SIZES.H, K=SIZES.K, V=SIZES.V, D=SIZES.D)
        cases.append(call.arguments(torch.float32, seed, sizes))

    def run(**arguments):
        return call(arguments)

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    check(name, run, compiled, cases, graphs=2 if is_of_one_length(name) else 1)


@pytest.mark.slow
@pytest.mark.parametrize("last", [0, 4])
def test_a_state_of_arguments_whose_last_axis_is_the_slowest(last):
    """Inductor reads it with the strides that the op's fake gave. last: tokens, of which there may be none."""

    def run(a, x, initial_state):
        return holdfast.rglru(a, x, initial_state, output_final_state=True)[1].sin()

    draw = [torch.randn(shape).mT.contiguous().mT for shape in ((3, last, 4), (3, last, 4), (3, 4))]
    torch.testing.assert_close(torch.compile(run, fullgraph=True)(*draw), run(*draw))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["an argument", "a gradient"])
def test_inductor_ignores_lazy_negation_in_any_function(where):
    """PyTorch's own fault, which the fuzzer leaves out (fuzz/case.py) and docs/fuzzing.md names; mended, draw it."""

    def plain(x, y):
        return (x * y).sin()

    x, y, grad = torch.randn(3, requires_grad=True), torch.randn(3), torch.randn(3)
    if where == "an argument":
        y = torch._neg_view(y)
    else:
        grad = torch._neg_view(grad)
    (right,), (got,) = (torch.autograd.grad(run(x, y), x, grad) for run in (plain, torch.compile(plain)))
    torch.testing.assert_close(got, -right)
