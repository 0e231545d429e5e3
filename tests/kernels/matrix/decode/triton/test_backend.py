"""Decoding without a GPU: the kernels in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

import holdfast
from holdfast.kernels.matrix.decode.triton.backend import TritonDecode
from holdfast.ops import step
from holdfast.planner import Device, Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes

pytest.importorskip("triton")
from holdfast.kernels.matrix.decode.triton.step import matrix_decode
from interpreted import interpret
from kernels.matrix.decode.triton.parity import MATRIX
from parity import relative_error
from triton_compile import TARGETS, compile_for

SINGLE_STATE = [name for name, r in RECURRENCES.items() if r.family == "matrix" and name != "mlstm"]


def test_decoding_interpreted():
    assert "mlstm" in interpret("kernels.matrix.decode.triton.parity", "interpreted")


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("erase", [None, torch.bfloat16])
def test_decoding_compiles(capability, erase):
    found = dict.fromkeys(matrix_decode.arg_names, 128) | {"scale": 0.1, "eps": 0.0, "m_ptr": None, "GROUP": 1}
    found |= {"e_ptr": erase, "ERASE_GROUP": 1, "ERASE_BEFORE_DECAY": erase is not None}
    found |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), torch.bfloat16)
    found |= dict.fromkeys(("g_ptr", "beta_ptr", "state_ptr", "next_ptr"), torch.float32)
    found |= {"K": 128, "V": 128, "BLOCK_K": 128, "BLOCK_V": 32, "VECTOR": False, "DELTA": True}
    made = compile_for(matrix_decode, capability, found, num_warps=4)
    assert made.stack == 0
    # the state moves 16 bytes a thread at a time
    assert "ld.global.v4" in made.ptx
    assert "st.global.v4" in made.ptx


def test_what_decoding_cannot_serve_is_said():
    sizes = {"B": 4, "T": 1, "H": 32, "Hq": 32, "K": 128, "V": 128}

    def said(traits=(), dtype="bfloat16", **changed):
        problem = Problem.of("gla", "matrix", dtype, sizes | changed, dict.fromkeys(traits, True))
        return TritonDecode().reject(problem, Device.named("h200"))

    assert said() is None
    assert "one token" in said(T=2)
    assert "one token" in said(["varlen"])
    assert "no backward pass" in said(["needs_grad"])
    assert "float64" in said(dtype="float64")
    assert "at most 512" in said(K=1024)


@pytest.mark.parametrize("name", SINGLE_STATE)
def test_step_is_the_op_with_its_state_in_place(name):
    arguments = RECURRENCES[name].example(Draw(0), Sizes(B=2, T=1, H=4, Hq=2, K=8, V=6))
    state = arguments.pop("initial_state")
    o, final = getattr(holdfast, name)(**arguments, initial_state=state, output_final_state=True)
    held = state.clone()
    place = held.data_ptr()
    assert torch.equal(step(name, arguments, held), o)
    assert torch.equal(held, final)
    assert held.data_ptr() == place


@pytest.mark.parametrize(
    "options", [{}, {"gating": "sigmoid"}, {"gating": "sigmoid", "normalize": False}, {"scale": 0.3}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_of_an_mlstm_is_the_op_with_its_states_in_place(options, dtype):
    state = None
    for n in range(3):
        arguments = RECURRENCES["mlstm"].example(Draw(n, dtype), Sizes(B=2, T=1, H=4, Hq=2, K=8, V=6))
        first = arguments.pop("initial_state")
        state = first if state is None else state
        held = tuple(x.clone() for x in state)
        o, state = holdfast.mlstm(**arguments, **options, initial_state=state, output_final_state=True)
        places = [x.data_ptr() for x in held]
        got = step("mlstm", arguments | options, held)
        assert got.dtype == dtype
        assert relative_error(got.double(), o.double()) <= (1e-6 if dtype == torch.float32 else 2.0**-8)
        assert all(relative_error(x, y) <= 1e-6 for x, y in zip(held, state, strict=True))
        assert [x.data_ptr() for x in held] == places


def test_step_refuses_what_it_cannot_do():
    arguments = RECURRENCES["simple_gla"].example(Draw(0), Sizes(B=2, T=1, H=4, K=8, V=6))
    state = arguments.pop("initial_state")
    with pytest.raises(ValueError, match="op: expected one of"):
        step("lstm", arguments, state)
    with pytest.raises(TypeError, match="got 'decay'"):
        step("simple_gla", arguments | {"decay": 1}, state)
    with pytest.raises(TypeError, match="no initial_state"):
        step("simple_gla", arguments | {"initial_state": state}, state)
    with pytest.raises(ValueError, match="contiguous"):
        step("simple_gla", arguments, state.mT.contiguous().mT)
    arguments = RECURRENCES["mlstm"].example(Draw(0), Sizes(B=2, T=1, H=4, K=8, V=6))
    C, n, m = arguments.pop("initial_state")
    with pytest.raises(TypeError, match="expected a tuple of 3"):
        step("mlstm", arguments, C)
    with pytest.raises(TypeError, match=r"the tensors \(C, n, m\)"):
        step("mlstm", arguments, (C, None, m))
    with pytest.raises(TypeError, match="got 'cu_seqlens'"):
        step("mlstm", arguments | {"cu_seqlens": None}, (C, n, m))
    with pytest.raises(ValueError, match="gating"):
        step("mlstm", arguments | {"gating": "relu"}, (C, n, m))
    longer = RECURRENCES["simple_gla"].example(Draw(0), Sizes(B=2, T=2, H=4, K=8, V=6))
    state = longer.pop("initial_state")
    with pytest.raises(ValueError, match="got T = 2"):
        step("simple_gla", longer, state)


def test_step_is_a_custom_op_that_says_what_it_changes():
    arguments = RECURRENCES["gated_delta_rule"].example(Draw(0), Sizes(B=2, T=1, H=4, K=8, V=6))
    call, _ = RECURRENCES["gated_delta_rule"].map(**arguments)
    torch.library.opcheck(torch.ops.holdfast.matrix_step.default, (*call, "gated_delta_rule", "chunked"))


@pytest.mark.parametrize("op", MATRIX)
def test_one_token_without_gradients_is_decoded(op):
    sizes = {"B": 256, "T": 1, "H": 32, "K": 128, "V": 128}
    said = holdfast.explain(op, sizes, "bfloat16", "h200", needs_grad=False)
    assert "runs     decode" in str(said)
