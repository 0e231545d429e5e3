"""A mixer's step of decoding: forward's results, on a state in place, by one op between the projections."""

import copy
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.cli.generate import generate
from holdfast.cli.language_model import LanguageModel
from holdfast.nn import (
    GLA,
    KDA,
    MLSTM,
    RGLRU,
    RWKV7,
    SLSTM,
    CapturedStep,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    Mamba,
    Mamba2,
    RetNet,
    RotLRU,
)
from interpreted import interpret
from parity import relative_error

MIXERS = {
    "gla": lambda: GLA(24, 2),
    "retnet": lambda: RetNet(24, 2),
    "mamba": lambda: Mamba(24, d_state=5, conv_width=3),
    "mamba2": lambda: Mamba2(24, 6, d_state=7, n_groups=3),
    "mamba2 of one group": lambda: Mamba2(24, 4, d_state=8, conv_width=2),
    "mlstm": lambda: MLSTM(24, 2, input_gate_bias=0.0),
    "mlstm sigmoid": lambda: MLSTM(24, 2, gating="sigmoid", normalize=False, gate_soft_cap=None),
    "deltanet": lambda: DeltaNet(24, 2, allow_neg_eigval=True),
    "gated deltanet": lambda: GatedDeltaNet(24, 2, num_v_heads=6, expand_v=0.75, conv_width=3),
    "gated deltanet without a convolution": lambda: GatedDeltaNet(24, 2, conv_width=1),
    "gated deltaproduct": lambda: GatedDeltaProduct(24, 2, num_v_heads=4, conv_width=2),
    "kda": lambda: KDA(24, 2, num_v_heads=6, expand_v=0.75, conv_width=3),
    "rwkv7": lambda: RWKV7(24, 2),
    "rglru": lambda: RGLRU(24, 2),
    "rotlru": lambda: RotLRU(24, 2),
    "slstm": lambda: SLSTM(24, 2),
}
every_mixer = pytest.mark.parametrize("name", MIXERS)
# what runs between their projections; of the others a step is a forward pass
FUSED = {
    "gla": "retention_step", "retnet": "retention_step", "mamba2": "conv_step", "mlstm": "mlstm_step",
    "mlstm sigmoid": "mlstm_step", "deltanet": "conv_step", "gated deltanet": "conv_step", "rglru": "rglru_step",
}  # fmt: skip


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    return MIXERS[name]().to(dtype).requires_grad_(False)


def decoded(mixer, x, prompt):
    """What steps after a prompt return, and the state after them."""
    y, state = mixer(x[:, :prompt])
    places = [s.data_ptr() for s in state]
    outputs = [y, *(mixer.step(token, state) for token in x[:, prompt:].split(1, 1))]
    assert [s.data_ptr() for s in state] == places
    assert all(y.dtype == x.dtype for y in outputs)
    return torch.cat(outputs, 1), state


@every_mixer
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_a_prompt_and_steps_equal_the_whole(name, dtype, limit, batch):
    mixer, x = make(name, dtype), torch.randn(batch, 33, 24, dtype=dtype)
    whole, final = mixer(x)
    y, state = decoded(mixer, x, 13)
    assert relative_error(y, whole) <= limit
    assert all(relative_error(s.double(), t.double()) <= limit for s, t in zip(state, final, strict=True))


@every_mixer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_forward_does(name, dtype):
    mixer, x = make(name, dtype), torch.randn(2, 33, 24).to(dtype)
    exact, _ = copy.deepcopy(mixer).double()(x.double())
    y, _ = decoded(mixer, x, 13)
    theirs = relative_error(mixer(x)[0].double(), exact)
    assert relative_error(y.double(), exact) <= 2 * theirs


@every_mixer
def test_a_step_may_follow_no_tokens(name):
    mixer, x = make(name, torch.float64), torch.randn(2, 4, 24, dtype=torch.float64)
    assert relative_error(decoded(mixer, x, 0)[0], mixer(x)[0]) <= 1e-12


@every_mixer
def test_autocast_is_close_and_keeps_states_wide(name):
    mixer, x = make(name), torch.randn(2, 20, 24)
    exact, _ = mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = mixer(x[:, :19])
        y = mixer.step(x[:, 19:], state)
    assert y.dtype == torch.bfloat16
    assert all(s.dtype in (torch.float32, torch.int64) for s in state)
    assert relative_error(y.float(), exact[:, 19:]) <= 0.03


@pytest.mark.parametrize("name", FUSED)
def test_one_op_runs_between_the_projections(name):
    counted = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            counted[op.name().split("::")[1]] += op.namespace == "holdfast"
            return op(*args, **(kwargs or {}))

    mixer = make(name)
    _, state = mixer(torch.randn(2, 4, 24))
    with Count():
        mixer.step(torch.randn(2, 1, 24), state)
    assert +counted == {FUSED[name]: 1}


@every_mixer
def test_a_step_records_no_gradient(name):
    mixer = make(name).requires_grad_(True)
    with torch.no_grad():
        _, state = mixer(torch.randn(2, 4, 24))
    assert not mixer.step(torch.randn(2, 1, 24, requires_grad=True), state).requires_grad


def test_a_saved_state_that_is_overwritten_is_found():
    mixer, x = make("gated deltanet").requires_grad_(True), torch.randn(2, 5, 24)
    _, state = mixer(x[:, :4])
    y, _ = mixer(x[:, 4:], state)
    mixer.step(x[:, 4:], tuple(s.detach() for s in state))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", [GatedDeltaNet, GLA, KDA, RotLRU])
@pytest.mark.parametrize("where", ["instance", "subclass"])
def test_an_op_that_was_replaced_is_the_one_that_decodes(kind, where):
    calls = []

    def op(*given, **named):
        calls.append(given)
        return kind.op(*given, **named)

    mixer = (type("Other", (kind,), {"op": staticmethod(op)}) if where == "subclass" else kind)(24, 2)
    if where == "instance":
        mixer.op = op
    x = torch.randn(2, 5, 24)
    with torch.no_grad():
        (_, state), (whole, _) = mixer(x[:, :4]), mixer(x)
    calls.clear()
    y = mixer.step(x[:, 4:], state)
    assert len(calls) == 1
    assert relative_error(y, whole[:, 4:]) < 1e-5


def test_a_forced_backend_is_the_one_that_decodes():
    mixer, x = GatedDeltaNet(24, 2, backend="reference"), torch.randn(2, 9, 24)
    with torch.no_grad():
        assert relative_error(decoded(mixer, x, 4)[0], mixer(x)[0]) <= 2e-6
    mixer.backend = "fused"
    with pytest.raises(ValueError, match="backend: expected one of"):
        mixer.step(x[:, :1], GatedDeltaNet(24, 2)(x)[1])


@pytest.mark.parametrize("name", ["gated deltanet", "mamba2", "retnet", "mlstm", "rglru"])
def test_a_step_compiles_as_one_graph(name):
    torch._dynamo.reset()
    mixer, x = make(name), torch.randn(2, 9, 24)
    _, state = mixer(x[:, :8])
    held = tuple(s.clone() for s in state)
    y = torch.compile(mixer.step, fullgraph=True, backend="aot_eager")(x[:, 8:], held)
    assert relative_error(y, mixer.step(x[:, 8:], state)) <= 1e-6
    assert all(relative_error(s.double(), t.double()) <= 1e-6 for s, t in zip(held, state, strict=True))


def test_what_a_step_cannot_take_is_said():
    mixer, x = make("gated deltanet"), torch.randn(2, 1, 24)
    S, tail = mixer(x)[1]
    for wrong in (torch.randn(2, 2, 24), torch.randn(2, 24), None):
        with pytest.raises(ValueError, match="x: expected one token"):
            mixer.step(wrong, (S, tail))
    with pytest.raises(ValueError, match=r"x: expected shape \[B, T, d_model=24\]"):
        mixer.step(torch.randn(2, 1, 23), (S, tail))
    with pytest.raises(TypeError, match="state: expected what forward returned; got None"):
        mixer.step(x, None)
    with pytest.raises(ValueError, match=r"state\[0\]: expected S of shape"):
        mixer.step(x, (S[:1], tail))
    with pytest.raises(TypeError, match=r"state\[0\]: expected S in torch.float32"):
        mixer.step(x, (S.double(), tail))
    with pytest.raises(ValueError, match=r"state\[0\]: expected S with memory of its own"):
        mixer.step(x, (S[:1].expand(2, -1, -1, -1), tail))
    with pytest.raises(ValueError, match="last axis side by side"):
        mixer.step(x, (S.mT.contiguous().mT, tail))
    # a tail may lie anyhow
    held = tail.clone()
    turned = tail.mT.contiguous().mT
    assert torch.equal(mixer.step(x, (S.clone(), held)), mixer.step(x, (S, turned)))
    assert torch.equal(held, turned)


def test_the_kernels_are_those_of_the_modules():
    assert "all checked" in interpret("kernels.layer_step.parity", "modules", seconds=300)


@pytest.mark.gpu
@every_mixer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_is_the_step(name, dtype):
    mixer, x = make(name, dtype).cuda(), torch.randn(2, 20, 24, device="cuda", dtype=dtype)
    y, state = mixer(x[:, :8])
    first, held = tuple(s.clone() for s in state), tuple(s.clone() for s in state)
    tokens = [token.contiguous() for token in x[:, 8:].split(1, 1)]
    exact, _ = copy.deepcopy(mixer).double()(x.double())
    limit = max(2 * relative_error(mixer(x)[0].double(), exact), 1e-5)
    captured = CapturedStep(mixer, tokens[0], state=held)
    assert all(map(torch.equal, held, first))
    runs = [[mixer.step(token, state).clone() for token in tokens]]
    for _ in range(2):
        runs.append([captured(token).clone() for token in tokens])
        assert all(
            relative_error(mine.double(), theirs.double()) <= limit for mine, theirs in zip(held, state, strict=True)
        )
        captured.load(first)
    for outputs in runs:
        assert relative_error(torch.cat([y, *outputs], 1).double(), exact) <= limit
    # PyTorch's products may sum in another order in a graph, but every replay has the same bits
    assert all(map(torch.equal, *runs[1:]))
    with pytest.raises(ValueError, match=r"inputs\[0\]: expected \[2, 1, 24\], .* for which it was captured; got"):
        captured(tokens[0][:1])
    with pytest.raises(ValueError, match="state: expected tensors"):
        captured.load(tuple(s[:1] for s in first))


@pytest.mark.parametrize("mixer", ["gated-deltanet", "lstm", "gru"])
def test_generate_steps_as_forward_would(mixer):
    torch.manual_seed(0)
    model = LanguageModel(mixer, 2, 32, 2)
    made, tokens = generate(model, b"def ", 12, temperature=0), torch.tensor([list(b"def ")])
    with torch.no_grad():
        for _ in made:
            tokens = torch.cat([tokens, model(tokens)[0][:, -1:].argmax(-1)], 1)
    assert tokens[0, 4:].tolist() == made


def test_a_captured_step_says_what_it_needs():
    mixer, x = make("gla"), torch.randn(2, 1, 24)
    state = mixer(x)[1]
    with pytest.raises(ValueError, match=r"inputs\[0\]: expected a tensor on an NVIDIA GPU; got one on cpu"):
        CapturedStep(mixer, x, state=state)
    with pytest.raises(TypeError, match="step: expected a function, or a module with a method step; got Linear"):
        CapturedStep(torch.nn.Linear(2, 2), x, state=state)
    with pytest.raises(TypeError, match="inputs: expected tensors; got none"):
        CapturedStep(mixer, state=state)
    with pytest.raises(TypeError, match="state: expected tensors; got int"):
        CapturedStep(mixer, x, state=(state, 3))


def test_a_step_that_fails_while_it_is_captured_leaves_the_state(monkeypatch):
    def step(x, state):
        state[0].zero_()
        raise RuntimeError("no more")

    # without a GPU: what comes before the graph
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    held = torch.ones(3)
    captured = object.__new__(CapturedStep)
    captured.state, captured._held, captured._inputs = [held], [held], [torch.zeros(1)]
    with pytest.raises(RuntimeError, match="no more"):
        captured._capture(step)
    assert torch.equal(held, torch.ones(3))
