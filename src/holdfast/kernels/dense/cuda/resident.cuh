// One head's recurrence in one block: R stays in registers, its vectors pass through shared memory.
// A warp holds 16 channels of the result, a block two sequences; lane r * 4 + q has channel r + 8 * (q / 2) of sequence
// q % 2.
//
// A product of 16 x 16 x 8 serves 16 channels and two sequences: every other column of b holds the same sequence, so that
// each lane finds its own cell among its four results, and all lanes have one.
// Before this file: constexpr int WIDTH (a multiple of 8), STAGES; constexpr bool RESETS.

constexpr int WARPS = (WIDTH + 15) / 16, THREADS = 32 * WARPS, ROWS = 2;
constexpr int STEPS = WARPS;               // products over a vector
constexpr int VECTOR_BYTES = 32 * STEPS;   // one vector of one sequence, zeros past WIDTH
constexpr int PAIRS = STEPS / 2;           // products whose operands come 16 bytes at a time

// bytes from row to row in shared memory, so that two rows side by side are read without bank conflicts
__device__ constexpr int row_bytes(int bytes, int element) {
    const int offset = element == 2 ? 32 : 64;
    return (bytes + 127 - offset) / 128 * 128 + offset;
}

struct Place {
    int lane, warp, r, q, channel, row, inside;  // inside: the channel, or the last one for a lane past WIDTH
    HF_DEVICE Place() {
        lane = threadIdx.x & 31;
        warp = threadIdx.x >> 5;
        r = lane >> 2;
        q = lane & 3;
        channel = 16 * warp + r + 8 * (q >> 1);
        row = q & 1;
        inside = min(channel, WIDTH - 1);
    }
};

// the k of element e (0 or 1) of register j (0: a[0], b[0]; 1: a[2], b[1]) of product i
HF_DEVICE int k_of(int i, int q, int j, int e) {
    return i < 2 * PAIRS ? 32 * (i / 2) + 8 * q + 4 * (i % 2) + 2 * j + e : 16 * i + 4 * q + 2 * j + e;
}

// R's part of a gate: weight(row, k) is the weight of channel row of the warp's for input channel k
template <typename Weight> HF_DEVICE void load_weights(u32 (&a)[STEPS][4], const Place& at, Weight weight) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int channel = 16 * at.warp + at.r + 8 * half, k = k_of(i, at.q, j, 0);
                const bool inside = channel < WIDTH && k < WIDTH;
                const u32 low = inside ? weight(channel, k) : 0, high = inside ? weight(channel, k + 1) : 0;
                a[i][2 * j + half] = low | high << 16;
            }
}

// the operands of two vectors: from is where the first begins, stride the bytes to the second
HF_DEVICE void load_vectors(u32 (&b)[STEPS][2], const char* from, int stride, const Place& at) {
    const char* mine = from + (at.r & 1) * stride;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const uint4 v = *(const uint4*)(mine + 64 * i + 16 * at.q);
        b[2 * i][0] = v.x;
        b[2 * i][1] = v.y;
        b[2 * i + 1][0] = v.z;
        b[2 * i + 1][1] = v.w;
    }
    if (STEPS % 2) {
        const uint2 v = *(const uint2*)(mine + 64 * PAIRS + 8 * at.q);
        b[STEPS - 1][0] = v.x;
        b[STEPS - 1][1] = v.y;
    }
}

// this lane's cell among a product's results
HF_DEVICE float own(const float (&sum)[4], const Place& at) {
    const float upper = at.row ? sum[1] : sum[0], lower = at.row ? sum[3] : sum[2];
    return at.q >> 1 ? lower : upper;
}

// The 16-byte pieces of a step that this thread moves, of COLUMNS for each row; rows past the batch are left out.
// place(row, column): where a piece lies in memory at the first step, column in pieces. It moves by step bytes a step.
template <int COLUMNS> struct Pieces {
    static constexpr int COUNT = ROWS * COLUMNS, MINE = (COUNT + THREADS - 1) / THREADS;
    char* memory[MINE];
    u32 held[MINE];  // in shared memory, from the start of a stage
    bool live[MINE];
    long long step;

    // shift: the first thread to have a piece, so that several kinds do not all fall to the first warps
    template <typename Memory, typename Held>
    HF_DEVICE void start(int rows, int shift, long long bytes_a_step, Memory place, Held inside) {
        step = bytes_a_step;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int piece = (threadIdx.x + THREADS - shift % THREADS) % THREADS + i * THREADS;
            const int row = piece / COLUMNS, column = piece % COLUMNS;
            live[i] = piece < COUNT && row < rows;
            memory[i] = (char*)place(live[i] ? row : 0, live[i] ? column : 0);
            held[i] = live[i] ? inside(row, column) : 0;
        }
    }
    // to shared memory, ahead of time
    HF_DEVICE void copy(u32 stage, bool wanted) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            copy_async(stage + held[i], memory[i], live[i] && wanted);
            memory[i] += step;
        }
    }
    // out of shared memory, in two halves: what lies between them hides the first one's latency
    HF_DEVICE void take(uint4 (&v)[MINE], const char* from) const {
#pragma unroll
        for (int i = 0; i < MINE; i++) v[i] = *(const uint4*)(from + held[i]);
    }
    HF_DEVICE void write(const uint4 (&v)[MINE], bool wanted) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            write_vector(memory[i], v[i], live[i] && wanted);
            if (wanted) memory[i] += step;
        }
    }
};

HF_DEVICE bool bit(const u32* resets, int words, int row, int t) {
    return resets[(long long)row * words + t / 32] >> (t & 31) & 1;
}
