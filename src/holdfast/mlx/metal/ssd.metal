// What a token of SSD does to the state: exp(delta A) decays its N rows, B delta writes u. In the words of the tile,
// K is N, k is B, V is P and v is delta u.
template <typename Inputs, typename Steps, typename Writes, typename Rates, int R, int RPL, int CPL>
struct SsdInput {
  typedef Token<RPL, CPL> Item;
  Inputs u;
  Steps delta;
  Writes B;
  Rates A;
  long head, first, group;  // h, b L H + h and b L G + h's group
  int H, G;
  Lane<R, RPL, CPL> lane;

  FUNCTION long row(int t) const { return first + long(t) * H; }
  FUNCTION long group_row(int t) const { return group + long(t) * G; }
  FUNCTION void load(thread Token<RPL, CPL>& token, int t) const {
    const float step = float(delta[row(t)]);
    load_rows(token.k, B, group_row(t) * lane.K, lane);
    load_columns(token.v, u, row(t) * lane.V, lane);
    load_rows(token.decay, A, head * lane.K, lane);
    for (int i = 0; i < RPL; ++i) token.decay[i] = exp(step * token.decay[i]);
    for (int j = 0; j < CPL; ++j) token.v[j] *= step;
  }
};
