// Runs the fused kernels on a CPU: every thread of every block is a fiber that yields where threads wait for one another.
// This is what comes before the kernel's source; it stands in for CUDA's built-ins and for ptx.cuh. The order in which
// fibers run is shuffled by a seed, so that a missing barrier has a chance to show. Asynchronous copies arrive as late
// as they may: when they are waited for.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __align__(n)
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
struct dim3 { int x = 0, y = 0, z = 0; };

namespace emulator {
struct Block;
// A fiber starts by setcontext and goes on by longjmp, as swapcontext would make two system calls a switch.
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    Block* block;
    int thread;
    bool started = false, done = false, turn = false;
    const unsigned* awaited = nullptr;  // a barrier's generation, until it is no longer this one
    unsigned seen = 0;
    std::vector<std::function<void()>> open;                // copies that no group holds yet
    std::vector<std::vector<std::function<void()>>> groups;  // committed, oldest first
};
struct Barrier { int arrived = 0; unsigned generation = 0; };
// Threads hand words on in two places by turns: who is ahead by one does not write where others still read.
struct Warp {
    Barrier barrier;
    unsigned words[2][32][6];
};
struct Block {
    dim3 index;
    std::vector<char> shared;
    Barrier barriers[16];
    std::vector<Warp> warps;
    std::vector<Fiber> fibers;
    int asleep = 0;  // rounds that the block sits out
};
inline Fiber* current;
inline jmp_buf scheduler;
inline int threads;

inline void yield() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}
inline void arrive(Barrier& b, int count) {
    if (++b.arrived == count) b.arrived = 0, b.generation++;
}
inline void wait(Barrier& b, int count) {
    const unsigned before = b.generation;
    arrive(b, count);
    if (b.generation != before) return;
    current->awaited = &b.generation, current->seen = before;
    yield();
    current->awaited = nullptr;
}
inline Warp& warp() { return current->block->warps[current->thread / 32]; }
inline int lane() { return current->thread % 32; }
// Hands a thread's words to all of its warp; the words of all, until the thread's second next such call.
using Words = unsigned[32][6];
inline const Words& together(const unsigned* mine, int count) {
    Words& all = warp().words[current->turn];
    current->turn = !current->turn;
    std::memcpy(all[lane()], mine, count * sizeof *mine);
    wait(warp().barrier, 32);
    return all;
}

// runtime.cpp; false when fibers no longer get anywhere
bool run(dim3 grid, int count, size_t shared, unsigned seed, std::function<void()> kernel, long patience);
inline char* shared_memory() {
    char* p = current->block->shared.data();
    return p + (128 - (size_t)p % 128) % 128;
}
struct Thread { struct { operator int() const { return current->thread; } } x; };
struct Index { int x, y, z; };
}  // namespace emulator

#define threadIdx (emulator::Index{emulator::current->thread, 0, 0})
#define blockIdx (emulator::current->block->index)

inline void __syncthreads() { emulator::wait(emulator::current->block->barriers[0], emulator::threads); }
template <typename T> T exchange(T value, int from) {
    static_assert(sizeof(T) == 4, "");
    unsigned word;
    std::memcpy(&word, &value, 4);
    std::memcpy(&value, emulator::together(&word, 1)[from], 4);
    return value;
}
template <typename T> T __shfl_xor_sync(unsigned, T v, int m) { return exchange(v, emulator::lane() ^ m); }
template <typename T> T __shfl_down_sync(unsigned, T v, int d) {
    return exchange(v, std::min(31, emulator::lane() + d));
}
inline bool __any_sync(unsigned, unsigned v) {
    bool any = false;
    for (auto& word : emulator::together(&v, 1)) any |= word[0] != 0;
    return any;
}
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
template <typename T> T min(T a, T b) { return a < b ? a : b; }
