// The states that the backward pass goes back to, on three levels: every SEG tokens over the whole sequence, every SUB
// tokens over the segment at hand, every token over the part at hand. A level does not repeat what the one above has,
// so L tokens need L / SEG + SEG / SUB - 1 + SUB - 1 states instead of L. Each lane keeps its own elements. SUB <= SEG.
template <int SEG, int SUB>
FUNCTION long checkpoint_slots(int segments) {
  return segments + (SEG + SUB - 1) / SUB - 1 + SUB - 1;
}

template <int SEG, int SUB, int RPL, int CPL>
struct Checkpoints {
  device float* kept;
  int segments;

  // Where the state that token t finds is kept.
  FUNCTION device float* slot(int t) const {
    const int in_segment = t % SEG, in_part = in_segment % SUB;
    const int parts = (SEG + SUB - 1) / SUB;
    int place = t / SEG;
    if (in_segment > 0) place = segments + in_segment / SUB - 1;
    if (in_part > 0) place = segments + parts - 1 + in_part - 1;
    return kept + long(place) * (32 * RPL * CPL);
  }
  FUNCTION void save(thread const float (&S)[RPL][CPL], int t) const {
    device float* at = slot(t);
    for (int i = 0; i < RPL; ++i)
      for (int j = 0; j < CPL; ++j) at[32 * (i * CPL + j)] = S[i][j];
  }
  FUNCTION void load(thread float (&S)[RPL][CPL], int t) const {
    const device float* at = slot(t);
    for (int i = 0; i < RPL; ++i)
      for (int j = 0; j < CPL; ++j) S[i][j] = at[32 * (i * CPL + j)];
  }
};

// Runs tokens [from, to) and keeps the state before every EVERY-th. The next token is on its way while one is used.
template <int EVERY, typename Input, typename Kept, int RPL, int CPL>
FUNCTION void sweep(thread float (&S)[RPL][CPL], int from, int to, thread const Input& input, thread const Kept& kept) {
  typename Input::Item token, next;
  input.load(next, from);
  for (int t = from; t < to; ++t) {
    token = next;
    input.load(next, min(t + 1, to - 1));
    if ((t - from) % EVERY == 0) kept.save(S, t);
    advance(S, token);
  }
}
