"""The delta rule's Triton kernels on an NVIDIA GPU: right at every size and dtype, on hard keys, and safe to repeat."""

import pytest
import torch

import holdfast
from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.delta_rule.triton.backend import TritonDelta
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.ops import matrix
from holdfast.planner import Plan
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from kernels.matrix.delta_rule.triton.parity import correlated, errors, example, with_exact_inverse
from kernels.matrix.scalar_decay.triton.parity import moved
from parity import relative_error, values_and_grads

pytestmark = pytest.mark.gpu
HALF = {"dtype": torch.bfloat16}
OPS = ["delta_rule", "gated_delta_rule"]


def plans(call, packed=False, **changes):
    cu_seqlens = torch.tensor([0, 1]) if packed else None
    problem = matrix.problem("gated_delta_rule", call, cu_seqlens, True)
    device = describe(torch.device("cuda", 0))
    found = [TritonDelta().candidates(problem, device, way)[0].plan for way in ("forward", "backward")]
    return [Plan("triton", tuple((dict(plan.values) | changes).items())) for plan in found]


def assert_exact_inverse(call):
    """Where rounded operands add up over the sequence: at most half more than they cost with an exact inverse."""
    found = errors(call, plans(call), device="cuda", exact=Chunked, exact_inverse=True)
    assert all(mine <= 1.5 * theirs for mine, theirs in found.values()), found


def assert_parity(call, packed=None, ends=True, **changes):
    """At most twice the error of the PyTorch path in the same dtype.

    That path's products are in float32 whatever the dtype, so that its states and gates' gradients, which are float32,
    carry no rounding of operands: of those the bound is that of the output. In float32 the kernels' products are of
    three TF32 products each, exact to 2^-22 where float32 is to 2^-24: 1e-6 whatever that path's error, 2e-6 for dg.
    """
    found = errors(call, plans(call, packed is not None, **changes), packed, device="cuda", exact=Chunked, ends=ends)
    for name, (mine, theirs) in found.items():
        floor = 0.0 if call.v.dtype != torch.float32 else 2e-6 if name == "dg" else 1e-6
        assert mine <= max(2 * theirs, 2 * found["o"][1], floor), (name, found)


def test_the_widths_of_a_model():
    assert_parity(example(B=2, T=1008, H=4, Hq=4, K=128, V=128, **HALF))
    # states in the memory of dq and dk, their gradients in three windows
    assert_parity(example(B=2, T=1024, H=4, Hq=4, K=128, V=128, **HALF), windows=3)


@pytest.mark.parametrize(("K", "V"), [(24, 160), (256, 64)])
def test_widths(K, V):
    assert_parity(example(T=304, H=4, Hq=2, K=K, V=V, **HALF))


@pytest.mark.parametrize("T", [1, 63, 65])
def test_lengths(T):
    assert_parity(example(B=2, T=T, H=4, Hq=4, K=32, V=32, **HALF))


@pytest.mark.parametrize("given", [{"g": "resets"}, {"beta": "two"}, {"beta": None}])
def test_gates(given):
    assert_parity(example(T=1008, H=4, Hq=4, K=32, V=32, **HALF, **given))


@pytest.mark.parametrize("g", ["none", None])
def test_no_decay(g):
    assert_exact_inverse(example(T=1008, H=4, Hq=4, K=32, V=32, g=g, **HALF))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(dtype):
    # whole chunks of grouped heads: the states lie in the memory of the gradients' float32 parts
    assert_parity(example(B=2, T=320, H=4, Hq=2, K=32, V=32, dtype=dtype))


def test_packed():
    packed = (0, 0, 1, 64, 300, 1008, 1008)
    assert_parity(example(T=1008, H=4, Hq=4, K=32, V=32, packed=packed, **HALF), packed)


def test_correlated_keys():
    assert_exact_inverse(correlated(1024))


def test_correlated_keys_over_131072_tokens():
    call = moved(correlated(131072), "cuda")
    segments = Plan("chunked", (("chunk", 64), ("segment", 4096)))
    right, _ = Chunked().forward(segments, moved(call, "cuda", torch.float64), None)
    o, _ = TritonDelta().forward(plans(call)[0], call, None)
    exact = relative_error(with_exact_inverse(call)[0].double(), right)
    assert relative_error(o.double(), right) <= 1.5 * exact


def test_memory_at_proposal_039s_shape():
    call = moved(correlated(4096, B=4, H=32), "cuda")
    grad_o = torch.randn_like(call.v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward, backward = plans(call)
    o = TritonDelta().forward(forward, call, None)
    grads = TritonDelta().backward(backward, call, None, grad_o, None)
    # read before the checks below, whose temporaries are larger than what is left of the bound
    most = torch.cuda.max_memory_allocated() - before
    assert o[0].isfinite().all()
    assert all(x is None or x.isfinite().all() for x in grads[0])
    assert most <= 700 << 20


def arguments_of(name, seed=0, **sizes):
    sizes = {"B": 2, "T": 304, "H": 4, "K": 32, "V": 32} | sizes
    found = RECURRENCES[name].example(Draw(seed, device="cuda"), Sizes(**sizes))
    return found | {x: found[x].half() for x in "qkv"}


def test_runs_repeat_bit_for_bit_and_permuted_inputs_are_read():
    arguments = arguments_of("gated_delta_rule")

    def run(a):
        return holdfast.gated_delta_rule(**a, output_final_state=True, backend="triton")

    first, second = (values_and_grads(run, arguments) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    apart = {name: arguments[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    assert all(torch.equal(x, y) for x, y in zip(run(arguments), run(arguments | apart), strict=True))


@pytest.mark.parametrize("name", OPS)
def test_compiles_as_one_graph(name):
    arguments = arguments_of(name)
    torch._dynamo.reset()
    compiled = torch.compile(getattr(holdfast, name), fullgraph=True, backend="aot_eager")
    eager = values_and_grads(lambda a: getattr(holdfast, name)(**a, backend="triton"), arguments)
    graph = values_and_grads(lambda a: compiled(**a, backend="triton"), arguments)
    assert all(relative_error(x, y) <= 1e-6 for x, y in zip(graph, eager, strict=True))


def test_opcheck():
    call = moved(example(B=2, T=304, H=4, Hq=4, K=32, V=32, dtype=torch.float16), "cuda")
    call = type(call)(*(None if x is None else x.requires_grad_() for x in call[:7]), *call[7:])
    given = (*call, None, "gated_delta_rule", True, "triton")
    torch.library.opcheck(torch.ops.holdfast.matrix_forward.default, given)


def test_captured_in_a_graph():
    arguments = arguments_of("gated_delta_rule")
    right, _ = holdfast.gated_delta_rule(**arguments, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = holdfast.gated_delta_rule(**arguments, backend="triton")
    graph.replay()
    assert torch.equal(o, right)
