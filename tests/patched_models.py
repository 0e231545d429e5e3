"""Small models of transformers, randomly initialised, with the layers that holdfast.nn.patch serves; an exact run."""

import copy
import re
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from holdfast.nn import patch

transformers = pytest.importorskip(
    "transformers", reason="needs transformers, which pip install 'holdfast[dev]' brings"
)

VOCABULARY = 97
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


@dataclass(frozen=True)
class Model:
    """name: of the model's classes. layers: how many patch finds. config: its arguments.

    rates: what A_log is drawn from, uniformly; None leaves the model's own draw, in which most heads forget at once.
    """

    name: str
    layers: int
    config: dict[str, Any]
    rates: tuple[float, float] | None = None

    def having(self, rates: tuple[float, float] | None = None, **config: Any) -> "Model":
        """The same with rates, and some arguments replaced."""
        return replace(self, config=self.config | config, rates=rates)

    def make(self, seed: int = 0) -> torch.nn.Module:
        """The model in float32, in evaluation mode, its weights moved off their starting values, zeros and ones."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.name + "Config")(**self.config)
        model = getattr(transformers, self.name.removesuffix("Text") + "ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
                if self.rates is not None and name.endswith("A_log"):
                    parameter.uniform_(*self.rates)
        return model


MODELS = {
    "qwen3_next": Model("Qwen3Next", 2, SIZES | HEADS | DELTA | EXPERTS | {"mlp_only_layers": [0, 1, 2]}),
    "qwen3_5": Model("Qwen3_5Text", 2, SIZES | HEADS | DELTA),
    "qwen3_5_moe": Model("Qwen3_5MoeText", 2, SIZES | HEADS | DELTA | EXPERTS | {"experts_implementation": "eager"}),
    "olmo_hybrid": Model("OlmoHybrid", 2, SIZES | {"num_attention_heads": 2, "pad_token_id": 0} | DELTA),
    "mamba2": Model(
        "Mamba2",
        2,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8}
        | {"state_size": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "bamba": Model("Bamba", 2, SIZES | HEADS | MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": Model("FalconH1", 2, SIZES | HEADS | MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "granite_moe_hybrid": Model(
        "GraniteMoeHybrid",
        2,
        SIZES
        | HEADS
        | MAMBA
        | {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0}
        | {"shared_intermediate_size": 48},
    ),
    "nemotron_h": Model(
        "NemotronH",
        2,
        SIZES
        | HEADS
        | {"head_dim": 16, "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "chunk_size": 16}
        | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2},
    ),
    "zamba2": Model(
        "Zamba2",
        3,
        SIZES
        | {"num_attention_heads": 2, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]}
        | {"n_mamba_heads": 8, "mamba_d_state": 16, "mamba_ngroups": 2, "chunk_size": 16, "num_mem_blocks": 1},
    ),
    "kimi_linear": Model(
        "KimiLinear",
        2,
        SIZES
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 3, "pad_token_id": 0}
        | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 8}
        | {"moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"mlp_layer_types": ["dense", "dense", "dense"], "linear_head_dim": 8, "linear_num_heads": 4},
    ),
    "mamba": Model("Mamba", 2, {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "falcon_mamba": Model(
        "FalconMamba", 2, {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    ),
    "jamba": Model(
        "Jamba",
        2,
        SIZES
        | HEADS
        | {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 4}
        | {"expert_layer_offset": 3, "mamba_d_state": 8, "num_experts": 2},
    ),
    "recurrent_gemma": Model(
        "RecurrentGemma",
        2,
        SIZES | {"num_attention_heads": 2, "lru_width": 32, "num_hidden_layers": 3, "attention_window_size": 16},
    ),
}


class Exact(TorchFunctionMode):
    """Turns every request for float32 into float64: transformers' reference functions ask for it whatever the input."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()

        def widen(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        return func(*map(widen, args), **{name: widen(x) for name, x in (kwargs or {}).items()})


def run(model: torch.nn.Module, ids: torch.Tensor, exact: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Logits, and the loss's gradient of every parameter that it reaches, by name. The model is left as it was."""
    model = copy.deepcopy(model)
    with Exact() if exact else nullcontext():
        output = model(ids, labels=ids, **options)
        output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach()} | gradients


def tokens(batch: int = 2, length: int = 70) -> torch.Tensor:
    """Token ids [batch, length], none of them 0, which pads."""
    return torch.randint(1, VOCABULARY, (batch, length))


def pair(model: Model, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """The model as it is, and a patched copy."""
    own = model.make(seed).to(device, dtype)
    patched = copy.deepcopy(own)
    assert patch(patched) == model.layers
    return own, patched


def bfloat16_ratios(model: Model, draws: int, length: int, device: str) -> dict[str, float]:
    """Error of the patched model over the model's own, both in bfloat16 against float64: of logits and every gradient.

    Layers have as few as four decays, too few for a fair ratio, so squares of errors are summed over layers and draws.
    """
    squares = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for seed in range(draws):
        models = pair(model, seed, torch.bfloat16, device)
        ids = tokens(length=length).to(device)
        exact = run(copy.deepcopy(models[0]).double(), ids, exact=True)
        results = [run(each, ids) for each in models]
        for key, right in exact.items():
            errors = torch.tensor([(result[key] - right).norm().item() for result in results])
            squares[re.sub(r"\.\d+\.", ".", key)] += errors.square()
    return {key: (patched / own).sqrt().item() for key, (own, patched) in squares.items()}


def decode(model: torch.nn.Module, prompt: torch.Tensor, new: int = 32, **options: Any) -> Any:
    """Greedy tokens and the logits that they were taken from, [batch, new, vocabulary]."""
    made = model.generate(
        prompt,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return made.sequences, torch.stack(made.logits, 1)
