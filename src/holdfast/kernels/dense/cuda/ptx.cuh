// All PTX of the kernels: 16-bit numbers, tensor-core products, copies, words that blocks exchange, named barriers.
// The tests put functions of the same names in its place and run the kernels on a CPU. Before this file: BFLOAT16.

typedef unsigned short half_t;
typedef unsigned int u32;
typedef unsigned long long u64;

// two floats, rounded to the operands' type; the first in the low half
HF_DEVICE u32 pack(float low, float high) {
    u32 y;
    if constexpr (BFLOAT16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

HF_DEVICE half_t narrow(float x) { return (half_t)(pack(x, 0.0f) & 0xffffu); }

HF_DEVICE float widen(half_t x) {
    float y;
    if constexpr (BFLOAT16)
        y = __int_as_float((int)x << 16);
    else
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

// c += a b: a 16 x 16 by rows, b 16 x 8 by columns, c 16 x 8 in float32.
// With r = lane / 4 and q = lane % 4, a lane holds: a[0], a[1] rows r and r + 8 at k = 2q, 2q + 1; a[2], a[3] the same at
// k + 8; b[0] column r at k = 2q, 2q + 1, b[1] at k + 8; c[0], c[1] row r at columns 2q, 2q + 1; c[2], c[3] row r + 8.
HF_DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (BFLOAT16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

HF_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// predicated inside the instruction: a branch would cost more than what it skips
HF_DEVICE void copy_async(u32 to, const void* from, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(to), "l"(from),
                 "r"((u32)wanted));
}
HF_DEVICE void write_vector(void* to, const uint4& v, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.u32 [%0], {%1,%2,%3,%4}; }" ::"l"(to), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w), "r"((u32)wanted));
}
// to an address that was computed before: the compiler would find where shared memory begins anew in every turn
HF_DEVICE void write_shared(u32 to, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
HF_DEVICE void write_shared(u32 to, const float (&v)[1]) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v[0]) : "memory");
}
HF_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING> HF_DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// words that one block writes and others read, past the caches that they do not share
HF_DEVICE void read_relaxed(uint4& v, const half_t* p, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"((u32)wanted));
}
HF_DEVICE void write_relaxed(half_t* p, half_t v, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.relaxed.gpu.global.u16 [%0], %1; }" ::"l"(p), "h"(v),
                 "r"((u32)wanted));
}

// what this thread did before comes before what it does after, for all that have seen a word of it from between
HF_DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// of either half of two words the larger
HF_DEVICE u32 larger(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 y;
    asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#else
    return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
#endif
}

// the same pointer, but not what was computed from it before: addresses that do not change would all be kept in registers
HF_DEVICE const half_t* anew(const half_t* p) {
    asm volatile("" : "+l"(p));
    return p;
}

// the same number, but kept in registers: what ptxas can compute again from others, it does in every turn of a loop
HF_DEVICE int pinned(int x) { return __shfl_sync(0xffffffffu, x, threadIdx.x & 31); }
HF_DEVICE long long pinned(long long x) {
    const u32 low = pinned((int)(x & 0xffffffff)), high = pinned((int)(x >> 32));
    return (long long)((u64)high << 32 | low);
}
template <typename T> HF_DEVICE T* pinned(T* p) { return (T*)pinned((long long)p); }

template <int THREADS> HF_DEVICE void barrier_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS> HF_DEVICE void barrier_arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// registers a thread from now on, where the architecture can move them between warps
template <int COUNT> HF_DEVICE void registers_more() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT> HF_DEVICE void registers_fewer() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
