"""Checks the arguments of an op against its definition before anything is launched."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.select import clearable_cache
from holdfast.kernels.varlen import sequence_count
from holdfast.recurrences.definition import Argument, Recurrence

# axes whose size must divide another's: query or group heads divide value heads, groups the channels of mamba1
_DIVIDES = (("Hq", "H"), ("G", "H"), ("G", "D"))
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _show(shape: str, sizes: Mapping[str, int]) -> str:
    return "[" + ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in shape.split()) + "]"


def _bind(shape: str, actual: torch.Size, sizes: dict[str, int]) -> bool:
    axes = shape.split()
    if len(axes) != len(actual):
        return False
    bound = dict(sizes)
    for axis, size in zip(axes, actual, strict=True):
        if bound.setdefault(axis, size) != size:
            return False
    sizes.update(bound)
    return True


def _check_dtype(name: str, x: Tensor, argument: Argument, dtype: torch.dtype) -> None:
    if argument.dtype == "bool":
        expected, right = "torch.bool", x.dtype == torch.bool
    elif argument.dtype == "input" and dtype in FLOATS:
        expected, right = f"{dtype}, as the other inputs have", x.dtype == dtype
    elif argument.dtype == "state":
        wide = torch.promote_types(dtype, torch.float32)
        expected, right = f"{wide}", x.dtype == wide
    else:
        # of 8 bits there are several, which PyTorch does not compute in
        expected = "a dtype of 16 bits or more" if x.is_floating_point() else "a floating-point dtype"
        right = x.dtype in FLOATS
    if not right:
        raise TypeError(f"{name}: expected {expected}; got {x.dtype}")


def check_cu_seqlens(cu_seqlens: Tensor, batch: int) -> None:
    """Raises TypeError or ValueError unless cu_seqlens is int32 or int64 [sequences + 1] beside a batch of one.

    Its values are checked where they are read, inside the op.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected a tensor; got {type(cu_seqlens).__name__}")
    check_is_local("cu_seqlens", cu_seqlens)
    if not is_dense(cu_seqlens) or cu_seqlens.device.type == "meta":
        found = f"one of layout {cu_seqlens.layout} on {cu_seqlens.device}"
        raise ValueError(f"cu_seqlens: expected a dense tensor with memory; got {found}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected torch.int32 or torch.int64; got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens: expected shape [sequences + 1]; got {list(cu_seqlens.shape)}")
    if batch != 1:
        raise ValueError(f"cu_seqlens: expected packed inputs with B = 1; got B = {batch}")


def prepare(
    recurrence: Recurrence,
    cu_seqlens: Tensor | None,
    arguments: Mapping[str, Any],
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Checks the tensors of a call against the recurrence's definition; under autocast, casts those of the input dtype.

    Args:
        recurrence: whose `arguments` say which shapes and dtypes are accepted.
        cu_seqlens: int32 or int64 [N + 1] for sequences packed along T, or None.
        arguments: name -> tensor, tuple of tensors, or None, in the op's order. The first carries the batch, the device
            and the input dtype.
        sizes: axes whose size is known beforehand, as of a cell's gates.

    Returns:
        name -> what was given, in the autocast dtype where autocast applies; None stays None.

    Raises:
        TypeError: for a required tensor that is missing, for what is no tensor, or for a wrong dtype.
        ValueError: for a wrong shape or device, for heads that do not divide, or for cu_seqlens with B > 1.
        Each names the argument, the expected and the actual.
    """
    return check_arguments(recurrence.arguments, cu_seqlens, arguments, sizes)


def check_arguments(
    expected_arguments: Mapping[str, Argument | tuple[Argument, ...]],
    cu_seqlens: Tensor | None,
    arguments: Mapping[str, Any],
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """`prepare` for an op that has no recurrence behind it.

    expected_arguments: name -> accepted shapes, such as "B T H D", and dtype. cu_seqlens: int32 or int64 [N + 1], or
    None. arguments: name -> tensor, tuple of tensors or None. sizes: axes whose sizes the caller has fixed.
    Returns and raises as `prepare` does. Metadata that has passed is not checked again.
    """
    metadata = _metadata(expected_arguments, cu_seqlens, arguments, sizes)
    # Dynamo, for which there is no metadata, would take apart all that is remembered
    if metadata is not None and metadata in _PASSED:
        return dict(arguments)
    checked = _check(expected_arguments, cu_seqlens, arguments, sizes)
    if metadata is not None:
        _PASSED[metadata] = expected_arguments
    return checked


# what no DTensor is
_LOCAL = (Tensor, torch.nn.Parameter)

# metadata that has passed its checks, which read nothing else, and what it was checked against, kept so that its id
# stays its own
_PASSED: dict[tuple[Any, ...], Mapping[str, Any]] = clearable_cache()


def _metadata(
    expected_arguments: Mapping[str, Any],
    cu_seqlens: Any,
    arguments: Mapping[str, Any],
    sizes: Mapping[str, int] | None,
) -> tuple[Any, ...] | None:
    """All that the checks read, hashable; None where it is not, or where arguments may be cast."""
    if torch.compiler.is_compiling():
        return None
    try:
        parts = [
            None
            if x is None
            else tuple([None if y is None else (y.shape, y.dtype, y.device, y.layout, type(y) in _LOCAL) for y in x])
            if type(x) is tuple
            else (x.shape, x.dtype, x.device, x.layout, type(x) in _LOCAL)
            for x in arguments.values()
        ]
        offsets = cu_seqlens
        packed = None if offsets is None else (offsets.shape, offsets.dtype, offsets.layout, offsets.device.type)
        fixed = None if sizes is None else tuple(sizes.items())
        metadata = (id(expected_arguments), *arguments, *parts, packed, fixed)
        # sizes that are traced have no hash
        hash(metadata)
        device = next(iter(arguments.values())).device
        return None if torch.is_autocast_enabled(device.type) else metadata
    except (AttributeError, TypeError, RuntimeError):
        # of what is no tensor, or one that has no shape or no autocast
        return None


def _check(
    expected_arguments: Mapping[str, Argument | tuple[Argument, ...]],
    cu_seqlens: Tensor | None,
    arguments: Mapping[str, Any],
    sizes: Mapping[str, int] | None,
) -> dict[str, Any]:
    first = next(iter(arguments.values()))
    specs, given = {}, {}
    for name, x in arguments.items():
        for label, spec, part in _parts(name, expected_arguments[name], x):
            specs[label], given[label] = spec, _cast(label, spec, part, first)
    dtype = next(iter(given.values())).dtype
    bound = dict(sizes or {})
    # what may have several shapes comes last, so that it is held against the sizes of the others
    for label, x in sorted(given.items(), key=lambda each: len(specs[each[0]].shapes) > 1):
        if x is None:
            continue
        spec = specs[label]
        _check_dtype(label, x, spec, dtype)
        if label == next(iter(given)):
            bound["sequences"] = _count_sequences(label, x, spec, cu_seqlens)
        if not any(_bind(shape, x.shape, bound) for shape in spec.shapes):
            expected = " or ".join(_show(shape, bound) for shape in spec.shapes)
            raise ValueError(f"{label}: expected shape {expected}; got {list(x.shape)}")
        _check_heads(label, x, spec, bound)
        _bind_derived(label, x, specs, bound)
    parts = iter(given.values())
    result = {}
    for name, x in arguments.items():
        spec = expected_arguments[name]
        checked = tuple(next(parts) for _ in spec) if isinstance(spec, tuple) else next(parts)
        result[name] = None if x is None else checked
    return result


def _parts(name: str, spec: Argument | tuple[Argument, ...], x: Any) -> list[tuple[str, Argument, Any]]:
    if not isinstance(spec, tuple):
        return [(name, spec, x)]
    if x is None:
        x = (None,) * len(spec)
    if not isinstance(x, tuple | list) or len(x) != len(spec):
        raise TypeError(f"{name}: expected a tuple of {len(spec)} tensors; got {type(x).__name__}")
    return [(f"{name}[{n}]", part, tensor) for n, (part, tensor) in enumerate(zip(spec, x, strict=True))]


def _cast(label: str, spec: Argument, x: Any, first: Tensor) -> Tensor | None:
    if x is None:
        if spec.required:
            raise TypeError(f"{label}: expected a tensor {_show(spec.shapes[0], {})}; got None")
        return None
    if not isinstance(x, Tensor):
        raise TypeError(f"{label}: expected a tensor; got {type(x).__name__}")
    check_is_local(label, x)
    if not is_dense(x):
        found = "a nested one" if x.is_nested else f"one of layout {x.layout}"
        raise TypeError(f"{label}: expected a dense tensor; got {found}")
    if x.device.type == "meta" and first is x:
        raise ValueError(f"{label}: expected a tensor with memory; got one on the meta device")
    if x.device != first.device:
        raise ValueError(f"{label}: expected device {first.device}, as the first argument has; got {x.device}")
    if spec.dtype == "input" and _autocasts(x):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def check_is_local(name: str, x: Tensor) -> None:
    """Raises TypeError for a DTensor: kernels see a rank's memory and nothing of the whole."""
    # known by what it has, so that nothing is imported of torch.distributed where nothing is distributed
    if type(x) not in _LOCAL and hasattr(x, "device_mesh"):
        raise TypeError(
            f"{name}: expected a local tensor; got a DTensor over {tuple(x.device_mesh.shape)} ranks as "
            f"{tuple(x.placements)}. Ops take a rank's part, {name}.to_local(), of whole heads and all tokens; in "
            "holdfast.parallel tensor_parallel shares out a mixer's heads, and ops take parts of the tokens"
        )


def is_dense(x: Any) -> bool:
    """Whether x is a tensor that has sizes and strides."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested


def _count_sequences(label: str, x: Tensor, spec: Argument, cu_seqlens: Tensor | None) -> int:
    if x.dim() == 0:
        raise ValueError(f"{label}: expected shape {_show(spec.shapes[0], {})}; got []")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x.shape[0])
    return sequence_count(x, cu_seqlens)


def _bind_derived(label: str, x: Tensor, specs: Mapping[str, Argument], bound: dict[str, int]) -> None:
    """Gives every axis named "D/2" half the size of D, and every axis named "W-1" one less than W."""
    axes = {axis for spec in specs.values() for shape in spec.shapes for axis in shape.split()}
    for half in (axis for axis in axes if axis.endswith("/2")):
        whole = half.removesuffix("/2")
        if half not in bound and whole in bound:
            if bound[whole] % 2:
                raise ValueError(f"{label}: expected an even {whole}; got {whole} = {bound[whole]} in {list(x.shape)}")
            bound[half] = bound[whole] // 2
    for less in (axis for axis in axes if axis.endswith("-1")):
        if (whole := less.removesuffix("-1")) in bound:
            bound.setdefault(less, bound[whole] - 1)


def _check_heads(label: str, x: Tensor, spec: Argument, bound: Mapping[str, int]) -> None:
    for axis in spec.shapes[0].split():
        if bound.get(axis) == 0 and axis not in ("B", "T", "W-1", "chunks", "sequences"):
            raise ValueError(f"{label}: expected {axis} > 0 in {_show(spec.shapes[0], {})}; got {list(x.shape)}")
        for part, whole in _DIVIDES:
            if axis in (part, whole) and part in bound and whole in bound and bound[whole] % bound[part]:
                raise ValueError(
                    f"{label}: expected {part} to divide {whole}; got {part} = {bound[part]}, {whole} = {bound[whole]}"
                )


def _autocasts(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)


def name_of(backend: str | None) -> str:
    """backend, and "" for None, as the custom ops take it. Raises TypeError unless it is a name, ValueError for "".

    Whether there is one of that name is found where the call is planned.
    """
    if backend is None:
        return ""
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected a name or None; got {type(backend).__name__}")
    if not backend:
        raise ValueError("backend: expected a name or None; got ''")
    return backend


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow: gradients are recorded, and one of the tensors, of any shape and dtype, needs
    its own. A None needs none."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False
