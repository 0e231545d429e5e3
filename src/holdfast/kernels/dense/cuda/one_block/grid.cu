// The forward pass of heads that fit a block each. Arguments as in one_block/forward.cu; fours: how many blocks of four
// sequences a head has; the rest of the batch, if any, blocks of two take. Grid (blocks of all heads).
// Before this file: constexpr bool HAS_FOURS, one_block/forward.cu in namespaces rows_2 and rows_4.

extern "C" __global__ void __launch_bounds__(rows_2::THREADS, BLOCKS_A_SM)
dense_one_block_forward(const half_t* x, const half_t* R, const half_t* bias, const float* initial, const u32* resets,
                        half_t* h, float* final, float* states, char* gates, int batch, int length, int heads,
                        int width, int fours) {
    extern __shared__ __align__(128) char shared[];
    // those of four come first: no SM has two of them before each has one
    const int wide = fours * heads, block = blockIdx.x, each = (batch - 4 * fours + 1) / 2;
    if (HAS_FOURS && block < wide)
        rows_4::forward(x, R, bias, initial, resets, h, final, states, gates, batch, length, heads, width, block / fours,
                        4 * (block % fours), shared);
    else
        rows_2::forward(x, R, bias, initial, resets, h, final, states, gates, batch, length, heads, width,
                        (block - wide) / each, 4 * fours + 2 * ((block - wide) % each), shared);
}
