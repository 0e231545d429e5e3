// Forward pass of a head over many blocks. Grid (slices of heads, ranges of rows sequences), cooperative.
// x [B, T, INPUTS, H, WIDTH], R [RECURRENTS, H, WIDTH, WIDTH], bias [GATES, H, WIDTH] or null, initial [STATES, B, H,
// WIDTH] or null, entry [B, H, WIDTH] the initial h as operand or null, resets [B, words] or null.
// h [B, T, H, WIDTH], the first REACH steps filled with SENTINEL, final [STATES, B, H, WIDTH]; states and gates for the
// backward pass, or null.
// failed: set to 1 when the grid is stuck. pause: cycles to wait before asking for what no block can have yet.
// Before this file: constexpr int AT_ONCE, 1 or 2: of how many turns vectors may be on their way.

// A matrix's 16 rows are two times eight channels of one gate: half n of all is gate n % RECURRENTS of the eighth n /
// RECURRENTS, so that a lane has all gates of its channels.
constexpr int HALVES = RECURRENTS * EIGHTS, MATRICES = (HALVES + 1) / 2;
using Held = Weights<MATRICES>;
// a cell's sums of TOGETHER gates at sequence * PITCH + channel: few bank conflicts either way
constexpr int TOGETHER = RECURRENTS == 1 ? 1 : 4, PITCH = RECURRENTS == 1 ? SLICE + 4 : SLICE + 1;
constexpr int PLANES = (RECURRENTS + TOGETHER - 1) / TOGETHER;
constexpr int PLACES = TILE * PITCH, PART_BYTES = 4 * TOGETHER * PLACES * PLANES * WARPS;
struct __align__(4 * TOGETHER) Sums {
    float gate[TOGETHER];
};
using Inputs = Ring<EIGHTS * TILE * INPUTS, 1>;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
dense_many_blocks_forward(const half_t* x, const half_t* R, const half_t* bias, const float* initial,
                          const half_t* entry, const u32* resets, half_t* h, float* final, float* states, char* gates,
                          int* failed, int batch, int length, int heads, int width, int rows, int first_head,
                          int pause) {
    extern __shared__ __align__(128) char shared[];
    const Share own(batch, rows, first_head);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int words = (length + 31) / 32, turns = length * own.tiles;
    const long long token = (long long)heads * WIDTH;
    Sums* parts = (Sums*)(shared + Held::BYTES);  // [2][warp][plane][place]
    char* slots = shared + Held::BYTES + 2 * PART_BYTES;
    const Clock pace{(u32*)(slots + SLOTS * Inputs::BYTES), pause};

    if (warp < WARPS) {
        take_registers();
        const int r = lane >> 2, q = lane & 3, k0 = 32 * warp * PER_WARP + 8 * q;
        Held weights;
        weights.load(shared, warp, lane, [&](int m, int half, int r, int k) {
            const int n = 2 * m + half, channel = own.channel + n / RECURRENTS * 8 + r;
            const long long row = ((long long)(n % RECURRENTS) * heads + own.head) * WIDTH + channel;
            return n < HALVES && channel < WIDTH ? *(const uint4*)(R + row * WIDTH + k) : uint4{0, 0, 0, 0};
        });
        const u32 inside = pieces_inside(k0);
        const half_t* entering = entry + (own.first + r) * token + own.head * WIDTH + k0;
        // of the step before
        const half_t* column = pinned(h + ((long long)(own.first + r) * length - 1) * token + own.head * WIDTH + k0);
        Mail<PER_WARP> mails[AT_ONCE];
        const half_t* sources[AT_ONCE];
#pragma unroll
        for (int m = 0; m < AT_ONCE; m++) mails[m].clear(), sources[m] = nullptr;
        Walk<1> asked(0, own.tiles, token, length);
        // The next turn's vectors, if there is one. Inlined, as take is: m has to be a constant for mails to be in registers.
        auto ask = [&](int m) ALWAYS_INLINE {
            if (asked.t == length) return;
            const half_t* source = asked.t == 0 ? entering + TILE * asked.tile * token : column + asked.at;
            const int row = TILE * asked.tile + r;
            const bool reads = row < own.live && (asked.t > 0 || entry) &&
                               !bit(resets, words, own.first + min(row, own.live - 1), asked.t);
            mails[m].ask([&](int i) { return source + 32 * i; }, [&](int i) { return reads && (inside >> i & 1); });
            sources[m] = source;
            asked.next();
        };
        const u32 parts_at = (u32)pinned((int)(shared_address(parts + warp * PLANES * PLACES + 2 * q * PITCH + r)));
        bool patient = true;
        // two turns ahead where the vectors of both have been published for long
        const int ahead = AT_ONCE == 2 && own.tiles > 3 ? 2 : 1;
        auto take = [&](int turn, int m) ALWAYS_INLINE {
            Mail<PER_WARP>& mail = mails[m];
            const half_t* source = sources[m];
            // now rather than where sums are stored: nobody waits for it here
            if (turn > 1) meet(EMPTY + (turn & 1));
            // what is there from the start may have any bits, SENTINEL's too
            if (patient && turn >= own.tiles && !mail.wait([&](int i) { return source + 32 * i; })) {
                patient = false;
                *(volatile int*)failed = 1;
            }
            float sum[MATRICES][4];
#pragma unroll
            for (int m = 0; m < MATRICES; m++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[m][j] = 0.0f;
#pragma unroll
            for (int i = 0; i < ON_CHIP; i++) {
                // matrices inside: neighbouring products do not wait for one another
#pragma unroll
                for (int m = 0; m < MATRICES; m++) weights.product(sum[m], m, i, 0, mail.v[i].x, mail.v[i].y);
#pragma unroll
                for (int m = 0; m < MATRICES; m++) weights.product(sum[m], m, i, 1, mail.v[i].z, mail.v[i].w);
            }
            if constexpr (ON_CHIP < PER_WARP) {
                const half_t* own_rows = anew(R) + ((long long)own.head * WIDTH + own.channel + r) * WIDTH + k0;
#pragma unroll
                for (int i = ON_CHIP; i < PER_WARP; i++)
#pragma unroll
                    for (int m = 0; m < MATRICES; m++) {
                        const half_t* rows[2];
                        bool there[2];
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const int n = 2 * m + half, eighth = 8 * (n / RECURRENTS);
                            rows[half] = own_rows + ((long long)(n % RECURRENTS) * heads * WIDTH + eighth) * WIDTH + 32 * i;
                            there[half] = n < HALVES && own.channel + eighth + r < WIDTH && (inside >> i & 1);
                        }
                        Held::streamed(sum[m], rows[0], there[0], rows[1], there[1], mail.v[i]);
                    }
            }
            if (ahead == 2)
                ask(m);
            else if (!own.keeps_pace())
                ask(AT_ONCE - 1 - m);
            const u32 part = parts_at + (turn & 1) * PART_BYTES;
#pragma unroll
            for (int p = 0; p < PLANES; p++)
#pragma unroll
                for (int e = 0; e < EIGHTS; e++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        Sums f;
#pragma unroll
                        for (int k = 0; k < TOGETHER; k++) {
                            const int gate = TOGETHER * p + k, half = e * RECURRENTS + (gate < RECURRENTS ? gate : 0);
                            f.gate[k] = sum[half / 2][2 * (half % 2) + j];
                        }
                        write_shared(part + (u32)sizeof(Sums) * (p * PLACES + j * PITCH + 8 * e), f.gate);
                    }
            arrive(FULL + (turn & 1));
            if (asked.tile == 0 && fences(asked.t)) fence();
            if (own.keeps_pace() && turn + 1 < turns) {
                if (turn + 1 >= own.tiles) pace.wait(turn + 1 - own.tiles);
                ask(AT_ONCE - 1 - m);
            }
        };
        ask(0);
        if (ahead == 2) ask(AT_ONCE - 1);
        for (int turn = 0; turn < turns; turn += AT_ONCE) {
            take(turn, 0);
            if (AT_ONCE == 2 && turn + 1 < turns) take(turn + 1, AT_ONCE - 1);
        }
    } else {
        leave_registers();
        const Cells my(own);
        const int channel = own.channel + my.d;
        const long long at = own.head * WIDTH + channel, plane = (long long)batch * length * token;
        const long long base = pinned((long long)(own.first + my.n) * length * token + at);  // of this lane's first cell
        const long long beside = pinned((long long)BESIDE * length * token);                 // to its next one
        const long long reach = pinned(REACH * token);
        float* carried = (float*)(slots + SLOTS * Inputs::BYTES + CLOCK_BYTES) + my.at;  // [tile][state][cell]
        float offset[GATES];
#pragma unroll
        for (int g = 0; g < GATES; g++) offset[g] = bias && my.exists ? widen(bias[g * token + at]) : 0.0f;
        auto place_of = [&](int tile, int i, int c) { return (tile * STATES + i) * CELLS + c * BESIDE * SLICE; };
        for (int tile = 0; tile < own.tiles; tile++)
#pragma unroll
            for (int c = 0; c < EACH; c++)
#pragma unroll
                for (int i = 0; i < STATES; i++) {
                    const int row = TILE * tile + my.n + c * BESIDE;
                    const bool given = initial && row < own.live;
                    if (my.exists)
                        carried[place_of(tile, i, c)] =
                            given ? initial[((long long)i * batch + own.first + row) * token + at] : 0.0f;
                }
        Inputs ring(slots, my.lane, 0, own.live, length, own.tiles, token,
                    [&](int piece, int& within, const char*& from, int& scale, bool&) {
                        const int gate = piece / (EIGHTS * TILE), start = own.channel + 8 * (piece % EIGHTS);
                        within = piece / EIGHTS % TILE;
                        scale = 2 * INPUTS;
                        from = (const char*)(x + ((long long)own.first * length * INPUTS + gate) * token + own.head * WIDTH + start);
                        return start < WIDTH;
                    });
        half_t input[EACH][INPUTS];
        auto take = [&](const char* slot) {
#pragma unroll
            for (int c = 0; c < EACH; c++)
#pragma unroll
                for (int i = 0; i < INPUTS; i++)
                    input[c][i] = ((const half_t*)slot)[i * CELLS + c * BESIDE * SLICE + my.at];
        };
        for (int i = 0; i < AHEAD; i++) ring.copy();
        copy_wait<AHEAD - 1>();
        barrier_sync<LANES>(SUMMED);
        take(slots);
        Walk<1> walk(0, own.tiles, token, length);
        for (int turn = 0; turn < turns; turn++, walk.next()) {
            const int tile = walk.tile;
            float g[EACH][GATES], s[EACH][STATES];
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const int row = TILE * tile + my.n + c * BESIDE;
                const bool zero = my.exists && row < own.live && bit(resets, words, own.first + row, walk.t);
#pragma unroll
                for (int i = 0; i < GATES; i++)
                    g[c][i] = INPUT_OF[i] >= 0 ? offset[i] + widen(input[c][INPUT_OF[i]]) : offset[i];
#pragma unroll
                for (int i = 0; i < STATES; i++) s[c][i] = zero ? 0.0f : carried[place_of(tile, i, c)];
            }
            ring.copy();
            copy_wait<AHEAD - 1>();

            meet(FULL + (turn & 1));
            const Sums* part = parts + (turn & 1) * WARPS * PLANES * PLACES + my.n * PITCH + my.d;
            float total[EACH][TOGETHER * PLANES];
#pragma unroll
            for (int c = 0; c < EACH; c++)
#pragma unroll
                for (int p = 0; p < PLANES; p++) {
                    // all on their way before the first is added
                    Sums f[WARPS];
#pragma unroll
                    for (int w = 0; w < WARPS; w++) f[w] = part[(w * PLANES + p) * PLACES + c * BESIDE * PITCH];
#pragma unroll
                    for (int k = 0; k < TOGETHER; k++) {
                        float sum = f[0].gate[k];
#pragma unroll
                        for (int w = 1; w < WARPS; w++) sum += f[w].gate[k];
                        total[c][TOGETHER * p + k] = sum;
                    }
                }
            if (turn + 2 < turns) arrive(EMPTY + (turn & 1));
            float out[EACH][STATES];
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const bool alive = my.exists && TILE * tile + my.n + c * BESIDE < own.live;
                const long long place = base + walk.at + c * beside;
#pragma unroll
                for (int i = 0; i < GATES; i++)
                    if (RECURRENT_OF[i] >= 0) g[c][i] += total[c][RECURRENT_OF[i]];
                cell_forward(s[c], g[c], out[c]);
                const float here = channel < width ? out[c][0] : 0.0f;
                write_relaxed(h + place, narrow(here), alive);
            }
            if (own.keeps_pace() && turn + own.tiles < turns) pace.publish(turn, my.lane);
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const bool alive = my.exists && TILE * tile + my.n + c * BESIDE < own.live;
                write_relaxed(h + base + walk.at + c * beside + reach, (half_t)SENTINEL, alive && walk.t + REACH < length);
            }
            if (tile == 0 && fences(walk.t)) fence();
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const bool alive = my.exists && TILE * tile + my.n + c * BESIDE < own.live;
                const long long place = base + walk.at + c * beside;
#pragma unroll
                for (int i = 0; i < STATES; i++)
                    if (my.exists) carried[place_of(tile, i, c)] = out[c][i];
                if (gates && alive) {
                    keep_gates(gates + place * (GATES_SAVED * GATE_SIZE), g[c]);
#pragma unroll
                    for (int i = 1; i < STATES; i++) states[(i - 1) * plane + place] = out[c][i];
                }
            }
            take(ring.next());
        }
        for (int tile = 0; tile < own.tiles; tile++)
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const int row = TILE * tile + my.n + c * BESIDE;
                if (my.exists && row < own.live)
#pragma unroll
                    for (int i = 0; i < STATES; i++)
                        final[((long long)i * batch + own.first + row) * token + at] = carried[place_of(tile, i, c)];
            }
    }
}
