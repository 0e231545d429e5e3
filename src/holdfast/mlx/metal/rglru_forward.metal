// h = a h + x, a thread a channel. Reads a, x [B, L, D] and h0 [B, D]; writes y [B, L, D] and last [B, D].
const int L = x_shape[1];
// A grid of CUDA is whole threadgroups; Metal's ends where it is told to.
if (thread_position_in_grid.x >= D) return;
const long batch = thread_position_in_grid.y, channel = batch * D + thread_position_in_grid.x;
const long first = batch * L * D + thread_position_in_grid.x;
decltype(a) gates = a + first;
decltype(x) inputs = x + first;
decltype(y) out = y + first;

float h = h0[channel];
int t = 0;
for (; t + AHEAD <= L; t += AHEAD) {
  // Gates and inputs do not wait for the state: those of a block of tokens are in flight together.
  float gate[AHEAD], input[AHEAD];
  for (int i = 0; i < AHEAD; ++i) {
    gate[i] = float(gates[i * D]);
    input[i] = float(inputs[i * D]);
  }
  for (int i = 0; i < AHEAD; ++i) {
    h = fma(gate[i], h, input[i]);
    out[i * D] = static_cast<Y>(h);
  }
  gates += AHEAD * D;
  inputs += AHEAD * D;
  out += AHEAD * D;
}
for (; t < L; ++t) {
  h = fma(float(*gates), h, float(*inputs));
  *out = static_cast<Y>(h);
  gates += D;
  inputs += D;
  out += D;
}
last[channel] = h;
