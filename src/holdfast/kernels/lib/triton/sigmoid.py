"""The sigmoid, its logarithm and 1 - exp in float32, for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def log_sigmoid(x):
    small = tl.exp(-tl.abs(x))
    # log(1 + small) / small for 0 <= small <= 1, to 4e-8
    p = small * 0.005364617798477411 - 0.03006497025489807
    p = p * small + 0.07920321077108383
    p = p * small - 0.1375369131565094
    p = p * small + 0.1915360391139984
    p = p * small - 0.248571515083313
    p = p * small + 0.333213210105896
    p = p * small - 0.49999648332595825
    p = p * small + 1.0
    return tl.minimum(x, 0.0) - small * p


@triton.jit
def sigmoid(x):
    # of a number that is never large
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@triton.jit
def one_minus_exp(x):
    """1 - exp(x) for x <= 0, to float32's precision also near 0."""
    p = x * 1.9841270114e-4 + 1.3888889225e-3
    p = p * x + 8.3333337680e-3
    p = p * x + 4.1666667908e-2
    p = p * x + 1.6666667163e-1
    p = p * x + 0.5
    p = p * x + 1.0
    return tl.where(x > -0.35, -x * p, 1.0 - tl.exp(x))
