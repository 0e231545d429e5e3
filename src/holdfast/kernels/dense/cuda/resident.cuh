// One head's recurrence in one block: R stays in registers, its vectors pass through shared memory.
// Before this file: constexpr int WIDTH (a multiple of 8), ROWS, STAGES; constexpr bool RESETS.
//
// A product of 16 x 16 x 8 serves eight columns. With two sequences a block, every other column is of the same sequence: the
// 16 rows of a matrix are channels of one gate, each lane finds its own cell among its four results, and all lanes have one.
// With eight, each column is a sequence, and a matrix's rows are eight channels of two gates, so that a lane has all gates of
// its two cells. A step is shortest with two; with eight it takes the fewest instructions a cell.

constexpr bool EIGHT = ROWS == 8;
static_assert(ROWS == 2 || ROWS == 8, "columns of a product");
constexpr int CHANNELS = EIGHT ? 8 : 16;   // of a warp
constexpr int CELLS = EIGHT ? 2 : 1;       // of a lane
constexpr int MATRICES = EIGHT ? (RECURRENTS + 1) / 2 : RECURRENTS;
constexpr int WARPS = (WIDTH + CHANNELS - 1) / CHANNELS, THREADS = 32 * WARPS;
constexpr int STEPS = (WIDTH + 15) / 16;   // products over a vector
constexpr int VECTOR_BYTES = 32 * STEPS;   // one vector of one sequence, zeros past WIDTH
constexpr int PAIRS = STEPS / 2;           // products whose operands come 16 bytes at a time

// bytes from row to row in shared memory: as many, rounded up to remainder past a multiple of 128
__device__ constexpr int padded(int bytes, int remainder) { return (bytes + 127 - remainder) / 128 * 128 + remainder; }
// so that the lanes of a warp read their cells' elements without bank conflicts
__device__ constexpr int row_bytes(int bytes, int element) { return padded(bytes, EIGHT ? 16 : element == 2 ? 32 : 64); }
// so that they read operands without bank conflicts
__device__ constexpr int vector_bytes(int bytes) { return padded(bytes, 64); }

// of a lane's cells: channel, the sequence of cell 0
struct Place {
    int lane, warp, r, q, channel, row, inside;  // inside: the channel, or the last one for a lane past WIDTH
    HF_DEVICE Place() {
        lane = threadIdx.x & 31;
        warp = threadIdx.x >> 5;
        r = lane >> 2;
        q = lane & 3;
        channel = CHANNELS * warp + r + (EIGHT ? 0 : 8 * (q >> 1));
        row = EIGHT ? 2 * q : q & 1;
        inside = min(channel, WIDTH - 1);
    }
};

// the k of element e (0 or 1) of register j (0: a[0], b[0]; 1: a[2], b[1]) of product i
HF_DEVICE int k_of(int i, int q, int j, int e) {
    return i < 2 * PAIRS ? 32 * (i / 2) + 8 * q + 4 * (i % 2) + 2 * j + e : 16 * i + 4 * q + 2 * j + e;
}

// weight(m, half, k): of this lane's row of matrix m's upper or lower half for input channel k, which is inside the head
template <typename Weight> HF_DEVICE void load_weights(u32 (&a)[MATRICES][STEPS][4], const Place& at, Weight weight) {
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int k = k_of(i, at.q, j, 0);
                    const u32 low = k < WIDTH ? weight(m, half, k) : 0, high = k < WIDTH ? weight(m, half, k + 1) : 0;
                    a[m][i][2 * j + half] = low | high << 16;
                }
}

// the operands of the vectors: from is where the first begins, stride the bytes to the next
HF_DEVICE void load_vectors(u32 (&b)[STEPS][2], const char* from, int stride, const Place& at) {
    const char* mine = from + at.r % ROWS * stride;
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

// gate g of this lane's cell j among the products' results
HF_DEVICE float own(const float (&sum)[MATRICES][4], const Place& at, int g, int j) {
    if (EIGHT) return sum[EIGHT ? g / 2 : 0][2 * (g % 2) + j];
    const float(&mine)[4] = sum[EIGHT ? 0 : g];
    const float upper = at.row ? mine[1] : mine[0], lower = at.row ? mine[3] : mine[2];
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
