"""Context parallelism beside the rest of PyTorch's engine: compilers, checkpointing, FSDP2."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from holdfast import nn as hnn
from holdfast.parallel import context_parallel

from .module_cases import MIXERS, WIDTH, Block, check, differences, made
from .op_cases import Setting, held_by, parts

TOKENS = 16


class Checkpointed(nn.Module):
    """A block that is run again in the backward pass, exchanges too."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def checkpointed_equals_one_process(rank: int, size: int, setting: Setting) -> None:
    whole = made("model")
    own = parts(setting.lengths, setting.layout)[rank]
    x = torch.randn(2, sum(setting.lengths), WIDTH, dtype=torch.float64)
    blocks = context_parallel(copy.deepcopy(whole), dist.group.WORLD)
    here = nn.Sequential(*(Checkpointed(block) for block in blocks))
    y, mine = whole(x), here(held_by(x, own))
    y.square().sum().backward()
    mine.square().sum().backward()
    check({"y": (mine, held_by(y, own))} | differences(here, whole), 1e-10)


def language_model(checkpointing: bool) -> nn.Sequential:
    torch.manual_seed(7)
    blocks = [Block(getattr(hnn, name)(WIDTH, **MIXERS[name])) for name in MIXERS]
    blocks = [Checkpointed(block) if checkpointing else block for block in blocks]
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, nn.Linear(WIDTH, TOKENS)).double()


def losses_of(model: nn.Module, batches: list[Tensor], tokens: int, group: dist.ProcessGroup | None) -> list[float]:
    """Losses of AdamW's steps, each a mean over a number of tokens, of which batches hold this rank's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for batch in batches:
        inputs, targets = batch
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / tokens
        # FSDP takes the mean of gradients over ranks, of which each has a share of the sum
        (loss * (1 if group is None else dist.get_world_size(group))).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if group is not None:
            dist.all_reduce(loss, group=group)
        found.append(loss.item())
    return found


def fsdp_trains_as_one_process(rank: int, size: int, data: int) -> None:
    """FSDP2 over all ranks, the batch cut over data of them and the tokens over the others."""
    torch.manual_seed(8)
    # the same at each step: of text that is noise nothing else is learnt
    text = 4 * [torch.randint(TOKENS, (4, 13))]
    pairs = [(x[:, :-1], x[:, 1:]) for x in text]
    expected = losses_of(language_model(False), pairs, 4 * 12, None)

    mesh = init_device_mesh("cpu", (data, size // data), mesh_dim_names=("dp", "cp"))
    model = language_model(True)
    if size // data > 1:
        context_parallel(model, mesh["cp"])
    for block in model:
        fully_shard(block, mesh=mesh["dp", "cp"]._flatten("all"))
    fully_shard(model, mesh=mesh["all"])
    row, part = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
    own = [tuple(x.chunk(data)[row].tensor_split(size // data, 1)[part] for x in pair) for pair in pairs]
    found = losses_of(model, own, 4 * 12, dist.group.WORLD)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    assert found[-1] < found[0]


def fsdp_keeps_gates_in_float32(rank: int, size: int) -> None:
    """Under FSDP2's mixed precision a mixer computes in bfloat16, and its states are float32."""
    torch.manual_seed(9)
    mixer = hnn.GatedDeltaNet(WIDTH, num_heads=2)
    x = torch.randn(2, 5, WIDTH)
    expected, _ = copy.deepcopy(mixer)(x)
    fully_shard(mixer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    y, (S, tail) = mixer(x)
    assert (y.dtype, S.dtype, tail.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.05)
    y.float().square().sum().backward()
    assert all(p.grad.to_local().isfinite().all() for p in mixer.parameters())


def compiled_equals_eager(rank: int, size: int) -> None:
    whole = made("GatedDeltaNet")
    setting = Setting((6, 6))
    own = parts(setting.lengths, setting.layout)[rank]
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    here = context_parallel(copy.deepcopy(whole), dist.group.WORLD)
    compiled = torch.compile(here, backend="aot_eager", fullgraph=True)
    y, _ = whole(x)
    mine, _ = compiled(held_by(x, own))
    y.square().sum().backward()
    mine.square().sum().backward()
    check({"y": (mine, held_by(y, own))} | differences(here, whole), 1e-10)
