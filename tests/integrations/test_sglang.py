"""SGLang's decode steps on its pool, against their equations a token at a time, and how they are hooked in."""

import inspect
import sys
from enum import Enum
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from holdfast.integrations import sglang

# as SGLang has them
SIGNATURES = {
    "fused_recurrent_gated_delta_rule_packed_decode": "mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, "
    "ssm_state_indices, use_qk_l2norm_in_kernel=False",
    "fused_sigmoid_gating_delta_rule_update": "A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, "
    "initial_state_source, initial_state_indices, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, "
    "is_kda=False, disable_state_update=False, intermediate_states_buffer=None, intermediate_state_indices=None, "
    "cache_steps=None, retrieve_parent_token=None, cache_ring=False, replayssm_rawv=None, replayssm_rawk=None, "
    "replayssm_g=None, replayssm_beta=None",
}
H, HV, K, V, SLOTS = 2, 4, 8, 6, 12


def example(N=3, L=1, is_kda=False):
    """Tokens by sequence, and a pool."""
    draw = torch.Generator().manual_seed(N + L)
    keys, gate = HV if is_kda else H, (HV, K) if is_kda else (HV,)
    shapes = {"q": (keys, K), "k": (keys, K), "v": (HV, V), "a": gate, "b": (HV,)}
    given = {name: torch.randn(N, L, *shape, generator=draw) for name, shape in shapes.items()}
    given |= {"A_log": torch.randn(HV, generator=draw), "dt_bias": torch.randn(gate, generator=draw)}
    return given, torch.randn(SLOTS, HV, V, K, generator=draw)


def right(given, pool, slots, scale=K**-0.5, norm=True):
    """Outputs [N, L, HV, V] and the states after each token [N, L, HV, V, K]."""
    given, outputs, states = {name: x.double() for name, x in given.items()}, [], []
    for n, slot in enumerate(slots):
        state = pool[slot].double().mT
        for t in range(given["q"].shape[1]):
            q, k, v, a, b = (given[name][n, t] for name in ("q", "k", "v", "a", "b"))
            if norm:
                q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            q, k = (x.repeat_interleave(HV // len(x), 0) for x in (q, k))
            rate = given["A_log"].exp() if a.dim() == 1 else given["A_log"].exp()[:, None]
            decay = (-rate * F.softplus(a + given["dt_bias"])).exp().view(HV, -1, 1)
            state = state * decay
            v = b.sigmoid()[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
            state = state + k[:, :, None] * v[:, None]
            outputs.append(scale * torch.einsum("hk,hkv->hv", q, state))
            states.append(state.mT)
    shape = len(slots), given["q"].shape[1]
    return torch.stack(outputs).unflatten(0, shape).float(), torch.stack(states).unflatten(0, shape).float()


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def packed(given, is_kda=False):
    """As SGLang hands tokens over: all sequences in one row, gates [tokens, ...]."""
    found = {name: given[name].flatten(0, 1)[None] for name in ("q", "k", "v")}
    found |= {name: given[name].flatten(0, 1).flatten(1) for name in ("a", "b")}
    return found | {"A_log": given["A_log"], "dt_bias": given["dt_bias"].flatten()}


def update(given, pool, slots, is_kda=False, **options):
    N, L = given["q"].shape[:2]
    fixed = {"softplus_beta": 1.0, "softplus_threshold": 20.0, "use_qk_l2norm_in_kernel": True, "is_kda": is_kda}
    fixed |= {"cu_seqlens": torch.arange(0, N * L + 1, L, dtype=torch.int32)}
    places = {"initial_state_source": pool, "initial_state_indices": slots}
    return sglang.fused_sigmoid_gating_delta_rule_update(**packed(given, is_kda) | fixed | places | options)


@pytest.mark.parametrize("norm", [False, True])
def test_one_token_of_a_packed_projection(norm):
    given, pool = example()
    slots, before = torch.tensor([7, -1, 4], dtype=torch.int32), pool.clone()
    o, states = right(given, pool, [7, 0, 4], 0.3, norm)
    mixed = torch.cat([given[name].flatten(1) for name in ("q", "k", "v")], 1)
    gates = [given[name][:, 0] for name in ("a", "b")]
    out = torch.full((3, 1, HV, V), 9.0)
    got, same = sglang.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, *gates, given["A_log"], given["dt_bias"], 0.3, pool, out, slots, norm
    )
    assert got is out
    assert same is pool
    close(out[[0, 2]], o[[0, 2]])
    assert not out[1].any()
    close(pool[[7, 4]], states[[0, 2], 0])
    rest = [n for n in range(SLOTS) if n not in (7, 4)]
    assert torch.equal(pool[rest], before[rest])


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("L", [1, 3])
def test_tokens_of_each_sequence(L, is_kda):
    given, pool = example(L=L, is_kda=is_kda)
    o, states = right(given, pool, [7, 0, 4])
    got = update(given, pool, torch.tensor([7, 0, 4], dtype=torch.int32), is_kda)
    assert got.shape == (1, 3 * L, HV, V)
    close(got.view(o.shape), o)
    close(pool[[7, 0, 4]], states[:, -1])


def test_without_offsets_sequences_are_rows():
    given, pool = example(L=2)
    o, _ = right(given, pool, [7, 0, 4])
    options = {name: given[name] for name in ("q", "k", "v", "a", "b")} | {"cu_seqlens": None}
    close(update(given, pool, torch.tensor([7, 0, 4]), **options), o)


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 3, 2], [0, -1, 2], [-1, -1, 3]])
def test_states_after_guesses_go_to_their_rows(rows):
    given, pool = example(L=3)
    before, buffer = pool.clone(), torch.randn(4, 3, HV, V, K)
    untouched = buffer.clone()
    o, states = right(given, pool, [7, 0, 4])
    options = {"intermediate_states_buffer": buffer, "intermediate_state_indices": torch.tensor(rows)}
    got = update(given, pool, torch.tensor([7, 0, 4]), disable_state_update=True, **options, cache_steps=3)
    assert torch.equal(pool, before)
    for n, row in enumerate(rows):
        if row >= 0:
            close(got.view(o.shape)[n], o[n])
            close(buffer[row], states[n])
    others = [row for row in range(4) if row not in rows]
    assert torch.equal(buffer[others], untouched[others])


def test_a_buffer_of_more_steps_than_there_are_guesses():
    given, pool = example(L=2)
    buffer = torch.randn(4, 5, HV, V, K)
    _, states = right(given, pool, [7, 0, 4])
    options = {"intermediate_states_buffer": buffer, "intermediate_state_indices": torch.tensor([1, 2, 3])}
    update(given, pool, torch.tensor([7, 0, 4]), disable_state_update=True, **options)
    close(buffer[1:, :2], states)


def test_guesses_that_are_only_looked_at_leave_the_pool():
    given, pool = example(L=2)
    before = pool.clone()
    o, _ = right(given, pool, [7, 0, 4])
    close(update(given, pool, torch.tensor([7, 0, 4]), disable_state_update=True).view(o.shape), o)
    assert torch.equal(pool, before)


def test_rows_that_fill_a_batch_up_touch_nothing():
    given, pool = example()
    before = pool.clone()
    o, states = right(given, pool, [7, 0])
    options = {"cu_seqlens": torch.tensor([0, 1, 2, 2])}
    got = update(given, pool, torch.tensor([7, 0, 0], dtype=torch.int32), **options)
    close(got[0, :2], o[:2, 0])
    close(pool[[7, 0]], states[:2, 0])
    assert torch.equal(pool[1:7], before[1:7])


BUFFER = torch.zeros(4, 1, HV, V, K)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"retrieve_parent_token": torch.zeros(3, 1)}, "retrieve_parent_token: expected None"),
        ({"cache_ring": True}, "cache_ring: expected False"),
        ({"softplus_beta": 2.0}, r"softplus_beta, softplus_threshold: expected 1.0 and 20.0 or more; got 2.0 and 20.0"),
        ({"softplus_threshold": 5.0}, "got 1.0 and 5.0"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens: expected shape \[N \+ 1=4\]; got \[2\]"),
        ({"cu_seqlens": None}, r"q: expected 3 sequences of as many tokens each; got \[1, 3, 2, 8\]"),
        ({"intermediate_states_buffer": BUFFER}, "disable_state_update: expected True beside"),
        (
            {"intermediate_states_buffer": BUFFER, "disable_state_update": True},
            "intermediate_state_indices: expected a tensor beside",
        ),
        (
            {
                "intermediate_states_buffer": BUFFER[:, :0],
                "disable_state_update": True,
                "intermediate_state_indices": torch.arange(3),
            },
            "intermediate_states_buffer: expected 1 steps or more; got 0",
        ),
    ],
)
def test_what_is_not_served_is_named(changed, message):
    given, pool = example()
    with pytest.raises(ValueError, match=message):
        update(given, pool, torch.tensor([7, 0, 4]), **changed)


@pytest.mark.parametrize(
    ("mixed", "pool", "message"),
    [
        (torch.zeros(3, 1, 56), torch.zeros(SLOTS, HV, V, K), r"mixed_qkv: expected \[B, 2 H K \+ HV V\]"),
        (torch.zeros(3, 56), torch.zeros(HV, V, K), r"initial_state: expected \[slots, HV, V, K\]; got \[4, 6, 8\]"),
        (torch.zeros(3, 57), torch.zeros(SLOTS, HV, V, K), "mixed_qkv: expected 24 columns of v and 2 H 8 of q and k"),
    ],
)
def test_a_projection_that_does_not_fit_is_named(mixed, pool, message):
    gates = torch.zeros(3, HV), torch.zeros(3, HV), torch.zeros(HV), torch.zeros(HV)
    with pytest.raises(ValueError, match=message):
        sglang.fused_recurrent_gated_delta_rule_packed_decode(
            mixed, *gates, 1.0, pool, torch.zeros(3, 1, HV, V), torch.arange(3)
        )


@pytest.mark.parametrize("name", SIGNATURES)
def test_they_have_sglangs_signatures(name):
    parameters = inspect.signature(getattr(sglang, name)).parameters.values()
    assert (
        ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters) == SIGNATURES[name]
    )


class HookType(Enum):
    AROUND = "around"


def test_register_hooks_them_into_sglangs_registry(monkeypatch):
    hooked, own = {}, lambda *args, **named: "theirs"

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type):
            assert hook_type is HookType.AROUND
            hooked[target] = hook

    for module, name in (("fused_recurrent", 0), ("fused_sigmoid_gating_recurrent", 1)):
        made = ModuleType(module)
        setattr(made, [*SIGNATURES][name], own)
        monkeypatch.setitem(sys.modules, f"{sglang._FOLDER}.{module}", made)
    registry = ModuleType("hook_registry")
    registry.HookRegistry, registry.HookType = HookRegistry, HookType
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    sglang.register()
    assert [target.rpartition(".")[2] for target in hooked] == [*SIGNATURES]
    step, guesses = hooked.values()
    # what is a tree goes to SGLang's own; all else is ours, and says what it lacks
    assert guesses(own, retrieve_parent_token=torch.zeros(1)) == "theirs"
    assert guesses(own, cache_ring=True) == "theirs"
    with pytest.raises(TypeError, match="missing"):
        guesses(own, retrieve_parent_token=None)
    with pytest.raises(TypeError, match="missing"):
        step(own)


def test_without_sglang():
    with pytest.raises(ImportError, match=r"holdfast\.integrations\.sglang: expected an SGLang with plugins"):
        sglang.register()
