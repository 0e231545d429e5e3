// (u, w) = a R(theta) (u, w) + x, a thread a pair. Reads a, cs, sn [B, L, P], x [B, L, 2 P] and h0 [B, 2 P];
// writes y [B, L, 2 P] and last [B, 2 P].
const int L = a_shape[1];
const long P = a_shape[2];
// A grid of CUDA is whole threadgroups; Metal's ends where it is told to.
if (thread_position_in_grid.x >= P) return;
const long pair = thread_position_in_grid.y * P + thread_position_in_grid.x;
const long first = thread_position_in_grid.y * L * P + thread_position_in_grid.x;

float u = h0[2 * pair], w = h0[2 * pair + 1];
for (int from = 0; from < L; from += AHEAD) {
  // Nothing but the state waits for the state: the loads of a block of tokens are in flight together.
  float re[AHEAD], im[AHEAD], xu[AHEAD], xw[AHEAD];
  for (int i = 0; i < AHEAD; ++i) {
    const long at = first + min(from + i, L - 1) * P;
    re[i] = float(a[at]) * float(cs[at]);
    im[i] = float(a[at]) * float(sn[at]);
    xu[i] = float(x[2 * at]);
    xw[i] = float(x[2 * at + 1]);
  }
  for (int i = 0; i < AHEAD; ++i) {
    if (from + i < L) {
      const long at = 2 * (first + (from + i) * P);
      const float turned = fma(re[i], u, fma(-im[i], w, xu[i]));
      w = fma(im[i], u, fma(re[i], w, xw[i]));
      u = turned;
      y[at] = static_cast<Y>(u);
      y[at + 1] = static_cast<Y>(w);
    }
  }
}
last[2 * pair] = u;
last[2 * pair + 1] = w;
