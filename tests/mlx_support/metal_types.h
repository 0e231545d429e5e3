// Metal's scalar types, as C++ and CUDA have them.
#pragma once
typedef unsigned int uint;

struct bfloat16_t {
  unsigned short bits;
  bfloat16_t() = default;
  FROM_ANYWHERE explicit bfloat16_t(float x) {
    uint u = BITS_OF(x);
    // to nearest, ties to even; a NaN stays one
    bits = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (unsigned short)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  FROM_ANYWHERE operator float() const { return FLOAT_OF(uint(bits) << 16); }
};

struct float16_t {
  unsigned short bits;
  float16_t() = default;
  FROM_ANYWHERE explicit float16_t(float x) {
    const uint u = BITS_OF(x), size = u & 0x7fffffffu;
    uint h;
    if (size > 0x7f800000u) h = 0x7e00u;                                               // NaN
    else if (size >= 0x477ff000u) h = 0x7c00u;                                         // rounds to infinity
    else if (size < 0x38800000u) h = BITS_OF(FLOAT_OF(size) + 0.5f) - 0x3f000000u;     // subnormal: 0.5's last place
    else h = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1)) >> 13;                 // is that of the smallest
    bits = (unsigned short)(h | ((u >> 16) & 0x8000u));
  }
  FROM_ANYWHERE operator float() const {
    const uint sign = uint(bits & 0x8000u) << 16, power = (bits >> 10) & 31u, rest = bits & 0x3ffu;
    if (power == 0) return FLOAT_OF(BITS_OF(rest * 5.9604644775390625e-8f) | sign);    // 2^-24
    return FLOAT_OF(sign | (power == 31 ? 0x7f800000u : (power + 112u) << 23) | rest << 13);
  }
};
