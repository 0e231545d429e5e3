"""Bad input to the dense family's ops, one by one: the message names the argument, what was expected and what came."""

import pytest
import torch

import holdfast
from holdfast.recurrences import RECURRENCES, Draw, Sizes

B, T, H, D = 2, 5, 3, 4


def good(**changes):
    arguments = RECURRENCES["lstm"].example(Draw(0), Sizes(B=B, T=T, H=H, D=D))
    return arguments | {"backend": None} | changes


CASES = {
    "x not a tensor": ({"x": [1.0]}, TypeError, ["x", "tensor", "list"]),
    "x of wrong rank": ({"x": torch.ones(B, T, 4, H * D)}, ValueError, ["x", "input_gates=4", "[2, 5, 4, 12]"]),
    "x with wrong gates": ({"x": torch.ones(B, T, 3, H, D)}, ValueError, ["x", "input_gates=4", "[2, 5, 3, 3, 4]"]),
    "x of integers": ({"x": torch.ones(B, T, 4, H, D, dtype=torch.int64)}, TypeError, ["x", "torch.int64"]),
    "x without heads": ({"x": torch.ones(B, T, 4, 0, D)}, ValueError, ["x", "H > 0", "[2, 5, 4, 0, 4]"]),
    "x without channels": ({"x": torch.ones(B, T, 4, H, 0)}, ValueError, ["x", "D > 0", "[2, 5, 4, 3, 0]"]),
    "R missing": ({"R": None}, TypeError, ["R", "tensor", "None"]),
    "R with wrong gates": ({"R": torch.ones(3, H, D, D)}, ValueError, ["R", "recurrent_gates=4", "[3, 3, 4, 4]"]),
    "R not square": ({"R": torch.ones(4, H, D, 5)}, ValueError, ["R", "D=4", "[4, 3, 4, 5]"]),
    "R with other heads": ({"R": torch.ones(4, 1, D, D)}, ValueError, ["R", "H=3", "[4, 1, 4, 4]"]),
    "R of another dtype": ({"R": torch.ones(4, H, D, D).double()}, TypeError, ["R", "torch.float32", "torch.float64"]),
    "b with wrong gates": ({"b": torch.ones(3, H, D)}, ValueError, ["b", "gates=4", "[3, 3, 4]"]),
    "b of another dtype": ({"b": torch.ones(4, H, D).half()}, TypeError, ["b", "torch.float32", "torch.float16"]),
    "state with too few": ({"initial_state": torch.ones(1, B, H, D)}, ValueError, ["initial_state", "states=2"]),
    "state of another batch": (
        {"initial_state": torch.ones(2, 3, H, D)},
        ValueError,
        ["initial_state", "sequences=2", "[2, 3, 3, 4]"],
    ),
    "state of another dtype": (
        {"initial_state": torch.ones(2, B, H, D).bfloat16()},
        TypeError,
        ["initial_state", "torch.float32", "torch.bfloat16"],
    ),
    "reset of another shape": ({"reset": torch.zeros(B, T + 1).bool()}, ValueError, ["reset", "T=5", "[2, 6]"]),
    "reset of floats": ({"reset": torch.zeros(B, T)}, TypeError, ["reset", "torch.bool", "torch.float32"]),
    "device": ({"R": torch.ones(4, H, D, D, device="meta")}, ValueError, ["R", "cpu", "meta"]),
    "clip of zero": ({"recurrent_grad_clip": 0.0}, ValueError, ["recurrent_grad_clip", "> 0", "0.0"]),
    "clip below zero": ({"recurrent_grad_clip": -1}, ValueError, ["recurrent_grad_clip", "> 0", "-1"]),
    "clip of NaN": ({"recurrent_grad_clip": float("nan")}, ValueError, ["recurrent_grad_clip", "> 0", "nan"]),
    "clip of a string": ({"recurrent_grad_clip": "1"}, TypeError, ["recurrent_grad_clip", "number", "str"]),
    "clip of a bool": ({"recurrent_grad_clip": True}, TypeError, ["recurrent_grad_clip", "number", "bool"]),
    "cut of a number": ({"cut_recurrent_grad": 1}, TypeError, ["cut_recurrent_grad", "bool", "int"]),
    "unknown backend": ({"backend": "warp"}, ValueError, ["backend", "'loop'", "'warp'"]),
    "cu_seqlens not a tensor": ({"cu_seqlens": [0, 5]}, TypeError, ["cu_seqlens", "tensor", "list"]),
    "cu_seqlens of floats": ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, ["cu_seqlens", "torch.float32"]),
    "cu_seqlens with a batch": ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, ["cu_seqlens", "B = 1", "B = 2"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_message_names_argument_expected_and_actual(case):
    changes, error, words = CASES[case]
    with pytest.raises(error) as caught:
        holdfast.lstm(**good(**changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("bounds", "words"), [([0, 4], ["0 to T = 5", "0 to 4"]), ([1, 5], ["1 to 5"]), ([0, 3, 2, 5], ["3 then 2"])]
)
@pytest.mark.parametrize("backend", ["loop", "reference"])
def test_offsets_are_checked(bounds, words, backend):
    x, R = torch.ones(1, T, 4, H, D), torch.ones(4, H, D, D)
    with pytest.raises(ValueError, match="cu_seqlens") as caught:
        holdfast.lstm(x, R, cu_seqlens=torch.tensor(bounds), backend=backend)
    assert all(word in str(caught.value) for word in words)


def test_elman_names_its_nonlinearities():
    x, R = torch.ones(B, T, 1, H, D), torch.ones(1, H, D, D)
    with pytest.raises(ValueError, match="nonlinearity: expected one of 'tanh', 'relu'; got 'gelu'"):
        holdfast.elman(x, R, nonlinearity="gelu")


def test_gru_wants_four_biases():
    x, R = torch.ones(B, T, 3, H, D), torch.ones(3, H, D, D)
    with pytest.raises(ValueError, match="gates=4"):
        holdfast.gru(x, R, torch.ones(3, H, D))


def test_rnn_wants_a_cell():
    with pytest.raises(TypeError, match=r"cell: expected a Cell, as holdfast\.cell makes; got function"):
        holdfast.rnn(lambda s, g: {}, torch.ones(B, T, 4, H, D), torch.ones(4, H, D, D))


def test_a_misspelt_argument_is_refused():
    with pytest.raises(TypeError, match="recurent"):
        holdfast.lstm(**good(recurent_grad_clip=1.0))
