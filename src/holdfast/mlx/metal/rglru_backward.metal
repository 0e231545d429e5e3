// The adjoint of rglru_forward, from the last token to the first: d = dy + a' d', with a' and d' of the next token.
// The output is the history of the state, so nothing else was kept. Writes da, dx [B, L, D] and dh0 [B, D].
const int L = a_shape[1];
const long D = a_shape[2];
// A grid of CUDA is whole threadgroups; Metal's ends where it is told to.
if (thread_position_in_grid.x >= D) return;
const long channel = thread_position_in_grid.y * D + thread_position_in_grid.x;
const long first = thread_position_in_grid.y * L * D + thread_position_in_grid.x;

const float entering = h0[channel];
float d = dlast[channel];
for (int to = L; to > 0; to -= AHEAD) {
  float gate[AHEAD], before[AHEAD], grad[AHEAD];
  for (int i = 0; i < AHEAD; ++i) {
    const int t = max(to - 1 - i, 0);
    gate[i] = float(a[first + t * D]);
    before[i] = t > 0 ? float(y[first + (t - 1) * D]) : entering;
    grad[i] = float(dy[first + t * D]);
  }
  for (int i = 0; i < AHEAD; ++i) {
    if (to - 1 - i >= 0) {
      const long at = first + (to - 1 - i) * D;
      d += grad[i];
      dx[at] = static_cast<X>(d);
      da[at] = static_cast<A>(d * before[i]);
      d *= gate[i];
    }
  }
}
dh0[channel] = d;
