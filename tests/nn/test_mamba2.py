"""nn.Mamba2's one op between its projections, against the same part by part."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from holdfast.nn import Mamba2
from holdfast.ops.parity import relative_error
from parity import assert_close

LENGTHS = (5, 0, 11, 1)
CASES = [{}, {"n_groups": 1}, {"packed": True}, {"T": 0}, {"T": 1}, {"conv_width": 1}, {"begins": True}]


def make(dtype=torch.float64, n_groups=2, conv_width=4, T=17, packed=False, begins=False, device="cpu", wide=False):
    """A mixer, its input, the state to begin with, and offsets. wide: with sizes that kernels serve."""
    torch.manual_seed(0)
    sizes = {"d_state": 64} if wide else {"num_heads": 4, "d_state": 8}
    mixer = Mamba2(128 if wide else 24, **sizes, n_groups=n_groups, conv_width=conv_width, norm_eps=1e-3)
    for p in (mixer.D, mixer.norm.weight):
        torch.nn.init.normal_(p, 1.0)
    mixer = mixer.to(device, dtype)
    x = torch.randn(*((1, 17) if packed else (2, T)), mixer.d_model).to(device, dtype)
    state = None
    if not begins:
        count, states = len(LENGTHS) if packed else 2, torch.promote_types(dtype, torch.float32)
        S = torch.randn(count, mixer.num_heads, mixer.d_state, mixer.head_dim)
        state = tuple(s.to(device, states) for s in (S, torch.randn(count, conv_width - 1, mixer.conv.channels)))
    offsets = torch.tensor((0, *LENGTHS), device=device).cumsum(0) if packed else None
    return mixer, x, state, offsets


def results(mixer, x, state, offsets, used=(0, 1, 2)):
    """Outputs and gradients of all, of some of the outputs alone."""
    leaves = [s.detach().requires_grad_() for s in (x, *(state or ()))]
    y, final = mixer(leaves[0], tuple(leaves[1:]) or None, offsets)
    made = y, *final
    loss = sum((made[n] * torch.linspace(-1, 1, made[n].numel()).to(y).view_as(made[n])).sum() for n in used)
    grads = torch.autograd.grad(loss, [*leaves, *mixer.parameters()], allow_unused=True)
    return [*made, *(torch.zeros(1) if grad is None else grad for grad in grads)]


def by_parts(mixer):
    """The mixer without its one op."""
    mixer._mix = mixer._mix_in_parts
    return mixer


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_its_parts(case):
    mixer, *given = make(**case)
    mine = results(mixer, *given)
    assert_close(mine, results(by_parts(mixer), *given), 1e-11)


@pytest.mark.parametrize("used", [(0,), (1,), (2,)])
def test_of_one_result_alone(used):
    mixer, *given = make()
    mine, theirs = results(mixer, *given, used), results(by_parts(mixer), *given, used)
    for got, right in zip(mine, theirs, strict=True):
        # of what has no part in it PyTorch has no gradient
        assert not (got.any() or right.any()) or relative_error(got, right) <= 1e-11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_its_parts(dtype):
    mixer, x, state, _ = make(T=90, begins=True)
    exact = results(mixer, x, state, None)
    mixer, x = mixer.to(dtype), x.to(dtype)
    mine, theirs = results(mixer, x, state, None), results(by_parts(mixer), x, state, None)
    for got, plain, right in zip(mine, theirs, exact, strict=True):
        assert relative_error(got.double(), right) <= 2 * relative_error(plain.double(), right) + 1e-6


def test_under_autocast_parameters_stay_as_they_are():
    mixer, x, *_ = make(torch.float32, begins=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x)
        z, final = by_parts(mixer)(x)
    assert [s.dtype for s in state] == [torch.float32, torch.float32]
    assert y.dtype == z.dtype == torch.bfloat16
    assert_close([y.double(), *state], [z.double(), *final], 0.03)


def test_no_state_unless_it_is_asked_for():
    mixer, x, state, _ = make()
    y, _ = mixer(x, state)
    z, nothing = mixer(x, state, output_final_state=False)
    assert nothing is None
    assert torch.equal(y, z)
    assert by_parts(mixer)(x, state, output_final_state=False)[1] is None


def test_no_sequence_sees_another():
    mixer, x, state, offsets = make(packed=True)
    y, final = mixer(x, state, offsets)
    x[:, :5], state[0][0] = torch.nan, torch.nan
    z, other = mixer(x, state, offsets)
    assert z[:, :5].isnan().all()
    assert torch.equal(z[:, 5:], y[:, 5:])
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(other, final, strict=True))


def test_gradients_repeat_under_checkpointing():
    mixer, x, state, _ = make()
    exact = torch.autograd.grad(mixer(x, state)[0].square().sum(), list(mixer.parameters()))
    y, _ = checkpoint(mixer, x, state, use_reentrant=False)
    again = torch.autograd.grad(y.square().sum(), list(mixer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(again, exact, strict=True))


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_as_one_graph(packed, final):
    mixer, x, state, offsets = make(packed=packed)
    torch._dynamo.reset()

    def run(x):
        y, last = mixer(x, state, offsets, final)
        return y.square().sum() + (sum(s.square().sum() for s in last) if final else 0)

    parameters = list(mixer.parameters())
    exact = torch.autograd.grad(run(x), parameters)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_close(torch.autograd.grad(compiled(x), parameters), exact, 1e-12)


def test_a_state_dict_without_rows_that_nothing_reads_is_loaded():
    mixer, x, *_ = make(begins=True)
    state = dict(mixer.state_dict())
    assert mixer.in_proj.used < state["in_proj.weight"].shape[0]
    other = Mamba2(24, 4, d_state=8, n_groups=2, norm_eps=1e-3).double()
    for given in (state | {"in_proj.weight": state["in_proj.weight"][: mixer.in_proj.used]}, state):
        other.load_state_dict(given)
        assert torch.equal(other(x)[0], mixer(x)[0])


def opchecked(device, final=True, **case):
    mixer, x, state, offsets = make(torch.float32, device=device, **case)
    parameters = (mixer.conv.weight, mixer.conv.bias, mixer.A_log, mixer.D, mixer.dt_bias, mixer.norm.weight)
    tensors = [s.detach().requires_grad_() for s in (mixer.in_proj(x), *parameters)]
    tensors += (None, None) if state is None else [s.requires_grad_() for s in state]
    op = torch.ops.holdfast.mamba2_layer_forward.default
    torch.library.opcheck(op, (*tensors, 1e-3, offsets, final, True, ""))
    tensors = [None if s is None else s.detach() for s in tensors]
    torch.library.opcheck(op, (*tensors, 1e-3, offsets, final, False, ""))
    y, S, tail, *kept = op(*tensors, 1e-3, offsets, final, True, "")
    grads = torch.randn_like(y), torch.randn_like(S), torch.randn_like(tail) if final else None
    torch.library.opcheck(
        torch.ops.holdfast.mamba2_layer_backward.default, (*grads, *kept, *tensors, 1e-3, offsets, "")
    )


@pytest.mark.parametrize("case", [{}, {"begins": True, "final": False}, {"packed": True}], ids=str)
def test_opcheck(case):
    opchecked("cpu", **case)


def launches(mixer, x):
    """Names of PyTorch's operations of a training step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Named(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.names.append(str(op))
            return op(*args, **(kwargs or {}))

    with Named() as seen, torch.autocast("cpu", torch.bfloat16):
        y, _ = mixer(x, output_final_state=False)
        y.sum().backward()
    return seen.names


def test_few_operations_are_run():
    """One op a pass, the projections and autocast's casts of their weights: each takes the host some microseconds."""
    mixer, x, *_ = make(torch.float32, begins=True)
    names = launches(mixer, x)
    assert [name for name in names if name.startswith("holdfast")] == [
        "holdfast.mamba2_layer_forward.default",
        "holdfast.mamba2_layer_backward.default",
    ]
    assert not [name for name in names if "cat" in name or "split" in name or "slice" in name]
    assert len(names) <= 40 < len(launches(by_parts(mixer), x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case, dtype):
    mixer, x, state, offsets = make(dtype=torch.float64, wide=True, **case)
    exact = results(mixer, x, state, offsets)
    mixer, x = mixer.to("cuda", dtype), x.to("cuda", dtype)
    state = None if state is None else tuple(s.float().cuda() for s in state)
    given = x, state, None if offsets is None else offsets.cuda()
    # the third call is replayed, and sums repeat bit for bit
    first, _, third = (results(mixer, *given) for _ in range(3))
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    theirs = results(by_parts(mixer), *given)
    for got, plain, right in zip(first, theirs, exact, strict=True):
        errors = [relative_error(s.cpu().double(), right) for s in (got, plain)]
        assert errors[0] <= 2 * errors[1] + 5e-6, errors


@pytest.mark.gpu
def test_opcheck_on_a_gpu():
    opchecked("cuda", wide=True)


@pytest.mark.gpu
def test_a_graph_captures_a_training_step():
    mixer, x, *_ = make(torch.bfloat16, begins=True, wide=True, device="cuda")
    x.requires_grad_()

    def step():
        y, _ = mixer(x, output_final_state=False)
        return y, *torch.autograd.grad(y.float().square().sum(), [x, *mixer.parameters()])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    with torch.no_grad():
        x.mul_(-1)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(made, step(), strict=True))
