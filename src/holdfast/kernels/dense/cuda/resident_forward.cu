// Forward pass, one head a block, persistent over time. Grid (blocks of ROWS sequences, heads).
// x [B, T, INPUTS, H, WIDTH], R [RECURRENTS, H, WIDTH, WIDTH], bias [GATES, H, WIDTH] or null, initial [STATES, B, H,
// WIDTH] or null, resets [B, words] or null: bit t % 32 of word t / 32 zeroes the state before step t.
// h [B, T, H, WIDTH], final [STATES, B, H, WIDTH]; for the backward pass: states [STATES - 1, B, T, H, WIDTH]
// and gates [B, T, H, WIDTH, GATES_KEPT]. Channels from width on are padding.
// Before this file: constexpr bool KEEPS, whether states and gates are written.

constexpr int X_BYTES = row_bytes(2 * INPUTS * WIDTH, 2);
constexpr int X_STAGE = ROWS * X_BYTES;
constexpr int H_BYTES = vector_bytes(VECTOR_BYTES);
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
    const bool exists = at.channel < WIDTH, padding = at.channel >= width;
    bool alive[CELLS];
#pragma unroll
    for (int j = 0; j < CELLS; j++) alive[j] = exists && at.row + j < live;

    u32 weights[MATRICES][STEPS][4];
    load_weights(weights, at, [&](int m, int half, int k) {
        const int gate = EIGHT ? 2 * m + half : m, channel = CHANNELS * at.warp + at.r + (EIGHT ? 0 : 8 * half);
        const long long row = ((long long)gate * heads + head) * WIDTH + channel;
        return gate < RECURRENTS && channel < WIDTH ? (u32)R[row * WIDTH + k] : 0u;
    });
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

    float s[CELLS][STATES];
    const long long sequence = (long long)length * token;  // from this lane's cell to its next one
    long long place = (long long)(first + at.row) * sequence + head * WIDTH + at.channel;  // the first one's element of h
    const int cell_at = at.row * H_BYTES + 2 * at.channel;
#pragma unroll
    for (int j = 0; j < CELLS; j++) {
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            const long long from = ((long long)i * batch + first + at.row + j) * token + head * WIDTH + at.channel;
            s[j][i] = initial && alive[j] ? initial[from] : 0.0f;
        }
        *(half_t*)(vectors + cell_at + j * H_BYTES) = padding ? (half_t)0 : narrow(s[j][0]);
    }
    const long long plane = (long long)batch * length * token;

    copy_wait<STAGES - 2>();
    __syncthreads();
    const char* now = vectors;
    char* next = vectors + ROWS * H_BYTES;
    int stage = 0;
    for (int t = 0; t < length; t++) {
        u32 operand[STEPS][2];
        load_vectors(operand, now, H_BYTES, at);
        half_t mine[CELLS][INPUTS];
#pragma unroll
        for (int j = 0; j < CELLS; j++)
#pragma unroll
            for (int i = 0; i < INPUTS; i++)
                mine[j][i] = *(const half_t*)(stages + stage * X_STAGE + (at.row + j) * X_BYTES + 2 * (i * WIDTH + at.inside));
        uint4 out_h[drain.MINE];
        drain.take(out_h, now);
        if (RESETS) {
            const int column = at.r % ROWS;
            const bool zero = column < live && bit(resets, words, first + column, t);
#pragma unroll
            for (int i = 0; i < STEPS; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) operand[i][j] = zero ? 0 : operand[i][j];
#pragma unroll
            for (int j = 0; j < CELLS; j++)
                if (at.row + j < live && bit(resets, words, first + at.row + j, t))
#pragma unroll
                    for (int i = 0; i < STATES; i++) s[j][i] = 0.0f;
        }
        float sum[MATRICES][4] = {};
        // matrices inside: neighbouring products do not wait for one another
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int m = 0; m < MATRICES; m++) multiply(sum[m], weights[m][i], operand[i][0], operand[i][1]);
        // under the products' latency
        drain.write(out_h, t > 0);
        stream.copy(stages_at + (stage == 0 ? STAGES - 1 : stage - 1) * X_STAGE, t + STAGES - 1 < length);
        copy_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        float g[CELLS][GATES], out[CELLS][STATES];
#pragma unroll
        for (int j = 0; j < CELLS; j++) {
#pragma unroll
            for (int i = 0; i < GATES; i++)
                g[j][i] = INPUT_OF[i] >= 0 ? offset[i] + widen(mine[j][INPUT_OF[i]]) : offset[i];
#pragma unroll
            for (int i = 0; i < GATES; i++)
                if (RECURRENT_OF[i] >= 0) g[j][i] += own(sum, at, RECURRENT_OF[i], j);
        }
#pragma unroll
        for (int j = 0; j < CELLS; j++) {
            cell_forward(s[j], g[j], out[j]);
            *(half_t*)(next + cell_at + j * H_BYTES) = padding ? (half_t)0 : narrow(out[j][0]);
        }
#pragma unroll
        for (int j = 0; j < CELLS; j++) {
#pragma unroll
            for (int i = 0; i < STATES; i++) s[j][i] = out[j][i];
            if (KEEPS && alive[j]) {
                const long long here = place + j * sequence;
                keep_gates(gates + here * (GATES_KEPT * GATE_SIZE), g[j]);
#pragma unroll
                for (int i = 1; i < STATES; i++) states[(i - 1) * plane + here] = out[j][i];
            }
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
#pragma unroll
    for (int j = 0; j < CELLS; j++)
        if (alive[j])
#pragma unroll
            for (int i = 0; i < STATES; i++)
                final[((long long)i * batch + first + at.row + j) * token + head * WIDTH + at.channel] = s[j][i];
}
