// The adjoint of rotlru_forward, from the last token to the first; the output is the history of the state.
// Writes da, dcs, dsn [B, L, P], dx [B, L, 2 P] and dh0 [B, 2 P].
const int L = a_shape[1];
// A grid of CUDA is whole threadgroups; Metal's ends where it is told to.
if (thread_position_in_grid.x >= P) return;
const long batch = thread_position_in_grid.y, pair = batch * P + thread_position_in_grid.x;
const long end = (batch + 1) * L * P - P + thread_position_in_grid.x;
decltype(a) gates = a + end;
decltype(cs) cosines = cs + end;
decltype(sn) sines = sn + end;
decltype(y) states = y + 2 * (end - P);
decltype(dy) grads = dy + 2 * end;
decltype(da) gate_grads = da + end;
decltype(dcs) cosine_grads = dcs + end;
decltype(dsn) sine_grads = dsn + end;
decltype(dx) input_grads = dx + 2 * end;

float du = dlast[2 * pair], dw = dlast[2 * pair + 1];
int to = L;
// the state before the first token is h0
for (; to > AHEAD; to -= AHEAD) {
  float gate[AHEAD], c[AHEAD], s[AHEAD], u[AHEAD], w[AHEAD], gu[AHEAD], gw[AHEAD];
  for (int i = 0; i < AHEAD; ++i) {
    gate[i] = float(gates[-i * P]);
    c[i] = float(cosines[-i * P]);
    s[i] = float(sines[-i * P]);
    u[i] = float(states[-2 * i * P]);
    w[i] = float(states[-2 * i * P + 1]);
    gu[i] = float(grads[-2 * i * P]);
    gw[i] = float(grads[-2 * i * P + 1]);
  }
  for (int i = 0; i < AHEAD; ++i) {
    du += gu[i];
    dw += gw[i];
    input_grads[-2 * i * P] = static_cast<X>(du);
    input_grads[-2 * i * P + 1] = static_cast<X>(dw);
    const TurnGrads found = turn_back(du, dw, gate[i], c[i], s[i], u[i], w[i]);
    gate_grads[-i * P] = static_cast<A>(found.gate);
    cosine_grads[-i * P] = static_cast<CS>(found.c);
    sine_grads[-i * P] = static_cast<SN>(found.s);
  }
  gates -= AHEAD * P;
  cosines -= AHEAD * P;
  sines -= AHEAD * P;
  states -= 2 * AHEAD * P;
  grads -= 2 * AHEAD * P;
  gate_grads -= AHEAD * P;
  cosine_grads -= AHEAD * P;
  sine_grads -= AHEAD * P;
  input_grads -= 2 * AHEAD * P;
}
for (; to > 0; --to) {
  const float u = to > 1 ? float(states[0]) : h0[2 * pair], w = to > 1 ? float(states[1]) : h0[2 * pair + 1];
  du += float(grads[0]);
  dw += float(grads[1]);
  input_grads[0] = static_cast<X>(du);
  input_grads[1] = static_cast<X>(dw);
  const TurnGrads found = turn_back(du, dw, float(*gates), float(*cosines), float(*sines), u, w);
  *gate_grads = static_cast<A>(found.gate);
  *cosine_grads = static_cast<CS>(found.c);
  *sine_grads = static_cast<SN>(found.s);
  gates -= P;
  cosines -= P;
  sines -= P;
  states -= 2 * P;
  grads -= 2 * P;
  gate_grads -= P;
  cosine_grads -= P;
  sine_grads -= P;
  input_grads -= 2 * P;
}
dh0[2 * pair] = du;
dh0[2 * pair + 1] = dw;
