"""Triton's interpreter in a quarter of the time: what it works out anew for every operation of every program is kept.

An interpreted kernel is some ten thousand operations on small arrays, and most of its time goes into their types.
Called in a process that interprets all its kernels, before the first of them.
"""

import builtins
from typing import Any

import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter


def take() -> None:
    """After read_loop_bounds, without which Triton's interpreter does not run."""
    _patch_the_language_once()
    _keep_shapes()
    _keep_what_needs_no_broadcast()
    _keep_numpys_types()
    _look_for_no_overflow()


def multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as integers of 16 bits, and its products are of those."""
    product = interpreter.InterpreterBuilder.create_dot

    def patched(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(
            self, *(self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest
        )

    interpreter.InterpreterBuilder.create_dot = patched


def read_loop_bounds() -> None:
    """A loop bound is read with int() of an array of one element, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _patch_the_language_once() -> None:
    """A launch puts the interpreter's operations into triton.language; a function that its kernel calls need not."""
    patch = interpreter._patch_lang

    def patched(function: Any) -> Any:
        modules = [x for x in function.__globals__.values() if x is tl or x is core]
        if modules and not any(core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = patched


def _keep_shapes() -> None:
    unwrap, type_of_values = core._unwrap_if_constexpr, core._type_for_tuple_values
    init, get = core.tuple.__init__, core.tuple.__getattr__
    init_block, init_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}

    def unwrapped(x: Any) -> Any:
        if type(x) is core.constexpr:
            return x.value
        return unwrap(x) if isinstance(x, (list, builtins.tuple, core.tuple)) else x

    def init_tuple(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            init(self, args, type)

    def get_of_tuple(self: Any, name: str) -> Any:
        if name != "type":
            return get(self, name)
        self.type = type_of_values(self.values)
        return self.type

    def init_kept_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *map(unwrapped, shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def init_kept_tensor(self: Any, handle: Any, type: Any) -> None:
        key = builtins.tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            init_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    core._unwrap_if_constexpr = unwrapped
    core.tuple.__init__, core.tuple.__getattr__ = init_tuple, get_of_tuple
    core.block_type.__init__, core.tensor.__init__ = init_kept_block, init_kept_tensor


def _keep_what_needs_no_broadcast() -> None:
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def kept(self: Any, lhs: Any, rhs: Any) -> Any:
        first, second = lhs.type, rhs.type
        if first.is_block() and second.is_block() and first.shape.values == second.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = kept


def _keep_numpys_types() -> None:
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def kept(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = kept


def _look_for_no_overflow() -> None:
    """Triton works out whether integers overflow even where, without the option debug, nothing comes of it."""
    find = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def found(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            find(self, lhs, rhs, binary_op)

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = found
