// (u, w) = a R(theta) (u, w) + x, a thread a pair. Reads a, cs, sn [B, L, P], x [B, L, 2 P] and h0 [B, 2 P];
// writes y [B, L, 2 P] and last [B, 2 P].
const int L = a_shape[1];
// A grid of CUDA is whole threadgroups; Metal's ends where it is told to.
if (thread_position_in_grid.x >= P) return;
const long batch = thread_position_in_grid.y, pair = batch * P + thread_position_in_grid.x;
const long first = batch * L * P + thread_position_in_grid.x;
decltype(a) gates = a + first;
decltype(cs) cosines = cs + first;
decltype(sn) sines = sn + first;
decltype(x) inputs = x + 2 * first;
decltype(y) out = y + 2 * first;

float u = h0[2 * pair], w = h0[2 * pair + 1];
int t = 0;
for (; t + AHEAD <= L; t += AHEAD) {
  // Nothing but the state waits for the state: the loads of a block of tokens are in flight together.
  float re[AHEAD], im[AHEAD], xu[AHEAD], xw[AHEAD];
  for (int i = 0; i < AHEAD; ++i) {
    re[i] = float(gates[i * P]) * float(cosines[i * P]);
    im[i] = float(gates[i * P]) * float(sines[i * P]);
    xu[i] = float(inputs[2 * i * P]);
    xw[i] = float(inputs[2 * i * P + 1]);
  }
  for (int i = 0; i < AHEAD; ++i) {
    const float turned = fma(re[i], u, fma(-im[i], w, xu[i]));
    w = fma(im[i], u, fma(re[i], w, xw[i]));
    u = turned;
    out[2 * i * P] = static_cast<Y>(u);
    out[2 * i * P + 1] = static_cast<Y>(w);
  }
  gates += AHEAD * P;
  cosines += AHEAD * P;
  sines += AHEAD * P;
  inputs += 2 * AHEAD * P;
  out += 2 * AHEAD * P;
}
for (; t < L; ++t) {
  const float re = float(*gates) * float(*cosines), im = float(*gates) * float(*sines);
  const float turned = fma(re, u, fma(-im, w, float(inputs[0])));
  w = fma(im, u, fma(re, w, float(inputs[1])));
  u = turned;
  out[0] = static_cast<Y>(u);
  out[1] = static_cast<Y>(w);
  gates += P;
  cosines += P;
  sines += P;
  inputs += 2 * P;
  out += 2 * P;
}
last[2 * pair] = u;
last[2 * pair + 1] = w;
