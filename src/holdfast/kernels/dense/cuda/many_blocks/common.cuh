// One head's recurrence over many blocks, all of which run at once. A block owns SLICE channels of a head for a range of
// sequences, which it takes 8 at a time (a tile); R's rows for those channels stay in registers, past that in shared memory;
// what does not fit there either is read again for every tile, from the L2 cache.
// The warps of a block share the sum over k out: each takes groups of 32 channels, and the block adds what they found.
//
// Vectors pass between blocks through memory that only they write, each number once: filled beforehand with SENTINEL, a NaN
// that no conversion yields, every number is its own flag. No fence, no barrier between blocks: a reader asks again
// until no word is the sentinel, a bounded number of times; then it reports that the grid is stuck and waits no more.
// The first REACH steps are filled before the launch. What comes after, the lanes that will write it fill REACH steps ahead;
// a fence at either end, some steps later, keeps a reader from seeing what was there before.
// Before this file: constexpr int WIDTH and SLICE (multiples of 8), WARPS (4, 8, 12 or 16), IN_REGISTERS, IN_SHARED, RESETS,
// TAKEN, LEFT and REACH.

// Two roles: WARPS warps wait for vectors and multiply, four more have a lane for each EACH cells of a tile, add up what the
// others found, run the cell and publish. They hand sums over through two buffers, so that both work at once.
constexpr int SLICES = (WIDTH + SLICE - 1) / SLICE, TILE = 8, CELLS = SLICE * TILE, LANES = 128, THREADS = 32 * WARPS + LANES;
constexpr int EACH = (SLICE + 15) / 16, BESIDE = TILE / EACH;  // sequences that the lanes take at a time
static_assert(TILE % EACH == 0, "all lanes have as many sequences");
constexpr int GROUPS = (WIDTH + 31) / 32, PER_WARP = (GROUPS + WARPS - 1) / WARPS;
constexpr int ON_CHIP = IN_REGISTERS + IN_SHARED;  // groups of a warp
constexpr int EIGHTS = SLICE / 8;  // of a slice's channels

constexpr u32 SENTINEL = 0xffffu;
constexpr int PATIENCE = 1 << 22;
// Whether to fence, after the first tile of step t: once or more between the filling of a step and the look at it.
HF_DEVICE bool fences(int t) { return t % ((REACH + 3) / 4) == 0; }

// named barriers
enum { FULL = 1, EMPTY = 3, PUBLISHED = 5, SUMMED = 7 };
HF_DEVICE void meet(int barrier) { barrier_sync<THREADS>(barrier); }
HF_DEVICE void arrive(int barrier) { barrier_arrive<THREADS>(barrier); }

// Registers go from the cells' warps, which keep LEFT a thread, to those that hold weights, which then have TAKEN; where
// the architecture can move them.
HF_DEVICE void take_registers() {
    if (TAKEN > 0) registers_more<TAKEN>();
}
HF_DEVICE void leave_registers() {
    if (LEFT > 0) registers_fewer<LEFT>();
}

// MATRICES times 16 rows of weights: products [group][half of the group]
template <int MATRICES> struct Weights {
    static constexpr int BYTES = MATRICES * IN_SHARED * 2 * 512 * WARPS;
    u32 held[MATRICES][IN_REGISTERS > 0 ? IN_REGISTERS : 1][2][4];
    const uint4* rest;  // [matrix][group][half][lane] of this warp

    // weight(m, half, r, k): of row 8 * half + r of matrix m, for the eight input channels from k on
    template <typename Weight> HF_DEVICE void load(char* shared, int warp, int lane, Weight weight) {
        const int r = lane >> 2, q = lane & 3;
        uint4* mine = (uint4*)shared + warp * (MATRICES * IN_SHARED * 2 * 32) + lane;
        rest = mine;
#pragma unroll
        for (int m = 0; m < MATRICES; m++)
#pragma unroll
            for (int i = 0; i < ON_CHIP; i++)
            {
                const int k = 32 * (warp * PER_WARP + i) + 8 * q;
                uint4 v = {0, 0, 0, 0}, w = {0, 0, 0, 0};
                if (k < WIDTH) v = weight(m, 0, r, k), w = weight(m, 1, r, k);
                const u32 a[2][4] = {{v.x, w.x, v.y, w.y}, {v.z, w.z, v.w, w.w}};
#pragma unroll
                for (int u = 0; u < 2; u++)
                    if (i < IN_REGISTERS) {
#pragma unroll
                        for (int j = 0; j < 4; j++) held[m][i < IN_REGISTERS ? i : 0][u][j] = a[u][j];
                    } else {
                        mine[((m * IN_SHARED + i - IN_REGISTERS) * 2 + u) * 32] = uint4{a[u][0], a[u][1], a[u][2], a[u][3]};
                    }
            }
    }
    // both products of a group that lies in memory: upper and lower are where this lane's eight channels of the rows r and r + 8
    // begin, if wanted
    static HF_DEVICE void streamed(float (&sum)[4], const half_t* upper, bool has_upper, const half_t* lower, bool has_lower,
                                   const uint4& b) {
        uint4 v = {0, 0, 0, 0}, w = {0, 0, 0, 0};
        if (has_upper) v = *(const uint4*)upper;
        if (has_lower) w = *(const uint4*)lower;
        const u32 first[4] = {v.x, w.x, v.y, w.y}, second[4] = {v.z, w.z, v.w, w.w};
        multiply(sum, first, b.x, b.y);
        multiply(sum, second, b.z, b.w);
    }
    HF_DEVICE void product(float (&sum)[4], int m, int i, int u, u32 b0, u32 b1) const {
        if (i < IN_REGISTERS) {
            multiply(sum, held[m][i < IN_REGISTERS ? i : 0][u], b0, b1);
        } else {
            const uint4 v = rest[((m * IN_SHARED + i - IN_REGISTERS) * 2 + u) * 32];
            const u32 a[4] = {v.x, v.y, v.z, v.w};
            multiply(sum, a, b0, b1);
        }
    }
};

HF_DEVICE u32 largest(const uint4& v) { return larger(larger(v.x, v.y), larger(v.z, v.w)); }
// whether one of two numbers, each the largest of many, is SENTINEL, the largest of all
HF_DEVICE bool missing(u32 most) { return most >> 16 == SENTINEL || (most & 0xffffu) == SENTINEL; }

// the pieces of a warp's share that lie within the head; all where they do for every warp, known when this is compiled
HF_DEVICE u32 pieces_inside(int first) {
    if (WIDTH % 32 == 0 && GROUPS == WARPS * PER_WARP) return ~0u;
    u32 inside = 0;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) inside |= (u32)(first + 32 * i < WIDTH) << i;
    return inside;
}

// COUNT pieces of eight channels that other blocks write: asked for early, waited for late.
// where(i): the place of piece i, the same in both calls. What is never asked for stays zeros; a sequence that is past the
// batch keeps what its lane had before, of which nothing comes.
template <int COUNT> struct Mail {
    uint4 v[COUNT];

    HF_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < COUNT; i++) v[i] = uint4{0, 0, 0, 0};
    }
    // wanted(i): whether piece i is
    template <typename Where, typename Wanted> HF_DEVICE void ask(Where where, Wanted wanted) {
        // a sequence that begins anew multiplies zeros
        if (RESETS) clear();
#pragma unroll
        for (int i = 0; i < COUNT; i++) read_relaxed(v[i], where(i), wanted(i));
    }
    // false after too many attempts
    template <typename Where> HF_DEVICE bool wait(Where where) {
#pragma unroll 1
        for (int attempt = 0; attempt < PATIENCE; attempt++) {
            u32 most = 0;
#pragma unroll
            for (int i = 0; i < COUNT; i++) most = larger(most, largest(v[i]));
            if (!__any_sync(0xffffffffu, missing(most))) return true;
#pragma unroll
            for (int i = 0; i < COUNT; i++) read_relaxed(v[i], where(i), missing(largest(v[i])));
        }
        return false;
    }
};

// Turns in order: all tiles of a step, then the next step's. at: where in memory the turn's first sequence begins, in
// elements of arrays of one vector a token; WAY: from step to step, 1 or -1.
template <int WAY> struct Walk {
    long long at, from_tile, from_step;  // and to the next one
    int t, tile, tiles;
    HF_DEVICE Walk(int first, int count, long long token, int length)
        : at(first * token), from_tile(pinned(TILE * token * length)),
          from_step(pinned(WAY * token - (count - 1) * from_tile)), t(first), tile(0), tiles(count) {}
    HF_DEVICE void next() {
        const bool wraps = tile + 1 == tiles;
        at += wraps ? from_step : from_tile;
        tile = wraps ? 0 : tile + 1;
        t += wraps ? WAY : 0;
    }
};

// What the cells need of memory comes through a ring in shared memory, AHEAD turns before its use: a load to registers
// would be waited for in the turn that asked for it, and memory is further away than a turn is long.
constexpr int SLOTS = 4, AHEAD = SLOTS - 1;

// The 16-byte pieces of a turn, COUNT in all; a lane of the cells moves MINE of them.
template <int COUNT, int WAY> struct Ring {
    static constexpr int MINE = (COUNT + LANES - 1) / LANES, BYTES = 16 * COUNT;
    const char* from[MINE];  // at step 0 of the first tile
    int scale[MINE];         // bytes of an element
    int row[MINE];           // within a tile
    bool before[MINE];       // belongs to the step before: the first step has none
    Walk<WAY> turn;
    int length, live;
    const char* slots;
    int slot;  // the next to be filled, in bytes from the first
    u32 mine;  // this lane's first piece in the first slot

    // place(piece, row, from, scale, before): where a piece of a row lies at step 0 of sequence 0, which is scale bytes an
    // element; false if nowhere
    template <typename Place>
    HF_DEVICE Ring(const char* shared, int lane, int first, int sequences, int steps, int tiles, long long token, Place place)
        : turn(first, tiles, token, steps), length(steps), live(sequences), slots(shared), slot(0),
          mine(shared_address(shared) + 16 * lane) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            row[i] = live, from[i] = nullptr, scale[i] = 0, before[i] = false;
            int within = 0;
            if (lane + i * LANES < COUNT && place(lane + i * LANES, within, from[i], scale[i], before[i])) row[i] = within;
            from[i] = pinned(from[i] + (long long)within * length * token * scale[i]);
        }
    }
    // asks for the next turn's pieces that nobody asked for yet; called in every turn, also when there are no more
    HF_DEVICE void copy() {
#pragma unroll
        for (int i = 0; i < MINE; i++)
            copy_async(mine + slot + 16 * i * LANES, from[i] + turn.at * scale[i],
                       turn.t >= before[i] && turn.t < length && TILE * turn.tile + row[i] < live);
        copy_commit();
        slot = after(slot);
        turn.next();
    }
    // what the next turn needs, once all cells have passed a barrier after copy_wait<AHEAD - 1>
    HF_DEVICE const char* next() const { return slots + after(slot); }
    HF_DEVICE static int after(int slot) { return slot == (SLOTS - 1) * BYTES ? 0 : slot + BYTES; }
};

// When a block publishes, by its own clock, for turns of either parity. With one or two tiles a turn's vectors were published
// just before by blocks that are as far as this one: nobody's can be there before its own, and asking too early, again and
// again, gets in the way of what all wait for.
constexpr int CLOCK_BYTES = 16;
struct Clock {
    volatile u32* times;
    int pause;
    // by all lanes of the cells, of which one tells the time
    HF_DEVICE void publish(int turn, int lane) const {
        if (lane == 0) times[turn & 1] = clock();
        arrive(PUBLISHED + (turn & 1));
    }
    // until pause cycles have passed since this block published in that turn
    HF_DEVICE void wait(int turn) const {
        meet(PUBLISHED + (turn & 1));
        const u32 start = times[turn & 1];
        while ((u32)clock() - start < (u32)pause) {
        }
    }
};

// this block's share: a slice of a head's channels, and sequences first to first + live - 1
struct Share {
    int head, channel, first, live, tiles;
    HF_DEVICE bool keeps_pace() const { return tiles <= 2; }  // whether Clock is used
    HF_DEVICE Share(int batch, int rows, int first_head) {
        const int bx = blockIdx.x, by = blockIdx.y;
        channel = bx % SLICES * SLICE;
        head = first_head + bx / SLICES;
        first = by * rows;
        live = min(rows, batch - first);
        tiles = (live + TILE - 1) / TILE;
    }
};

// a lane's cells: channel d of the slice in sequences n, n + BESIDE and so on of a tile
struct Cells {
    int lane, d, n, at;  // at: the first cell's place among a tile's
    bool exists;
    HF_DEVICE Cells(const Share& own) {
        lane = threadIdx.x - 32 * WARPS;
        d = lane % SLICE;
        n = lane / SLICE;
        exists = n < BESIDE && own.channel + d < WIDTH;
        n = min(n, BESIDE - 1);
        at = n * SLICE + d;
    }
};

HF_DEVICE bool bit(const u32* resets, int words, int row, int t) {
    return RESETS && (resets[(long long)row * words + t / 32] >> (t & 31) & 1);
}
