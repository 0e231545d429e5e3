"""What is no tensor, or one without memory, and what is no number or switch: named in the error, for every op."""

import inspect

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import holdfast
from every_call import CALLS
from holdfast.ops import step

KINDS = {
    "numpy": (lambda x: x.numpy(), TypeError, "expected a tensor; got ndarray"),
    "list": (lambda x: x.tolist(), TypeError, "expected a tensor; got list"),
    "text": (lambda x: "q", TypeError, "expected a tensor; got str"),
    "meta": (lambda x: x.to("meta"), ValueError, "expected (a tensor with memory|device cpu).*meta"),
    "sparse": (lambda x: x.to_sparse(), TypeError, "expected a dense tensor; got one of layout torch.sparse_coo"),
    "nested": (
        lambda x: torch.nested.nested_tensor(list(x.unbind())),
        TypeError,
        "expected a dense tensor; got a nested one",
    ),
    "complex": (lambda x: x.to(torch.complex64), TypeError, "expected .*; got torch.complex64"),
    "integers": (lambda x: x.int(), TypeError, "expected .*; got torch.int32"),
    "8 bits": (lambda x: x.to(torch.float8_e4m3fn), TypeError, "expected .*; got torch.float8_e4m3fn"),
}
NUMBERS = {"scale", "eps"}
SWITCHES = {"qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "dt_softplus", "normalize", "cut_recurrent_grad"}
SWITCHES |= {"output_final_state"}
every_call = pytest.mark.parametrize("name", CALLS)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
@every_call
def test_a_wrong_kind_of_tensor_is_named(name, kind):
    change, error, message = KINDS[kind]
    call = CALLS[name]
    right = call.arguments(torch.float32)
    # right once, so that the checks have passed for these shapes and dtypes
    call(right)
    for key, x in right.items():
        if all(part.is_floating_point() for part in tree_leaves(x)):
            with pytest.raises(error, match=rf"^{key}(\[0\])?: {message}"):
                call(right | {key: tree_map(change, x)})
    floating = {key: x for key, x in right.items() if key != "reset"}
    with pytest.raises(error, match=rf"^{next(iter(right))}: |^\w: {message}"):
        call({**right, **tree_map(change, floating)})


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.has_state])
def test_offsets_of_a_wrong_kind_are_named(name):
    call = CALLS[name]
    right = call.arguments(torch.float32)
    offsets = torch.tensor([0, 5])
    for wrong in (offsets.numpy(), [0, 5], offsets.to("meta"), offsets.to_sparse(), offsets.float()):
        with pytest.raises((TypeError, ValueError), match=r"^cu_seqlens: expected"):
            call(right, cu_seqlens=wrong)


def options(kinds):
    """(call, option) for every op and option of a kind."""
    plain = {name: call for name, call in CALLS.items() if "," not in name and " " not in name}
    return [(name, x) for name, call in plain.items() for x in inspect.signature(call.op).parameters if x in kinds]


@pytest.mark.parametrize(("name", "option"), options(NUMBERS))
def test_a_number_that_is_none_is_named(name, option):
    call = CALLS[name]
    right = call.arguments(torch.float32)
    for wrong in ("big", "0.5", [1.0], 1j, True, torch.ones(2), torch.tensor(0.5, requires_grad=True), np.ones(2)):
        with pytest.raises(TypeError, match=rf"^{option}: expected a number"):
            call(right, **{option: wrong})
    for wrong in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match=rf"^{option}: expected a finite number.*; got -?(nan|inf)"):
            call(right, **{option: wrong})
    if option == "eps":
        with pytest.raises(ValueError, match=r"^eps: expected a finite number >= 0; got -1"):
            call(right, eps=-1)
    # what is one, in any form
    expected = tree_leaves(call(right, **{option: 0.5}))
    for number in (np.float64(0.5), np.float32(0.5), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16)):
        for got, x in zip(tree_leaves(call(right, **{option: number})), expected, strict=True):
            assert torch.equal(got, x)


@pytest.mark.parametrize(("name", "option"), options(SWITCHES))
def test_a_switch_that_is_none_is_named(name, option):
    call = CALLS[name]
    right = call.arguments(torch.float32)
    for wrong in ("no", 0.5, None, torch.ones(2), [True]):
        with pytest.raises(TypeError, match=rf"^{option}: expected a bool; got {type(wrong).__name__}"):
            call.op(**right, **call.options, **{option: wrong})


@every_call
def test_a_backend_that_is_no_name_is_named(name):
    right = CALLS[name].arguments(torch.float32)
    for wrong in (1, True, ["chunked"], torch.ones(2)):
        with pytest.raises(TypeError, match=rf"^backend: expected a name or None; got {type(wrong).__name__}"):
            CALLS[name](right, backend=wrong)
    with pytest.raises(ValueError, match=r"^backend: expected a name or None; got ''"):
        CALLS[name](right, backend="")


def test_a_layer_that_is_no_integer_is_named():
    right = CALLS["lightning"].arguments(torch.float32)
    for option in ("layer", "num_layers"):
        for wrong in ("1", 0.5, True, torch.tensor(1)):
            with pytest.raises(TypeError, match=rf"^{option}: expected an integer; got {type(wrong).__name__}"):
                holdfast.lightning(**right, **{option: wrong})


def test_a_step_names_them_too():
    arguments = CALLS["mlstm"].arguments(torch.float32)
    state = arguments.pop("initial_state")
    token = {key: x[:, :1] for key, x in arguments.items()}
    for wrong, message in (
        ({"scale": "big"}, "scale: expected a number; got str"),
        ({"eps": "big"}, "eps: expected a number; got str"),
        ({"q": token["q"].numpy()}, "q: expected a tensor; got ndarray"),
        ({"normalize": "no"}, "normalize: expected a bool; got str"),
    ):
        with pytest.raises(TypeError, match=message):
            holdfast.step("mlstm", token | wrong, state)
    with pytest.raises(TypeError, match="backend: expected a name or None; got int"):
        holdfast.step("mlstm", token, state, backend=1)


def test_mixers_name_them():
    mixer = holdfast.nn.GLA(8, 2)
    x = torch.randn(2, 5, 8)
    for wrong, error, message in (
        (x.numpy(), TypeError, "x: expected a tensor; got ndarray"),
        (x.to("meta"), ValueError, "x: expected a tensor with memory; got one on the meta device"),
        (x.to_sparse(), TypeError, "x: expected a dense tensor; got one of torch.sparse_coo"),
        (x.to(torch.float8_e4m3fn), TypeError, "x: expected a dtype of 16 bits or more; got torch.float8_e4m3fn"),
        (x.int(), TypeError, "x: expected a floating-point dtype; got torch.int32"),
    ):
        with pytest.raises(error, match=message):
            mixer(wrong)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["nested", "sparse", "meta"])
@pytest.mark.parametrize("name", ["simple_gla", "causal_conv1d"])
def test_a_wrong_kind_is_named_after_calls_that_recorded_gradients(name, kind):
    """Such calls are told apart in C++: they go straight to the op."""
    change, error, _ = KINDS[kind]
    call = CALLS[name]
    right = {key: x.requires_grad_() for key, x in call.arguments(torch.float32).items()}
    for _ in range(3):
        call(right)
    for key, x in right.items():
        with pytest.raises(error, match=f"^{key}: "):
            call(right | {key: change(x.detach()).requires_grad_()})


def test_a_token_of_mlstm_takes_no_negative_eps():
    token = {name: torch.randn(2, 1, 2, 8) for name in "qkv"} | {name: torch.randn(2, 1, 2) for name in "if"}
    state = torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8), torch.zeros(2, 2)
    for eps in (-1, -0.5):
        with pytest.raises(ValueError, match=rf"^eps: expected a finite number >= 0; got {eps}"):
            step("mlstm", token | {"eps": eps}, state)
