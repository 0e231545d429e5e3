// The gates of one channel side by side in memory, padded to GATES_SAVED, a power of two: one access a lane.
// In the operands' type, or in float32 with WIDE_GATES. Before this file: constexpr int GATES_SAVED, WIDE_GATES.

constexpr int GATE_SIZE = WIDE_GATES ? 4 : 2;                          // bytes
constexpr int GATE_WORDS = (GATES_SAVED * GATE_SIZE + 3) / 4;
struct gate_words {
    u32 word[GATE_WORDS];
};

HF_DEVICE void keep_gates(char* to, const float (&g)[GATES]) {
    u32 word[GATE_WORDS];
#pragma unroll
    for (int i = 0; i < GATE_WORDS; i++) {
        const int first = WIDE_GATES ? i : 2 * i;
        const float low = first < GATES ? g[first < GATES ? first : 0] : 0.0f;
        const float high = first + 1 < GATES ? g[first + 1 < GATES ? first + 1 : 0] : 0.0f;
        word[i] = WIDE_GATES ? __float_as_uint(low) : pack(low, high);
    }
    if constexpr (GATES_SAVED * GATE_SIZE == 2) *(half_t*)to = (half_t)(word[0] & 0xffffu);
    if constexpr (GATE_WORDS == 1 && GATES_SAVED * GATE_SIZE == 4) *(u32*)to = word[0];
    if constexpr (GATE_WORDS == 2) *(uint2*)to = uint2{word[0], word[1]};
    if constexpr (GATE_WORDS >= 4)
#pragma unroll
        for (int i = 0; i < GATE_WORDS / 4; i++)
            ((uint4*)to)[i] = uint4{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]};
}

HF_DEVICE void load_gates(gate_words& g, const char* from) {
    if constexpr (GATES_SAVED * GATE_SIZE == 2) g.word[0] = *(const half_t*)from;
    if constexpr (GATE_WORDS == 1 && GATES_SAVED * GATE_SIZE == 4) g.word[0] = *(const u32*)from;
    if constexpr (GATE_WORDS == 2) {
        const uint2 v = *(const uint2*)from;
        g.word[0] = v.x, g.word[1] = v.y;
    }
    if constexpr (GATE_WORDS >= 4)
#pragma unroll
        for (int i = 0; i < GATE_WORDS / 4; i++) {
            const uint4 v = ((const uint4*)from)[i];
            g.word[4 * i] = v.x, g.word[4 * i + 1] = v.y, g.word[4 * i + 2] = v.z, g.word[4 * i + 3] = v.w;
        }
}

HF_DEVICE void unpack_gates(float (&g)[GATES], const gate_words& from) {
#pragma unroll
    for (int i = 0; i < GATES; i++)
        g[i] = WIDE_GATES ? __uint_as_float(from.word[WIDE_GATES ? i : 0])
                          : widen((half_t)(from.word[WIDE_GATES ? 0 : i / 2] >> (16 * (i % 2)) & 0xffffu));
}
