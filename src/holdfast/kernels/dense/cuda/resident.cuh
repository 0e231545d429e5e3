// One head's recurrence in one block: R stays in registers, its vectors pass through shared memory.
// A warp holds 8 channels of the result, ROWS = 4 * TILES sequences; lane r * 4 + q has channel r of sequences q + 4 n.
//
// A product of 16 x 16 x 8 serves 8 channels and 4 sequences by splitting the sum over k in two: rows 0-7 of a hold the
// weights of the first half, rows 8-15 of the second; columns 2q and 2q + 1 of b hold the halves of sequence q. What is
// wanted are c[0] (first half) and c[3] (second); their sum is the whole product, one channel and sequence a lane.
// Before this file: constexpr int WIDTH (a multiple of 8), TILES, STAGES; constexpr bool RESETS.

constexpr int WARPS = WIDTH / 8, THREADS = 32 * WARPS, ROWS = 4 * TILES;
constexpr int STEPS = (WIDTH + 31) / 32;        // products over a half
constexpr int HALF = 16 * STEPS;                // channels of a half, zeros past WIDTH
constexpr int HALF_BYTES = 2 * HALF + (192 - 2 * HALF % 128) % 128;  // 64 mod 128: both halves of a row in one access
constexpr int VECTOR_BYTES = 2 * HALF_BYTES;    // one vector of one sequence
constexpr int PAIRS = STEPS / 2;                // products whose operands come 16 bytes at a time
constexpr int CHAINS = STEPS == 2 ? 2 : 1;      // sums that do not wait for one another, where registers allow

// rows of shared memory, that lanes of four rows read side by side, without bank conflicts; in bytes
__device__ constexpr int row_bytes(int bytes, int element) {
    const int offset = element == 2 ? 16 : 32;
    return (bytes + 127 - offset) / 128 * 128 + offset;
}

struct Place {
    int lane, warp, r, q, channel;
    HF_DEVICE Place() {
        lane = threadIdx.x & 31;
        warp = threadIdx.x >> 5;
        r = lane >> 2;
        q = lane & 3;
        channel = 8 * warp + r;
    }
};

// the k, within a half, of element e (0 or 1) of register j (0: a[0], b[0]; 1: a[2], b[1]) of product i
HF_DEVICE int k_of(int i, int q, int j, int e) {
    return i < 2 * PAIRS ? 32 * (i / 2) + 8 * q + 4 * (i % 2) + 2 * j + e : 16 * i + 4 * q + 2 * j + e;
}

// R's part of a gate: weight(k) is the weight of this lane's channel for input channel k
template <typename Weight> HF_DEVICE void load_weights(u32 (&a)[STEPS][4], int q, Weight weight) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int k = half * HALF + k_of(i, q, j, 0);
                const u32 low = k_of(i, q, j, 0) + half * HALF < WIDTH ? weight(k) : 0;
                const u32 high = k_of(i, q, j, 1) + half * HALF < WIDTH ? weight(k + 1) : 0;
                a[i][2 * j + half] = low | high << 16;
            }
}

// the operands of a tile of four vectors: from is where vector 0 of the tile begins, stride the bytes between vectors
HF_DEVICE void load_vectors(u32 (&b)[STEPS][2], const char* from, int stride, const Place& at) {
    const char* mine = from + (at.r >> 1) * stride + (at.r & 1) * HALF_BYTES;
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

// a[0] b[0] + a[1] b[1] + ..., in CHAINS sums
HF_DEVICE void multiply_all(float (&sum)[CHAINS][4], const u32 (&a)[STEPS][4], const u32 (&b)[STEPS][2]) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) multiply(sum[i % CHAINS], a[i], b[i][0], b[i][1]);
}
HF_DEVICE float whole(const float (&sum)[CHAINS][4]) {
    float total = sum[0][0] + sum[0][3];
    if (CHAINS == 2) total += sum[CHAINS - 1][0] + sum[CHAINS - 1][3];
    return total;
}

// where channel d of a vector is, in bytes
HF_DEVICE int vector_place(int d) { return d < HALF ? 2 * d : HALF_BYTES + 2 * (d - HALF); }

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
