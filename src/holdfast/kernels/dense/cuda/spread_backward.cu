// Backward pass of a head over many blocks, from the last step. Grid (slices of heads, ranges of rows sequences), cooperative.
// Arguments as in resident_backward.cu; dx and extra filled with SENTINEL; entry is not needed. db [ranges, GATES, H, WIDTH].
// Before this file: constexpr int AT_ONCE, the gates whose gradients a warp asks for together.

constexpr int PART_FLOATS = TILE * 20;  // a cell's sum at sequence * 20 + channel: no bank conflicts
constexpr int PART_BYTES = 4 * PART_FLOATS * WARPS;

// A turn's kept gates, states before the step, gradients of h and h before the step, in 16-byte pieces: how many of each.
__device__ constexpr int old_states() {
    int n = 0;
    for (int i = 1; i < STATES; i++) n += NEEDS[i];
    return n;
}
constexpr int CELL_BYTES = GATES_KEPT * GATE_SIZE;
constexpr int GATE_PIECES = TILE * CELL_BYTES, STATE_PIECES = 4 * TILE, HALF_PIECES = 2 * TILE;
constexpr int STATES_AT = GATE_PIECES, GRAD_AT = STATES_AT + old_states() * STATE_PIECES, H_AT = GRAD_AT + HALF_PIECES;
using Kept = Ring<H_AT + NEEDS[0] * HALF_PIECES, -1>;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
spread_backward(const half_t* R, const u32* resets, const float* initial, const half_t* h, const float* states,
                const char* gates, const half_t* grad_h, const float* grad_final, float clip, half_t* dx, half_t* extra,
                float* db, float* grad_initial, int* failed, int batch, int length, int heads, int width, int rows,
                int first_head, int pause) {
    extern __shared__ __align__(128) char shared[];
    const Share own(batch, rows, first_head);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // one turn a tile more than there are steps: the last takes R^T dg to the initial state
    const int words = (length + 31) / 32, turns = (length + 1) * own.tiles;
    const long long token = (long long)heads * WIDTH, tile_step = TILE * token * length;
    float* parts = (float*)(shared + WEIGHT_BYTES);  // [2][warp][slot]

    if (warp < WARPS) {
        take_registers();
        const int r = lane >> 2, q = lane & 3, k0 = 32 * warp * PER_WARP + 8 * q;
        Weights weights;
        weights.load(shared, warp, lane, [&](int g, int row, int k) {
            const int channel = own.channel + row;
            return channel < WIDTH ? (u32)R[(((long long)g * heads + own.head) * WIDTH + k) * WIDTH + channel] : 0u;
        });
        u32 inside = 0;
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) inside |= (u32)(k0 + 32 * i < WIDTH) << i;
        const long long column = (long long)(own.first + r) * length * token;
        const long long within = own.head * WIDTH + k0;
        Mail<AT_ONCE * PER_WARP> mail;
        const half_t *input = dx, *other = extra;  // this lane's dg of the asked step
        int base = 0;                              // the first gate asked for
        auto where = [&](int i) {
            const int gate = GATE_OF[min(base + i / PER_WARP, RECURRENTS - 1)];
            return (EXTRAS == 0 || INPUT_OF[gate] >= 0 ? input + INPUT_OF[gate] * token : other + EXTRA_OF[gate] * token) +
                   32 * (i % PER_WARP);
        };
        auto ask = [&](int t, int tile) {
            const int row = TILE * tile + r;
            const long long source = column + tile * tile_step + t * token;
            input = dx + source * INPUTS + within;
            other = extra + source * EXTRAS + within;
            const bool reads = row < own.live && !bit(resets, words, own.first + min(row, own.live - 1), t);
            u32 wanted = 0;
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (base + j < RECURRENTS) wanted |= inside << (j * PER_WARP);
            mail.ask(reads ? wanted : 0, where);
        };
        bool patient = true;
        int turn = 0;
        for (int t = length - 1; t >= -1; t--)
            for (int tile = 0; tile < own.tiles; tile++, turn++) {
                const bool wraps = tile + 1 == own.tiles, ends = turn + 1 == turns;
                float sum[RECURRENTS][4];
#pragma unroll
                for (int k = 0; k < RECURRENTS; k++)
#pragma unroll
                    for (int j = 0; j < 4; j++) sum[k][j] = 0.0f;
                if (t < length - 1) {
#pragma unroll
                    for (int k = 0; k < RECURRENTS; k += AT_ONCE) {
                        base = k;
                        if (k > 0) ask(t + 1, tile);
                        if (patient && !mail.wait(where)) {
                            patient = false;
                            *(volatile int*)failed = 1;
                        }
#pragma unroll
                        for (int i = 0; i < PER_WARP; i++)
#pragma unroll
                            for (int u = 0; u < 2; u++)
#pragma unroll
                                for (int j = 0; j < AT_ONCE; j++)
                                    if (k + j < RECURRENTS) {
                                        const uint4 b = mail.v[j * PER_WARP + i];
                                        weights.product(sum[k + j], k + j, i, u, u ? b.z : b.x, u ? b.w : b.y);
                                    }
                    }
                    base = 0;
                }
                // the step whose dg the next turn multiplies, if there is one
                const int next = t + 1 - wraps;
                if (own.tiles > 1 && !ends && next < length) ask(next, wraps ? 0 : tile + 1);
                if (turn > 1) meet(EMPTY + (turn & 1));
                float* part = parts + ((turn & 1) * WARPS + warp) * PART_FLOATS;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float total = 0.0f;
#pragma unroll
                    for (int k = 0; k < RECURRENTS; k++) total += sum[k][j];
                    part[(2 * q + (j & 1)) * 20 + r + 8 * (j >> 1)] = total;
                }
                arrive(FULL + (turn & 1));
                if (own.tiles == 1 && !ends) {
                    meet(PUBLISHED);
                    pass(pause);
                    ask(t, 0);
                }
            }
    } else {
        leave_registers();
        const int cell = threadIdx.x - 32 * WARPS, d = cell % SLICE, n = cell / SLICE, channel = own.channel + d;
        const bool exists = channel < WIDTH, even = d % 2 == 0;
        const long long at = own.head * WIDTH + channel, plane = (long long)batch * length * token;
        const long long base = (long long)(own.first + n) * length * token;
        float* carried = (float*)(shared + WEIGHT_BYTES + 2 * PART_BYTES + SLOTS * Kept::BYTES) + cell;  // [tile][state][cell]
        for (int tile = 0; tile < own.tiles; tile++)
#pragma unroll
            for (int i = 0; i < STATES; i++) {
                const int row = TILE * tile + n;
                const bool given = grad_final && exists && row < own.live;
                carried[(tile * STATES + i) * CELLS] =
                    given ? grad_final[((long long)i * batch + own.first + row) * token + at] : 0.0f;
            }
        // element 0 of the slice in sequence 0, as a token of one vector
        const long long origin = (long long)own.first * length * token + own.head * WIDTH + own.channel;
        Kept ring;
        ring.start(shared + WEIGHT_BYTES + 2 * PART_BYTES, cell, length - 1, own.live, length, own.tiles,
                   [&](int piece, int& within, const char*& from, long long& stride, bool& before) {
                       int column;  // in bytes, of a row's
                       if (piece < STATES_AT) {
                           within = piece / CELL_BYTES, column = 16 * (piece % CELL_BYTES), stride = CELL_BYTES;
                           from = gates + origin * CELL_BYTES;
                       } else if (piece < GRAD_AT) {
                           const int which = (piece - STATES_AT) / STATE_PIECES;
                           within = (piece - STATES_AT) / 4 % TILE, column = 16 * (piece % 4), stride = 4, before = true;
                           int state = 0;
#pragma unroll
                           for (int i = 1, k = 0; i < STATES; i++)
                               if (NEEDS[i] && k++ == which) state = i - 1;
                           from = (const char*)(states + state * plane + origin);
                       } else {
                           before = piece >= H_AT;
                           within = (piece - GRAD_AT) / 2 % TILE, column = 16 * (piece % 2), stride = 2;
                           from = (const char*)((before ? h : grad_h) + origin);
                           if (!before && !grad_h) return false;
                       }
                       const bool inside = own.channel + column / (int)stride < WIDTH;
                       stride *= token;
                       from += column - (before ? stride : 0);
                       return inside;
                   });
        gate_words kept = {};
        float before[STATES], bias[GATES];
        half_t grad = 0;
#pragma unroll
        for (int i = 0; i < GATES; i++) bias[i] = 0.0f;
        auto take = [&](const char* slot, int t, int tile) {
            load_gates(kept, slot + cell * CELL_BYTES);
            if (grad_h) grad = ((const half_t*)(slot + 16 * GRAD_AT))[cell];
            const bool given = t == 0 && initial && exists && TILE * tile + n < own.live;
#pragma unroll
            for (int i = 0, k = 0; i < STATES; i++) {
                before[i] = 0.0f;
                if (NEEDS[i]) {
                    if (t > 0) before[i] = i == 0 ? widen(((const half_t*)(slot + 16 * H_AT))[cell])
                                                  : ((const float*)(slot + 16 * (STATES_AT + k * STATE_PIECES)))[cell];
                    if (given) before[i] = initial[((long long)i * batch + own.first + TILE * tile + n) * token + at];
                    k += i > 0;
                }
            }
        };
        for (int i = 0; i < AHEAD; i++) ring.copy();
        copy_wait<AHEAD - 1>();
        barrier_sync<CELLS>(SUMMED);
        take(shared + WEIGHT_BYTES + 2 * PART_BYTES, length - 1, 0);
        int turn = 0;
        for (int t = length - 1; t >= -1; t--)
            for (int tile = 0; tile < own.tiles; tile++, turn++) {
                const int row = TILE * tile + n;
                const bool alive = exists && row < own.live;
                const bool wraps = tile + 1 == own.tiles;
                const bool zero = alive && t >= 0 && bit(resets, words, own.first + row, t);
                float g[GATES], old[STATES], after[STATES], carry[STATES], dg[GATES];
                unpack_gates(g, kept);
                const float given = widen(grad);
#pragma unroll
                for (int i = 0; i < STATES; i++) {
                    old[i] = zero ? 0.0f : before[i];
                    after[i] = carried[(tile * STATES + i) * CELLS];
                }
                ring.copy();
                copy_wait<AHEAD - 1>();

                meet(FULL + (turn & 1));
                float through = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) through += parts[((turn & 1) * WARPS + w) * PART_FLOATS + n * 20 + d];
                if (turn + 2 < turns) arrive(EMPTY + (turn & 1));
                after[0] += hf_min(hf_max(through, -clip), clip);
                if (t >= 0) {
                    after[0] += given;
                    cell_backward(old, g, after, carry, dg);
                    const long long place = base + tile * tile_step + t * token;
#pragma unroll
                    for (int i = 0; i < GATES; i++) {
                        const float value = alive && channel < width ? dg[i] : 0.0f;
                        const u32 pair = pack(value, __shfl_down_sync(0xffffffffu, value, 1));
                        bias[i] += value;
                        if (INPUT_OF[i] >= 0) write_relaxed(dx + place * INPUTS + INPUT_OF[i] * token + at, pair, alive && even);
                        if (EXTRA_OF[i] >= 0) write_relaxed(extra + place * EXTRAS + EXTRA_OF[i] * token + at, pair, alive && even);
                    }
                    if (own.tiles == 1) arrive(PUBLISHED);
#pragma unroll
                    for (int i = 0; i < STATES; i++) carried[(tile * STATES + i) * CELLS] = zero ? 0.0f : carry[i];
                } else if (alive) {
#pragma unroll
                    for (int i = 0; i < STATES; i++)
                        grad_initial[((long long)i * batch + own.first + row) * token + at] = after[i];
                }
                take(ring.next(), t - wraps, wraps ? 0 : tile + 1);
            }
        // this block's share of db, added in one order
        float* sums = (float*)(shared + WEIGHT_BYTES + 2 * PART_BYTES + SLOTS * Kept::BYTES) + cell;
#pragma unroll
        for (int i = 0; i < GATES; i++) {
            sums[0] = bias[i];
            barrier_sync<CELLS>(SUMMED);
            if (n == 0 && exists) {
                float total = 0.0f;
                for (int k = 0; k < TILE; k++) total += sums[k * SLICE];
                db[((long long)blockIdx.y * GATES + i) * token + at] = total;
            }
            barrier_sync<CELLS>(SUMMED);
        }
    }
}
