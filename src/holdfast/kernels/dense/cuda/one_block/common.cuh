// One head's recurrence in one block: R stays in registers, its vectors pass through shared memory.
// Before this file: constexpr int WIDTH (a multiple of 8), ROWS, STAGES; constexpr bool RESETS.
//
// A product of 16 x 16 x 8 serves eight columns, of which a lane keeps its even one, 2q: no result is selected or passed on
// by a lane that is not to use it. With two sequences a block, a matrix's rows are 16 channels of one gate: half of the lanes
// have the upper ones' cells, half the lower ones'. With four, they are eight channels of two gates, and a lane has the cells
// of both eighths of its warp's channels. A step is shortest with two; with four it takes fewer instructions a cell.

constexpr bool FOUR = ROWS == 4;
static_assert(ROWS == 2 || ROWS == 4, "columns of a product");
constexpr int CHANNELS = 16;         // of a warp
constexpr int CELLS = FOUR ? 2 : 1;  // of a lane
constexpr int MATRICES = FOUR ? 2 * ((RECURRENTS + 1) / 2) : RECURRENTS;  // with four, matrix m is of eighth m % 2
constexpr int WARPS = (WIDTH + CHANNELS - 1) / CHANNELS, THREADS = 32 * WARPS;
constexpr int STEPS = (WIDTH + 15) / 16;   // products over a vector
constexpr int VECTOR_BYTES = 32 * STEPS;   // one vector of one sequence, zeros past WIDTH
constexpr int PAIRS = STEPS / 2;           // products whose operands come 16 bytes at a time

// bytes from row to row in shared memory: as many, rounded up to remainder past a multiple of 128
__device__ constexpr int padded(int bytes, int remainder) { return (bytes + 127 - remainder) / 128 * 128 + remainder; }
// so that the lanes of a warp read their cells' elements without bank conflicts
__device__ constexpr int row_bytes(int bytes, int element) { return padded(bytes, FOUR ? 16 : element == 2 ? 32 : 64); }
// so that they read operands without bank conflicts
__device__ constexpr int vector_bytes(int bytes) { return padded(bytes, 32); }

// of a lane's cells: channels and their sequence
struct Place {
    int lane, warp, r, q, row, channel[CELLS], inside[CELLS];  // inside: the channel, or the last one for one past WIDTH
    HF_DEVICE Place() {
        lane = threadIdx.x & 31;
        warp = threadIdx.x >> 5;
        r = lane >> 2;
        q = lane & 3;
        row = q % ROWS;
#pragma unroll
        for (int j = 0; j < CELLS; j++) {
            channel[j] = CHANNELS * warp + 8 * (FOUR ? j : q >> 1) + r;
            inside[j] = min(channel[j], WIDTH - 1);
        }
    }
    // which sequence column r of products is
    HF_DEVICE int column() const { return (r >> 1) % ROWS; }
};

// the k of element e (0 or 1) of register j (0: a[0], b[0]; 1: a[2], b[1]) of product i
HF_DEVICE int k_of(int i, int q, int j, int e) {
    return i < 2 * PAIRS ? 32 * (i / 2) + 8 * q + 4 * (i % 2) + 2 * j + e : 16 * i + 4 * q + 2 * j + e;
}

// weight(m, half, k): of this lane's row of matrix m's upper or lower half for input channels k and k + 1, inside the head
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
                    a[m][i][2 * j + half] = k < WIDTH ? weight(m, half, k) : 0;
                }
}

// the operands of the vector of this lane's column, which begins at mine
HF_DEVICE void load_vector(u32 (&b)[STEPS][2], const char* mine, const Place& at) {
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
    if (FOUR) return sum[FOUR ? g / 2 * 2 + j : 0][g % 2 * 2];
    return at.q >> 1 ? sum[FOUR ? 0 : g][2] : sum[FOUR ? 0 : g][0];
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
            memory[i] += step;
        }
    }
};

HF_DEVICE bool bit(const u32* resets, int words, int row, int t) {
    return resets[(long long)row * words + t / 32] >> (t & 31) & 1;
}
