"""Shared heads beside the rest of PyTorch's engine: FSDP2, checkpoints, compilers, parts of sequences."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from holdfast import nn as hnn
from holdfast.parallel import clip_grad_norm, context_parallel, tensor_parallel, weights_held

from .module_cases import check
from .tensor_cases import MIXERS, WIDTH, drawn, made, over_all_ranks, parameters_alike
from .training_cases import Checkpointed

TOKENS, LENGTH, ROWS = 16, 12, 4
WHOLE = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    """A mixer whose state nobody asks for, behind a norm."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))[0]


def language_model(names: tuple[str, ...], wrap: Any = nn.Sequential) -> nn.Sequential:
    """In float64; wrap: what stands around each block."""
    torch.manual_seed(7)
    blocks = [wrap(Block(getattr(hnn, MIXERS[name][0])(WIDTH, **MIXERS[name][1]))) for name in names]
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, nn.Linear(WIDTH, TOKENS)).double()


class Run:
    """A model under training, of whose text each rank has its rows and its tokens."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """mesh: with axes dp, cp, or neither."""
        self.model, self.mesh = model, mesh
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def _own(self, x: Tensor) -> Tensor:
        for axis, dim in (("dp", 0), ("cp", 1)):
            if self.mesh is not None and axis in self.mesh.mesh_dim_names:
                x = x.tensor_split(self.mesh[axis].size(), dim)[self.mesh.get_local_rank(axis)]
        return x

    def steps(self, first: int, count: int) -> list[tuple[float, float]]:
        """Of each step its loss and the norm of its gradients, which are clipped."""
        found = []
        for n in range(first, first + count):
            torch.manual_seed(n)
            text = torch.randint(TOKENS, (ROWS, LENGTH + 1))
            inputs, targets = self._own(text[:, :-1]), self._own(text[:, 1:])
            logits = self.model(inputs).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / (ROWS * LENGTH)
            shares = 1 if self.mesh is None else self.mesh.size() // self.mesh["tp"].size()
            # FSDP takes the mean over ranks
            (loss * shares).backward()
            norm = clip_grad_norm(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach()
            if self.mesh is not None:
                dist.all_reduce(total)
                total = total / self.mesh["tp"].size()
            found.append((total.item(), norm.item()))
        return found

    def whole(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model, options=WHOLE),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=WHOLE),
        }

    def load(self, saved: dict[str, Any]) -> "Run":
        # which puts DTensors in the place of what it is given
        saved = copy.deepcopy(saved)
        set_model_state_dict(self.model, saved["model"], options=WHOLE)
        set_optimizer_state_dict(self.model, self.optimizer, saved["optimizer"], options=WHOLE)
        return self


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def alike(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def fsdp_and_checkpoints(rank: int, size: int, names: tuple[str, ...], folder: str) -> None:
    """Trains as one process does, with activations computed twice; goes on as one process, and on other meshes."""
    one = Run(language_model(names))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    here = Run(sharded(tensor_parallel(language_model(names, Checkpointed), mesh["tp"]), mesh["dp"]), mesh)
    alike(here.steps(0, 2), one.steps(0, 2))
    dcp.save({"model": get_model_state_dict(here.model)}, checkpoint_id=Path(folder) / "model")
    saved = here.whole()
    expected = one.steps(2, 1)

    alike(Run(language_model(names, Checkpointed)).load(saved).steps(2, 1), expected)
    heads = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    alike(
        Run(tensor_parallel(language_model(names, Checkpointed), heads["tp"]), heads).load(saved).steps(2, 1), expected
    )
    # a part of each weight read by each rank, from a layout of other parts
    again = tensor_parallel(language_model(names, Checkpointed), heads["tp"])
    nn.init.zeros_(again[-1].weight)
    state = {"model": get_model_state_dict(again)}
    dcp.load(state, checkpoint_id=Path(folder) / "model")
    set_model_state_dict(again, state["model"])
    found = get_model_state_dict(again, options=WHOLE)
    check({key: (x, saved["model"][key]) for key, x in found.items()}, 0.0)


def data_sequence_and_heads(rank: int, size: int, names: tuple[str, ...], heads_first: bool) -> None:
    """Parts of sequences, heads and weights over three axes."""
    one = Run(language_model(names))
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    model = language_model(names, Checkpointed)
    if heads_first:
        tensor_parallel(model, mesh["tp"])
    context_parallel(model, mesh["cp"])
    if not heads_first:
        tensor_parallel(model, mesh["tp"])
    here = Run(sharded(model, mesh["dp", "cp"]._flatten("shards")), mesh)
    alike(here.steps(0, 2), one.steps(0, 2))


def mixed_precision(rank: int, size: int) -> None:
    """Under FSDP2's a mixer computes in bfloat16, and its states are float32."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    one = made("GatedDeltaNet").float()
    here = tensor_parallel(copy.deepcopy(one), mesh["tp"])
    fully_shard(here, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="stay where they are; got one under fully_shard"), weights_held(here):
        pass
    x = drawn(2, 5, WIDTH).float()
    (y, (S, tail)), (right, _) = here(x), one(x)
    assert (y.dtype, S.dtype, tail.dtype, S.shape[1]) == (torch.bfloat16, torch.float32, torch.float32, 4)
    torch.testing.assert_close(y.float(), right, rtol=0.1, atol=0.05)
    y.float().square().sum().backward()
    right.square().sum().backward()
    for p, q in zip(here.parameters(), one.parameters(), strict=True):
        grad = p.grad.full_tensor()
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad / q.grad.norm(), q.grad / q.grad.norm(), rtol=0, atol=0.05)


def a_part_of_a_mixer_is_not_cut_alone(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    here = tensor_parallel(made("GLA"), mesh["tp"])
    fully_shard(here.in_proj, mesh=mesh["dp"])
    with pytest.raises(
        RuntimeError, match=r"in_proj\.weight: expected all of this rank's heads; .* Apply it to the GLA"
    ):
        here(drawn(1, 3, WIDTH))


def compiled_equals_one_process(rank: int, size: int, name: str, backend: str) -> None:
    one = Block(made(name)).double()
    here = tensor_parallel(copy.deepcopy(one), over_all_ranks())
    x = drawn(2, 6, WIDTH)
    # as tests/test_inductor.py has it: on a machine that has compiled nothing, each rank would ask for vectors
    with inductor.patch({"cpp.simdlen": 1, "cpp.vec_isa_ok": False}):
        y, right = torch.compile(here, backend=backend, fullgraph=True)(x), one(x)
        y.square().sum().backward()
    right.square().sum().backward()
    check({"y": (y, right)} | parameters_alike(here.mixer, one.mixer), 1e-10)
    torch.compiler.reset()


def all_together(rank: int, size: int, name: str) -> None:
    """Compiled blocks, computed twice, of shared heads, over FSDP2's parts."""
    names = (name, name)
    one = Run(language_model(names))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(language_model(names, Checkpointed), mesh["tp"])
    for block in model[1:-1]:
        block.compile(backend="aot_eager")
    alike(Run(sharded(model, mesh["dp"]), mesh).steps(0, 2), one.steps(0, 2))
