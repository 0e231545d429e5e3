"""The steps of layers as custom ops: what PyTorch is told of them holds, and a state is changed where it lies."""

import pytest
import torch

from holdfast.ops import layer_step, layer_step_checks
from holdfast.ops.layer_step_checks import DRAWN, apart, states_of, stepped
from holdfast.recurrences import Draw, Sizes

SIZES = Sizes(B=2, H=4, Hq=2, K=6, V=5)
OPS = {
    "delta": "conv_step", "ssd": "conv_step", "gla": "retention_step", "retnet": "retention_step",
    "mlstm": "mlstm_step", "rglru": "rglru_step",
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", DRAWN)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_registered_holds(kind, dtype):
    call = DRAWN[kind](Draw(0, dtype), SIZES)
    op = getattr(torch.ops.holdfast, OPS[kind]).default
    torch.library.opcheck(op, (*apart(call), ""), test_utils=("test_schema", "test_faketensor"))


@every_kind
def test_states_change_where_they_lie_and_nothing_else_does(kind):
    call = DRAWN[kind](Draw(0), SIZES)
    before = {name: x.clone() for name, x in call._asdict().items() if isinstance(x, torch.Tensor)}
    versions = [x._version for x in states_of(call)]
    y = getattr(layer_step, OPS[kind])(*call, "")
    assert y.shape[:2] == (2, 1)
    assert all(x._version > version for x, version in zip(states_of(call), versions, strict=True))
    states = {id(x) for x in states_of(call)}
    for name, x in before.items():
        now = getattr(call, name)
        assert torch.equal(x, now) == (id(now) not in states), name


@every_kind
def test_a_batch_of_none(kind):
    call = DRAWN[kind](Draw(0), Sizes(B=0, H=4, Hq=2, K=6, V=5))
    assert getattr(layer_step, OPS[kind])(*call, "").shape[:2] == (0, 1)


def test_a_backend_is_chosen_or_refused_by_name():
    call = DRAWN["gla"](Draw(0), SIZES)
    y, _ = stepped(type(call), call._asdict(), "pytorch")
    assert torch.equal(y, stepped(type(call), call._asdict(), "")[0])
    with pytest.raises(ValueError, match="'triton' cannot run layer_step here: it needs an NVIDIA GPU"):
        stepped(type(call), call._asdict(), "triton")
    with pytest.raises(ValueError, match="backend: expected one of 'triton', 'pytorch' for layer_step; got 'hopper'"):
        stepped(type(call), call._asdict(), "hopper")


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("delta", {"B": 2, "H": 4, "K": 6, "V": 5, "W": 4, "N": 5}),
        ("ssd", {"B": 2, "H": 4, "K": 6, "V": 5, "W": 4, "N": 20}),
        ("gla", {"B": 2, "H": 4, "K": 6, "V": 5, "W": 0, "N": 5}),
        ("retnet", {"B": 2, "H": 4, "K": 6, "V": 5, "W": 0, "N": 5}),
        ("mlstm", {"B": 2, "H": 4, "K": 6, "V": 5, "W": 0, "N": 5}),
        ("rglru", {"B": 2, "H": 1, "K": 0, "V": 20, "W": 0, "N": 0}),
    ],
)
def test_planning_is_told_sizes_and_0_for_what_a_call_has_not(kind, sizes):
    problem = layer_step.problem(DRAWN[kind](Draw(0), SIZES))
    assert dict(problem.sizes) == sizes


def test_tokens_are_parts_of_a_wider_tensor():
    """As of a projection: neither their rows nor their first channel are where a tensor of their own has them."""
    x = DRAWN["gla"](Draw(0), SIZES).x
    assert (x.shape, x.stride(0), x.storage_offset()) == ((2, 1, 4 * 17), 4 * 17 + 7, 3)


@pytest.mark.parametrize("spare", [0, 2])
def test_a_caches_tail_has_channels_apart(spare):
    tail = layer_step_checks.draw_delta(Draw(0), SIZES, taps=3, spare=spare).tail
    assert tail.shape == (2, 2 + spare, 2 * 2 * 6 + 4 * 5)
    assert tail.stride(2) == (4 if spare else 1)


def test_draws_reach_what_is_hard():
    """Positions of which float32 has no fractions, gates that decide, decays from almost none to almost all."""
    many = Sizes(B=3, H=64, V=64, K=2)
    assert DRAWN["retnet"](Draw(0), many).position.tolist() == [100_000, 100_001, 100_002]
    gates, rate = DRAWN["mlstm"](Draw(0), many).gates, DRAWN["rglru"](Draw(0), many).rate
    assert abs(gates.mean()) < 0.5
    assert gates.std() == pytest.approx(3, rel=0.1)
    assert (rate.mean(), rate.std()) == (pytest.approx(-3, abs=0.2), pytest.approx(3, rel=0.1))
    weight = layer_step_checks.draw_ssd(Draw(0), many).conv_weight
    assert weight.std() == pytest.approx(0.5, rel=0.1)
