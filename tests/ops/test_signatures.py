"""The public ops' options and their defaults, which calls that leave them out rely on."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import holdfast
import holdfast.nn
from holdfast import ops

EVERY = {"initial_state": None, "output_final_state": False, "cu_seqlens": None, "backend": None}
DELTA = EVERY | {"scale": None, "qk_l2norm": False, "beta_sigmoid": False, "allow_neg_eigval": False}
DENSE = EVERY | {"b": None, "reset": None, "recurrent_grad_clip": None, "cut_recurrent_grad": False}
DEFAULTS = {
    "linear_attention": EVERY | {"scale": None},
    "simple_gla": EVERY | {"g": None, "scale": None},
    "gla": EVERY | {"scale": None},
    "retnet": EVERY | {"scale": None},
    "lightning": EVERY | {"layer": 0, "num_layers": 1, "scale": None},
    "mamba1": EVERY | {"D": None, "z": None, "dt_bias": None, "dt_softplus": False},
    "ssd": EVERY | {"D": None, "z": None, "dt_bias": None, "dt_softplus": False},
    "mlstm": EVERY | {"gating": "exp", "normalize": True, "scale": None, "eps": 1e-6},
    "delta_rule": DELTA,
    "gated_delta_rule": DELTA | {"A_log": None, "dt_bias": None},
    "kda": DELTA | {"A_log": None, "dt_bias": None, "lower_bound": None},
    "gdn2": EVERY | {"scale": None, "A_log": None, "dt_bias": None, "lower_bound": None, "qk_l2norm": False},
    "comba": EVERY | {"beta": None, "scale": None, "qk_l2norm": False},
    "gated_delta_product": DELTA | {"num_householder": None, "A_log": None, "dt_bias": None},
    "rwkv7": EVERY | {"scale": 1.0},
    "rglru": EVERY,
    "rotlru": EVERY,
    "hgrn": EVERY,
    "elman": DENSE | {"nonlinearity": "tanh"},
    "lstm": DENSE,
    "gru": DENSE,
    "slstm": DENSE,
    "rnn": DENSE,
    "inter_chunk_scan": EVERY | {"W": None, "Y": None},
    "intra_chunk": {
        "states": None, "gate": None, "chunk_size": 64, "scale": None, "gate_activation": "silu", "backend": None,
    },
    "gated_rms_norm": {
        "gate": None, "weight": None, "eps": 1e-5, "activation": "silu", "center": False, "backend": None,
    },
    "causal_conv1d": EVERY | {"bias": None, "activation": None},
    "causal_conv1d_update": {
        "bias": None, "activation": None, "backend": None, "slots": None, "next_slots": None, "accepted": None,
    },
    "step": {"backend": None},
    "pooled_prefill": {
        "next_slots": None, "block": None, "block_slots": None, "keys_last": False, "backend": None,
    },
    "pooled_step": {"next_slots": None, "accepted": None, "keys_last": False, "backend": None},
    "explain": {
        "sizes": None, "dtype": "float32", "device": "cpu", "needs_grad": True, "varlen": False, "backend": None,
        "calls": 0,
    },
}  # fmt: skip


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


@pytest.mark.parametrize("name", ops.__all__)
def test_defaults(name):
    if name not in DEFAULTS:
        pytest.fail(f"{name} is a new op, or an old one that has gone: {defaults(getattr(holdfast, name))}")
    assert defaults(getattr(holdfast, name)) == DEFAULTS[name]


def test_none_has_gone():
    assert set(DEFAULTS) <= set(ops.__all__)


def test_every_custom_op_tells_compiled_graphs_that_they_may_hold_it():
    # some are registered by modules that the public ops do not import
    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"holdfast.ops.{module.name}")
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("holdfast::")]
    assert {"holdfast::matrix_forward", "holdfast::conv_update", "holdfast::delta_inputs"} <= set(names)
    for name in names:
        tags = getattr(torch.ops.holdfast, name.removeprefix("holdfast::")).default.tags
        assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order} <= set(tags), name
