"""Every private name of PyTorch that Holdfast uses, tried when it is imported, and what serves where one is missing.

PyTorch promises none of them: at an upgrade this is the file to look at. What is missing, or does something else than
expected, is warned of once; what serves in its place is slower and as right. Names are looked up here, once, and not at
each call, since a replayed call has no time for it. `recurrences/torch_private.py` has those that lower floors need.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from holdfast.recurrences.torch_private import MISSING, NO_REPLAY, DispatchMode, expect, find

# what imports Dynamo makes it a module of this name
DYNAMO = "torch._dynamo"


def _examples() -> tuple[Tensor, Tensor]:
    """Two tensors that are alike, whatever the importer is under."""
    with torch.inference_mode(False):
        x, y = (torch.empty(2, 3, dtype=torch.float32, device="cpu") for _ in range(2))
    return x, y


def negated(x: Tensor) -> Tensor:
    """-x, whose sign PyTorch has yet to change: as of the imaginary part of a conjugate."""
    return torch._neg_view(x) if hasattr(torch, "_neg_view") else torch.complex(torch.zeros_like(x), x).conj().imag


def _dispatch_modes() -> Callable[[], int]:
    count = torch._C._len_torch_dispatch_stack
    before = count()
    with DispatchMode():
        expect(count() == before + 1)
    expect(count() == before)
    return count


# how many dispatch modes this thread is under; one too many where nobody knows
dispatch_modes = find("torch._C._len_torch_dispatch_stack", NO_REPLAY, _dispatch_modes, lambda: 1)


def _transforms() -> Callable[[], bool]:
    is_active = torch._C._are_functorch_transforms_active
    seen: list[bool] = []
    torch.func.vmap(lambda x: (x, seen.append(is_active()))[0])(_examples()[0])
    expect(seen == [True])
    return is_active


# whether this thread is inside a transform of torch.func; None where nobody knows
_is_transformed = find("torch._C._are_functorch_transforms_active", NO_REPLAY, _transforms, None)


def is_transformed() -> bool:
    """Whether this thread is known to be inside a transform of torch.func, by which PyTorch refuses autograd's own."""
    return _is_transformed is not None and _is_transformed()


def _level() -> bool:
    expect(isinstance(forward_ad._current_level, int))
    if forward_ad._current_level < 0:
        with forward_ad.dual_level():
            expect(forward_ad._current_level >= 0)
    return True


_HAS_LEVEL = find("torch.autograd.forward_ad._current_level", NO_REPLAY, _level, False)


def may_have_tangents() -> bool:
    """False outside of torch.func.jvp and dual_level, where no tensor has a tangent."""
    return not _HAS_LEVEL or forward_ad._current_level >= 0


def _profiled() -> Callable[[], bool]:
    is_profiled = torch.autograd._profiler_enabled
    expect(isinstance(is_profiled(), bool))
    return is_profiled


_is_profiled = find("torch.autograd._profiler_enabled", NO_REPLAY, _profiled, lambda: True)


def _autocast() -> tuple[Callable[[], bool], Callable[[], AbstractContextManager[Any]]]:
    is_on, off = torch._C._is_any_autocast_enabled, torch._C._DisableAutocast
    with torch.autocast("cpu", torch.bfloat16):
        expect(is_on())
        with off():
            expect(not is_on())
    return is_on, off


_AUTOCAST = find("torch._C._DisableAutocast", NO_REPLAY, _autocast, None)
is_any_autocast_on, without_autocast = _AUTOCAST or (None, None)


def _keys() -> Callable[[Tensor], Any]:
    keys, (x, y) = torch._C._dispatch_keys, _examples()
    expect(keys(x).raw_repr() == keys(y).raw_repr() != keys(x.to("meta")).raw_repr())
    expect(keys(negated(x)).raw_repr() != keys(x).raw_repr())
    return keys


# of a tensor, with raw_repr(): whether it is more than memory and strides, as a subclass or a lazy negation
dispatch_keys = find("torch._C._dispatch_keys", NO_REPLAY, _keys, None)


def _versions() -> Callable[[Tensor], int]:
    x, _ = _examples()
    before = x._version
    torch.autograd.graph.increment_version([x])
    expect(x._version == before + 1)
    return lambda x: x._version


# what autograd counts writes to a tensor by
version_of = find("torch.Tensor._version", NO_REPLAY, _versions, None)

# whether calls can be recorded, and told from those that may not be replayed
CAN_REPLAY = not any(NO_REPLAY in note for note in MISSING)


def is_observed() -> bool:
    """Whether something looks at, or changes, this thread's operations: a mode, a transform, a profiler, a tangent."""
    return bool(
        not CAN_REPLAY or dispatch_modes() or _is_transformed() or _is_profiled() or forward_ad._current_level >= 0
    )


def _storages() -> Callable[[Tensor, Tensor], bool]:
    def is_one(x: Tensor, y: Tensor) -> bool:
        return x.untyped_storage()._cdata == y.untyped_storage()._cdata

    x, y = _examples()
    expect(is_one(x, x[1:]) and not is_one(x, y))
    return is_one


def _by_address(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


# whether two tensors have their memory in one storage; by their address those without memory count as one
shares_storage = find("torch.UntypedStorage._cdata", "nothing", _storages, _by_address)


def _check() -> Callable[[Sequence[Tensor]], Callable[..., bool]]:
    guards = torch._C._dynamo.guards.TensorGuards

    def check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
        sizes, strides = ([list(of(x)) for x in tensors] for of in (Tensor.size, Tensor.stride))
        return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        x, y = _examples()
        check, others = check_of((x, y)), [y.t(), y[:1], y.double(), y.clone().requires_grad_(), y.to("meta")]
        expect(check(y, x) and not check(x, x) and not any(check(x, z) for z in (*others, negated(y))))
        with torch.inference_mode():
            expect(not check(x, y))
        with torch.autocast("cpu", torch.bfloat16):
            expect(not check(x, y))
    return check_of


# from tensors what says in C++ whether others are like them, by which compiled graphs check their inputs: in dispatch
# keys, which modes, transforms, autocast and inference mode change too, in device, dtype, shape, strides, and whether
# each needs a gradient. None: it has to be told in Python
tensor_check = find("torch._C._dynamo.guards.TensorGuards", "replayed calls take longer to find", _check, None)


def _wrapped() -> tuple[Callable[[Any], bool], Callable[[Any], bool], Callable[[Any], Tensor]]:
    functorch, seen = torch._C._functorch, []
    is_wrapped, is_batched, unwrapped = (
        functorch.is_functorch_wrapped_tensor, functorch.is_batchedtensor, functorch.get_unwrapped,
    )  # fmt: skip

    def look(x: Tensor) -> Tensor:
        seen.extend((is_wrapped(x), is_batched(x), is_batched(unwrapped(x)), unwrapped(x).shape))
        return x

    x, _ = _examples()
    torch.func.vmap(look)(x)
    expect(seen == [True, True, False, x.shape] and not is_wrapped(x))
    return is_wrapped, is_batched, unwrapped


# whether torch.func wraps a tensor, and for vmap; what vmap wraps. Where nobody knows, no call of a gradient is taken
# for plain, and of tensors in vmap PyTorch itself says whether it can differentiate them
is_wrapped, is_batched, unwrapped = find(
    "torch._C._functorch", "calls that record a gradient take longer", _wrapped,
    (lambda x: True, lambda x: False, lambda x: x),
)  # fmt: skip


def _below() -> tuple[Callable[[], AbstractContextManager[Any]], Callable[[], AbstractContextManager[Any]]]:
    autograd, views = torch._C._AutoDispatchBelowAutograd, torch._C._AutoDispatchBelowADInplaceOrView
    with torch.inference_mode(False), torch.enable_grad():
        x = _examples()[0].requires_grad_()
        with autograd():
            expect(not (x * 2).requires_grad)
        expect((x * 2).requires_grad)
        with views():
            expect(not (x * 2).requires_grad)
    return autograd, views


# within one of them operators run below autograd, or below what counts writes too. None: PyTorch's own custom_op serves
below_autograd, below_views = find("torch._C._AutoDispatchBelowAutograd", "ops take longer", _below, (None, None))


def _gpu_name(name: str, take: Callable[[], Any], instead: Any) -> Any:
    # PyTorch for a CPU has none of them
    return find(name, "a launch takes longer", take, instead) if torch.version.cuda is not None else instead


def _raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# (shape, strides, dtype) -> memory on the current device, in a fraction of new_empty's time, as compiled graphs take it
empty_on_gpu = _gpu_name("_empty_strided_cuda", lambda: torch._C._dynamo.guards._empty_strided_cuda, None)


def _parts() -> Callable[[Tensor, Sequence[int], Sequence[int], int], Tensor]:
    take, x = torch._C._dynamo.guards._reinterpret_tensor, _examples()[0]
    y = take(x[:, 1:], (2,), (3,), 1)
    expect(y.shape == (2,) and y.stride() == (3,) and y.storage_offset() == 2 and shares_storage(x, y))
    return take


def _as_strided(x: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(shape, strides, x.storage_offset() + offset)


# (x, shape, strides, offset) -> the numbers from offset after x's first, as compiled graphs take views: no gradient
# goes through it, and writes to one are not counted for the other
part_of = find("torch._C._dynamo.guards._reinterpret_tensor", "replayed calls take longer", _parts, _as_strided)
current_device: Callable[[], int] = _gpu_name(
    "torch._C._cuda_getDevice", lambda: torch._C._cuda_getDevice, torch.cuda.current_device
)
# of a device, in a fraction of torch.cuda.current_stream's time
stream_of: Callable[[int], int] = _gpu_name(
    "torch._C._cuda_getCurrentRawStream", lambda: torch._C._cuda_getCurrentRawStream, _raw_stream
)


def has_hooks(module: nn.Module) -> bool:
    """Whether something looks at what a module takes or returns; taken to be so where nobody knows."""
    return bool(getattr(module, "_forward_hooks", True) or getattr(module, "_forward_pre_hooks", True))


def compile_here() -> None:
    """Has Inductor compile in this process alone."""
    import torch._inductor.config as config

    config.compile_threads = 1


def graph_counters() -> Any:
    """What Dynamo counts: kind -> name -> how often."""
    import torch._dynamo.utils as dynamo

    return dynamo.counters


if MISSING:
    warnings.warn(
        f"PyTorch {torch.__version__} does not have, or has changed, private names by which Holdfast is faster: "
        f"{', '.join(MISSING)}. Results are the same",
        RuntimeWarning,
        stacklevel=2,
    )
