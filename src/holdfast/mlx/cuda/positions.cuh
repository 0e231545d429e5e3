// What Metal hands to a kernel as parameters, from CUDA's own variables. The grid's x is in threads, y and z in blocks.
const uint3 thread_position_in_grid = {blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y, blockIdx.z};
const uint3 threadgroup_position_in_grid = {blockIdx.x, blockIdx.y, blockIdx.z};
const uint3 threadgroups_per_grid = {gridDim.x, gridDim.y, gridDim.z};
const unsigned thread_index_in_simdgroup = threadIdx.x % 32;
const unsigned simdgroup_index_in_threadgroup = threadIdx.x / 32;
