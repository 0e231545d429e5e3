// Runs a kernel's fibers to their end. Compiled once for all kernels, as it takes as long as one of them.
#include "builtins.h"

#include <memory>
#include <random>

namespace emulator {
std::function<void()>* body;
void entry() {
    (*body)();
    current->done = true;
    yield();
}
// Runs a fiber until it yields.
void resume(Fiber* f) {
    current = f;
    if (_setjmp(scheduler)) return;
    if (f->started) _longjmp(f->place, 1);
    f->started = true;
    setcontext(&f->context);
}
bool run(dim3 grid, int count, size_t shared, unsigned seed, std::function<void()> kernel, long patience) {
    threads = count;
    body = &kernel;
    std::vector<Block> blocks(grid.x * grid.y * grid.z);
    std::vector<Fiber*> order;
    constexpr size_t STACK = 96 * 1024;
    // not a vector, which would write to all of it
    const std::unique_ptr<char[]> stacks(new char[blocks.size() * count * STACK]);
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
            f.context.uc_stack.ss_sp = stacks.get() + (i * count + t) * STACK;
            f.context.uc_stack.ss_size = STACK;
            f.context.uc_link = nullptr;
            makecontext(&f.context, entry, 0);
            order.push_back(&f);
        }
    }
    std::mt19937 random(seed);
    for (long turn = 0; turn < patience; turn++) {
        std::shuffle(order.begin(), order.end(), random);
        bool waits = true;
        // blocks fall behind one another
        for (Block& b : blocks)
            if (b.asleep > 0)
                b.asleep--;
            else if (blocks.size() > 1 && random() % 40 == 0)
                b.asleep = random() % 200;
        for (Fiber* f : order) {
            const bool asleep = f->block->asleep > 0;
            const bool stuck = f->awaited && *f->awaited == f->seen;
            waits &= stuck && !asleep;
            if (!asleep && !stuck) resume(f);
        }
        if (waits && !order.empty()) return false;
        order.erase(std::remove_if(order.begin(), order.end(), [](Fiber* f) { return f->done; }), order.end());
        if (order.empty()) return true;
    }
    return false;
}
}  // namespace emulator
