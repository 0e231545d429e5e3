"""Shared heads beside the same module in one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import holdfast
from holdfast import nn as hnn
from holdfast.parallel import Cut, HeadwiseParallel, Sections, tensor_parallel, tensor_parallel_plan, weights_held

from .exchange_cases import Traffic
from .module_cases import check

WIDTH = 16
# heads for four ranks; of Mamba2 and GatedDeltaNet also with groups fewer than ranks
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GLA": ("GLA", {"num_heads": 4, "gate_rank": 3}),
    "RetNet": ("RetNet", {"num_heads": 4}),
    "Mamba2": ("Mamba2", {"num_heads": 8, "d_state": 3, "n_groups": 4}),
    "Mamba2, one group": ("Mamba2", {"num_heads": 8, "d_state": 3}),
    "MLSTM": ("MLSTM", {"num_heads": 4, "input_gate_bias": 0.0}),
    "DeltaNet": ("DeltaNet", {"num_heads": 4}),
    "GatedDeltaNet": ("GatedDeltaNet", {"num_heads": 4, "num_v_heads": 8}),
    "GatedDeltaNet, one key head": ("GatedDeltaNet", {"num_heads": 1, "head_dim": 8, "num_v_heads": 4}),
    "GatedDeltaProduct": ("GatedDeltaProduct", {"num_heads": 4, "num_v_heads": 8}),
    "KDA": ("KDA", {"num_heads": 4, "num_v_heads": 8}),
    "KDA, one key head": ("KDA", {"num_heads": 1, "head_dim": 8, "num_v_heads": 4}),
    "RWKV7": ("RWKV7", {"num_heads": 4}),
    "RGLRU": ("RGLRU", {"num_heads": 4}),
    "RotLRU": ("RotLRU", {"num_heads": 4}),
    "SLSTM": ("SLSTM", {"num_heads": 4}),
}
STACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTM": ("LSTM", {"num_layers": 2, "bidirectional": True}),
    "GRU": ("GRU", {"num_layers": 2}),
    "RNN": ("RNN", {"bias": False, "bidirectional": True}),
}


# all heads have one weight of the norm
SHARED_NORM = ("GLA", "GatedDeltaNet")


def made(name: str) -> nn.Module:
    """In float64; the same on every rank."""
    torch.manual_seed(5)
    if name in STACKS:
        kind, options = STACKS[name]
        return getattr(hnn, kind)(WIDTH, 8, num_heads=4, batch_first=True, **options).double()
    kind, options = MIXERS[name]
    return getattr(hnn, kind)(WIDTH, **options).double()


def over_all_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def drawn(*shape: int, seed: int = 11) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return x.full_tensor()


def parameters_alike(here: nn.Module, one: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Whole parameters, gradients and state_dict beside those of one process."""
    found = {}
    for (name, x), (right_name, y) in zip(here.named_parameters(), one.named_parameters(), strict=True):
        assert name == right_name
        found |= {name: (whole(x.detach()), y.detach()), f"d{name}": (whole(x.grad), y.grad)}
    kept, expected = here.state_dict(), one.state_dict()
    assert list(kept) == list(expected)
    return found | {f"{key} in state_dict": (whole(x), expected[key]) for key, x in kept.items()}


def module_equals_one_process(rank: int, size: int, name: str, packed: bool) -> None:
    """Outputs and gradients of text in two pieces, the second from the state that the first left."""
    one = made(name)
    here = tensor_parallel(copy.deepcopy(one), over_all_ranks())
    x = drawn(1 if packed else 2, 9, WIDTH)
    bounds = (torch.tensor([0, 3, 5]), torch.tensor([0, 1, 4])) if packed else ()

    def run(module: nn.Module) -> tuple[Tensor, Tensor]:
        given = x.clone().requires_grad_()
        first, state = module(given[:, :5], None, *bounds[:1])
        second, _ = module(given[:, 5:], state, *bounds[1:])
        y = torch.cat([first, second], 1)
        (y * drawn(*y.shape, seed=12)).sum().backward()
        return y, given.grad

    (y, dx), (right, right_dx) = run(here), run(one)
    check({"y": (y, right), "dx": (dx, right_dx)} | parameters_alike(here, one), 1e-10)


def step_equals_one_process(rank: int, size: int, name: str) -> None:
    """Tokens decoded from a prompt, the weights exchanged at each and held."""
    one = made(name)
    here = tensor_parallel(copy.deepcopy(one), over_all_ranks())
    x, found = drawn(2, 8, WIDTH), {}
    with torch.no_grad():
        (_, state), (_, right) = here(x[:, :4]), one(x[:, :4])
    for t in range(4, 6):
        found[f"token {t}"] = here.step(x[:, t : t + 1], state), one.step(x[:, t : t + 1], right)
    sums = {"Mamba2, one group": 2}.get(name, 1) * ["all_reduce"]
    with weights_held(here):
        here.step(x[:, 6:7], state)
        with Names() as names:
            y = here.step(x[:, 7:8], state)
    one.step(x[:, 6:7], right)
    check(found | {"token 7": (y, one.step(x[:, 7:8], right))}, 1e-10)
    assert names.seen == sums
    with Names() as names:
        here.step(x[:, 7:8], state)
    # RWKV7 has no packed weight
    assert names.seen == [*([] if name == "RWKV7" else ["alltoall_base_"]), *sums]


def one_exchange_and_one_sum_a_pass(rank: int, size: int, name: str) -> None:
    here = tensor_parallel(made(name), over_all_ranks())
    x = drawn(2, 5, WIDTH).requires_grad_()
    with Names() as forward:
        y = here(x)[0].sum()
    with Names() as backward:
        y.backward()
    assert sorted(forward.seen) == sorted(set(backward.seen)) == ["all_reduce", "alltoall_base_"]
    # beside the input's, the gradient of a norm that every head has
    assert len(backward.seen) == 2 + (name in SHARED_NORM)


class Names(Traffic):
    """The collectives that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.name().partition("::")[2].partition(".")[0]
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in name and "wrap" not in name:
            self.seen.append(name)
        return function(*arguments, **(named or {}))


def a_plan_beside_others(rank: int, size: int) -> None:
    """A block whose mixer takes the plan, its MLP one of a packed weight, and tokens lie over the ranks between."""
    torch.manual_seed(6)
    one = nn.ModuleDict({"mixer": hnn.GatedDeltaNet(WIDTH, num_heads=4), "mlp": Gated()}).double()
    here = copy.deepcopy(one)
    (name, style), *others = tensor_parallel_plan(here).items()
    assert (name, others) == ("mixer", [])
    sections = Sections((12, 12), (12, 12))
    plan = {
        "mixer": HeadwiseParallel(style.cut, input_layouts=Shard(1), output_layouts=Shard(1)),
        "mlp": HeadwiseParallel(
            Cut({"enter.weight": sections, "leave.weight": Shard(1)}),
            input_layouts=Shard(1),
            output_layouts=Replicate(),
        ),
    }
    parallelize_module(here, over_all_ranks(), plan)
    x = drawn(2, 8, WIDTH)
    mine = x.chunk(size, 1)[rank].clone().requires_grad_()
    x.requires_grad_()
    right, y = one["mlp"](one["mixer"](x)[0]), here["mlp"](here["mixer"](mine)[0])
    (right * drawn(*right.shape)).sum().backward()
    (y * drawn(*y.shape)).sum().backward()
    dx = x.grad.chunk(size, 1)[rank]
    check({"y": (y, right), "dx": (mine.grad, dx)} | parameters_alike(here, one), 1e-10)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 24, bias=False), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.enter(x).chunk(2, -1)
        return self.leave(gate.sigmoid() * value)


def a_copy_is_over_the_same_ranks(rank: int, size: int, name: str) -> None:
    here = tensor_parallel(made(name), over_all_ranks())
    again, x = copy.deepcopy(here), drawn(2, 3, WIDTH)
    with torch.no_grad():
        for parameter in here.parameters():
            parameter.zero_()
    y, right = again(x)[0], made(name)(x)[0]
    check({"y": (y, right)}, 1e-10)
    y.sum().backward()
    right.sum().backward()
    assert all(parameter.grad is None for parameter in here.parameters())


def weights_are_the_first_ranks(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    mixer = hnn.GLA(WIDTH, num_heads=4)
    tensor_parallel(mixer, over_all_ranks())
    torch.manual_seed(0)
    first = hnn.GLA(WIDTH, num_heads=4)
    for x, right in zip(mixer.parameters(), first.parameters(), strict=True):
        assert torch.equal(whole(x), right)


def refuses(rank: int, size: int) -> None:
    """Each with its numbers, and nothing has changed."""
    mesh = over_all_ranks()
    model = nn.Sequential(hnn.GLA(WIDTH, num_heads=4), hnn.RetNet(WIDTH, num_heads=1))
    groups = hnn.Mamba2(WIDTH, num_heads=6 * size, n_groups=3, expand=6.0)
    odd = hnn.GatedDeltaNet(24, num_heads=3, num_v_heads=3 * size, head_dim=2)
    cases = [
        (model, mesh, ValueError, rf"num_heads of RetNet at '1': expected a multiple of {size}, .* got 1"),
        (groups, mesh, ValueError, rf"n_groups of Mamba2: expected a multiple of {size}, .* got 3"),
        (odd, mesh, ValueError, rf"num_heads of GatedDeltaNet: expected a multiple or a divisor of {size}, .* got 3"),
        (hnn.RWKV7(16, 4, layer=1, num_layers=2), mesh, ValueError, "RWKV7: expected the first layer, .* got layer 1"),
        (nn.Linear(3, 3), mesh, ValueError, r"model: expected a mixer or a recurrent layer of holdfast\.nn.*none"),
        (model[0], dist.group.WORLD, TypeError, r"mesh: expected a DeviceMesh of one axis"),
        (model[0], init_device_mesh("cpu", (1, size)), ValueError, "mesh: expected one of one axis, such as mesh"),
    ]
    for module, given, kind, said in cases:
        with pytest.raises(kind, match=said):
            tensor_parallel(module, given)
        assert all(type(x) is nn.Parameter for x in module.parameters())
        assert all("forward" not in vars(part) for part in module.modules())
    with pytest.raises(ValueError, match="model: expected one that tensor_parallel has changed"), weights_held(model):
        pass
    layers = hnn.LSTM(WIDTH, 8, num_heads=4)
    with pytest.raises(ValueError, match="layouts of LSTM: expected Replicate"):
        HeadwiseParallel(tensor_parallel_plan(layers)[""].cut, input_layouts=Shard(1)).check(layers, mesh)
    gated, leave = Gated(), {"leave.weight": Shard(1)}
    for parameters, said in [
        ({"enter.weight": Sections((12, 12), (3, 3))}, "enter.weight of Gated: expected sections of whole heads"),
        ({"enter.weight": Sections((14, 12), (2, 2))}, "enter.weight of Gated: expected sections of 24 rows at most"),
        ({"mid.weight": Shard(0)}, "cut of Gated: expected names of its parameters; got mid.weight"),
    ]:
        with pytest.raises(ValueError, match=said):
            parallelize_module(gated, mesh, HeadwiseParallel(Cut(leave | parameters)))
    narrow = nn.Linear(size + 1, 4)
    with pytest.raises(ValueError, match=rf"weight of Linear: expected a multiple of {size}.* axis 1; got \[4, "):
        parallelize_module(narrow, mesh, HeadwiseParallel(Cut({"weight": Shard(1)})))
    tensor_parallel(model[0], mesh)
    with pytest.raises(
        ValueError, match=r"weight of GLA: expected a parameter that is not distributed yet; got a DTensor"
    ):
        tensor_parallel(model[0], mesh)


def ops_refuse_distributed_tensors(rank: int, size: int) -> None:
    mesh = over_all_ranks()
    q, g = torch.randn(1, 4, 4, 3), -torch.rand(1, 4, 4)
    spread = DTensor.from_local(g, mesh, [Replicate()])
    # what passed its checks before is known by its shape
    for _ in range(3):
        holdfast.simple_gla(q, q, q, g)
    with pytest.raises(TypeError, match=r"g: expected a local tensor; got a DTensor over .*g\.to_local\(\)"):
        holdfast.simple_gla(q, q, q, spread)
    with pytest.raises(TypeError, match=r"x: expected a local tensor; got a DTensor"):
        hnn.GLA(WIDTH)(DTensor.from_local(torch.randn(1, 3, WIDTH), mesh, [Replicate()]))
    with pytest.raises(TypeError, match=r"weight: expected a local tensor; got a DTensor"):
        holdfast.causal_conv1d(torch.randn(1, 3, 4), DTensor.from_local(torch.randn(4, 4), mesh, [Replicate()]))
