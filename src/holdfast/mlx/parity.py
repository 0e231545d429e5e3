"""Comparing a scan with its reference: the output and every gradient."""

from collections.abc import Callable, Sequence

import mlx.core as mx

Report = dict[str, dict[str, float]]


def parity_check(
    kernel_fn: Callable[..., mx.array],
    reference_fn: Callable[..., mx.array],
    inputs: Sequence[mx.array],
    arg_names: Sequence[str],
    grad_argnums: Sequence[int],
    *,
    w_out: mx.array | None = None,
    y_tol: float = 1e-3,
    grad_rtol: float = 1e-3,
    label: str = "",
    verbose: bool = True,
) -> tuple[bool, Report]:
    """Compares y and the gradients of sum(y * w_out) with respect to inputs[i] for i in grad_argnums.

    Args:
        kernel_fn, reference_fn: `f(*inputs) -> y`, the one to test and the one to hold it to.
        arg_names: of all inputs.
        w_out: weights shaped like y; by default drawn anew from a fixed seed.
        y_tol: limit on y's largest absolute difference.
        grad_rtol: limit on each gradient's largest difference, relative to its largest value.
        label: before each printed line.
        verbose: whether to print.

    Returns:
        Whether all is within the limits, and {"y" or "grad_<name>": {"abs": ..., "rel": ...}}.
    """
    if w_out is None:
        w_out = mx.random.normal(reference_fn(*inputs).shape, key=mx.random.key(1234))
    argnums = list(grad_argnums)
    (y, grads), (exact_y, exact_grads) = (
        _value_and_grads(f, inputs, argnums, w_out) for f in (kernel_fn, reference_fn)
    )
    report = {"y": _differences(y, exact_y)}
    for argnum, grad, exact in zip(argnums, grads, exact_grads, strict=True):
        report[f"grad_{arg_names[argnum]}"] = _differences(grad, exact)
    is_close = report["y"]["abs"] < y_tol and all(
        found["rel"] < grad_rtol for name, found in report.items() if name != "y"
    )
    if verbose:
        for name, found in report.items():
            print(f"{label} {name}: largest difference {found['abs']:.2e}, relative {found['rel']:.2e}".strip())
        print(f"{label} {'PASS' if is_close else 'FAIL'}".strip())
    return is_close, report


def _value_and_grads(f, inputs, argnums, w_out):
    def loss(*xs):
        y = f(*xs)
        return (y * w_out).sum(), y

    (_, y), grads = mx.value_and_grad(loss, argnums=argnums)(*inputs)
    return y, grads


def _differences(x: mx.array, exact: mx.array) -> dict[str, float]:
    x, exact = x.astype(mx.float32), exact.astype(mx.float32)
    largest = mx.abs(x - exact).max().item()
    return {"abs": largest, "rel": largest / (mx.abs(exact).max().item() + 1e-30)}
