// Backward pass, one head a block, persistent over time from the last step. Grid (blocks of ROWS sequences, heads).
// R, resets, initial, h, states, gates as the forward pass had or left them; grad_h [B, T, H, WIDTH] or null, grad_final
// [STATES, B, H, WIDTH] or null. clip bounds R^T dg, the gradient that reaches h through R: infinite for no bound.
// dx [B, T, INPUTS, H, WIDTH]; extra [B, T, EXTRAS, H, WIDTH], the gradients of gates that R alone feeds; db [blocks,
// GATES, H, WIDTH], float32 sums over each block's sequences; grad_initial [STATES, B, H, WIDTH].

constexpr int COLUMNS = WIDTH / 8;  // 16-byte pieces of a vector
constexpr int GATE_BYTES = row_bytes(GATE_SIZE * GATES_SAVED * WIDTH, GATE_SIZE * GATES_SAVED);
constexpr int STATE_BYTES = row_bytes(4 * WIDTH, 4);
constexpr int HALF_ROW_BYTES = row_bytes(2 * WIDTH, 2);
__device__ constexpr int old_states() {
    int n = 0;
    for (int i = 1; i < STATES; i++) n += NEEDS[i];
    return n;
}
constexpr int OLD = old_states();
// a stage: gates, the states before the step, grad_h, and h before the step where the cell's backward needs it
constexpr int OLD_AT = ROWS * GATE_BYTES, GRAD_AT = OLD_AT + OLD * ROWS * STATE_BYTES;
constexpr int H_AT = GRAD_AT + ROWS * HALF_ROW_BYTES;
constexpr int STAGE = H_AT + NEEDS[0] * ROWS * HALF_ROW_BYTES;
constexpr int G_BYTES = vector_bytes(GATES * VECTOR_BYTES);
static_assert(!FOUR, "two sequences a block");  // the gates' gradients of one sequence
constexpr int G_TOTAL = 2 * ROWS * G_BYTES;
static_assert(G_TOTAL + STAGES * STAGE <= SHARED_BYTES, "shared memory as planned");

// the gate at place k of x, or of extra
HF_DEVICE int gate_of(const int (&places)[GATES], int k) {
    int gate = 0;
#pragma unroll
    for (int i = 0; i < GATES; i++) gate = places[i] == k ? i : gate;
    return gate;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_SM)
dense_one_block_backward(const half_t* R, const u32* resets, const float* initial, const half_t* h,
                         const float* states, const char* gates, const half_t* grad_h, const float* grad_final,
                         float clip, half_t* dx, half_t* extra, float* db, float* grad_initial, int batch, int length,
                         int heads, int width) {
    extern __shared__ __align__(128) char shared[];
    const Place at;
    const int head = blockIdx.y, first = blockIdx.x * ROWS, live = min(ROWS, batch - first);
    const int words = (length + 31) / 32;
    const long long token = (long long)heads * WIDTH, plane = (long long)batch * length * token;
    const int channel = at.channel[0], inside = at.inside[0], row = at.row;  // of this lane's cell
    const bool exists = channel < WIDTH, alive = exists && row < live;

    u32 weights[RECURRENTS][STEPS][4];
    load_weights(weights, at, [&](int g, int half, int k) {
        const int column = CHANNELS * at.warp + 8 * half + at.r;
        const half_t* from = R + (((long long)g * heads + head) * WIDTH + k) * WIDTH + column;
        return column < WIDTH ? from[0] | (u32)from[WIDTH] << 16 : 0u;
    });
    for (int i = threadIdx.x; i < SHARED_BYTES / 16; i += THREADS) ((uint4*)shared)[i] = uint4{0, 0, 0, 0};
    __syncthreads();

    char* vectors = shared;
    const char* stages = shared + G_TOTAL;
    const u32 stages_at = shared_address(stages);
    const long long last = length - 1;
    // where the vector of a row begins, steps after the last one, in arrays of one vector a token
    auto vector = [&](int row, long long step) { return ((long long)(first + row) * length + last + step) * token + head * WIDTH; };
    int shift = 0;
    Pieces<GATES_SAVED * GATE_SIZE / 2 * COLUMNS> gate_pieces;
    gate_pieces.start(
        live, shift, -GATE_SIZE * GATES_SAVED * token,
        [&](int row, int column) { return gates + vector(row, 0) * (GATES_SAVED * GATE_SIZE) + 16 * column; },
        [&](int row, int column) { return row * GATE_BYTES + 16 * column; });
    shift += gate_pieces.COUNT;
    Pieces<WIDTH / 4> state_pieces[OLD + 1];
#pragma unroll
    for (int i = 1, k = 0; i < STATES; i++)
        if (NEEDS[i]) {
            state_pieces[k].start(
                live, shift, -4 * token,
                [&](int row, int column) { return states + (i - 1) * plane + vector(row, -1) + 4 * column; },
                [&](int row, int column) { return OLD_AT + (k * ROWS + row) * STATE_BYTES + 16 * column; });
            shift += state_pieces[k++].COUNT;
        }
    Pieces<COLUMNS> grad_pieces, h_pieces;
    grad_pieces.start(
        grad_h ? live : 0, shift, -2 * token,
        [&](int row, int column) { return grad_h + vector(row, 0) + 8 * column; },
        [&](int row, int column) { return GRAD_AT + row * HALF_ROW_BYTES + 16 * column; });
    shift += grad_pieces.COUNT;
    h_pieces.start(
        live, shift, -2 * token, [&](int row, int column) { return h + vector(row, -1) + 8 * column; },
        [&](int row, int column) { return H_AT + row * HALF_ROW_BYTES + 16 * column; });
    if (NEEDS[0]) shift += h_pieces.COUNT;
    auto fetch = [&](int step, int slot) {
        const u32 to = stages_at + slot * STAGE;
        gate_pieces.copy(to, step < length);
        grad_pieces.copy(to, step < length);
        // what was before the first step lies elsewhere
#pragma unroll
        for (int k = 0; k < OLD; k++) state_pieces[k].copy(to, step + 1 < length);
        if (NEEDS[0]) h_pieces.copy(to, step + 1 < length);
        copy_commit();
    };
    Pieces<INPUTS * COLUMNS> drain;
    drain.start(
        live, shift, -2 * INPUTS * token,
        [&](int row, int column) {
            // one step early: in its first turn it writes nothing
            const long long gate = ((long long)(first + row) * length + length) * INPUTS + column / COLUMNS;
            return dx + gate * token + head * WIDTH + 8 * (column % COLUMNS);
        },
        [&](int row, int column) {
            return row * G_BYTES + gate_of(INPUT_OF, column / COLUMNS) * VECTOR_BYTES + 16 * (column % COLUMNS);
        });
    Pieces<(EXTRAS > 0 ? EXTRAS : 1) * COLUMNS> extra_drain;
    extra_drain.start(
        EXTRAS > 0 ? live : 0, 0, -2 * EXTRAS * token,
        [&](int row, int column) {
            const long long gate = ((long long)(first + row) * length + length) * EXTRAS + column / COLUMNS;
            return extra + gate * token + head * WIDTH + 8 * (column % COLUMNS);
        },
        [&](int row, int column) {
            return row * G_BYTES + gate_of(EXTRA_OF, column / COLUMNS) * VECTOR_BYTES + 16 * (column % COLUMNS);
        });
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i, i);

    const long long own_state = (long long)(first + row) * token + head * WIDTH + channel;
    float carry[STATES], bias[GATES];
#pragma unroll
    for (int i = 0; i < GATES; i++) bias[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < STATES; i++) carry[i] = grad_final && alive ? grad_final[i * batch * token + own_state] : 0.0f;
    copy_wait<STAGES - 2>();
    __syncthreads();
    const char* now = vectors;
    char* next = vectors + ROWS * G_BYTES;
    int stage = 0;
    // one turn more than there are steps: the last takes R^T dg to the initial state
    for (int step = 0; step <= length; step++) {
        const int t = length - 1 - step;
        const char* here = stages + stage * STAGE;
        float sum[RECURRENTS][4] = {};
        u32 operand[RECURRENTS][STEPS][2];
#pragma unroll
        for (int k = 0; k < RECURRENTS; k++)
            load_vector(operand[k], now + at.column() * G_BYTES + GATE_OF[k] * VECTOR_BYTES, at);
        // gates inside: neighbouring products do not wait for one another
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int k = 0; k < RECURRENTS; k++) multiply(sum[k], weights[k][i], operand[k][i][0], operand[k][i][1]);
        uint4 out[drain.MINE], out_extra[extra_drain.MINE];
        drain.take(out, now);
        if (EXTRAS > 0) extra_drain.take(out_extra, now);

        float g[GATES], old[STATES];
        gate_words kept;
        load_gates(kept, here + row * GATE_BYTES + inside * (GATES_SAVED * GATE_SIZE));
        unpack_gates(g, kept);
        const float grad = widen(((const half_t*)(here + GRAD_AT + row * HALF_ROW_BYTES))[inside]);
        const bool starts = RESETS && row < live && t >= 0 && bit(resets, words, first + row, t);
#pragma unroll
        for (int i = 0, k = 0; i < STATES; i++) {
            old[i] = 0.0f;
            if (NEEDS[i] && i == 0) old[i] = widen(((const half_t*)(here + H_AT + row * HALF_ROW_BYTES))[inside]);
            if (NEEDS[i] && i > 0) {
                old[i] = ((const float*)(here + OLD_AT + (k * ROWS + row) * STATE_BYTES))[inside];
                k++;
            }
        }
        if (t == 0)
#pragma unroll
            for (int i = 0; i < STATES; i++) old[i] = initial && alive ? initial[i * batch * token + own_state] : 0.0f;
        if (RESETS && starts)
#pragma unroll
            for (int i = 0; i < STATES; i++) old[i] = 0.0f;
        // under the products' latency
        drain.write(out, step > 0);
        if (EXTRAS > 0) extra_drain.write(out_extra, step > 0);
        fetch(step + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        copy_wait<STAGES - 2>();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int k = 1; k < RECURRENTS; k++) sum[0][j] += sum[k][j];
        float through = hf_min(hf_max(own(sum, at, 0, 0), -clip), clip);
        if (RESETS && row < live && step > 0 && bit(resets, words, first + row, t + 1)) through = 0.0f;
        carry[0] += through;
        if (t >= 0) {
            float d[STATES], dg[GATES];
#pragma unroll
            for (int i = 0; i < STATES; i++) d[i] = carry[i];
            d[0] += grad;
            cell_backward(old, g, d, carry, dg);
            if (RESETS && starts)
#pragma unroll
                for (int i = 0; i < STATES; i++) carry[i] = 0.0f;
            half_t* to = (half_t*)(next + row * G_BYTES + 2 * channel);
#pragma unroll
            for (int i = 0; i < GATES; i++) {
                bias[i] += alive ? dg[i] : 0.0f;
                if (channel < width) to[i * (VECTOR_BYTES / 2)] = narrow(dg[i]);
            }
        }
        __syncthreads();
        char* used = (char*)now;
        now = next;
        next = used;
    }
    if (alive)
#pragma unroll
        for (int i = 0; i < STATES; i++) grad_initial[i * batch * token + own_state] = carry[i];
#pragma unroll
    for (int i = 0; i < GATES; i++) {
        const float total = bias[i] + __shfl_xor_sync(0xffffffffu, bias[i], 1);
        if (row == 0 && exists) db[(((long long)blockIdx.x * GATES + i) * heads + head) * WIDTH + channel] = total;
    }
}
