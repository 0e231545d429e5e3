// The adjoint of rglru_forward, from the last token to the first: d = dy + a' d', with a' and d' of the next token.
// The output is the history of the state, so nothing else was kept. Writes da, dx [B, L, D] and dh0 [B, D].
const int L = a_shape[1];
// A grid of CUDA is whole threadgroups; Metal's ends where it is told to.
if (thread_position_in_grid.x >= D) return;
const long batch = thread_position_in_grid.y, channel = batch * D + thread_position_in_grid.x;
const long end = (batch + 1) * L * D - D + thread_position_in_grid.x;
decltype(a) gates = a + end;
decltype(y) states = y + end - D;
decltype(dy) grads = dy + end;
decltype(da) gate_grads = da + end;
decltype(dx) input_grads = dx + end;

float d = dlast[channel];
int to = L;
// the state before the first token is h0
for (; to > AHEAD; to -= AHEAD) {
  float gate[AHEAD], before[AHEAD], grad[AHEAD];
  for (int i = 0; i < AHEAD; ++i) {
    gate[i] = float(gates[-i * D]);
    before[i] = float(states[-i * D]);
    grad[i] = float(grads[-i * D]);
  }
  for (int i = 0; i < AHEAD; ++i) {
    d += grad[i];
    input_grads[-i * D] = static_cast<X>(d);
    gate_grads[-i * D] = static_cast<A>(d * before[i]);
    d *= gate[i];
  }
  gates -= AHEAD * D;
  states -= AHEAD * D;
  grads -= AHEAD * D;
  gate_grads -= AHEAD * D;
  input_grads -= AHEAD * D;
}
for (; to > 0; --to) {
  d += float(*grads);
  *input_grads = static_cast<X>(d);
  *gate_grads = static_cast<A>(d * (to > 1 ? float(*states) : h0[channel]));
  d *= float(*gates);
  gates -= D;
  states -= D;
  grads -= D;
  gate_grads -= D;
  input_grads -= D;
}
dh0[channel] = d;
