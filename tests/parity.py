"""What tests of every family share, beyond holdfast.ops.parity."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.ops.parity import cast, leaves, relative_error, values_and_grads, with_grad
from holdfast.recurrences import Recurrence, oracle

__all__ = ["assert_close", "cast", "leaves", "op_and_oracle", "relative_error", "values_and_grads", "with_grad"]


def op_and_oracle(op: Callable[..., Any], recurrence: Recurrence, arguments: dict[str, Any], **options: Any) -> Any:
    """(values and gradients of the op, of the oracle in float64 on the same numbers)."""
    cu_seqlens = options.get("cu_seqlens")
    got = values_and_grads(lambda a: op(**a, output_final_state=True, **options), arguments)
    exact = values_and_grads(lambda a: oracle(recurrence, a, cu_seqlens), cast(arguments, torch.float64))
    return got, exact


def assert_close(got: list[Tensor], exact: list[Tensor], limit: float) -> None:
    """Every pair within limit, relative."""
    errors = [relative_error(x, y) for x, y in zip(got, exact, strict=True)]
    assert all(error <= limit for error in errors), f"relative errors {errors} exceed {limit}"
