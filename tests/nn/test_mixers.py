"""What must hold of every mixer of both linear families: one set of weights for training, prefill and decode."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.nn import (
    GLA,
    KDA,
    MLSTM,
    RGLRU,
    RWKV7,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    Mamba,
    Mamba2,
    RetNet,
    RotLRU,
)
from parity import assert_close, relative_error

MIXERS = {
    "gla": lambda: GLA(24, 2),
    "retnet": lambda: RetNet(24, 2),
    "mamba": lambda: Mamba(24, d_state=8),
    "mamba2": lambda: Mamba2(24, 4, d_state=8, n_groups=2),
    "mlstm": lambda: MLSTM(24, 2),
    "mlstm sigmoid": lambda: MLSTM(24, 2, gating="sigmoid", normalize=False, gate_soft_cap=None),
    "deltanet": lambda: DeltaNet(24, 2, allow_neg_eigval=True),
    "gated deltanet": lambda: GatedDeltaNet(24, 2, num_v_heads=4),
    "gated deltaproduct": lambda: GatedDeltaProduct(24, 2, num_v_heads=4, num_householder=3),
    "gated deltaproduct without decay": lambda: GatedDeltaProduct(24, 2, forget_gate=False, allow_neg_eigval=False),
    "kda": lambda: KDA(24, 2, num_v_heads=4),
    "kda bounded": lambda: KDA(24, 2, lower_bound=-5.0, allow_neg_eigval=True),
    "rwkv7": lambda: RWKV7(24, 2),
    "rglru": lambda: RGLRU(24, 2),
    "rotlru": lambda: RotLRU(24, 2),
}
every_mixer = pytest.mark.parametrize("name", MIXERS)


def make(name, dtype=torch.float64):
    torch.manual_seed(0)
    return MIXERS[name]().to(dtype)


def states_close(got, expected, limit):
    assert_close([x.double() for x in got], [x.double() for x in expected], limit)


@every_mixer
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_prefill_and_decode_equal_the_whole(name, dtype, limit):
    mixer, x = make(name, dtype), torch.randn(2, 90, 24, dtype=dtype)
    whole, final = mixer(x)
    y, state = mixer(x[:, :70])
    outputs = [y]
    for t in range(70, 90):
        y, state = mixer(x[:, t : t + 1], state)
        outputs.append(y)
    assert relative_error(torch.cat(outputs, 1), whole) <= limit
    states_close(state, final, limit)


@every_mixer
@settings(max_examples=10)
@given(first=st.integers(0, 40), second=st.integers(0, 40))
def test_a_sequence_may_be_split_anywhere(name, first, second):
    mixer, x = make(name), torch.randn(2, first + second + 1, 24, dtype=torch.float64)
    whole, final = mixer(x)
    outputs, state = [], None
    for part in x.split([first, second, 1], 1):
        y, state = mixer(part, state)
        outputs.append(y)
    assert relative_error(torch.cat(outputs, 1), whole) <= 1e-9
    states_close(state, final, 1e-9)


@every_mixer
@pytest.mark.parametrize("lengths", [(5, 70, 1, 2, 12), (0, 5, 0, 2, 0), (0, 0, 0, 0, 0), (0, 1, 0, 0, 0)])
def test_packed_sequences_equal_separate_calls(name, lengths):
    mixer, x = make(name), torch.randn(1, sum(lengths), 24, dtype=torch.float64)
    _, entry = mixer(torch.randn(5, 3, 24, dtype=torch.float64))
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0)
    y, state = mixer(x, entry, cu_seqlens=cu_seqlens.int())
    alone = [mixer(part, tuple(s[n : n + 1] for s in entry)) for n, part in enumerate(x.split(lengths, 1))]
    assert relative_error(y, torch.cat([part for part, _ in alone], 1)) <= 1e-9
    states_close(state, [torch.cat(parts) for parts in zip(*(s for _, s in alone), strict=True)], 1e-9)


@every_mixer
def test_packed_sequences_need_no_state(name):
    mixer, x = make(name), torch.randn(1, 9, 24, dtype=torch.float64)
    y, _ = mixer(x, cu_seqlens=torch.tensor([0, 4, 9]))
    assert relative_error(y, torch.cat([mixer(x[:, :4])[0], mixer(x[:, 4:])[0]], 1)) <= 1e-9


# those that read the offsets before the op checks them
@pytest.mark.parametrize("name", ["retnet", "mamba2", "mlstm", "deltanet", "gated deltanet", "kda"])
@pytest.mark.parametrize("offsets", [(0, 4, 8), (0, 4, 12), (0, 6, 4, 9), (1, 4, 9), (0, -3, 9)])
def test_wrong_offsets_are_refused(name, offsets):
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets"):
        make(name)(torch.randn(1, 9, 24, dtype=torch.float64), cu_seqlens=torch.tensor(offsets))


@every_mixer
def test_outputs_do_not_depend_on_later_tokens(name):
    mixer, x = make(name), torch.randn(2, 70, 24, dtype=torch.float64)
    changed = torch.cat([x[:, :31], torch.randn(2, 39, 24, dtype=torch.float64)], 1)
    assert relative_error(mixer(changed)[0][:, :31], mixer(x)[0][:, :31]) <= 1e-12
    assert relative_error(mixer(changed)[0], mixer(x)[0]) > 0.01


@every_mixer
def test_gradients_reach_parameters_input_and_state(name):
    mixer = make(name)
    _, state = mixer(torch.randn(2, 5, 24, dtype=torch.float64))
    state = tuple(s.detach().requires_grad_(s.is_floating_point()) for s in state)
    x = torch.randn(2, 20, 24, dtype=torch.float64, requires_grad=True)
    y, final = mixer(x, state)
    # mLSTM without a normaliser carries n and m untouched
    floating = [s for s in final if s.is_floating_point()]
    (y.square().sum() + sum(s.square().sum() for s in floating)).backward()
    leaves = {"x": x, **dict(mixer.named_parameters())}
    leaves |= {f"state[{n}]": s for n, s in enumerate(state) if s.is_floating_point() and torch.any(s != 0)}
    assert [key for key, leaf in leaves.items() if leaf.grad is None or not torch.isfinite(leaf.grad).all()] == []
    assert [key for key, leaf in leaves.items() if not torch.any(leaf.grad != 0)] == []


@every_mixer
def test_gradient_through_a_split_equals_that_of_the_whole(name):
    mixer, x = make(name), torch.randn(2, 40, 24, dtype=torch.float64)
    mixer(x)[0].square().sum().backward()
    expected = [p.grad.clone() for p in mixer.parameters()]
    mixer.zero_grad()
    first, state = mixer(x[:, :17])
    second, _ = mixer(x[:, 17:], state)
    (first.square().sum() + second.square().sum()).backward()
    assert_close([p.grad for p in mixer.parameters()], expected, 1e-9)


@every_mixer
def test_state_survives_saving(name):
    mixer, x = make(name), torch.randn(2, 9, 24, dtype=torch.float64)
    _, state = mixer(x)
    assert isinstance(state, tuple)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for got, expected in zip(mixer(x[:, :1], loaded)[1], mixer(x[:, :1], state)[1], strict=True):
        assert torch.equal(got, expected)


@every_mixer
def test_a_call_leaves_its_state_as_it_was(name):
    mixer, x = make(name), torch.randn(2, 9, 24, dtype=torch.float64)
    _, state = mixer(x)
    before = [s.clone() for s in state]
    mixer(x[:, :1], state)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@every_mixer
def test_the_first_axis_of_a_state_is_the_sequence(name):
    mixer, x = make(name), torch.randn(3, 9, 24, dtype=torch.float64)
    _, state = mixer(x)
    order = torch.tensor([2, 0])
    y, _ = mixer(x[order, :1], tuple(s[order] for s in state))
    assert relative_error(y, mixer(x[:, :1], state)[0][order]) <= 1e-12


@every_mixer
def test_autocast_is_close_and_keeps_states_wide(name):
    mixer, x = make(name, torch.float32), torch.randn(2, 40, 24)
    exact, _ = mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer(x[:, :39])
        last, state = mixer(x[:, 39:], state)
    assert y.dtype == torch.bfloat16
    assert all(s.dtype in (torch.float32, torch.int64) for s in state)
    assert relative_error(torch.cat([y, last], 1).float(), exact) <= 0.03
    y.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in mixer.parameters())


@every_mixer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(name, dtype):
    x = torch.randn(2, 40, 24).to(dtype)
    exact, _ = make(name, dtype).double()(x.double())
    y, state = make(name, dtype)(x[:, :39])
    last, state = make(name, dtype)(x[:, 39:], state)
    assert y.dtype == dtype
    assert all(s.dtype in (torch.float32, torch.int64) for s in state)
    assert relative_error(torch.cat([y, last], 1).double(), exact) <= 0.03


@pytest.mark.parametrize(
    "name", ["retnet", "mamba2", "mlstm", "gated deltanet", "gated deltaproduct", "kda", "rglru", "rotlru"]
)
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()
    mixer, x = make(name), torch.randn(2, 9, 24, dtype=torch.float64)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    y, state = mixer(x)
    y.square().sum().backward()
    expected = [p.grad.clone() for p in mixer.parameters()]
    mixer.zero_grad()
    z, final = compiled(x)
    z.square().sum().backward()
    assert_close([z, *(p.grad for p in mixer.parameters())], [y, *expected], 1e-9)
    states_close(final, state, 1e-9)


def test_packed_sequences_compile_as_one_graph():
    torch._dynamo.reset()
    mixer, x = make("mamba2"), torch.randn(1, 9, 24, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 4, 9])
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x, cu_seqlens=cu_seqlens)[0], mixer(x, cu_seqlens=cu_seqlens)[0]) <= 1e-12


@every_mixer
def test_a_backend_may_be_forced(name):
    mixer, x = make(name), torch.randn(2, 9, 24, dtype=torch.float64)
    y, _ = mixer(x)
    mixer.backend = "reference"
    assert relative_error(mixer(x)[0], y) <= 1e-9
    mixer.backend = "abacus"
    with pytest.raises(ValueError, match=r"backend.*abacus"):
        mixer(x)
