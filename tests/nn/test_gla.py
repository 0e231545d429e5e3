"""nn.GLA's one op between its projections, against the same part by part."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from holdfast.nn import GLA
from holdfast.ops.parity import relative_error
from parity import assert_close

LENGTHS = (5, 0, 11, 1)
CASES = [{}, {"packed": True}, {"T": 0}, {"T": 1}, {"begins": True}, {"rank": 3}]


def make(dtype=torch.float64, T=17, rank=16, packed=False, begins=False, device="cpu", wide=False):
    """A mixer, its input, the state to begin with, and offsets. wide: with sizes that kernels serve."""
    torch.manual_seed(0)
    mixer = GLA(128 if wide else 24, 2, gate_rank=rank, gate_normalizer=2.0, norm_eps=1e-3)
    torch.nn.init.normal_(mixer.norm.weight, 1.0)
    mixer = mixer.to(device, dtype)
    x = torch.randn(*((1, 17) if packed else (2, T)), mixer.d_model).to(device, dtype)
    state = None
    if not begins:
        S = torch.randn(len(LENGTHS) if packed else 2, 2, mixer.key_dim, mixer.value_dim)
        state = (S.to(device, torch.promote_types(dtype, torch.float32)),)
    offsets = torch.tensor((0, *LENGTHS), device=device).cumsum(0) if packed else None
    return mixer, x, state, offsets


def results(mixer, x, state, offsets, used=(0, 1)):
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


@pytest.mark.parametrize("used", [(0,), (1,)])
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


def test_no_state_unless_it_is_asked_for():
    mixer, x, state, _ = make()
    y, nothing = mixer(x, state, output_final_state=False)
    assert nothing is None
    assert torch.equal(y, mixer(x, state)[0])


def test_gradients_repeat_under_checkpointing():
    mixer, x, state, _ = make()
    exact = torch.autograd.grad(mixer(x, state)[0].square().sum(), list(mixer.parameters()))
    y, _ = checkpoint(mixer, x, state, use_reentrant=False)
    again = torch.autograd.grad(y.square().sum(), list(mixer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(again, exact, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_as_one_graph(packed):
    mixer, x, state, offsets = make(packed=packed)
    torch._dynamo.reset()

    def run(x):
        y, (S,) = mixer(x, state, offsets)
        return y.square().sum() + S.square().sum()

    parameters = list(mixer.parameters())
    exact = torch.autograd.grad(run(x), parameters)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_close(torch.autograd.grad(compiled(x), parameters), exact, 1e-12)


def test_a_state_dict_with_the_decays_projection_apart_is_loaded():
    mixer, x, *_ = make(begins=True, rank=3)
    state = dict(mixer.state_dict())
    *widths, rank = mixer.widths
    apart = {"in_proj.weight": state["in_proj.weight"][: sum(widths)]}
    apart["decay_down.weight"] = state["in_proj.weight"][sum(widths) :][:rank]
    other = GLA(24, 2, gate_rank=3, gate_normalizer=2.0, norm_eps=1e-3).double()
    for given in (state | apart, state):
        other.load_state_dict(given)
        assert torch.equal(other(x)[0], mixer(x)[0])
    assert set(other.state_dict()) == set(state)


def opchecked(device, **case):
    mixer, x, state, offsets = make(torch.float32, device=device, **case)
    parameters = (mixer.in_proj(x), mixer.decay_up.weight, mixer.decay_up.bias, mixer.norm.weight)
    tensors = [s.detach().requires_grad_() for s in parameters]
    tensors.append(None if state is None else state[0].requires_grad_())
    op, numbers = torch.ops.holdfast.gla_layer_forward.default, (2, 2.0, 1e-3)
    torch.library.opcheck(op, (*tensors, *numbers, offsets, True, ""))
    tensors = [None if s is None else s.detach() for s in tensors]
    torch.library.opcheck(op, (*tensors, *numbers, offsets, False, ""))
    y, S, *kept = op(*tensors, *numbers, offsets, True, "")
    given = (torch.randn_like(y), torch.randn_like(S), *kept, *tensors, *numbers, offsets, "")
    torch.library.opcheck(torch.ops.holdfast.gla_layer_backward.default, given)


@pytest.mark.parametrize("case", [{"begins": True}, {"packed": True}], ids=str)
def test_opcheck(case):
    opchecked("cpu", **case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case, dtype):
    mixer, x, state, offsets = make(wide=True, **case)
    exact = results(mixer, x, state, offsets)
    mixer, x = mixer.to("cuda", dtype), x.to("cuda", dtype)
    given = x, None if state is None else (state[0].float().cuda(),), None if offsets is None else offsets.cuda()
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
