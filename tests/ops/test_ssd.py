"""ssd and what stands around its scan as one op, against its definition's mapping in PyTorch's operations."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast.ops import matrix
from holdfast.recurrences import Draw, Sizes
from holdfast.recurrences.ssd import SSD
from parity import assert_close, cast, relative_error, values_and_grads

SIZES = {"B": 2, "T": 21, "H": 4, "K": 5, "V": 3, "Hq": 2}


def arguments(dtype=torch.float64, without=(), wide_D=False, packed=False, **sizes):
    drawn = SSD.example(Draw(0, dtype), Sizes(**SIZES | ({"B": 1} if packed else {}) | sizes))
    if wide_D:
        drawn["D"] = torch.randn(4, 3, dtype=drawn["D"].dtype)
    if packed and "initial_state" not in without:
        drawn["initial_state"] = torch.randn(4, *drawn["initial_state"].shape[1:], dtype=drawn["initial_state"].dtype)
    return {name: x for name, x in drawn.items() if name not in without}


def mapped(given, softplus, cu_seqlens=None):
    return matrix.run(SSD, SSD.map(**given, dt_softplus=softplus), True, cu_seqlens, None)


CALLS = [
    ({}, True),
    ({"wide_D": True}, False),
    ({"without": ("D",)}, True),
    ({"without": ("z", "initial_state")}, True),
    ({"without": ("z", "D", "dt_bias", "initial_state")}, False),
    ({"packed": True}, True),
    ({"T": 0}, True),
    ({"T": 1, "H": 4, "Hq": 4}, True),
]


@pytest.mark.parametrize(("changes", "softplus"), CALLS)
def test_it_is_what_the_definition_says(changes, softplus):
    given = arguments(**changes)
    offsets = torch.tensor([0, 9, 9, 13, 21]) if changes.get("packed") else None
    options = {"dt_softplus": softplus, "output_final_state": True, "cu_seqlens": offsets}
    exact = values_and_grads(lambda a: mapped(a, softplus, offsets), given)
    assert_close(values_and_grads(lambda a: holdfast.ssd(**a, **options), given), exact, 1e-12)


@pytest.mark.parametrize("used", [0, 1])
def test_of_one_result_alone(used):
    given = arguments()
    exact = values_and_grads(lambda a: mapped(a, True)[used], given)
    run = lambda a: holdfast.ssd(**a, dt_softplus=True, output_final_state=True)[used]  # noqa: E731
    assert_close(values_and_grads(run, given), exact, 1e-12)


@pytest.mark.parametrize("name", ["dt", "A", "dt_bias", "D"])
def test_one_argument_may_be_in_float64(name):
    given = arguments(torch.float32)
    given[name] = given[name].double()
    y, final = holdfast.ssd(**given, dt_softplus=True, output_final_state=True)
    assert (y.dtype, final.dtype) == (torch.float32, torch.float32)
    exact = mapped(cast(given, torch.float64), True)
    assert relative_error(y, exact[0]) <= 1e-5
    leaf = given[name].requires_grad_()
    holdfast.ssd(**given)[0].sum().backward()
    assert leaf.grad.dtype == torch.float64


def test_gates_of_wide_inputs_are_wide():
    """float32 parameters beside float64 inputs, as a mapping has them."""
    given = arguments() | cast({name: arguments()[name] for name in ("A", "dt_bias", "dt", "D")}, torch.float32)
    assert_close(values_and_grads(lambda a: holdfast.ssd(**a)[0], given),
                 values_and_grads(lambda a: mapped(a, False)[0], given), 1e-12)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_the_mapping(dtype):
    given = arguments(dtype, T=150)
    exact = values_and_grads(lambda a: mapped(a, True), cast(given, torch.float64))
    theirs = values_and_grads(lambda a: mapped(a, True), given)
    mine = values_and_grads(lambda a: holdfast.ssd(**a, dt_softplus=True, output_final_state=True), given)
    for got, plain, right in zip(mine, theirs, exact, strict=True):
        assert relative_error(got, right) <= 2 * relative_error(plain, right) + 1e-6


def test_gradients_repeat_under_checkpointing():
    given = {name: x.requires_grad_() for name, x in arguments().items()}

    def run(*tensors):
        return holdfast.ssd(**dict(zip(given, tensors, strict=True)), dt_softplus=True)[0]

    exact = torch.autograd.grad(run(*given.values()).square().sum(), list(given.values()))
    again = torch.autograd.grad(
        checkpoint(run, *given.values(), use_reentrant=False).square().sum(), list(given.values())
    )
    assert all(torch.equal(x, y) for x, y in zip(again, exact, strict=True))


def test_what_no_gradient_needs_is_not_kept():
    given = arguments()
    *_, o, step, g = torch.ops.holdfast.ssd_forward(*given.values(), True, None, False, "")
    assert o.numel() == step.numel() == g.numel() == 0
    *_, o, step, g = torch.ops.holdfast.ssd_forward(*given.values(), True, None, True, "")
    assert (o.shape, step.shape, g.shape) == (given["x"].shape, given["dt"].shape, given["dt"].shape)


@pytest.mark.parametrize("changes", [{}, {"without": ("z", "D", "dt_bias", "initial_state")}])
def test_opcheck(changes):
    given = arguments(torch.float32, **changes)
    tensors = [given[name].requires_grad_() if name in given else None for name in SSD.arguments]
    torch.library.opcheck(torch.ops.holdfast.ssd_forward.default, (*tensors, True, None, True, ""))
    tensors = [None if x is None else x.detach() for x in tensors]
    torch.library.opcheck(torch.ops.holdfast.ssd_forward.default, (*tensors, True, None, False, ""))
    y, final, *kept = torch.ops.holdfast.ssd_forward(*tensors, True, None, True, "")
    grads = torch.randn_like(y), torch.randn_like(final)
    torch.library.opcheck(torch.ops.holdfast.ssd_backward.default, (*grads, *kept, *tensors, True, None, ""))


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_as_one_graph(packed):
    given = arguments(packed=packed)
    options = {"dt_softplus": True, "output_final_state": True}
    options["cu_seqlens"] = torch.tensor([0, 9, 9, 13, 21]) if packed else None
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: holdfast.ssd(**a, **options), fullgraph=True, backend="aot_eager")
    eager = values_and_grads(lambda a: holdfast.ssd(**a, **options), given)
    assert_close(values_and_grads(compiled, given), eager, 1e-12)


def test_autocast_casts_inputs_and_no_more():
    given = arguments(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, final = holdfast.ssd(**given, output_final_state=True)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    narrow = given | {name: given[name].bfloat16() for name in ("x", "B", "C", "z")}
    assert torch.equal(y, holdfast.ssd(**narrow)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("changes", "softplus"), CALLS)
def test_on_a_gpu(changes, softplus, dtype):
    """The kernels around the scan, the mapping's error on the same GPU for a measure."""
    given = arguments(dtype, **{"T": 21 if changes.get("packed") else 150} | changes)
    offsets = torch.tensor([0, 9, 9, 13, 21]).cuda() if changes.get("packed") else None
    exact = values_and_grads(
        lambda a: mapped(a, softplus, None if offsets is None else offsets.cpu()), cast(given, torch.float64)
    )
    given = {name: x.cuda() for name, x in given.items()}
    options = {"dt_softplus": softplus, "output_final_state": True, "cu_seqlens": offsets}
    theirs = values_and_grads(lambda a: mapped(a, softplus, offsets), given)
    # the third call is replayed, and sums repeat bit for bit
    first, _, third = (values_and_grads(lambda a: holdfast.ssd(**a, **options), given) for _ in range(3))
    assert all(torch.equal(x, y) for x, y in zip(first, third, strict=True))
    for got, plain, right in zip(first, theirs, exact, strict=True):
        assert relative_error(got.cpu(), right) <= 2 * relative_error(plain.cpu(), right) + 5e-6
