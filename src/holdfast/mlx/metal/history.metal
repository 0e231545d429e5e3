// In place of checkpoint.metal: the forward pass has kept every state, so that a sweep is one load.
template <int SEG, int SUB>
FUNCTION long checkpoint_slots(int segments) {
  return long(segments) * SEG + 1;
}

template <int SEG, int SUB, int RPL, int CPL>
struct Checkpoints {
  const device float* kept;
  int segments;

  // The state that token t finds.
  FUNCTION void load(thread float (&S)[RPL][CPL], int t) const {
    const device float* at = kept + long(t) * (32 * RPL * CPL);
    for (int i = 0; i < RPL; ++i)
      for (int j = 0; j < CPL; ++j) S[i][j] = at[32 * (i * CPL + j)];
  }
};

template <int EVERY, typename Input, typename Kept, int RPL, int CPL>
FUNCTION void sweep(thread float (&S)[RPL][CPL], int from, int to, thread const Input& input, thread const Kept& kept) {
  kept.load(S, to);
}
