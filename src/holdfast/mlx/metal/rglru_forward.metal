// h = a h + x, a thread a channel. Reads a, x [B, L, D] and h0 [B, D]; writes y [B, L, D] and last [B, D].
const int L = x_shape[1];
const long D = x_shape[2];
// A grid of CUDA is whole threadgroups; Metal's ends where it is told to.
if (thread_position_in_grid.x >= D) return;
const long channel = thread_position_in_grid.y * D + thread_position_in_grid.x;
const long first = thread_position_in_grid.y * L * D + thread_position_in_grid.x;

float h = h0[channel];
for (int from = 0; from < L; from += AHEAD) {
  // Gates and inputs do not wait for the state: those of a block of tokens are in flight together.
  float gate[AHEAD], input[AHEAD];
  for (int i = 0; i < AHEAD; ++i) {
    const long at = first + min(from + i, L - 1) * D;
    gate[i] = float(a[at]);
    input[i] = float(x[at]);
  }
  for (int i = 0; i < AHEAD; ++i) {
    if (from + i < L) {
      h = fma(gate[i], h, input[i]);
      y[first + (from + i) * D] = static_cast<Y>(h);
    }
  }
}
last[channel] = h;
