"""What patch does to a model's layers and how it is undone, the calls that it serves, and what it refuses."""

import copy
import re
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn

import holdfast
from holdfast.nn import patch, unpatch
from holdfast.nn.patching import delta, mamba2
from parity import relative_error
from patched_models import MODELS, tokens, transformers

SOURCE = Path(holdfast.__file__).parent
one_of_each = pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "recurrent_gemma"])


def layers(model):
    return [layer for layer in model.modules() if "_patched_by_holdfast" in vars(layer)]


def test_the_package_does_not_import_transformers():
    named = [
        path for path in SOURCE.rglob("*.py") if re.search(r"^\s*(import|from) transformers", path.read_text(), re.M)
    ]
    assert named == []


@one_of_each
def test_unpatch_gives_the_models_own_results_back(name):
    model, ids = MODELS[name].make(), tokens(length=12)
    before, keys = model(ids).logits, list(model.state_dict())
    patch(model, "no such backend")
    assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="no such backend"):
        model(ids)
    assert unpatch(model) == MODELS[name].layers
    assert torch.equal(model(ids).logits, before)
    assert unpatch(model) == 0


@one_of_each
def test_another_model_of_the_kind_is_left_alone(name):
    other, model, ids = MODELS[name].make(), MODELS[name].make(), tokens(length=12)
    before = other(ids).logits
    patch(model, "no such backend")
    assert torch.equal(other(ids).logits, before)


@one_of_each
def test_prefill_and_decoding_run_on_the_backend_that_was_asked_for(name):
    model, ids = MODELS[name].make(), tokens(length=9)
    assert patch(model, "no such backend") == MODELS[name].layers
    with pytest.raises(ValueError, match="no such backend"):
        model(ids)
    assert patch(model, "reference") == MODELS[name].layers
    with torch.no_grad():
        cache = {"past_key_values": model(ids, use_cache=True).get("past_key_values")}
        if name == "mamba2":
            cache = {"cache_params": model(ids, use_cache=True).cache_params}
        patch(model, "no such backend")
        with pytest.raises(ValueError, match="no such backend"):
            model(ids[:, :1], use_cache=True, **cache)


@one_of_each
def test_a_copy_of_a_patched_model_is_patched_by_itself(name):
    model, ids = MODELS[name].make(), tokens(length=12)
    patch(model)
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.1)
    expected = made(ids).logits
    assert unpatch(model) == MODELS[name].layers
    assert torch.equal(made(ids).logits, expected)
    assert unpatch(made) == MODELS[name].layers
    assert relative_error(made(ids).logits, expected) <= 5e-6


@pytest.mark.parametrize("patched_first", [False, True])
def test_hooks_of_accelerate_still_run(patched_first):
    hooks = pytest.importorskip("accelerate.hooks", reason="needs accelerate: pip install accelerate")

    class Counting(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    model, ids, hook = MODELS["mamba2"].make(), tokens(length=12), Counting()
    before = model(ids).logits
    if patched_first:
        patch(model, "no such backend")
    hooks.add_hook_to_module(model.backbone.layers[0].mixer, hook)
    if not patched_first:
        patch(model, "no such backend")
    with pytest.raises(ValueError, match="no such backend"):
        model(ids)
    assert hook.calls == 1
    assert unpatch(model) == 2
    assert torch.equal(model(ids).logits, before)
    assert hook.calls == 2
    hooks.remove_hook_from_module(model.backbone.layers[0].mixer)
    assert patch(model) == 2


def test_packed_sequences_of_gated_deltanet():
    q, k, v = torch.randn(3, 1, 20, 2, 8)
    g, beta = -torch.rand(1, 20, 2), torch.rand(1, 20, 2)

    def call(part, **options):
        inputs = (x[:, part] for x in (q, k, v, g, beta))
        options |= {"rule": "gated_delta_rule", "backend": None}
        return delta.chunk_rule(*inputs, use_qk_l2norm_in_kernel=True, **options)[0]

    packed = call(slice(0, 20), cu_seqlens=torch.tensor([0, 13, 20]), max_length_q=13)
    assert relative_error(packed, torch.cat([call(slice(0, 13)), call(slice(13, 20))], 1)) <= 1e-6


def scan(x, dt, B, C, **options):
    given = {"D": torch.ones(4), "dt_bias": torch.zeros(4), "dt_softplus": True}
    return mamba2.chunk_scan(x, dt, -torch.arange(1.0, 5.0), B, C, 16, **given, **options, backend=None)


def mamba_inputs(batch=1):
    return torch.randn(batch, 20, 4, 8), torch.randn(batch, 20, 4), *torch.randn(2, batch, 20, 2, 6)


def test_packed_sequences_of_mamba2():
    inputs = mamba_inputs()
    numbers = torch.tensor([[0] * 13 + [1] * 2 + [5] * 5])
    alone = [scan(*(x[:, part] for x in inputs)) for part in (slice(0, 13), slice(13, 15), slice(15, 20))]
    assert relative_error(scan(*inputs, seq_idx=numbers), torch.cat(alone, 1)) <= 1e-6
    with pytest.raises(ValueError, match=r"seq_idx: expected shape \[1, T\]"):
        scan(*mamba_inputs(2), seq_idx=numbers.expand(2, -1))


def test_limits_of_the_step_size():
    modeling = transformers.models.mamba2.modeling_mamba2
    x, dt, B, C = mamba_inputs(2)
    given = {"D": torch.ones(4), "dt_bias": torch.zeros(4), "dt_softplus": True, "dt_limit": (0.5, 1.0)}
    expected = modeling.mamba2_chunk_scan(x, dt, -torch.arange(1.0, 5.0), B, C, 16, **given)
    got = scan(x, dt, B, C, dt_limit=(0.5, 1.0))
    assert relative_error(got, expected) <= 1e-6
    assert relative_error(scan(x, dt, B, C), expected) > 0.01


def test_a_gradient_flows_through_a_step_of_decoding():
    modeling = transformers.models.qwen3_next.modeling_qwen3_next
    q, k, v = torch.randn(3, 2, 1, 2, 8)
    g, beta, state = -torch.rand(2, 1, 2), torch.rand(2, 1, 2), torch.randn(2, 2, 8, 8)
    results = []
    for function, options in (
        (modeling.torch_recurrent_gated_delta_rule, {}),
        (delta.recurrent_rule, {"rule": "gated_delta_rule", "backend": None}),
    ):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, g, beta, state)]
        o, after = function(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True, **options)
        (o.square().sum() + after.square().sum()).backward()
        results.append([o, after, *(x.grad for x in inputs)])
    assert torch.equal(inputs[5], state)
    for got, expected in zip(*results[::-1], strict=True):
        assert relative_error(got, expected) <= 1e-5


def test_a_step_size_that_differs_within_a_head_is_refused():
    state, x = torch.zeros(2, 4, 8, 6), torch.randn(2, 4, 8)
    A, B = -torch.ones(4, 1, 1).expand(4, 8, 6), torch.randn(2, 2, 6)
    with pytest.raises(ValueError, match="dt: expected one number a head"):
        mamba2.selective_state_update(state, x, torch.randn(2, 4, 8), A, B, B, backend=None)


def torch_chunk_gated_delta_rule(query, key):
    raise NotImplementedError


torch_recurrent_gated_delta_rule = torch_chunk_gated_delta_rule


class Recurrent(nn.Module):
    """A layer with Gated DeltaNet's parameters."""

    def __init__(self):
        super().__init__()
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x


class HalfKnown(Recurrent):
    def forward(self, x):
        return torch_chunk_gated_delta_rule(x)


class OtherParameters(Recurrent):
    def forward(self, x):
        return torch_chunk_gated_delta_rule(x), torch_recurrent_gated_delta_rule(x)


def test_what_cannot_be_patched_is_named():
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module; got dict"):
        patch({})
    with pytest.raises(ValueError, match=r"model: expected layers of Gated DeltaNet, .*RG-LRU; got a Linear"):
        patch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"expected Recurrent \(.*\) to call torch_chunk_gated_delta_rule and .*none"):
        patch(nn.Sequential(Recurrent()))
    with pytest.raises(ValueError, match=r"a layer of Gated DeltaNet, to call .*does not have torch_recurrent_gated"):
        patch(nn.Sequential(HalfKnown()))
    with pytest.raises(ValueError, match=r"to take \(query, key, value, .*it takes \(query, key\)"):
        patch(nn.Sequential(OtherParameters()))


def test_nothing_is_patched_where_one_layer_cannot_be():
    model = nn.Sequential(MODELS["mamba2"].make(), Recurrent())
    with pytest.raises(ValueError, match="expected Recurrent"):
        patch(model)
    assert layers(model) == []


def test_a_forward_that_someone_else_replaced_is_refused():
    model = MODELS["mamba2"].make()
    mixer = model.backbone.layers[0].mixer
    mixer.forward = MethodType(lambda self, x, **_: x, mixer)
    with pytest.raises(ValueError, match=r"Mamba2Mixer \(transformers .*\) with its class's forward; got one that was"):
        patch(model)


def test_the_layer_of_glm_is_patched_alone():
    """Its decay has a bound; the model has attention that Holdfast has no part in."""
    glm = pytest.importorskip("transformers.models.glm5_next")
    config = glm.configuration_glm5_next.Glm5NextTextConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, linear_head_dim=8,
        linear_num_heads=4, layer_types=["linear_attention"] * 2, pad_token_id=0,
    )  # fmt: skip
    layer = glm.modeling_glm5_next.Glm5NextTextLinearAttention(config, 0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0, 0.2)
    x, patched = torch.randn(2, 70, 32), copy.deepcopy(layer)
    assert patch(patched) == 1
    assert relative_error(patched(x), layer(x)) <= 2e-6
