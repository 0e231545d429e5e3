"""Tensor parallelism: the mixers of a model over ranks that share their heads."""

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from .cuts import MIXERS, cut_of
from .headwise import HeadwiseParallel, check_mesh


def tensor_parallel_plan(model: nn.Module) -> dict[str, HeadwiseParallel]:
    """The plan by which `torch.distributed.tensor.parallel.parallelize_module` shares out the heads of all mixers.

    model: a mixer of `holdfast.nn`, any of them, or a model that has some. Returns name -> style, "" for model itself;
    other modules' styles can be added. Raises ValueError for a model without mixers.
    """
    plan = {name: HeadwiseParallel(cut_of(part)) for name, part in model.named_modules() if isinstance(part, MIXERS)}
    if not plan:
        raise ValueError("model: expected a mixer or a recurrent layer of holdfast.nn, or a model with one; found none")
    return plan


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """Shares out the heads of all mixers in a model among the ranks of a mesh; the model is changed and returned.

    model: a mixer of `holdfast.nn`, any of them, or a model that has some. All else in it stays as it is, and every
    rank computes all of it; `parallelize_module` takes a plan for linear layers.
    mesh: of one axis, such as mesh["tp"].

    Every rank calls a mixer with the same x and has the same y; states are of this rank's heads. Parameters become
    DTensors, the whole of which is what one process has, gradients and state_dict likewise: optimizers, FSDP2,
    distributed checkpoints and torch.compile take them as they are. Weights are those of the first rank.

    Raises TypeError for a mesh that is none; ValueError for a mesh of several axes, a model without mixers, heads that
    do not divide by the ranks, named with their numbers, and parameters that are distributed already. Nothing has
    changed then.
    """
    check_mesh(mesh)
    plan = tensor_parallel_plan(model)
    for name, style in plan.items():
        style.check(model.get_submodule(name), mesh, name)
    for name, style in plan.items():
        parallelize_module(model.get_submodule(name), mesh, style)
    return model
