"""What Triton kernels take from Triton under one name, whatever its version, 3.6 to 3.9."""

import triton

# For constants that belong together. A NamedTuple, made by keyword, carries pointers, tensors and None. The interpreter
# runs functions that take either: tests/kernels/lib/triton/named_tuples.py.
try:
    aggregate = triton.aggregate
except AttributeError:
    from triton.language.core import _aggregate as aggregate

__all__ = ["aggregate"]
