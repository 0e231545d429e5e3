"""fla's fused_chunk_ and parallel_ forms and its linear attention, held against chunk_ forms and a loop in float64."""

import inspect

import pytest
import torch

from holdfast.integrations.fla import ops
from integrations.test_fla_ops import (
    B,
    H,
    K,
    T,
    V,
    assert_close,
    called,
    decays,
    drawn,
    gradients,
    qkv,
    stepped,
)  # fmt: skip

# of which there are such forms
FUSED_CHUNK = [
    "simple_gla",
    "simple_gla of constant decay",
    "simple_gla without decay",
    "gla",
    "delta_rule",
    "retention",
]
PARALLEL = ["simple_gla", "simple_gla without decay", "retention"]
# which take packed sequences; the others have no argument for them in fla either
PACKED = [call for call in FUSED_CHUNK if call not in ("gla", "delta_rule")]


@pytest.mark.parametrize("call", FUSED_CHUNK)
def test_fused_chunk(call):
    _, given, loop = called("chunk", call)
    op, state = getattr(ops, f"fused_chunk_{call.split()[0]}"), drawn(B, H, K, V).requires_grad_()
    found = op(**given, initial_state=state, output_final_state=True, scale=0.7, head_first=False)
    right = stepped(**loop, state=state, scale=0.7)
    assert_close(found, right)
    leaves = [*(x for x in given.values() if isinstance(x, torch.Tensor)), state]
    assert_close(*(gradients(each, leaves) for each in (found, right)))
    o, last = op(**given)
    assert_close([o], stepped(**loop)[:1])
    assert last is None


@pytest.mark.parametrize("call", PARALLEL)
def test_parallel(call):
    _, given, loop = called("chunk", call)
    op = getattr(ops, f"parallel_{call.split()[0]}")
    o, scores = op(**given, scale=0.7)
    right = stepped(**loop, scale=0.7)[0]
    assert_close([o], [right])
    assert scores is None
    leaves = [x for x in given.values() if isinstance(x, torch.Tensor)]
    assert_close(*(torch.autograd.grad(each.double().sin().sum(), leaves) for each in (o, right)))
    with pytest.raises(ValueError, match=r"output_attentions: expected False, as scores of all pairs .*; got True"):
        op(**given, output_attentions=True)


@pytest.mark.parametrize("call", PACKED)
def test_packed_sequences(call):
    op, given, _ = called("chunk", call, batch=1)
    offsets, states, name = torch.tensor([0, 2, 2, T]), drawn(3, H, K, V), call.split()[0]
    right = op(**given, initial_state=states, output_final_state=True, cu_seqlens=offsets)
    found = getattr(ops, f"fused_chunk_{name}")(
        **given, initial_state=states, output_final_state=True, cu_seqlens=offsets
    )
    assert all(map(torch.equal, found, right))
    if call in PARALLEL:
        o, _ = getattr(ops, f"parallel_{name}")(**given, cu_seqlens=offsets)
        assert torch.equal(o, op(**given, cu_seqlens=offsets)[0])


def normalised(q, k, v, state=None, z=None, scale=None):
    """o, the state and the sum of keys [B, 1, H, K], in float64."""
    o, state = stepped(q, k, v, state=state, scale=scale)
    sums = k.double().cumsum(1) + (0 if z is None else z.double())
    read = (K**-0.5 if scale is None else scale) * (q.double() * sums).sum(-1, keepdim=True)
    return o / (read + 1e-10), state, sums[:, -1:]


def positive():
    """Queries, keys and values as a feature map makes them, so that their products are no quotients by 0."""
    return {name: x.detach().abs().add(0.1).requires_grad_() for name, x in qkv().items()}


LINEAR = [ops.chunk_linear_attn, ops.fused_chunk_linear_attn, ops.fused_recurrent_linear_attn]


@pytest.mark.parametrize("op", LINEAR)
def test_linear_attention(op):
    given, state, z = positive(), drawn(B, H, K, V).requires_grad_(), drawn(B, 1, H, K).abs().requires_grad_()
    found = op(**given, initial_state=state, output_final_state=True, scale=0.7, normalize=False)
    right = stepped(**given, state=state, scale=0.7)
    assert_close(found, right)
    assert op(**given, normalize=False)[1] is None
    o, (last, keys) = op(**given, initial_state=(state, z), output_final_state=True, scale=0.7, normalize=True)
    *right, sums = normalised(**given, state=state, z=z, scale=0.7)
    assert_close((o, last, keys), (*right, sums))
    total = [x.double().sin().sum() + y.double().cos().sum() for x, y in ((o, keys), (right[0], sums))]
    leaves = [*given.values(), state, z]
    assert_close(*(torch.autograd.grad(each, leaves) for each in total))
    # by itself a state has no keys beside it, and nothing asks for one
    o, (last, keys) = op(**given, initial_state=state, normalize=True)
    right = normalised(**given, state=state)
    assert last is None
    assert_close((o, keys), (right[0], right[2]))


def test_what_linear_attention_does_by_default():
    given = positive()
    assert_close([ops.chunk_linear_attn(**given)[0]], [normalised(**given)[0]])
    assert_close([ops.fused_chunk_linear_attn(**given)[0]], [normalised(**given)[0]])
    assert_close([ops.fused_recurrent_linear_attn(**given)[0]], [stepped(**given)[0]])


def test_linear_attention_backwards_and_packed():
    given, offsets = {name: x[:1] for name, x in positive().items()}, torch.tensor([0, 2, 2, T])
    states, z = drawn(3, H, K, V), drawn(3, 1, H, K).abs()
    for reverse in (False, True):
        options = {"output_final_state": True, "normalize": True, "reverse": reverse}
        o, (last, keys) = ops.fused_recurrent_linear_attn(
            **given, initial_state=(states, z), cu_seqlens=offsets, **options
        )
        for n, a, b in ((0, 0, 2), (2, 2, T)):
            part = {name: x[:, a:b].flip(1) if reverse else x[:, a:b] for name, x in given.items()}
            right, state, sums = normalised(**part, state=states[n : n + 1], z=z[n : n + 1])
            found = (o[:, a:b].flip(1) if reverse else o[:, a:b], last[n : n + 1], keys[n : n + 1])
            assert_close(found, (right, state, sums))
        assert torch.equal(last[1], states[1])
        assert torch.equal(keys[1], z[1])


def test_linear_attention_of_grouped_heads():
    given = positive()
    wide = given | {"v": torch.cat([given["v"]] * 2, 3)[..., : 2 * V].reshape(B, T, 2 * H, V)}
    o, (_, keys) = ops.chunk_linear_attn(**wide)
    repeated = {name: x.repeat_interleave(2, 2) if name != "v" else x for name, x in wide.items()}
    assert_close([o], [ops.chunk_linear_attn(**repeated)[0]])
    assert keys.shape == (B, 1, H, K)


def test_other_names_of_the_gated_delta_rule():
    assert ops.chunk_gdn is ops.chunk_gated_delta_rule
    assert ops.fused_recurrent_gdn is ops.fused_recurrent_gated_delta_rule


REST = [name for name in ops.__all__ if name.startswith(("fused_chunk", "parallel")) or name.endswith("linear_attn")]


@pytest.mark.parametrize("name", REST)
def test_head_first_is_refused_and_unknown_arguments_are(name):
    op, given = getattr(ops, name), qkv()
    taken = inspect.signature(op).parameters
    given |= {"g": decays(B, T, H, K)} if name.endswith("_gla") and name[12:] == "gla" else {}
    given |= {"beta": decays(B, T, H).exp()} if "beta" in taken else {}
    with pytest.raises(ValueError, match="head_first: Holdfast's op has none"):
        op(**given, head_first=True)
    with pytest.raises(TypeError, match="use_exp2"):
        op(**given, use_exp2=True)


def test_forms_that_fla_gave_up_take_names_alone():
    """As fla's, which take any name and point to the chunk_ form."""
    with pytest.raises(TypeError, match="positional"):
        ops.fused_chunk_gla(*qkv().values(), decays(B, T, H, K))
    with pytest.raises(TypeError, match="positional"):
        ops.fused_chunk_delta_rule(*qkv().values(), decays(B, T, H).exp())
