// Forward pass, one head a block, persistent over time. Grid (blocks of ROWS sequences, heads).
// x [B, T, INPUTS, H, WIDTH], R [RECURRENTS, H, WIDTH, WIDTH], bias [GATES, H, WIDTH] or null, initial [STATES, B, H,
// WIDTH] or null, resets [B, words] or null: bit t % 32 of word t / 32 zeroes the state before step t.
// h [B, T, H, WIDTH], final [STATES, B, H, WIDTH]; for the backward pass: states [STATES - 1, B, T, H, WIDTH]
// and gates [B, T, H, WIDTH, GATES_KEPT]. Channels from width on are padding.
// Before this file: constexpr bool KEEPS, whether states and gates are written.

constexpr int X_BYTES = row_bytes(2 * INPUTS * WIDTH, 2);
constexpr int X_STAGE = ROWS * X_BYTES;
constexpr int H_BYTES = row_bytes(VECTOR_BYTES, 4);
constexpr int H_TOTAL = 2 * ROWS * H_BYTES;
constexpr int COLUMNS = WIDTH / 8;  // 16-byte pieces of a vector
static_assert(H_TOTAL + STAGES * X_STAGE <= SHARED_BYTES, "shared memory as planned");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_SM)
resident_forward(const half_t* x, const half_t* R, const half_t* bias, const float* initial, const u32* resets,
                 half_t* h, float* final, float* states, char* gates, int batch, int length, int heads, int width) {
    extern __shared__ __align__(128) char shared[];
    const Place at;
    const int head = blockIdx.y, first = blockIdx.x * ROWS, live = min(ROWS, batch - first);
    const int words = (length + 31) / 32;
    const long long token = (long long)heads * WIDTH;  // elements of one vector for all heads
    const bool exists = at.channel < WIDTH, alive = exists && at.row < live, padding = at.channel >= width;

    u32 weights[RECURRENTS][STEPS][4];
#pragma unroll
    for (int g = 0; g < RECURRENTS; g++) {
        const half_t* matrix = R + ((long long)g * heads + head) * WIDTH * WIDTH;
        load_weights(weights[g], at, [&](int row, int k) { return (u32)matrix[row * WIDTH + k]; });
    }
    float offset[GATES];
#pragma unroll
    for (int g = 0; g < GATES; g++)
        offset[g] = bias && exists ? widen(bias[((long long)g * heads + head) * WIDTH + at.channel]) : 0.0f;

    for (int i = threadIdx.x; i < SHARED_BYTES / 16; i += THREADS) ((uint4*)shared)[i] = uint4{0, 0, 0, 0};
    __syncthreads();

    char* vectors = shared;
    const char* stages = shared + H_TOTAL;
    const u32 stages_at = shared_address(stages);
    Pieces<INPUTS * COLUMNS> stream;
    stream.start(
        live, 0, 2 * INPUTS * token,
        [&](int row, int column) {
            const long long gate = (long long)(first + row) * length * INPUTS + column / COLUMNS;
            return x + gate * token + head * WIDTH + 8 * (column % COLUMNS);
        },
        [&](int row, int column) { return row * X_BYTES + 16 * column; });
    Pieces<COLUMNS> drain;
    drain.start(
        live, THREADS / 2, 2 * token,
        [&](int row, int column) { return h + (long long)(first + row) * length * token + head * WIDTH + 8 * column; },
        [&](int row, int column) { return row * H_BYTES + 16 * column; });
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        stream.copy(stages_at + i * X_STAGE, i < length);
        copy_commit();
    }

    float s[STATES];
    long long place = (long long)(first + at.row) * length * token + head * WIDTH + at.channel;  // this lane's element of h
#pragma unroll
    for (int i = 0; i < STATES; i++)
        s[i] = initial && alive ? initial[((long long)i * batch + first + at.row) * token + head * WIDTH + at.channel] : 0.0f;
    const int cell_at = at.row * H_BYTES + 2 * at.channel;
    *(half_t*)(vectors + cell_at) = padding ? (half_t)0 : narrow(s[0]);
    const long long plane = (long long)batch * length * token;

    copy_wait<STAGES - 2>();
    __syncthreads();
    const char* now = vectors;
    char* next = vectors + ROWS * H_BYTES;
    int stage = 0;
    for (int t = 0; t < length; t++) {
        u32 operand[STEPS][2];
        load_vectors(operand, now, H_BYTES, at);
        half_t mine[INPUTS];
#pragma unroll
        for (int i = 0; i < INPUTS; i++)
            mine[i] = *(const half_t*)(stages + stage * X_STAGE + at.row * X_BYTES + 2 * (i * WIDTH + at.inside));
        uint4 out_h[drain.MINE];
        drain.take(out_h, now);
        if (RESETS) {
            const int row = at.r & 1;
            const bool zero = row < live && bit(resets, words, first + row, t);
#pragma unroll
            for (int i = 0; i < STEPS; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) operand[i][j] = zero ? 0 : operand[i][j];
            if (at.row < live && bit(resets, words, first + at.row, t))
#pragma unroll
                for (int i = 0; i < STATES; i++) s[i] = 0.0f;
        }
        float sum[RECURRENTS][4] = {};
        // gates inside: neighbouring products do not wait for one another
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int g = 0; g < RECURRENTS; g++) multiply(sum[g], weights[g][i], operand[i][0], operand[i][1]);
        // under the products' latency
        drain.write(out_h, t > 0);
        stream.copy(stages_at + (stage == 0 ? STAGES - 1 : stage - 1) * X_STAGE, t + STAGES - 1 < length);
        copy_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        float g[GATES], out[STATES];
#pragma unroll
        for (int i = 0; i < GATES; i++) g[i] = INPUT_OF[i] >= 0 ? offset[i] + widen(mine[INPUT_OF[i]]) : offset[i];
#pragma unroll
        for (int i = 0; i < GATES; i++)
            if (RECURRENT_OF[i] >= 0) g[i] += own(sum[RECURRENT_OF[i]], at);
        cell_forward(s, g, out);
        *(half_t*)(next + cell_at) = padding ? (half_t)0 : narrow(out[0]);
#pragma unroll
        for (int i = 0; i < STATES; i++) s[i] = out[i];
        if (KEEPS && alive) {
            keep_gates(gates + place * (GATES_KEPT * GATE_SIZE), g);
#pragma unroll
            for (int i = 1; i < STATES; i++) states[(i - 1) * plane + place] = out[i];
        }
        place += token;
        copy_wait<STAGES - 2>();
        __syncthreads();
        char* used = (char*)now;
        now = next;
        next = used;
    }
    uint4 out_h[drain.MINE];
    drain.take(out_h, now);
    drain.write(out_h, true);
    if (alive)
#pragma unroll
        for (int i = 0; i < STATES; i++)
            final[((long long)i * batch + first + at.row) * token + head * WIDTH + at.channel] = s[i];
}
