"""A call of one of mlstm_kernels' functions, heads before tokens, as one of `holdfast.mlstm`."""

from typing import Any

import torch
from torch import Tensor

from holdfast import ops
from holdfast.ops.autocast import without_autocast
from holdfast.ops.check import check_arguments, needs_grad
from holdfast.recurrences.definition import Argument
from holdfast.recurrences.mlstm import Gating
from holdfast.recurrences.scalars import flag

States = tuple[Tensor, Tensor, Tensor]
# what functions for training return, with return_last_states and without
Result = Tensor | tuple[Tensor, States]

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _arguments(time: str, gate: str, suffix: str, is_state_required: bool) -> dict[str, Argument]:
    return {
        "q": Argument("queries", f"B H {time} K"),
        "k": Argument("keys", f"B H {time} K"),
        "v": Argument("values", f"B H {time} V"),
        "i": Argument("input gate, pre-activation", f"B H {gate}", "float"),
        "f": Argument("forget gate, pre-activation", f"B H {gate}", "float"),
        f"c{suffix}": Argument("matrix state", "B H K V", "float", is_state_required),
        f"n{suffix}": Argument("normaliser", "B H K", "float", is_state_required),
        f"m{suffix}": Argument("stabiliser", ("B H 1", "B H"), "float", is_state_required),
    }


_SEQUENCE = _arguments("T", "T", "_initial", is_state_required=False)
_STEP = _arguments("", "1", "", is_state_required=True)


def sequence(
    given: dict[str, Tensor | None],
    return_last_states: bool,
    eps: float,
    autocast_kernel_dtype: torch.dtype | None = None,
    gating: Gating = "exp",
    normalize: bool = True,
) -> tuple[Tensor, States | None]:
    """h [B, H, T, V] and, if asked for, the states (c [B, H, K, V], n [B, H, K], m [B, H, 1]), float32 (float64 beside
    float64).

    given: q, k, v, i, f, c_initial, n_initial, m_initial, of which the last three may be None for zeros.
    autocast_kernel_dtype: what q, k and v are cast to under autocast, in place of autocast's dtype.
    """
    flag("return_last_states", return_last_states)
    q = given["q"]
    if autocast_kernel_dtype is not None:
        _check_dtype("autocast_kernel_dtype", autocast_kernel_dtype)
        if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type):
            with without_autocast(q):
                cast = {name: given[name].to(autocast_kernel_dtype) for name in ("q", "k", "v")}
                return sequence(given | cast, return_last_states, eps, None, gating, normalize)
    q, k, v, i, f, *initial = check_arguments(_SEQUENCE, None, given, {"1": 1}).values()
    h, last = ops.mlstm(
        *(x.transpose(1, 2) for x in (q, k, v, i, f)), gating, normalize, eps=eps,
        initial_state=_entering(q, v, *initial), output_final_state=return_last_states,
    )  # fmt: skip
    h = h.transpose(1, 2)
    if last is None:
        return h, None
    c, n, m = last
    # the op has n as one more column of c
    return h, (c.contiguous(), n.contiguous(), m[..., None])


def step(given: dict[str, Tensor], eps: float, dtype_state: torch.dtype) -> tuple[Tensor, States]:
    """h [B, H, V] and the states after one token, in dtype_state; those before are left as they are.

    given: q, k [B, H, K], v [B, H, V], i, f [B, H, 1], and c, n, m as `sequence` returns them.
    """
    _check_dtype("dtype_state", dtype_state, torch.float64)
    q, k, v, i, f, *before = check_arguments(_STEP, None, given, {"1": 1}).values()
    if needs_grad(q, k, v, i, f, *before):
        token = {name: x[:, :, None] for name, x in (("q", q), ("k", k), ("v", v))}
        states = {f"{name}_initial": given[name] for name in ("c", "n", "m")}
        h, after = sequence(token | {"i": i, "f": f} | states, return_last_states=True, eps=eps)
        h = h[:, :, 0]
    else:
        c, n, m = _entering(q, v, *before, copy=True)
        token = {name: x[:, None] for name, x in (("q", q), ("k", k), ("v", v))}
        arguments: dict[str, Any] = token | {"i": i.transpose(1, 2), "f": f.transpose(1, 2), "eps": eps}
        h = ops.step("mlstm", arguments, (c, n, m))[:, 0]
        after = c, n, m[..., None]
    return h, tuple(x.to(dtype_state) for x in after)


def check_chunk_size(chunk_size: int | None) -> None:
    """Raises ValueError unless it is None or a positive int."""
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(f"chunk_size: expected a positive int; got {chunk_size!r}")


def _check_dtype(name: str, dtype: torch.dtype, *more: torch.dtype) -> None:
    if dtype not in (*KERNEL_DTYPES, *more):
        raise ValueError(f"{name}: expected one of {', '.join(map(str, (*KERNEL_DTYPES, *more)))}; got {dtype}")


def _entering(
    q: Tensor, v: Tensor, c: Tensor | None, n: Tensor | None, m: Tensor | None, copy: bool = False
) -> States | None:
    """States as the op takes them, zeros for one that is None; None where all are."""
    if c is None and n is None and m is None:
        return None
    wide, heads = torch.promote_types(q.dtype, torch.float32), q.shape[:2]
    shapes = ((*heads, q.shape[-1], v.shape[-1]), (*heads, q.shape[-1]), heads)
    return tuple(
        q.new_zeros(shape, dtype=wide) if x is None else x.reshape(shape).to(wide, copy=copy).contiguous()
        for x, shape in zip((c, n, m), shapes, strict=True)
    )
