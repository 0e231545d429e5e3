"""The gradients that a forward pass has kernels compiled for beside its own: those that usually come."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from every_call import CALLS, PARTS
from fused_on_cpu import fused_on_cpu
from holdfast.ops import registration

# of others the first result alone: no loss is made of a final state
OF = {
    # where one is missing, it is filled in
    "rotary": {"dy", "dz"},
    "lru_gates": {"da", "dwrite"},
    "mlstm_gates": {"dg", "dbeta", "dm"},
    "delta_inputs": {"dy", "dz", "ddecay", "dstrength"},
}
FIRST = {"dy", "ddecay", "grad_o", "grad_h", "grad_y"}
NAMES = ["rotary", "lru_gates of pairs", "gated_gelu", "soft_cap", "gated_delta_rule with all options", "mlstm", "ssd"]
NAMES += ["kda with all options", "lstm", "rotlru", "mamba1", "inter_chunk_scan", "intra_chunk", "gated_rms_norm"]


class Given(TorchDispatchMode):
    """Backward op -> names of its arguments that are results' gradients, and came."""

    def __init__(self):
        super().__init__()
        self.of = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "holdfast" and (name := op._schema.name).endswith("_backward"):
            forward = name.removesuffix("_backward").removeprefix("holdfast::")
            named = {argument.name: x for argument, x in zip(op._schema.arguments, args, strict=False)}
            grads = {
                key
                for key in named
                if key.startswith(("d", "grad_")) and key not in ("decay", "delta", "dt", "dt_bias")
            }
            self.of[forward] = {key for key in grads if named[key] is not None}
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*NAMES, "causal_conv1d"])
def test_kernels_are_compiled_for_gradients_that_usually_come(monkeypatch, name):
    given = Given()

    def run_and_dry_run(run, arguments, named, then=None):
        outputs = run(*arguments, **named)
        if then is not None:
            with given:
                then(arguments, outputs)
        return outputs

    monkeypatch.setattr(registration, "with_parallel_compile", run_and_dry_run)
    call = (CALLS | PARTS)[name]
    arguments = tree_map(lambda x: x.requires_grad_(x.is_floating_point()), call.arguments(torch.float32))
    with fused_on_cpu():
        call(arguments)
    assert given.of
    for op, found in given.of.items():
        assert found == OF.get(op, found & FIRST), op
        assert len(found) == len(OF.get(op, ".")), op
