"""Modules whose heads are shared out among ranks: each runs the module's own forward pass on its heads' parameters."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.func import functional_call

from holdfast.nn.check import wide
from holdfast.nn.sequences import Sequences
from holdfast.nn.stack import Stack
from holdfast.nn.step import Mixer

from .cuts import Cut, Number
from .sections import Sections, routes
from .to_heads import Exchange, to_heads


class HeadwiseParallel(ParallelStyle):
    """A style of `parallelize_module` for a module that acts within heads between its first and its last projection.

    A rank runs the module's own forward pass with its heads' parameters; what the last projection gives is summed over
    the ranks, by one all-reduce. Parameters become DTensors, of packed ones too the whole tensor is that of the module
    in one process: a packed weight is held as Shard(0), and a forward pass begins with an exchange of its rows, after
    which each rank has its heads' of every section.

    cut: how parameters and numbers are cut; see `Cut`.
    input_layouts, output_layouts: as in `ColwiseParallel` and `RowwiseParallel`, of x and of the output, or of the
    first of several: `Replicate()`, or `Shard(1)` for parts of the tokens, which are gathered before and scattered
    after (sequence parallelism).

    Applying it raises TypeError for a mesh that is none; ValueError for one of several axes, for heads that do not
    divide by its ranks, for parameters that are distributed already, and for layouts of recurrent layers (LSTM, GRU,
    RNN), whose inputs and outputs every rank has. Nothing has changed then.
    """

    def __init__(
        self, cut: Cut, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None
    ) -> None:
        super().__init__()
        self.cut = cut
        self.input_layouts, self.output_layouts = input_layouts or Replicate(), output_layouts or Replicate()

    def check(self, module: nn.Module, mesh: DeviceMesh, name: str = "") -> None:
        """Raises what applying it would. name: of the module, for the message."""
        where = f"{type(module).__name__} at {name!r}" if name else type(module).__name__
        ranks, cut = check_mesh(mesh).size(), self.cut
        layouts = self.input_layouts, self.output_layouts
        if isinstance(module, Stack) and layouts != (Replicate(), Replicate()):
            raise ValueError(f"layouts of {where}: expected Replicate() of inputs and outputs; got {layouts}")
        parameters = dict(module.named_parameters())
        if unknown := cut.parameters.keys() - parameters.keys():
            raise ValueError(f"cut of {where}: expected names of its parameters; got {', '.join(sorted(unknown))}")
        for key, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"{key} of {where}: expected a parameter that is not distributed yet; got a DTensor. Tensor "
                    "parallelism comes before fully_shard, and once"
                )
        for number, heads in cut.heads.items():
            if heads % ranks:
                raise ValueError(
                    f"{number} of {where}: expected a multiple of {ranks}, the number of tensor-parallel ranks; got "
                    f"{heads}"
                )
        for number, heads in cut.groups.items():
            if heads % ranks and ranks % heads:
                raise ValueError(
                    f"{number} of {where}: expected a multiple or a divisor of {ranks}, the number of tensor-parallel "
                    f"ranks; got {heads}"
                )

        for key, placement in cut.parameters.items():
            shape = parameters[key].shape
            if isinstance(placement, Sections):
                placement.check(f"{key} of {where}", shape[0], ranks)
            elif isinstance(placement, Shard) and shape[placement.dim] % ranks:
                raise ValueError(
                    f"{key} of {where}: expected a multiple of {ranks}, the number of tensor-parallel ranks, along "
                    f"axis {placement.dim}; got {list(shape)}"
                )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh)
        parts = _Parts(module, device_mesh, self)
        for key, value in (self.cut.numbers | self.cut.heads | self.cut.groups).items():
            owner, name = _owner(module, key)
            setattr(owner, name, _local(value, device_mesh))
        for key, parameter in list(module.named_parameters()):
            owner, name = _owner(module, key)
            placement = self.cut.parameters.get(key, Replicate())
            placements = [Shard(0) if isinstance(placement, Sections) else placement]
            data = distribute_tensor(parameter.detach(), device_mesh, placements, src_data_rank=self.src_data_rank)
            owner.register_parameter(name, nn.Parameter(data, requires_grad=parameter.requires_grad))
        instead = {"over_ranks": parts, "forward": parts.forward}
        if isinstance(module, Stack):
            instead = {"over_ranks": parts, "forward": parts.run, "_directions": parts.directions}
        elif isinstance(module, Mixer) and type(module)._token is not Mixer._token:
            instead["_token"] = partial(parts.forward, method="_token")
        if self.cut.spanning_norm:
            # the fused layer and its step have the norm inside
            instead |= {"_mix": partial(parts.run_own, "_mix_in_parts"), "_token": partial(Mixer._token, module)}
            module.norm.forward = parts.norm
        for name, value in instead.items():
            setattr(module, name, value)
        return module


class _Run(nn.Module):
    """Runs a method of a module's class, past what stands in its place in the module itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(type(self.module), method)(self.module, *arguments, **named)


class _Parts:
    """A module's part on this rank."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, style: HeadwiseParallel) -> None:
        self.module, self.mesh, self.style = module, mesh, style
        self.group = mesh.get_group()
        self._run = _Run(module)
        self._keys = [key for key, _ in module.named_parameters()]
        self._first = _owner(module, self._keys[0])
        cuts = {key: style.cut.parameters.get(key, Replicate()) for key in self._keys}
        self._whole = {key for key, cut in cuts.items() if cut == Replicate()}
        self._routes = {
            key: routes(cut, module.get_parameter(key).shape[0], mesh.size())
            for key, cut in cuts.items()
            if isinstance(cut, Sections)
        }
        # this rank's parameters where weights are held
        self.held: dict[str, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Parts":
        """For a copy of the module, over the same ranks."""
        made = object.__new__(_Parts)
        memo[id(self)] = made
        made.__dict__ |= vars(self) | {"module": deepcopy(self.module, memo), "_run": deepcopy(self._run, memo)}
        owner, name = self._first
        made._first, made.held = (deepcopy(owner, memo), name), None
        return made

    def forward(self, x: Any, *rest: Any, method: str = "forward", **named: Any) -> Any:
        """The module's method over the ranks. x: this rank's, as the style's input_layouts say."""
        if not self._is_outside() or not isinstance(x, Tensor):
            return self._run(method, x, *rest, **named)
        made = self.run(self._entered(x), *rest, method=method, **named)
        return (self._left(made[0]), *made[1:]) if isinstance(made, tuple) else self._left(made)

    def run(self, *arguments: Any, method: str = "forward", **named: Any) -> Any:
        """The module's method with this rank's parameters."""
        return functional_call(self._run, self._local(), (method, *arguments), named, tie_weights=False)

    def directions(
        self, sequences: Sequences, x: Tensor, suffixes: list[str], states: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """`Stack._directions` over the ranks: x and each direction's output have all heads, states this rank's."""
        outputs, final = self._run("_directions", sequences, self._copied(x), suffixes, states)
        gathered = (self._distributed(y, Shard(2)).redistribute(placements=[Replicate()]) for y in outputs)
        return [y.to_local() for y in gathered], final

    def run_own(self, method: str, *arguments: Any) -> Any:
        """A method of the module's class, where its parameters are this rank's already."""
        return self._run(method, *arguments)

    def norm(self, x: Tensor) -> Tensor:
        """The module's `GatedRMSNorm` over the channels of all ranks. x: this rank's [B, T, 1, channels]."""
        norm = self.module.norm
        x_wide = x.to(wide(x.dtype))
        squares = self._distributed(x_wide.square().sum(-1, keepdim=True), Partial())
        total = self._copied(squares.redistribute(placements=[Replicate()]).to_local())
        scale = (total / (x.shape[-1] * self.mesh.size()) + norm.eps).rsqrt()
        return (x_wide * scale * norm.weight).to(x.dtype)

    def is_sharded(self) -> bool:
        """Whether the module's parameters are also cut along other axes, as fully_shard does."""
        return any(isinstance(x, DTensor) and x.device_mesh != self.mesh for x in self.module.parameters())

    def _is_outside(self) -> bool:
        """Whether the module has its own parameters, and not already this rank's."""
        return isinstance(getattr(*self._first), DTensor)

    def _distributed(self, x: Tensor, layout: Placement) -> DTensor:
        return x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [layout], run_check=False)

    def _copied(self, x: Tensor) -> Tensor:
        """x, the same on all ranks, whose gradient is the sum over them."""
        return self._distributed(x, Replicate()).to_local(grad_placements=[Partial()])

    def _entered(self, x: Tensor) -> Tensor:
        whole = self._distributed(x, self.style.input_layouts).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def _left(self, y: Tensor) -> Tensor:
        return self._distributed(y, Partial()).redistribute(placements=[self.style.output_layouts]).to_local()

    def _local(self) -> dict[str, Tensor]:
        """This rank's parameters, under the names that they have in `_Run`."""
        if self.held:
            return self.held
        found, packed = {}, defaultdict(list)
        for key in self._keys:
            parameter = self.module.get_parameter(key)
            if not isinstance(parameter, DTensor):
                raise TypeError(
                    f"{key}: expected a DTensor, as tensor parallelism made it; got {type(parameter).__name__}"
                )
            if parameter.device_mesh.ndim > 1:
                raise RuntimeError(
                    f"{key}: expected all of this rank's heads; got the part that fully_shard left. Apply it to the "
                    f"{type(self.module).__name__} or to a module around it, not to a module within"
                )
            x = parameter.to_local()
            if key in self._routes:
                packed[x.dtype].append((key, x))
            else:
                found[key] = self._copied(x) if key in self._whole else x
        for each in packed.values():
            keys = [key for key, _ in each]
            way = tuple(self._routes[key] for key in keys)
            exchange = Exchange(way, self.group, self.mesh.get_local_rank(), self.mesh.size())
            found |= zip(keys, to_heads([x for _, x in each], exchange), strict=True)
        found = {f"module.{key}": x for key, x in found.items()}
        if self.held is not None:
            self.held = found
        return found


@contextmanager
def weights_held(model: nn.Module) -> Iterator[None]:
    """Within it packed weights are exchanged once, at the first call, without gradients: for decoding under tensor
    parallelism. Weights must not change meanwhile.

    model: with modules that `tensor_parallel` changed. Raises ValueError where there are none, and under fully_shard,
    which gives a weight's memory back after each call.
    """
    found = [parts for module in model.modules() if (parts := getattr(module, "over_ranks", None)) is not None]
    if not found:
        raise ValueError("model: expected one that tensor_parallel has changed; found no such module")
    if any(parts.is_sharded() for parts in found):
        raise ValueError("model: expected weights that stay where they are; got one under fully_shard")
    try:
        for parts in found:
            parts.held = {}
        with torch.no_grad():
            yield
    finally:
        for parts in found:
            parts.held = None


def check_mesh(mesh: Any) -> DeviceMesh:
    """mesh. Raises TypeError for what is no DeviceMesh, ValueError for one of several axes."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh of one axis, such as mesh['tp']; got {type(mesh).__name__}")
    if mesh.ndim != 1:
        axes = mesh.mesh_dim_names or tuple(mesh.shape)
        raise ValueError(f"mesh: expected one of one axis, such as mesh['tp']; got one of {mesh.ndim}, {axes}")
    return mesh


def _owner(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    path, _, name = key.rpartition(".")
    return module.get_submodule(path), name


def _local(value: Number, mesh: DeviceMesh) -> Any:
    if isinstance(value, Sections):
        return value.local(mesh.size())
    # of groups that are fewer than ranks each has one
    return max(1, value // mesh.size()) if isinstance(value, int) else value(mesh.get_local_rank(), mesh.size())
