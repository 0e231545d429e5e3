// Backward pass of a head over many blocks, from the last step. Grid (slices of heads, ranges of rows sequences), cooperative.
// Arguments as in one_block/backward.cu; the last REACH steps of dx and extra are filled with SENTINEL; entry is not
// needed. db [ranges, GATES, H, WIDTH].
// Before this file: constexpr int AT_ONCE, the gates whose gradients a warp asks for together.

// of weights that are read again and again, eight must lie side by side: R is [RECURRENTS, H, in, out] then
constexpr bool TURNED = ON_CHIP < PER_WARP;

// a matrix has 16 channels of one gate
constexpr int PER_GATE = (EIGHTS + 1) / 2;
using Held = Weights<RECURRENTS * PER_GATE>;
constexpr int PITCH = SLICE + 4, PART_FLOATS = TILE * PITCH;  // a cell's sum at sequence * PITCH + channel: no bank conflicts
constexpr int PART_BYTES = 4 * PART_FLOATS * WARPS;

// A turn's kept gates, states before the step, gradients of h and h before the step, in 16-byte pieces: how many of each.
__device__ constexpr int old_states() {
    int n = 0;
    for (int i = 1; i < STATES; i++) n += NEEDS[i];
    return n;
}
constexpr int CELL_BYTES = GATES_SAVED * GATE_SIZE;
// a row of a slice is CELL_BYTES, 4 or 2 bytes a channel
constexpr int GATE_PIECES = CELLS * CELL_BYTES / 16, STATE_PIECES = CELLS / 4, HALF_PIECES = CELLS / 8;
constexpr int STATES_AT = GATE_PIECES, GRAD_AT = STATES_AT + old_states() * STATE_PIECES, H_AT = GRAD_AT + HALF_PIECES;
using Kept = Ring<H_AT + NEEDS[0] * HALF_PIECES, -1>;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
dense_many_blocks_backward(const half_t* R, const u32* resets, const float* initial, const half_t* h,
                           const float* states, const char* gates, const half_t* grad_h, const float* grad_final,
                           float clip, half_t* dx, half_t* extra, float* db, float* grad_initial, int* failed,
                           int batch, int length, int heads, int width, int rows, int first_head, int pause) {
    extern __shared__ __align__(128) char shared[];
    const Share own(batch, rows, first_head);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // one turn a tile more than there are steps: the last takes R^T dg to the initial state
    const int words = (length + 31) / 32, turns = (length + 1) * own.tiles;
    const long long token = (long long)heads * WIDTH;
    float* parts = (float*)(shared + Held::BYTES);  // [2][warp][slot]
    char* slots = shared + Held::BYTES + 2 * PART_BYTES;
    const Clock pace{(u32*)(slots + SLOTS * Kept::BYTES), pause};

    if (warp < WARPS) {
        take_registers();
        const int r = lane >> 2, q = lane & 3, k0 = 32 * warp * PER_WARP + 8 * q;
        Held weights;
        weights.load(shared, warp, lane, [&](int m, int half, int r, int k) {
            const int place = m % PER_GATE * 16 + 8 * half + r, channel = own.channel + place;
            const long long matrix = (long long)(m / PER_GATE) * heads + own.head;
            if (place >= SLICE || channel >= WIDTH) return uint4{0, 0, 0, 0};
            if (TURNED) return *(const uint4*)(R + (matrix * WIDTH + channel) * WIDTH + k);
            const half_t* from = R + (matrix * WIDTH + k) * WIDTH + channel;
            auto two = [&](int i) { return from[2 * i * WIDTH] | (u32)from[(2 * i + 1) * WIDTH] << 16; };
            return uint4{two(0), two(1), two(2), two(3)};
        });
        const u32 inside = pieces_inside(k0);
        const long long column = (long long)(own.first + r) * length * token, within = own.head * WIDTH + k0;
        const half_t *inputs = pinned(dx + column * INPUTS + within), *others = extra + column * EXTRAS + within;
        Mail<AT_ONCE * PER_WARP> mail;
        mail.clear();
        const half_t *input = inputs, *other = others;  // this lane's dg of the asked step
        int base = 0;                                   // the first gate asked for
        bool reads = false;
        auto where = [&](int i) {
            const int gate = GATE_OF[min(base + i / PER_WARP, RECURRENTS - 1)];
            return (EXTRAS == 0 || INPUT_OF[gate] >= 0 ? input + INPUT_OF[gate] * token : other + EXTRA_OF[gate] * token) +
                   32 * (i % PER_WARP);
        };
        auto wanted = [&](int i) { return reads && base + i / PER_WARP < RECURRENTS && (inside >> (i % PER_WARP) & 1); };
        Walk<-1> asked(length - 1, own.tiles, token, length);
        // the first gates of the next turn that has any
        auto ask = [&]() ALWAYS_INLINE {
            const int row = TILE * asked.tile + r;
            input = inputs + asked.at * INPUTS;
            other = others + asked.at * EXTRAS;
            reads = row < own.live && !bit(resets, words, own.first + min(row, own.live - 1), asked.t);
            mail.ask(where, wanted);
            asked.next();
        };
        bool patient = true;
        int turn = 0;
        for (int t = length - 1; t >= -1; t--)
            for (int tile = 0; tile < own.tiles; tile++, turn++) {
                const bool wraps = tile + 1 == own.tiles, ends = turn + 1 == turns;
                if (turn > 1) meet(EMPTY + (turn & 1));
                float sum[RECURRENTS * PER_GATE][4];
#pragma unroll
                for (int m = 0; m < RECURRENTS * PER_GATE; m++)
#pragma unroll
                    for (int j = 0; j < 4; j++) sum[m][j] = 0.0f;
                if (t < length - 1) {
#pragma unroll
                    for (int k = 0; k < RECURRENTS; k += AT_ONCE) {
                        base = k;
                        if (k > 0) mail.ask(where, wanted);
                        if (patient && !mail.wait(where)) {
                            patient = false;
                            *(volatile int*)failed = 1;
                        }
#pragma unroll
                        for (int i = 0; i < ON_CHIP; i++)
#pragma unroll
                            for (int u = 0; u < 2; u++)
#pragma unroll
                                for (int j = 0; j < AT_ONCE; j++)
                                    if (k + j < RECURRENTS) {
                                        const uint4 b = mail.v[j * PER_WARP + i];
#pragma unroll
                                        for (int e = 0; e < PER_GATE; e++) {
                                            const int m = (k + j) * PER_GATE + e;
                                            weights.product(sum[m], m, i, u, u ? b.z : b.x, u ? b.w : b.y);
                                        }
                                    }
                        if constexpr (TURNED) {
                            const half_t* own_rows = anew(R) + ((long long)own.head * WIDTH + own.channel + r) * WIDTH + k0;
#pragma unroll
                            for (int i = ON_CHIP; i < PER_WARP; i++)
#pragma unroll
                                for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
                                    for (int e = 0; e < PER_GATE; e++)
                                        if (k + j < RECURRENTS) {
                                            const long long matrix = (long long)(k + j) * heads * WIDTH;
                                            const half_t* rows = own_rows + (matrix + 16 * e) * WIDTH + 32 * i;
                                            const bool wanted = inside >> i & 1;
                                            bool there[2];
#pragma unroll
                                            for (int half = 0; half < 2; half++) {
                                                const int place = 16 * e + 8 * half + r;
                                                there[half] = place < SLICE && own.channel + place < WIDTH && wanted;
                                            }
                                            Held::streamed(sum[(k + j) * PER_GATE + e], rows, there[0], rows + 8 * WIDTH,
                                                           there[1], mail.v[j * PER_WARP + i]);
                                        }
                        }
                    }
                    base = 0;
                }
                // the step whose dg the next turn multiplies, if there is one
                const int next = t + 1 - wraps;
                if (!own.keeps_pace() && !ends && next < length) ask();
                float* part = parts + ((turn & 1) * WARPS + warp) * PART_FLOATS;
#pragma unroll
                for (int e = 0; e < EIGHTS; e++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        float total = 0.0f;
#pragma unroll
                        for (int k = 0; k < RECURRENTS; k++) total += sum[k * PER_GATE + e / 2][2 * (e % 2) + j];
                        part[(2 * q + j) * PITCH + 8 * e + r] = total;
                    }
                arrive(FULL + (turn & 1));
                if (tile == 0 && fences(t + 1)) fence();
                if (own.keeps_pace() && !ends && next < length) {
                    pace.wait(turn + 1 - own.tiles);
                    ask();
                }
            }
    } else {
        leave_registers();
        const Cells my(own);
        const int channel = own.channel + my.d;
        const long long at = own.head * WIDTH + channel, plane = (long long)batch * length * token;
        const long long base = pinned((long long)(own.first + my.n) * length * token);  // of this lane's first row
        const long long beside = pinned((long long)BESIDE * length * token);            // to its next one
        float* carried = (float*)(slots + SLOTS * Kept::BYTES + CLOCK_BYTES) + my.at;  // [tile][state][cell]
        auto place_of = [&](int tile, int i, int c) { return (tile * STATES + i) * CELLS + c * BESIDE * SLICE; };
        for (int tile = 0; tile < own.tiles; tile++)
#pragma unroll
            for (int c = 0; c < EACH; c++)
#pragma unroll
                for (int i = 0; i < STATES; i++) {
                    const int row = TILE * tile + my.n + c * BESIDE;
                    const bool given = grad_final && row < own.live;
                    if (my.exists)
                        carried[place_of(tile, i, c)] =
                            given ? grad_final[((long long)i * batch + own.first + row) * token + at] : 0.0f;
                }
        // element 0 of the slice in sequence 0, as a token of one vector
        const long long origin = (long long)own.first * length * token + own.head * WIDTH + own.channel;
        Kept ring(slots, my.lane, length - 1, own.live, length, own.tiles, token,
                   [&](int piece, int& within, const char*& from, int& scale, bool& before) {
                       int column;  // in bytes, of a row's
                       if (piece < STATES_AT) {
                           constexpr int ROW = GATE_PIECES / TILE;
                           within = piece / ROW, column = 16 * (piece % ROW), scale = CELL_BYTES;
                           from = gates + origin * CELL_BYTES;
                       } else if (piece < GRAD_AT) {
                           const int which = (piece - STATES_AT) / STATE_PIECES;
                           constexpr int ROW = STATE_PIECES / TILE;
                           within = (piece - STATES_AT) / ROW % TILE, column = 16 * ((piece - STATES_AT) % ROW);
                           scale = 4, before = true;
                           int state = 0;
#pragma unroll
                           for (int i = 1, k = 0; i < STATES; i++)
                               if (NEEDS[i] && k++ == which) state = i - 1;
                           from = (const char*)(states + state * plane + origin);
                       } else {
                           before = piece >= H_AT;
                           constexpr int ROW = HALF_PIECES / TILE;
                           within = (piece - GRAD_AT) / ROW % TILE, column = 16 * ((piece - GRAD_AT) % ROW), scale = 2;
                           from = (const char*)((before ? h : grad_h) + origin);
                           if (!before && !grad_h) return false;
                       }
                       from += column - (before ? scale * token : 0);
                       return own.channel + column / scale < WIDTH;
                   });
        gate_words kept[EACH] = {};
        float before[EACH][STATES], bias[GATES];
        half_t grad[EACH] = {};
#pragma unroll
        for (int i = 0; i < GATES; i++) bias[i] = 0.0f;
        auto take = [&](const char* slot, int t, int tile) {
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const int cell = my.at + c * BESIDE * SLICE, row = TILE * tile + my.n + c * BESIDE;
                load_gates(kept[c], slot + cell * CELL_BYTES);
                if (grad_h) grad[c] = ((const half_t*)(slot + 16 * GRAD_AT))[cell];
                const bool given = t == 0 && initial && my.exists && row < own.live;
#pragma unroll
                for (int i = 0, k = 0; i < STATES; i++) {
                    before[c][i] = 0.0f;
                    if (NEEDS[i]) {
                        if (t > 0)
                            before[c][i] = i == 0 ? widen(((const half_t*)(slot + 16 * H_AT))[cell])
                                                  : ((const float*)(slot + 16 * (STATES_AT + k * STATE_PIECES)))[cell];
                        if (given) before[c][i] = initial[((long long)i * batch + own.first + row) * token + at];
                        k += i > 0;
                    }
                }
            }
        };
        for (int i = 0; i < AHEAD; i++) ring.copy();
        copy_wait<AHEAD - 1>();
        barrier_sync<LANES>(SUMMED);
        take(slots, length - 1, 0);
        Walk<-1> walk(length - 1, own.tiles, token, length);
        for (int turn = 0; turn < turns; turn++, walk.next()) {
            const int t = walk.t, tile = walk.tile;
            const bool wraps = tile + 1 == own.tiles;
            bool zero[EACH];
            float g[EACH][GATES], given[EACH], old[EACH][STATES], after[EACH][STATES];
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const int row = TILE * tile + my.n + c * BESIDE;
                zero[c] = my.exists && row < own.live && t >= 0 && bit(resets, words, own.first + row, t);
                unpack_gates(g[c], kept[c]);
                given[c] = widen(grad[c]);
#pragma unroll
                for (int i = 0; i < STATES; i++) {
                    old[c][i] = zero[c] ? 0.0f : before[c][i];
                    after[c][i] = carried[place_of(tile, i, c)];
                }
            }
            ring.copy();
            copy_wait<AHEAD - 1>();

            meet(FULL + (turn & 1));
            const float* part = parts + (turn & 1) * WARPS * PART_FLOATS + my.n * PITCH + my.d;
            float through[EACH] = {};
#pragma unroll
            for (int w = 0; w < WARPS; w++)
#pragma unroll
                for (int c = 0; c < EACH; c++) through[c] += part[w * PART_FLOATS + c * BESIDE * PITCH];
            if (turn + 2 < turns) arrive(EMPTY + (turn & 1));
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const int row = TILE * tile + my.n + c * BESIDE;
                const bool alive = my.exists && row < own.live;
                after[c][0] += hf_min(hf_max(through[c], -clip), clip);
                if (t >= 0) {
                    float carry[STATES], dg[GATES];
                    after[c][0] += given[c];
                    cell_backward(old[c], g[c], after[c], carry, dg);
                    const long long place = base + walk.at + c * beside;
#pragma unroll
                    for (int i = 0; i < GATES; i++) {
                        const float value = alive && channel < width ? dg[i] : 0.0f;
                        const half_t found = narrow(value);
                        bias[i] += value;
                        if (INPUT_OF[i] >= 0)
                            write_relaxed(dx + place * INPUTS + INPUT_OF[i] * token + at, found, alive);
                        if (EXTRA_OF[i] >= 0)
                            write_relaxed(extra + place * EXTRAS + EXTRA_OF[i] * token + at, found, alive);
                    }
#pragma unroll
                    for (int i = 0; i < STATES; i++)
                        if (my.exists) carried[place_of(tile, i, c)] = zero[c] ? 0.0f : carry[i];
                } else if (alive) {
#pragma unroll
                    for (int i = 0; i < STATES; i++)
                        grad_initial[((long long)i * batch + own.first + row) * token + at] = after[c][i];
                }
            }
            if (own.keeps_pace() && t >= 0) pace.publish(turn, my.lane);
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const bool fills = my.exists && TILE * tile + my.n + c * BESIDE < own.live && t >= REACH;
                const long long place = base + walk.at - REACH * token + c * beside;
#pragma unroll
                for (int i = 0; i < GATES; i++) {
                    if (INPUT_OF[i] >= 0)
                        write_relaxed(dx + place * INPUTS + INPUT_OF[i] * token + at, (half_t)SENTINEL, fills);
                    if (EXTRA_OF[i] >= 0)
                        write_relaxed(extra + place * EXTRAS + EXTRA_OF[i] * token + at, (half_t)SENTINEL, fills);
                }
            }
            if (tile == 0 && t >= 0 && fences(t)) fence();
            take(ring.next(), t - wraps, wraps ? 0 : tile + 1);
        }
        // this block's share of db, added in one order
        float* sums = (float*)(slots + SLOTS * Kept::BYTES + CLOCK_BYTES) + my.at;
#pragma unroll
        for (int i = 0; i < GATES; i++) {
            if (my.exists) sums[0] = bias[i];
            barrier_sync<LANES>(SUMMED);
            if (my.n == 0 && my.exists) {
                float total = 0.0f;
                for (int k = 0; k < BESIDE; k++) total += sums[k * SLICE];
                db[((long long)blockIdx.y * GATES + i) * token + at] = total;
            }
            barrier_sync<LANES>(SUMMED);
        }
    }
}
