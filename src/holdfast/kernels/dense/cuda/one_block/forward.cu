// Forward pass of a block that has one head, for ROWS sequences from first on, persistent over time.
// x [B, T, INPUTS, H, WIDTH], R [RECURRENTS, H, WIDTH, WIDTH], bias [GATES, H, WIDTH] or null, initial [STATES, B, H,
// WIDTH] or null, resets [B, words] or null: bit t % 32 of word t / 32 zeroes the state before step t.
// h [B, T, H, WIDTH], final [STATES, B, H, WIDTH]; for the backward pass: states [STATES - 1, B, T, H, WIDTH]
// and gates [B, T, H, WIDTH, GATES_SAVED]. Channels from width on are padding.
// Before this file: constexpr bool SAVES, whether states and gates are written; constexpr int TURNS, by how many the loop
// over time is unrolled.

constexpr int X_BYTES = row_bytes(2 * INPUTS * WIDTH, 2);
constexpr int X_STAGE = ROWS * X_BYTES;
constexpr int H_BYTES = vector_bytes(VECTOR_BYTES);
constexpr int H_TOTAL = 2 * ROWS * H_BYTES;
constexpr int COLUMNS = WIDTH / 8;  // 16-byte pieces of a vector
static_assert(H_TOTAL + STAGES * X_STAGE <= SHARED_BYTES, "shared memory as planned");

HF_DEVICE void forward(const half_t* x, const half_t* R, const half_t* bias, const float* initial, const u32* resets,
                       half_t* h, float* final, float* states, char* gates, int batch, int length, int heads, int width,
                       int head, int first, char* shared) {
    const Place at;
    const int live = min(ROWS, batch - first);
    const int words = (length + 31) / 32;
    const long long token = (long long)heads * WIDTH;  // elements of one vector for all heads
    bool alive[CELLS];
#pragma unroll
    for (int j = 0; j < CELLS; j++) alive[j] = at.channel[j] < WIDTH && at.row < live;

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
        // one step early: in its first turn it writes nothing
        [&](int row, int column) { return h + ((long long)(first + row) * length - 1) * token + head * WIDTH + 8 * column; },
        [&](int row, int column) { return row * H_BYTES + 16 * column; });
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        stream.copy(stages_at + i * X_STAGE, i < length);
        copy_commit();
    }

    u32 weights[MATRICES][STEPS][4];
    load_weights(weights, at, [&](int m, int half, int k) {
        const int gate = FOUR ? m / 2 * 2 + half : m, eighth = FOUR ? m % 2 : half;
        const int channel = CHANNELS * at.warp + 8 * eighth + at.r;
        const long long row = ((long long)gate * heads + head) * WIDTH + channel;
        return gate < RECURRENTS && channel < WIDTH ? *(const u32*)(R + row * WIDTH + k) : 0u;
    });
    float offset[CELLS][GATES];
#pragma unroll
    for (int j = 0; j < CELLS; j++)
#pragma unroll
        for (int g = 0; g < GATES; g++)
            offset[j][g] = bias ? widen(bias[((long long)g * heads + head) * WIDTH + at.inside[j]]) : 0.0f;

    float s[CELLS][STATES];
    int cell_at[CELLS];
    long long place[CELLS];  // the cells' elements of h
#pragma unroll
    for (int j = 0; j < CELLS; j++) {
        place[j] = (long long)(first + at.row) * length * token + head * WIDTH + at.channel[j];
        cell_at[j] = at.row * H_BYTES + 2 * at.channel[j];
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            const long long from = ((long long)i * batch + first + at.row) * token + head * WIDTH + at.channel[j];
            s[j][i] = initial && alive[j] ? initial[from] : 0.0f;
        }
        if (at.channel[j] < width) *(half_t*)(vectors + cell_at[j]) = narrow(s[j][0]);
    }
    const long long plane = (long long)batch * length * token;

    copy_wait<STAGES - 2>();
    __syncthreads();
    const char* now = vectors;
    char* next = vectors + ROWS * H_BYTES;
    int stage = 0;
#pragma unroll TURNS
    for (int t = 0; t < length; t++) {
        u32 operand[STEPS][2];
        load_vector(operand, now + at.column() * H_BYTES, at);
        if (RESETS) {
            const int column = at.column();
            const bool zero = column < live && bit(resets, words, first + column, t);
#pragma unroll
            for (int i = 0; i < STEPS; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) operand[i][j] = zero ? 0 : operand[i][j];
            if (at.row < live && bit(resets, words, first + at.row, t))
#pragma unroll
                for (int j = 0; j < CELLS; j++)
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
        uint4 out_h[drain.MINE];
        drain.take(out_h, now);
        float g[CELLS][GATES], out[CELLS][STATES];
#pragma unroll
        for (int j = 0; j < CELLS; j++)
#pragma unroll
            for (int i = 0; i < GATES; i++) {
                const char* inputs = stages + stage * X_STAGE + at.row * X_BYTES + 2 * at.inside[j];
                g[j][i] = offset[j][i];
                if (INPUT_OF[i] >= 0) g[j][i] += widen(*(const half_t*)(inputs + 2 * INPUT_OF[i] * WIDTH));
            }
        stream.copy(stages_at + (stage == 0 ? STAGES - 1 : stage - 1) * X_STAGE, t + STAGES - 1 < length);
        copy_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        drain.write(out_h, t > 0);
        copy_wait<STAGES - 2>();
#pragma unroll
        for (int j = 0; j < CELLS; j++)
#pragma unroll
            for (int i = 0; i < GATES; i++)
                if (RECURRENT_OF[i] >= 0) g[j][i] += own(sum, at, RECURRENT_OF[i], j);
#pragma unroll
        for (int j = 0; j < CELLS; j++) {
            cell_forward(s[j], g[j], out[j]);
            if (at.channel[j] < width) *(half_t*)(next + cell_at[j]) = narrow(out[j][0]);
        }
#pragma unroll
        for (int j = 0; j < CELLS; j++) {
#pragma unroll
            for (int i = 0; i < STATES; i++) s[j][i] = out[j][i];
            if (SAVES && alive[j]) {
                keep_gates(gates + place[j] * (GATES_SAVED * GATE_SIZE), g[j]);
#pragma unroll
                for (int i = 1; i < STATES; i++) states[(i - 1) * plane + place[j]] = out[j][i];
            }
            place[j] += token;
        }
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
                final[((long long)i * batch + first + at.row) * token + head * WIDTH + at.channel[j]] = s[j][i];
}
