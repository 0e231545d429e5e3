// Runs the fused kernels on a CPU: every thread of every block is a fiber that yields where threads wait for one another.
// This is what comes before the kernel's source; it stands in for CUDA's built-ins and for ptx.cuh. The order in which
// fibers run is shuffled by a seed, so that a missing barrier has a chance to show. Asynchronous copies arrive as late
// as they may: when they are waited for.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <map>
#include <random>
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
struct Fiber {
    ucontext_t context;
    Block* block;
    int thread;
    bool done = false;
    std::vector<std::function<void()>> open;                // copies that no group holds yet
    std::vector<std::vector<std::function<void()>>> groups;  // committed, oldest first
};
struct Barrier { int arrived = 0; unsigned generation = 0; };
struct Warp {
    Barrier barrier;
    unsigned words[32][6];
};
struct Block {
    dim3 index;
    std::vector<char> shared;
    std::map<int, Barrier> barriers;
    std::vector<Warp> warps;
    std::vector<Fiber> fibers;
    int asleep = 0;  // rounds that the block sits out
};
inline Fiber* current;
inline ucontext_t scheduler;
inline int threads;

inline void yield() { swapcontext(&current->context, &scheduler); }
inline void arrive(Barrier& b, int count) {
    if (++b.arrived == count) b.arrived = 0, b.generation++;
}
inline void wait(Barrier& b, int count) {
    const unsigned before = b.generation;
    arrive(b, count);
    while (b.generation == before) yield();
}
inline Warp& warp() { return current->block->warps[current->thread / 32]; }
inline int lane() { return current->thread % 32; }
inline void together() { wait(warp().barrier, 32); }

inline std::function<void()>* body;
inline void entry() {
    (*body)();
    current->done = true;
    swapcontext(&current->context, &scheduler);
}
// false when fibers no longer get anywhere
inline bool run(dim3 grid, int count, size_t shared, unsigned seed, std::function<void()> kernel, long patience) {
    threads = count;
    body = &kernel;
    std::vector<Block> blocks(grid.x * grid.y * grid.z);
    std::vector<Fiber*> order;
    std::vector<char> stacks;
    constexpr size_t STACK = 96 * 1024;
    stacks.resize(blocks.size() * count * STACK);
    for (size_t i = 0; i < blocks.size(); i++) {
        Block& b = blocks[i];
        b.index.x = i % grid.x, b.index.y = i / grid.x % grid.y, b.index.z = i / grid.x / grid.y;
        // what a kernel does not write must not look like zeros
        b.shared.assign(shared + 128, (char)0xcd);
        b.warps.resize(count / 32);
        b.fibers.resize(count);
        for (int t = 0; t < count; t++) {
            Fiber& f = b.fibers[t];
            f.block = &b, f.thread = t;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = stacks.data() + (i * count + t) * STACK;
            f.context.uc_stack.ss_size = STACK;
            f.context.uc_link = nullptr;
            makecontext(&f.context, entry, 0);
            order.push_back(&f);
        }
    }
    std::mt19937 random(seed);
    for (long turn = 0; turn < patience; turn++) {
        std::shuffle(order.begin(), order.end(), random);
        // blocks fall behind one another
        for (Block& b : blocks)
            if (b.asleep > 0)
                b.asleep--;
            else if (blocks.size() > 1 && random() % 40 == 0)
                b.asleep = random() % 200;
        for (Fiber* f : order) {
            if (f->block->asleep > 0) continue;
            current = f;
            swapcontext(&scheduler, &f->context);
        }
        order.erase(std::remove_if(order.begin(), order.end(), [](Fiber* f) { return f->done; }), order.end());
        if (order.empty()) return true;
    }
    return false;
}
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
    auto& w = emulator::warp();
    std::memcpy(&w.words[emulator::lane()][0], &value, 4);
    emulator::together();
    std::memcpy(&value, &w.words[from][0], 4);
    emulator::together();
    return value;
}
template <typename T> T __shfl_xor_sync(unsigned, T v, int m) { return exchange(v, emulator::lane() ^ m); }
template <typename T> T __shfl_down_sync(unsigned, T v, int d) {
    return exchange(v, std::min(31, emulator::lane() + d));
}
inline bool __any_sync(unsigned, unsigned v) {
    auto& w = emulator::warp();
    w.words[emulator::lane()][0] = v;
    emulator::together();
    bool any = false;
    for (auto& word : w.words) any |= word[0] != 0;
    emulator::together();
    return any;
}
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
template <typename T> T min(T a, T b) { return a < b ? a : b; }
