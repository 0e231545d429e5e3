"""What ranks send one another, what they refuse, and what they say when one is gone."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast import parallel
from holdfast.nn import RetNet
from holdfast.recurrences import RECURRENCES, Draw, Sizes

from .module_cases import made
from .op_cases import leaves


class Traffic(TorchDispatchMode):
    """Counts the collectives' bytes: of the larger of what goes in and what comes out, which is what all ranks sent, of
    numbers and of sizes (integers) apart."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.sizes = self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
            most = max(x.numel() * x.element_size() for x in tensors)
            if tensors[0].is_floating_point():
                self.numbers += most
            else:
                self.sizes += most
            self.calls += 1
        return function(*arguments, **(named or {}))


def traffic_of_op(rank: int, size: int, name: str, length: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Bytes of numbers and of sizes, and the number of collectives, of the forward and of the backward pass."""
    arguments = RECURRENCES[name].example(Draw(rank), Sizes(2, length, H=4, K=3, V=5, D=6, Hq=2))
    for x in leaves(arguments).values():
        x.requires_grad_()
    with Traffic() as forward:
        o, _ = getattr(parallel, name)(**arguments, output_final_state=True, group=dist.group.WORLD)
    with Traffic() as backward:
        o.sum().backward()
    return tuple((x.numbers, x.sizes, x.calls) for x in (forward, backward))


def traffic_of_model(rank: int, size: int, name: str, length: int) -> int:
    """Bytes of both passes of a mixer."""
    mixer = parallel.context_parallel(made(name), dist.group.WORLD)
    x = torch.randn(2, length, mixer.d_model, dtype=torch.float64)
    with Traffic() as all_of_it:
        mixer(x)[0].sum().backward()
    return all_of_it.numbers


def traffic_of_fsdp(rank: int, size: int) -> tuple[int, int]:
    """The weights of a layer that FSDP2 shards in a model, and the bytes of both passes."""
    layer = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    weights = sum(x.numel() for x in layer.parameters())
    mesh = init_device_mesh("cpu", (size,))
    model = fully_shard(nn.Sequential(fully_shard(layer, mesh=mesh)), mesh=mesh)
    with Traffic() as all_of_it:
        model(torch.randn(3, 8)).sum().backward()
    return weights, all_of_it.numbers


def sums_of_a_cut_mlp(rank: int, size: int) -> dict[str, int]:
    """Collectives of both passes of an MLP that PyTorch shares by channels, by name."""
    mesh = init_device_mesh("cpu", (size,))
    mlp = nn.Sequential(nn.Linear(8, 16, bias=False), nn.SiLU(), nn.Linear(16, 8, bias=False))
    parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(3, 8, requires_grad=True)
    with CommDebugMode() as seen:
        mlp(x).sum().backward()
    return {str(function): count for function, count in seen.get_comm_counts().items()}


class Sent(TorchDispatchMode):
    """Counts the numbers that a rank sends to others by all-to-all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.numbers = rank, 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if "alltoall_base" in function.name():
            sizes = arguments[4]
            self.numbers += sum(sizes) - sizes[self.rank]
        return function(*arguments, **(named or {}))


def rows_that_change_hands(rank: int, size: int) -> tuple[list[int], int, int]:
    """Widths of a mixer's packed weight, its heads, and the rows of it that this rank sends in both passes."""
    mixer = RetNet(16, num_heads=4).double()
    widths = mixer.widths
    parallel.tensor_parallel(mixer, init_device_mesh("cpu", (size,)))
    with Sent(rank) as sent:
        mixer(torch.randn(2, 5, mixer.d_model, dtype=torch.float64))[0].sum().backward()
    return widths, 4, sent.numbers // mixer.d_model


def draw(**sizes: Any) -> dict[str, Tensor]:
    arguments = RECURRENCES["simple_gla"].example(Draw(0), Sizes(**{"B": 2, "T": 4, "H": 2, "K": 3, "V": 4} | sizes))
    del arguments["initial_state"]
    return arguments


def refuses_what_differs(rank: int, size: int) -> None:
    """Every rank raises, and can go on."""
    group = dist.group.WORLD
    narrower = {name: x.to((torch.float64, torch.float32)[rank]) for name, x in draw().items()}
    recorded = draw()
    recorded["q"].requires_grad_(rank == 1)
    with pytest.raises(
        ValueError, match=r"simple_gla's batch: expected the same on every rank.*B = 2 on rank 0, B = 3"
    ):
        parallel.simple_gla(**draw(B=2 + rank), group=group)
    with pytest.raises(ValueError, match=r"simple_gla's state: .*\[2, 3, 4\] on rank 0, \[2, 3, 5\] on rank 1"):
        parallel.simple_gla(**draw(V=4 + rank), group=group)
    with pytest.raises(ValueError, match=r"simple_gla's dtype: .*float64 on rank 0, torch.float32 on rank 1"):
        parallel.simple_gla(**narrower, group=group)
    with pytest.raises(ValueError, match=r"simple_gla's requires_grad: .*False on rank 0, True on rank 1"):
        parallel.simple_gla(**recorded, group=group)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected the same on every rank.*None on rank 0, offsets"):
        parallel.simple_gla(**draw(B=1), cu_seqlens=torch.tensor([0, 8]) if rank else None, group=group)
    with pytest.raises(ValueError, match=r"cu_seqlens: .*T = 8; got 0 to 7"):
        parallel.simple_gla(**draw(B=1), cu_seqlens=torch.tensor([0, 7]), group=group)
    with pytest.raises(ValueError, match=r"cu_seqlens: .*do not decrease; got 5 then 3 at 2"):
        parallel.simple_gla(**draw(B=1), cu_seqlens=torch.tensor([0, 5, 3, 8]), group=group)
    with pytest.raises(ValueError, match=r"layout: expected an even T on every rank.*got T = 5"):
        parallel.simple_gla(**draw(T=4 + rank), group=group, layout="zigzag")
    o, _ = parallel.simple_gla(**draw(), group=group)
    assert o.isfinite().all()


def refuses_groups(rank: int, size: int) -> None:
    with pytest.raises(TypeError, match="group: expected a ProcessGroup or a DeviceMesh"):
        parallel.simple_gla(**draw(), group="cp")
    with pytest.raises(ValueError, match=r"layout: expected one of .*; got 'ring'"):
        parallel.simple_gla(**draw(), group=dist.group.WORLD, layout="ring")
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match=r"group: expected a mesh of one axis.*got one of 2, \('dp', 'cp'\)"):
        parallel.simple_gla(**draw(), group=mesh)
    expected, _ = parallel.simple_gla(**draw(), group=dist.group.WORLD)
    assert torch.equal(parallel.simple_gla(**draw(), group=mesh["cp"])[0], expected)
    first = dist.new_group([0])
    if rank:
        with pytest.raises((ValueError, TypeError), match="group: expected a"):
            parallel.simple_gla(**draw(), group=first)
    elsewhere = dist.new_group(backend="cuda:gloo")
    with pytest.raises(ValueError, match=r"group: expected one that sends tensors on cpu.*got one for cuda"):
        parallel.simple_gla(**draw(), group=elsewhere)
    with pytest.raises(ValueError, match=r"group: expected one that sends tensors on cpu"):
        parallel.context_parallel(made("GLA"), elsewhere)(torch.randn(1, 3, 8, dtype=torch.float64))
    with pytest.raises(TypeError, match="group: expected a ProcessGroup"):
        parallel.context_parallel(nn.Sequential(made("GLA")), 3)


def dies(rank: int, size: int, when: str) -> None:
    """The last rank is killed, before a layer's forward or its backward pass."""
    arguments = draw()
    arguments["k"].requires_grad_()
    if when == "forward" and rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    o, _ = parallel.simple_gla(**arguments, group=dist.group.WORLD)
    if when == "backward" and rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    o.sum().backward()


def stays_away(rank: int, size: int) -> None:
    """The last rank does not call the op."""
    if rank < size - 1:
        parallel.simple_gla(**draw(), group=dist.group.WORLD)
