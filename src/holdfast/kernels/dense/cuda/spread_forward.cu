// Forward pass of a head over many blocks. Grid (slices of heads, ranges of rows sequences), cooperative.
// x [B, T, INPUTS, H, WIDTH], R [RECURRENTS, H, WIDTH, WIDTH], bias [GATES, H, WIDTH] or null, initial [STATES, B, H,
// WIDTH] or null, entry [B, H, WIDTH] the initial h as operand, resets [B, words] or null.
// h [B, T, H, WIDTH] filled with SENTINEL, final [STATES, B, H, WIDTH]; states and gates for the backward pass, or null.
// failed: set to 1 when the grid is stuck. pause: cycles to wait before asking for what no block can have yet.

// a cell's sums of TOGETHER gates at sequence * PITCH + channel: few bank conflicts either way
constexpr int TOGETHER = RECURRENTS == 1 ? 1 : 4, PITCH = RECURRENTS == 1 ? 20 : 17;
constexpr int PLANES = (RECURRENTS + TOGETHER - 1) / TOGETHER;
constexpr int PLACES = TILE * PITCH, PART_BYTES = 4 * TOGETHER * PLACES * PLANES * WARPS;
struct __align__(4 * TOGETHER) Sums {
    float gate[TOGETHER];
};
using Inputs = Ring<2 * TILE * INPUTS, 1>;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
spread_forward(const half_t* x, const half_t* R, const half_t* bias, const float* initial, const half_t* entry,
               const u32* resets, half_t* h, float* final, float* states, char* gates, int* failed, int batch,
               int length, int heads, int width, int rows, int first_head, int pause) {
    extern __shared__ __align__(128) char shared[];
    const Share own(batch, rows, first_head);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int words = (length + 31) / 32, turns = length * own.tiles;
    const long long token = (long long)heads * WIDTH, tile_step = TILE * token * length;
    Sums* parts = (Sums*)(shared + WEIGHT_BYTES);  // [2][warp][plane][place]

    if (warp < WARPS) {
        take_registers();
        const int r = lane >> 2, q = lane & 3, k0 = 32 * warp * PER_WARP + 8 * q;
        Weights weights;
        weights.load(shared, warp, lane, [&](int g, int row, int k) {
            const int channel = own.channel + row;
            return channel < WIDTH ? (u32)R[(((long long)g * heads + own.head) * WIDTH + channel) * WIDTH + k] : 0u;
        });
        u32 inside = 0;
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) inside |= (u32)(k0 + 32 * i < WIDTH) << i;
        const half_t* entering = entry + (own.first + r) * token + own.head * WIDTH + k0;
        const half_t* column = h + (long long)(own.first + r) * length * token + own.head * WIDTH + k0;
        const half_t* source = entering;
        auto where = [&](int i) { return source + 32 * i; };
        Mail<PER_WARP> mail;
        auto ask = [&](int t, int tile) {
            const int row = TILE * tile + r;
            source = t == 0 ? entering + TILE * tile * token : column + tile * tile_step + (t - 1) * token;
            const bool reads = row < own.live && !bit(resets, words, own.first + min(row, own.live - 1), t);
            mail.ask(reads ? inside : 0, where);
            // what is there from the start may have any bits, SENTINEL's too
            if (t == 0) mail.pending = 0;
        };
        ask(0, 0);
        bool patient = true;
        int turn = 0;
        for (int t = 0; t < length; t++)
            for (int tile = 0; tile < own.tiles; tile++, turn++) {
                if (patient && !mail.wait(where)) {
                    patient = false;
                    *(volatile int*)failed = 1;
                }
                float sum[RECURRENTS][4];
#pragma unroll
                for (int k = 0; k < RECURRENTS; k++)
#pragma unroll
                    for (int j = 0; j < 4; j++) sum[k][j] = 0.0f;
#pragma unroll
                for (int i = 0; i < PER_WARP; i++) {
                    // gates inside: neighbouring products do not wait for one another
#pragma unroll
                    for (int k = 0; k < RECURRENTS; k++) weights.product(sum[k], k, i, 0, mail.v[i].x, mail.v[i].y);
#pragma unroll
                    for (int k = 0; k < RECURRENTS; k++) weights.product(sum[k], k, i, 1, mail.v[i].z, mail.v[i].w);
                }
                const bool wraps = tile + 1 == own.tiles, ends = turn + 1 == turns;
                if (own.tiles > 1 && !ends) ask(t + wraps, wraps ? 0 : tile + 1);
                if (turn > 1) meet(EMPTY + (turn & 1));
                Sums* part = parts + ((turn & 1) * WARPS + warp) * PLANES * PLACES;
#pragma unroll
                for (int p = 0; p < PLANES; p++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        Sums f;
#pragma unroll
                        for (int k = 0; k < TOGETHER; k++) {
                            const int gate = TOGETHER * p + k;
                            f.gate[k] = gate < RECURRENTS ? sum[gate < RECURRENTS ? gate : 0][j] : 0.0f;
                        }
                        part[p * PLACES + (2 * q + (j & 1)) * PITCH + r + 8 * (j >> 1)] = f;
                    }
                arrive(FULL + (turn & 1));
                if (own.tiles == 1 && !ends) {
                    // nobody's next vectors can be there before this block's own: asking earlier gets in their way
                    meet(PUBLISHED);
                    pass(pause);
                    ask(t + 1, 0);
                }
            }
    } else {
        leave_registers();
        const int cell = threadIdx.x - 32 * WARPS, d = cell % SLICE, n = cell / SLICE, channel = own.channel + d;
        const bool exists = channel < WIDTH, even = d % 2 == 0;
        const long long at = own.head * WIDTH + channel, plane = (long long)batch * length * token;
        const long long base = (long long)(own.first + n) * length * token;  // this lane's row of a tile's first step
        float* carried = (float*)(shared + WEIGHT_BYTES + 2 * PART_BYTES + SLOTS * Inputs::BYTES) + cell;  // [tile][state][cell]
        float offset[GATES];
#pragma unroll
        for (int g = 0; g < GATES; g++) offset[g] = bias && exists ? widen(bias[g * token + at]) : 0.0f;
        for (int tile = 0; tile < own.tiles; tile++)
#pragma unroll
            for (int i = 0; i < STATES; i++) {
                const int row = TILE * tile + n;
                const bool given = initial && exists && row < own.live;
                carried[(tile * STATES + i) * CELLS] =
                    given ? initial[((long long)i * batch + own.first + row) * token + at] : 0.0f;
            }
        Inputs ring;
        ring.start(shared + WEIGHT_BYTES + 2 * PART_BYTES, cell, 0, own.live, length, own.tiles,
                   [&](int piece, int& within, const char*& from, long long& stride, bool&) {
                       const int gate = piece / (2 * TILE), start = own.channel + 8 * (piece % 2);
                       within = piece / 2 % TILE;
                       stride = 2 * INPUTS * token;
                       from = (const char*)(x + ((long long)own.first * length * INPUTS + gate) * token + own.head * WIDTH + start);
                       return start < WIDTH;
                   });
        half_t input[INPUTS];
        auto take = [&](const char* slot) {
#pragma unroll
            for (int i = 0; i < INPUTS; i++) input[i] = *(const half_t*)(slot + 32 * (TILE * i + n) + 2 * d);
        };
        for (int i = 0; i < AHEAD; i++) ring.copy();
        copy_wait<AHEAD - 1>();
        barrier_sync<CELLS>(SUMMED);
        take(shared + WEIGHT_BYTES + 2 * PART_BYTES);
        int turn = 0;
        for (int t = 0; t < length; t++)
            for (int tile = 0; tile < own.tiles; tile++, turn++) {
                const int row = TILE * tile + n;
                const bool alive = exists && row < own.live;
                const bool ends = turn + 1 == turns;
                const bool zero = alive && bit(resets, words, own.first + row, t);
                float g[GATES], s[STATES], out[STATES];
#pragma unroll
                for (int i = 0; i < GATES; i++) g[i] = INPUT_OF[i] >= 0 ? offset[i] + widen(input[INPUT_OF[i]]) : offset[i];
#pragma unroll
                for (int i = 0; i < STATES; i++) s[i] = zero ? 0.0f : carried[(tile * STATES + i) * CELLS];
                ring.copy();
                copy_wait<AHEAD - 1>();
                const long long place = base + tile * tile_step + t * token + at;

                meet(FULL + (turn & 1));
                float total[TOGETHER * PLANES];
#pragma unroll
                for (int k = 0; k < TOGETHER * PLANES; k++) total[k] = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++)
#pragma unroll
                    for (int p = 0; p < PLANES; p++) {
                        const Sums f = parts[(((turn & 1) * WARPS + w) * PLANES + p) * PLACES + n * PITCH + d];
#pragma unroll
                        for (int k = 0; k < TOGETHER; k++) total[TOGETHER * p + k] += f.gate[k];
                    }
                if (turn + 2 < turns) arrive(EMPTY + (turn & 1));
#pragma unroll
                for (int i = 0; i < GATES; i++)
                    if (RECURRENT_OF[i] >= 0) g[i] += total[RECURRENT_OF[i]];
                cell_forward(s, g, out);
                const float here = channel < width ? out[0] : 0.0f;
                write_relaxed(h + place, pack(here, __shfl_down_sync(0xffffffffu, here, 1)), alive && even);
                if (own.tiles == 1 && !ends) arrive(PUBLISHED);
#pragma unroll
                for (int i = 0; i < STATES; i++) carried[(tile * STATES + i) * CELLS] = out[i];
                if (gates && alive) {
                    keep_gates(gates + place * (GATES_KEPT * GATE_SIZE), g);
#pragma unroll
                    for (int i = 1; i < STATES; i++) states[(i - 1) * plane + place] = out[i];
                }
                take(ring.next());
            }
        for (int tile = 0; tile < own.tiles; tile++)
            if (exists && TILE * tile + n < own.live)
#pragma unroll
                for (int i = 0; i < STATES; i++)
                    final[((long long)i * batch + own.first + TILE * tile + n) * token + at] =
                        carried[(tile * STATES + i) * CELLS];
    }
}
