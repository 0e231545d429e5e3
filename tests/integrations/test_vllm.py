"""vLLM's decode step of Gated DeltaNet on its pool, against its equations a token at a time, and where it is put."""

import inspect
import sys
from types import ModuleType

import pytest
import torch

from holdfast.integrations import vllm

# as vLLM's module of that name has it, but for trees of guesses
SIGNATURE = (
    "q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, cu_seqlens=None, "
    "ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False"
)


def example(N=3, L=1, H=2, HV=4, K=8, V=6, slots=12):
    draw = torch.Generator().manual_seed(N + L)
    tokens = {"q": (H, K), "k": (H, K), "v": (HV, V)}
    given = {name: torch.randn(N, L, *shape, generator=draw) for name, shape in tokens.items()}
    given["k"] = torch.nn.functional.normalize(given["k"], dim=-1)
    given |= {"g": -torch.rand(N, L, HV, generator=draw), "beta": torch.rand(N, L, HV, generator=draw)}
    return given, torch.randn(slots, HV, K, V, generator=draw)


def right(given, pool, start, places, scale, norm=False):
    """Outputs, and the pool afterwards; start [N], places [N, L]."""
    pool, outputs = pool.double().clone(), torch.zeros_like(given["v"], dtype=torch.float64)
    for n in range(len(start)):
        state = pool[start[n]].clone()
        for t in range(places.shape[1]):
            q, k, v, g, beta = (given[name][n, t].double() for name in ("q", "k", "v", "g", "beta"))
            if norm:
                q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            q, k = (x.repeat_interleave(len(v) // len(x), 0) for x in (q, k))
            state = state * g.exp()[:, None, None]
            v = beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
            state = state + k[:, :, None] * v[:, None]
            outputs[n, t] = scale * torch.einsum("hk,hkv->hv", q, state)
            pool[places[n, t]] = state
    return outputs, pool


def packed(given):
    return {name: x.flatten(0, 1)[None] for name, x in given.items()}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_token_of_each_sequence(is_packed, norm):
    given, pool = example()
    at = torch.tensor([7, 0, 4], dtype=torch.int32)
    o, after = right(given, pool, at.tolist(), at[:, None], 8**-0.5, norm)
    cu_seqlens = torch.arange(4, dtype=torch.int32) if is_packed else None
    mine, same = vllm.fused_recurrent_gated_delta_rule(
        **(packed(given) if is_packed else given),
        initial_state=pool,
        cu_seqlens=cu_seqlens,
        ssm_state_indices=at,
        use_qk_l2norm_in_kernel=norm,
    )
    assert same is pool
    torch.testing.assert_close(mine.reshape(o.shape), o.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool, after.float(), rtol=1e-5, atol=1e-5)


def test_guesses_go_on_from_the_last_accepted_token():
    given, pool = example(L=3)
    places = torch.tensor([[0, 1, 2], [5, 4, 3], [6, 7, 8]], dtype=torch.int32)
    accepted = torch.tensor([1, 3, 2], dtype=torch.int32)
    o, after = right(given, pool, [0, 3, 7], places, 0.5)
    mine, _ = vllm.fused_recurrent_gated_delta_rule(
        **packed(given),
        scale=0.5,
        initial_state=pool,
        cu_seqlens=torch.tensor([0, 3, 6, 9]),
        ssm_state_indices=places,
        num_accepted_tokens=accepted,
    )
    torch.testing.assert_close(mine.reshape(o.shape), o.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool, after.float(), rtol=1e-5, atol=1e-5)


def test_rows_that_fill_a_batch_up_touch_nothing():
    given, pool = example()
    before, at = pool.clone(), torch.tensor([7, 0, 0], dtype=torch.int32)
    o, after = right(given, pool, [7, 0], at[:2, None], 8**-0.5)
    mine, _ = vllm.fused_recurrent_gated_delta_rule(
        **packed(given), initial_state=pool, cu_seqlens=torch.tensor([0, 1, 2, 2]), ssm_state_indices=at
    )
    torch.testing.assert_close(mine[0, :2, None], o[:2].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool, after.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(pool[1:7], before[1:7])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"initial_state": None}, ValueError, "initial_state: expected a tensor, as of states in a pool"),
        ({"ssm_state_indices": None}, ValueError, "ssm_state_indices: expected a tensor"),
        ({"inplace_final_state": False}, ValueError, "inplace_final_state: expected True"),
        ({"cu_seqlens": torch.tensor([0, 2, 3])}, ValueError, r"cu_seqlens: expected shape \[N \+ 1=4\]; got \[3\]"),
        ({"num_accepted_tokens": torch.ones(2, dtype=torch.int32)}, ValueError, r"num_accepted_tokens: expected shape"),
        ({"cu_seqlens": torch.arange(4)}, ValueError, r"q: expected \[1, 3, ...\]; got \[3, 1, 2, 8\]"),
        ({"ssm_state_indices": torch.zeros(3)}, TypeError, "ssm_state_indices: expected a tensor of torch.int32"),
    ],
)
def test_what_is_not_served_is_named(changed, error, message):
    given, pool = example()
    arguments = given | {"initial_state": pool, "ssm_state_indices": torch.tensor([7, 0, 4])} | changed
    with pytest.raises(error, match=message):
        vllm.fused_recurrent_gated_delta_rule(**arguments)


def test_it_has_vllms_signature():
    parameters = inspect.signature(vllm.fused_recurrent_gated_delta_rule).parameters.values()
    assert ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters) == SIGNATURE


def test_models_that_are_imported_later_take_it(monkeypatch):
    own = object()
    places = {place: ModuleType(place) for place in vllm._PLACES}
    for place, module in places.items():
        module.fused_recurrent_gated_delta_rule = own
        monkeypatch.setitem(sys.modules, place, module)
    vllm.register()
    vllm.register()
    taken = {module.fused_recurrent_gated_delta_rule for module in places.values()}
    assert taken == {vllm.fused_recurrent_gated_delta_rule}
    vllm.unregister()
    assert {module.fused_recurrent_gated_delta_rule for module in places.values()} == {own}


def test_without_vllm():
    with pytest.raises(ImportError, match=r"holdfast\.integrations\.vllm: expected a vLLM with vllm\.model_executor"):
        vllm.register()
    assert not vllm._theirs
