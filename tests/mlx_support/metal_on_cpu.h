// Runs a Metal kernel body on one CPU thread. Each Metal thread is a fiber; simdgroup operations and barriers hand over
// to a scheduler, which takes simdgroups and lanes in a random order and reports lanes that do not meet.
#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define FROM_ANYWHERE inline
static inline unsigned bits_of(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static inline float float_of(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
#define BITS_OF bits_of
#define FLOAT_OF float_of
#include "metal_types.h"
#define device
#define constant
#define thread

// One section for all threadgroup memory, so that it can be poisoned between threadgroups.
#define threadgroup static __attribute__((section("threadgroup_memory")))
char unused_threadgroup_memory __attribute__((section("threadgroup_memory"), used));
extern "C" char __start_threadgroup_memory[], __stop_threadgroup_memory[];

struct uint3 { uint x, y, z; };
template <typename N> static inline N min(N a, N b) { return a < b ? a : b; }
template <typename N> static inline N max(N a, N b) { return a > b ? a : b; }
// builtins: math.h of C++ takes longer to compile than a kernel
static inline float exp(float x) { return __builtin_expf(x); }
static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
enum class mem_flags { mem_none, mem_device, mem_threadgroup };

namespace shim {
constexpr int WIDTH = 32, MOST = 1024, STACK = 1 << 16;
enum State { READY, AT_SIMD, AT_BARRIER, DONE };

struct Place { uint3 grid, in_group, group, groups; uint lane, simdgroup; };
struct Fiber { ucontext_t start; jmp_buf at; char *stack; bool started; State state; int line; float value; Place place; };

static Fiber fibers[MOST];
static float shown[MOST];  // what each lane brought to the last simdgroup operation
static int current, count;
static jmp_buf scheduler;
static unsigned long long luck;
static void (*body)(const Place &);
static char trouble[256];

static unsigned draw(unsigned below) {
  luck = luck * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(luck >> 33) % below;
}

static void hand_over(State state, int line) {
  Fiber &fiber = fibers[current];
  fiber.state = state;
  fiber.line = line;
  if (!_setjmp(fiber.at)) _longjmp(scheduler, 1);
}

static void live() {
  for (;;) {
    body(fibers[current].place);
    hand_over(DONE, 0);
  }
}

static void run_lane(int lane) {
  current = lane;
  if (_setjmp(scheduler)) return;
  Fiber &fiber = fibers[lane];
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  if (!fiber.stack) fiber.stack = (char *)mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack;
  fiber.start.uc_stack.ss_size = STACK;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, live, 0);
  setcontext(&fiber.start);
}

static bool fail(const char *what, int line, int other) {
  snprintf(trouble, sizeof trouble, "%s: line %d of the generated source beside line %d", what, line, other);
  return false;
}

// Whether all lanes [from, to) are in the same state at the same line.
static bool agree(int from, int to) {
  for (int i = from; i < to; ++i)
    if (fibers[i].state != fibers[from].state || fibers[i].line != fibers[from].line)
      return fail("lanes of a simdgroup diverge at a simdgroup operation or barrier", fibers[from].line, fibers[i].line);
  return true;
}

static void shuffle(int *order, int n) {
  for (int i = 0; i < n; ++i) order[i] = i;
  for (int i = n - 1; i > 0; --i) { int j = draw(i + 1), kept = order[i]; order[i] = order[j]; order[j] = kept; }
}

// Runs the lanes of a simdgroup to their next meeting. False if they do not meet.
static bool run_simdgroup(int from, int to) {
  int lanes[WIDTH];
  shuffle(lanes, to - from);
  for (int i = 0; i < to - from; ++i) run_lane(from + lanes[i]);
  if (!agree(from, to)) return false;
  if (fibers[from].state != AT_SIMD) return true;
  if (to - from < WIDTH) return fail("a simdgroup operation in a simdgroup that is not full", fibers[from].line, 0);
  for (int i = from; i < to; ++i) { shown[i] = fibers[i].value; fibers[i].state = READY; }
  return true;
}

static bool run_threadgroup() {
  const int groups = (count + WIDTH - 1) / WIDTH;
  int order[MOST];
  for (int i = 0; i < count; ++i) fibers[i].state = READY;
  for (;;) {
    bool ran = false;
    shuffle(order, groups);
    for (int g = 0; g < groups; ++g) {
      const int from = order[g] * WIDTH, to = min(from + WIDTH, count);
      // some take a few operations, some run on as far as they can: far enough ahead to meet a race
      const int burst = draw(2) ? 1 + (int)draw(8) : 1 << 30;
      for (int i = 0; i < burst && fibers[from].state == READY; ++i) {
        ran = true;
        if (!run_simdgroup(from, to)) return false;
      }
    }
    if (ran) continue;
    // no simdgroup can go on: all are done, or all wait at one barrier
    for (int i = 0; i < count; ++i)
      if (fibers[i].state != fibers[0].state || fibers[i].line != fibers[0].line)
        return fail("simdgroups of a threadgroup diverge at a barrier", fibers[0].line, fibers[i].line);
    if (fibers[0].state == DONE) return true;
    for (int i = 0; i < count; ++i) fibers[i].state = READY;
  }
}

// Runs the threadgroups from `first` on, in each direction.
static int launch(void (*kernel)(const Place &), const int *grid, const int *group, const int *first, unsigned seed,
                  char *message) {
  body = kernel;
  // 32 KiB on every Apple GPU; g++ may pad in between
  const long bytes = __stop_threadgroup_memory - __start_threadgroup_memory;
  if (bytes > 32 * 1024 + 64) {
    sprintf(message, "%ld bytes of threadgroup memory, of 32768", bytes);
    return 1;
  }
  luck = seed * 2654435761ull + 1;
  uint n[3], size[3];
  for (int i = 0; i < 3; ++i) { size[i] = min(group[i], grid[i]); n[i] = (grid[i] + size[i] - 1) / size[i]; }
  // a fiber stopped halfway by an earlier failure starts anew
  for (int i = 0; i < MOST; ++i) fibers[i].started = false;
  for (uint z = first[2]; z < n[2]; ++z)
    for (uint y = first[1]; y < n[1]; ++y)
      for (uint x = first[0]; x < n[0]; ++x) {
        memset(__start_threadgroup_memory, 0xff, __stop_threadgroup_memory - __start_threadgroup_memory);
        count = 0;
        for (uint k = z * size[2]; k < min((z + 1) * size[2], (uint)grid[2]); ++k)
          for (uint j = y * size[1]; j < min((y + 1) * size[1], (uint)grid[1]); ++j)
            for (uint i = x * size[0]; i < min((x + 1) * size[0], (uint)grid[0]); ++i, ++count)
              fibers[count].place = {{i, j, k},
                                     {i - x * size[0], j - y * size[1], k - z * size[2]},
                                     {x, y, z},
                                     {n[0], n[1], n[2]},
                                     (uint)(count % WIDTH),
                                     (uint)(count / WIDTH)};
        if (!run_threadgroup()) { strcpy(message, trouble); return 1; }
      }
  return 0;
}

static const float *meet(float value, int line) {
  fibers[current].value = value;
  hand_over(AT_SIMD, line);
  return shown + current / WIDTH * WIDTH;
}
static float sum(float x, int line) {
  const float *lanes = meet(x, line);
  float total = 0;
  for (int i = 0; i < WIDTH; ++i) total += lanes[i];
  return total;
}
static float shuffle_xor(float x, int mask, int line) { return meet(x, line)[(current % WIDTH) ^ mask]; }
static float shuffle_from(float x, int lane, int line) { return meet(x, line)[lane]; }
}  // namespace shim

#define simd_sum(x) shim::sum(x, __LINE__)
#define simd_shuffle_xor(x, mask) shim::shuffle_xor(x, mask, __LINE__)
#define simd_shuffle(x, lane) shim::shuffle_from(x, lane, __LINE__)
#define simdgroup_barrier(flags) shim::meet(0, __LINE__)
#define threadgroup_barrier(flags) shim::hand_over(shim::AT_BARRIER, __LINE__)
