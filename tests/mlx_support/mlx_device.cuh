// In place of what mlx puts before a CUDA kernel: its 16-bit types, and shapes as they are passed.
#define FROM_ANYWHERE __device__ inline
#define BITS_OF __float_as_uint
#define FLOAT_OF __uint_as_float
#include "metal_types.h"
using __nv_bfloat16 = bfloat16_t;
using __half = float16_t;
struct Shape {
  int sizes[10];
  __device__ int operator[](int i) const { return sizes[i]; }
};
