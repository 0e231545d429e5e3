// Metal's names in CUDA: a simdgroup is a warp, a threadgroup is a block.
#define FUNCTION __device__ inline
#define threadgroup __shared__
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
__device__ inline float simd_sum(float x) {
  for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}
#define simd_shuffle_xor(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#define simdgroup_barrier(flags) __syncwarp()
#define threadgroup_barrier(flags) __syncthreads()
