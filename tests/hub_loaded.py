"""What test_hub.py runs in a process of its own: `python -P tests/hub_loaded.py TREE CHECK`."""

import sys
from pathlib import Path

import torch

import holdfast
import kernels


def ops_and_modules(tree: Path) -> None:
    """The tree's are the package's, bit for bit, under a name of its own."""
    loaded = kernels.get_local_kernel(tree, backend="cpu")
    assert loaded.__name__.startswith("holdfast_cpu_")
    assert loaded.gla is not holdfast.gla
    q, k, v = torch.randn(3, 1, 70, 2, 16).unbind()
    g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
    found = []
    for package in (holdfast, loaded):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
        o, state = package.gated_delta_rule(*leaves, output_final_state=True)
        found.append([o, state, *torch.autograd.grad(o.sum() + state.sum(), leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    x, R = torch.randn(2, 5, 4, 1, 8), torch.randn(4, 1, 8, 8)
    assert torch.equal(loaded.lstm(x, R)[0], holdfast.lstm(x, R)[0])
    mixer, its = holdfast.nn.GatedDeltaNet(32, 2), loaded.nn.GatedDeltaNet(32, 2)
    its.load_state_dict(mixer.state_dict())
    x = torch.randn(1, 9, 32)
    assert torch.equal(mixer(x)[0], its(x)[0])
    sizes = {"B": 1, "T": 64, "H": 2, "K": 64, "V": 64}
    explained, right = (package.explain("gla", sizes, "bfloat16", "h200") for package in (loaded, holdfast))
    assert str(explained) == str(right)


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.rand(16)), 1e-3

    def forward(self, hidden_states):
        scale = (hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return hidden_states * scale * self.weight


class GatedNorm(Norm):
    def forward(self, hidden_states, gate=None):
        y = super().forward(hidden_states)
        return y if gate is None else y * torch.nn.functional.silu(gate)


def layers(tree: Path) -> None:
    """The tree's layers take the places of a model's."""
    for name, layer, inputs in (("RMSNorm", Norm, 1), ("GatedRMSNorm", GatedNorm, 2)):
        kernels.replace_kernel_forward_from_hub(layer, name)
        model = torch.nn.Sequential(layer())
        given = [torch.randn(3, 5, 16) for _ in range(inputs)]
        right, plain = model[0](*given), model[0].forward.__func__
        mapping = {name: {"cpu": kernels.LocalLayerRepository(tree, layer_name=name)}}
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
        assert model[0].forward.__func__ is not plain
        torch.testing.assert_close(model[0](*given), right, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    {"ops_and_modules": ops_and_modules, "layers": layers}[sys.argv[2]](Path(sys.argv[1]))
    print(f"{sys.argv[2]} right")
