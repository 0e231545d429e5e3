"""The sigmoid and its logarithm in float32, for Triton kernels."""

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
