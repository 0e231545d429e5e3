// The adjoint of rotlru_forward, from the last token to the first; the output is the history of the state.
// Writes da, dcs, dsn [B, L, P], dx [B, L, 2 P] and dh0 [B, 2 P].
const int L = a_shape[1];
const long P = a_shape[2];
// A grid of CUDA is whole threadgroups; Metal's ends where it is told to.
if (thread_position_in_grid.x >= P) return;
const long pair = thread_position_in_grid.y * P + thread_position_in_grid.x;
const long first = thread_position_in_grid.y * L * P + thread_position_in_grid.x;

const float entering_u = h0[2 * pair], entering_w = h0[2 * pair + 1];
float du = dlast[2 * pair], dw = dlast[2 * pair + 1];
for (int to = L; to > 0; to -= AHEAD) {
  float gate[AHEAD], c[AHEAD], s[AHEAD], u[AHEAD], w[AHEAD], gu[AHEAD], gw[AHEAD];
  for (int i = 0; i < AHEAD; ++i) {
    const int t = max(to - 1 - i, 0);
    const long at = first + t * P, before = 2 * (at - P);
    gate[i] = float(a[at]);
    c[i] = float(cs[at]);
    s[i] = float(sn[at]);
    u[i] = t > 0 ? float(y[before]) : entering_u;
    w[i] = t > 0 ? float(y[before + 1]) : entering_w;
    gu[i] = float(dy[2 * at]);
    gw[i] = float(dy[2 * at + 1]);
  }
  for (int i = 0; i < AHEAD; ++i) {
    if (to - 1 - i >= 0) {
      const long at = first + (to - 1 - i) * P;
      du += gu[i];
      dw += gw[i];
      dx[2 * at] = static_cast<X>(du);
      dx[2 * at + 1] = static_cast<X>(dw);
      const float along = fma(du, u[i], dw * w[i]), across = fma(dw, u[i], -du * w[i]);
      da[at] = static_cast<A>(fma(c[i], along, s[i] * across));
      dcs[at] = static_cast<CS>(gate[i] * along);
      dsn[at] = static_cast<SN>(gate[i] * across);
      const float back = gate[i] * fma(c[i], du, s[i] * dw);
      dw = gate[i] * fma(c[i], dw, -s[i] * du);
      du = back;
    }
  }
}
dh0[2 * pair] = du;
dh0[2 * pair + 1] = dw;
