// Metal's names in CUDA, for NVRTC: simdgroups are warps, threadgroups are blocks.
#define FROM_ANYWHERE __device__ inline
#define BITS_OF __float_as_uint
#define FLOAT_OF __uint_as_float
#include "metal_types.h"
#define threadgroup __shared__
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
__device__ inline float simd_sum(float x) {
  for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}
#define simd_shuffle_xor(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#define simdgroup_barrier(flags) __syncwarp()
#define threadgroup_barrier(flags) __syncthreads()
