// What a token of gated linear attention does to the state: the gate (one a head, GK = 1, or one a key channel) decays
// its rows, the key writes the value.
template <typename Keys, typename Values, typename Gates, int GK, int R, int RPL, int CPL>
struct GlaInput {
  typedef Token<RPL, CPL> Item;
  Keys k;
  Values v;
  Gates gates;
  long first;  // b L H + h
  int H;
  Lane<R, RPL, CPL> lane;

  FUNCTION long row(int t) const { return first + long(t) * H; }
  FUNCTION void load(thread Token<RPL, CPL>& token, int t) const {
    const long at = row(t);
    load_rows(token.k, k, at * lane.K, lane);
    load_columns(token.v, v, at * lane.V, lane);
    if (GK == 1) {
      for (int i = 0; i < RPL; ++i) token.decay[i] = float(gates[at]);
    } else {
      load_rows(token.decay, gates, at * lane.K, lane);
    }
  }
};
