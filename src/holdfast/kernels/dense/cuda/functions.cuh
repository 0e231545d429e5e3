// The functions that printed cells call, in float32. A host compiler takes the same file, with its own exp and division.
// hf_exp: 2 ulp. hf_div: 2 ulp. hf_sigmoid: 4 ulp where the result is over 1e-38.
// hf_tanh: at most 2e-6 relative.
// Before this file: constexpr bool BFLOAT16.

#ifdef __CUDACC__
#define HF_DEVICE __device__ __forceinline__
#define HF_CONSTANT __device__ constexpr
HF_DEVICE float hf_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
HF_DEVICE float hf_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
HF_DEVICE float hf_div(float a, float b) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
HF_DEVICE float hf_inf() { return __int_as_float(0x7f800000); }
HF_DEVICE float hf_nan() { return __int_as_float(0x7fffffff); }
HF_DEVICE bool hf_signbit(float x) { return __float_as_int(x) < 0; }
#else
#include <cmath>
#include <limits>
using std::fabs;
#define HF_DEVICE inline
#define HF_CONSTANT constexpr
HF_DEVICE float hf_exp2(float x) { return exp2f(x); }
HF_DEVICE float hf_reciprocal(float x) { return 1.0f / x; }
HF_DEVICE float hf_div(float a, float b) { return a / b; }
HF_DEVICE float hf_inf() { return std::numeric_limits<float>::infinity(); }
HF_DEVICE float hf_nan() { return std::numeric_limits<float>::quiet_NaN(); }
HF_DEVICE bool hf_signbit(float x) { return std::signbit(x); }
#endif

#define ALWAYS_INLINE __attribute__((always_inline))  // of a lambda

HF_DEVICE bool hf_isnan(float x) { return x != x; }
HF_DEVICE bool hf_isinf(float x) { return fabsf(x) == hf_inf(); }
// as in PyTorch, a NaN on either side is the result
HF_DEVICE float hf_max(float a, float b) { return a != a || a > b ? a : b; }
HF_DEVICE float hf_min(float a, float b) { return a != a || a < b ? a : b; }
HF_DEVICE float hf_sign(float x) { return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : x); }

constexpr float HF_LOG2E = 1.4426950408889634f, HF_LOG2E_LOW = 1.925963033500e-8f;

// the product with log2(e) in two parts: one alone would lose the digits that the whole part of the exponent takes
HF_DEVICE float hf_exp(float x) {
    const float whole = x * HF_LOG2E;
    const float rest = fmaf(x, HF_LOG2E_LOW, fmaf(x, HF_LOG2E, -whole));
    const float power = hf_exp2(whole);
    // an infinite power has no correction
    return fabsf(whole) < 128.0f ? fmaf(power, rest * 0.6931471805599453f, power) : power;
}

HF_DEVICE float hf_sigmoid(float x) { return hf_reciprocal(1.0f + hf_exp2(-HF_LOG2E * x)); }

// tanh as a fraction whose parts cannot overflow. Below 0.1 in size 1 - exp(-2|x|) would lose digits: a series instead.
HF_DEVICE void hf_tanh_parts(float x, float& over, float& under) {
    const float power = hf_exp2(-2.0f * HF_LOG2E * fabsf(x));
    const float y = x * x;
    const float series = fmaf(x * y, fmaf(y, 0.13333334f, -0.33333334f), x);
    under = 1.0f + power;
    over = fabsf(x) < 0.1f ? series * under : copysignf(1.0f - power, x);
}

// Of a value that is rounded to bfloat16 next and seen by nothing else: 2^-11 relative, an eighth of that rounding's range.
HF_DEVICE float hf_tanh_before_rounding(float x) {
#ifdef __CUDACC__
    if constexpr (BFLOAT16) {
        float y;
        asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
#endif
    float over, under;
    hf_tanh_parts(x, over, under);
    return over * hf_reciprocal(under);
}

HF_DEVICE float hf_tanh(float x) {
    float over, under;
    hf_tanh_parts(x, over, under);
    return over * hf_reciprocal(under);
}
