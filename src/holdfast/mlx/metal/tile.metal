// A simdgroup's share of a K x V state. The 32 lanes are R row lanes by 32 / R column lanes; each holds the rows
// r, r + R, r + 2 R, ... (RPL of them) of the columns c, c + 32 / R, ... (CPL of them). Rows from K and columns from V
// on are zeros that nothing is read into and nothing is written from. K and V are compiled in, so that where there are
// none of these no lane asks.

template <int R, int RPL, int CPL>
struct Lane {
  int index, K, V, columns;
  bool has_all_rows, has_all_columns;
  FUNCTION int row(int i) const { return index % R + R * i; }
  FUNCTION int column(int j) const { return columns + index / R + (32 / R) * j; }
  FUNCTION bool has_row(int i) const { return has_all_rows || row(i) < K; }
  FUNCTION bool has_column(int j) const { return has_all_columns || column(j) < V; }
};

// Of simdgroups of a head that are counted from 0, SG to a threadgroup.
template <int R, int RPL, int CPL, int SG>
FUNCTION Lane<R, RPL, CPL> lane_of(int index, int K, int V, int simdgroup) {
  const int width = (32 / R) * CPL;
  return Lane<R, RPL, CPL>{index, K, V, simdgroup * width, K == R * RPL, V % (SG * width) == 0};
}

// Sums over lanes whose index differs in the bits from FROM to TO: <1, R> over rows, <R, 32> over columns.
template <int FROM, int TO>
FUNCTION float sum_lanes(float x) {
  for (int mask = FROM; mask < TO; mask *= 2) x += simd_shuffle_xor(x, mask);
  return x;
}

template <int R, int RPL, int CPL, typename Pointer>
FUNCTION void load_rows(thread float (&x)[RPL], Pointer from, long at, Lane<R, RPL, CPL> lane) {
  for (int i = 0; i < RPL; ++i) x[i] = lane.has_row(i) ? float(from[at + lane.row(i)]) : 0.0f;
}

template <int R, int RPL, int CPL, typename Pointer>
FUNCTION void load_columns(thread float (&x)[CPL], Pointer from, long at, Lane<R, RPL, CPL> lane) {
  for (int j = 0; j < CPL; ++j) x[j] = lane.has_column(j) ? float(from[at + lane.column(j)]) : 0.0f;
}

// One token as the state sees it: S = diag(decay) S + k v^T.
template <int RPL, int CPL>
struct Token {
  float decay[RPL], k[RPL], v[CPL];
};

// The one place where the state moves. The product is rounded, then added with one more rounding: no compiler can
// contract it otherwise, so a recomputed state is the first one bit for bit.
template <int RPL, int CPL>
FUNCTION void advance(thread float (&S)[RPL][CPL], thread const Token<RPL, CPL>& token) {
  for (int i = 0; i < RPL; ++i)
    for (int j = 0; j < CPL; ++j) S[i][j] = fma(token.decay[i], S[i][j], token.k[i] * token.v[j]);
}

// A state in memory, element (k, v) at k * rows_apart + v * columns_apart.
template <int R, int RPL, int CPL, typename Pointer>
FUNCTION void load_state(thread float (&S)[RPL][CPL], Pointer from, long rows_apart, long columns_apart,
                       Lane<R, RPL, CPL> lane) {
  for (int i = 0; i < RPL; ++i)
    for (int j = 0; j < CPL; ++j) {
      const bool is_inside = lane.has_row(i) && lane.has_column(j);
      S[i][j] = is_inside ? float(from[lane.row(i) * rows_apart + lane.column(j) * columns_apart]) : 0.0f;
    }
}

template <int R, int RPL, int CPL>
FUNCTION void store_state(thread const float (&S)[RPL][CPL], device float* to, long rows_apart, long columns_apart,
                        Lane<R, RPL, CPL> lane) {
  for (int i = 0; i < RPL; ++i)
    for (int j = 0; j < CPL; ++j)
      if (lane.has_row(i) && lane.has_column(j))
        to[lane.row(i) * rows_apart + lane.column(j) * columns_apart] = S[i][j];
}

// o_v = sum over k of q_k S_kv, the same in every row lane.
template <int R, int RPL, int CPL>
FUNCTION void read_out(thread float (&o)[CPL], thread const float (&S)[RPL][CPL], thread const float (&q)[RPL]) {
  for (int j = 0; j < CPL; ++j) {
    float sum = 0.0f;
    for (int i = 0; i < RPL; ++i) sum = fma(q[i], S[i][j], sum);
    o[j] = sum_lanes<1, R>(sum);
  }
}

// Puts x at a place that only this thread writes, or adds it to what the thread has put there.
template <typename Out>
FUNCTION void put(device Out* to, long at, float x, bool is_first) {
  to[at] = static_cast<Out>(is_first ? x : float(to[at]) + x);
}

// Column j is written by row lane j, so that the lanes of a simdgroup share the stores.
template <typename Out, int R, int RPL, int CPL>
FUNCTION void store_columns(thread const float (&x)[CPL], device Out* to, long at, Lane<R, RPL, CPL> lane) {
  for (int j = 0; j < CPL; ++j)
    if (lane.index % R == j % R && lane.has_column(j)) to[at + lane.column(j)] = static_cast<Out>(x[j]);
}
