"""The functions that cells printed as Triton call, in float32, by the names that cuda/functions.cuh has for them.

hf_exp and hf_div: 2 ulp. hf_sigmoid: 4 ulp. hf_tanh: at most 2e-6 relative.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500e-8)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def hf_inf():
    return float("inf")


@triton.jit
def hf_nan():
    return float("nan")


@triton.jit
def hf_div(a, b):
    return a / b


@triton.jit
def hf_isnan(x):
    return x != x


@triton.jit
def hf_isinf(x):
    return tl.abs(x) == float("inf")


@triton.jit
def hf_signbit(x):
    return x.to(tl.int32, bitcast=True) < 0


@triton.jit
def hf_max(a, b):
    return tl.where((a != a) | (a > b), a, b)


@triton.jit
def hf_min(a, b):
    return tl.where((a != a) | (a < b), a, b)


@triton.jit
def hf_sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def hf_exp(x):
    # the product with log2(e) in two parts: one alone would lose the digits that the exponent's whole part takes
    whole = x * LOG2E
    rest = tl.fma(x, LOG2E_LOW, tl.fma(x, LOG2E, -whole))
    power = tl.exp2(whole)
    return tl.where(tl.abs(whole) < 128.0, tl.fma(power, rest * LN2, power), power)


@triton.jit
def hf_sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-LOG2E * x))


@triton.jit
def hf_tanh(x):
    power = tl.exp2(-2.0 * LOG2E * tl.abs(x))
    size = (1.0 - power) / (1.0 + power)
    y = x * x
    # near zero 1 - exp(-2|x|) would lose digits
    series = x + x * y * (y * 0.13333334 - 0.33333334)
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0, -size, size))


@triton.jit
def fabsf(x):
    return tl.abs(x)


@triton.jit
def copysignf(x, y):
    return tl.where(hf_signbit(y), -tl.abs(x), tl.abs(x))


@triton.jit
def sqrtf(x):
    return tl.sqrt_rn(x)


@triton.jit
def exp2f(x):
    return tl.exp2(x)


@triton.jit
def expm1f(x):
    # Kahan's: errors of the power and of its logarithm cancel
    power = hf_exp(x)
    less = power - 1.0
    return tl.where(power == 1.0, x, tl.where((less == -1.0) | hf_isinf(power), less, less * x / tl.log(power)))


@triton.jit
def logf(x):
    return tl.log(x)


@triton.jit
def log2f(x):
    return tl.log2(x)


@triton.jit
def log1pf(x):
    more = 1.0 + x
    return tl.where((more == 1.0) | hf_isinf(more), x, tl.log(more) * (x / (more - 1.0)))


@triton.jit
def sinf(x):
    return tl.sin(x)


@triton.jit
def cosf(x):
    return tl.cos(x)


@triton.jit
def erff(x):
    return tl.erf(x)


@triton.jit
def floorf(x):
    return tl.floor(x)


@triton.jit
def ceilf(x):
    return tl.ceil(x)


@triton.jit
def truncf(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))
