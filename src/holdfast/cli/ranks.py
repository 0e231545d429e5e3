"""The processes of one training run, as torchrun starts them, and what each has of a batch and of its tokens."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .config import LanguageModelConfig
from .errors import UserError, first_line


@dataclass(frozen=True)
class Ranks:
    """This process among others: of `dp` times `cp` times `tp`, which share the batch, each sequence's tokens and each
    layer's heads.

    mesh: of the axes "dp", "cp" and "tp"; None for a process by itself, which has all of them.
    """

    mesh: DeviceMesh | None = None
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def count(self) -> int:
        return self.data * self.tp

    @property
    def data(self) -> int:
        """Parts that a batch's tokens are in."""
        return self.dp * self.cp

    @property
    def is_first(self) -> bool:
        return self.mesh is None or dist.get_rank() == 0

    @property
    def command(self) -> str:
        """What starts as many processes again."""
        return "holdfast" if self.mesh is None else f"torchrun --nproc-per-node {self.count} -m holdfast.cli"

    def described(self, device: torch.device, sharding: str) -> str:
        """What a run says of where it is."""
        if self.mesh is None:
            return str(device)
        shared = f", {self.cp} to a sequence" if self.cp > 1 else ""
        shared += f", {self.tp} to a layer" if self.tp > 1 else ""
        return f"{self.count} x {device.type} ({sharding}{shared})"

    def _place(self, axis: str) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    def rows(self, windows: Tensor) -> Tensor:
        """This rank's sequences of a batch [B, ...], of which every rank has as many."""
        return windows.chunk(self.dp)[self._place("dp")]

    def tokens(self, x: Tensor) -> Tensor:
        """This rank's part of the tokens [B, T]; parts may differ by one token in length."""
        return x.tensor_split(self.cp, 1)[self._place("cp")]

    def sum(self, value: float | Tensor) -> float:
        """Over all ranks, on every rank."""
        if self.mesh is None:
            return float(value)
        total = torch.tensor(float(value), dtype=torch.float64, device=self.mesh.device_type)
        dist.all_reduce(total)
        return total.item()

    def largest(self, value: int) -> int:
        """Over all ranks, on every rank."""
        if self.mesh is None:
            return value
        found = torch.tensor(value, device=self.mesh.device_type)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def wrapped(self, model: nn.Module, sharding: str) -> nn.Module:
        """The model as ranks train it: layers shared where "tp" is more than 1, mixers over parts of sequences where
        "cp" is, gradients averaged over ranks with other tokens, and with "fsdp" weights and what the optimizer keeps
        cut among them, block by block."""
        if self.mesh is None:
            return model
        every = None
        if self.tp > 1:
            from .heads import share_layers

            # FSDP2 knows the mesh that it cuts what is shared along, or copies it
            sizes = (self.data, 1) if sharding == "ddp" else (1, self.data)
            names = ("copies", "parts", "tp")
            layout = init_device_mesh(self.mesh.device_type, (*sizes, self.tp), mesh_dim_names=names)
            share_layers(model, layout["tp"])
            every = layout[names[:2]] if sharding == "ddp" else layout["parts"]
        if self.cp > 1:
            from holdfast.parallel import context_parallel

            context_parallel(model, self.mesh["cp"])
        if every is None and sharding == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if every is None:
            every = init_device_mesh(self.mesh.device_type, (self.count,))
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=every)
        return fully_shard(model, mesh=every)

    def clip(self, parameters: Iterable[Tensor], most: float) -> None:
        """Scales all gradients so that their norm is `most` or less."""
        if self.tp == 1:
            nn.utils.clip_grad_norm_(parameters, most)
        else:
            from holdfast.parallel import clip_grad_norm

            clip_grad_norm(parameters, most)

    @contextlib.contextmanager
    def gradients_stay(self, model: nn.Module, stay: bool) -> Iterator[None]:
        """Where they do, a backward pass adds to this rank's own gradients and exchanges none."""
        if self.mesh is None or not stay:
            yield
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            with model.no_sync():
                yield
        else:
            model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                model.set_requires_gradient_sync(True)


ALONE = Ranks()


def _axes(config: LanguageModelConfig, processes: int) -> tuple[int, int, int]:
    """Ranks that share the batch, that share a sequence and that share a layer. Raises UserError where they do not
    fit."""
    dp = processes
    for option, share in (("tp", config.tp), ("cp", config.cp)):
        if dp % share:
            each = processes if dp == processes else f"{processes} / --tp {config.tp} = {dp}"
            raise UserError(
                f"--{option}: expected a divisor of the number of processes, {each}; got {share}, which a resumed run "
                f"has from its checkpoint unless --{option} is given"
            )
        dp //= share
    at_once = config.local_batch or config.accumulate
    if config.batch % (dp * at_once):
        option = "--accumulate" if config.local_batch is None else "--local-batch"
        raise UserError(
            f"--batch: expected a multiple of {dp * at_once}, for {dp} processes that share it and {option} {at_once}; "
            f"got {config.batch}"
        )
    return dp, config.cp, config.tp


@contextlib.contextmanager
def joined(device: torch.device, config: LanguageModelConfig) -> Iterator[Ranks]:
    """The processes that torchrun started, or this one by itself; the group ends with the context.

    One that ends takes the others with it: the first raises UserError, the rest SystemExit.
    """
    if not dist.is_torchelastic_launched():
        _axes(config, 1)
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    processes = dist.get_world_size()
    try:
        axes = _axes(config, processes)
        yield Ranks(init_device_mesh(device.type, axes, mesh_dim_names=("dp", "cp", "tp")), *axes)
    except RuntimeError as error:
        if not is_of_another(error):
            raise
        if dist.get_rank():
            # the first one says it for all; where that is the one that ended, torchrun does
            raise SystemExit(2) from error
        raise UserError(
            f"one of the {processes} processes has ended, and the others with it ({first_line(error)}); with --out the "
            "last checkpoint is whole: start all again with --resume"
        ) from error
    finally:
        dist.destroy_process_group()


def local_device(name: str) -> str:
    """The device of this process: of several CUDA devices the one of its number on its machine."""
    if name in ("auto", "cuda") and dist.is_torchelastic_launched() and torch.cuda.is_available():
        return f"cuda:{dist.get_node_local_rank() % torch.cuda.device_count()}"
    return name


def is_of_another(error: RuntimeError) -> bool:
    """Whether it says that another rank has ended."""
    said = str(error)
    return isinstance(error, dist.DistError) or any(
        x in said
        for x in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "could not exchange")
    )


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and what the optimizer keeps, by the names of the weights, in whole tensors on the CPU of the first rank.

    Every rank calls.
    """
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = state_dict.get_model_state_dict(model, options=options)
    # of an optimizer that has not run PyTorch would make a state by a step of its own, which stays
    kept = state_dict.get_optimizer_state_dict(model, optimizer, options=options) if optimizer.state else {}
    return weights, kept


def load_whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Any], kept: dict[str, Any]
) -> None:
    """Takes what `whole_state` gave, on however many ranks; every rank has it."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state_dict.set_model_state_dict(model, weights, options=options)
    if kept:
        state_dict.set_optimizer_state_dict(model, optimizer, kept, options=options)
