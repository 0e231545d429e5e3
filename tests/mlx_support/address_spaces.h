// Metal's address spaces as clang's, so that clang refuses what Metal refuses: a pointer of one space as another's.
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup static __attribute__((address_space(3)))
#define thread
typedef unsigned int uint;
struct uint3 { uint x, y, z; };
// a scalar type of 16 bits that any clang knows: only its being a scalar matters here
typedef _Float16 bfloat16_t;
typedef _Float16 float16_t;
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <typename N> N simd_sum(N);
template <typename N> N simd_shuffle_xor(N, unsigned short);
float fma(float, float, float);
float exp(float);
template <typename N> N min(N, N);
template <typename N> N max(N, N);
