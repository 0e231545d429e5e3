// A token of the gated delta rule: the gate decays the rows of the state, then the key's value moves to v by beta.
template <int R, int RPL, int CPL>
struct DeltaToken {
  Token<RPL, CPL> part;
  float beta;
};

// S = diag(decay) S;  S = S + k (beta (v - S^T k))^T. Each element is rounded the same wherever this runs.
template <int R, int RPL, int CPL>
FUNCTION void advance(thread float (&S)[RPL][CPL], thread const DeltaToken<R, RPL, CPL>& token) {
  for (int j = 0; j < CPL; ++j) {
    float sum = 0.0f;
    for (int i = 0; i < RPL; ++i) {
      S[i][j] *= token.part.decay[i];
      sum = fma(token.part.k[i], S[i][j], sum);
    }
    const float write = token.beta * (token.part.v[j] - sum_lanes<1, R>(sum));
    for (int i = 0; i < RPL; ++i) S[i][j] = fma(token.part.k[i], write, S[i][j]);
  }
}

template <typename Keys, typename Values, typename Gates, typename Betas, int GK, int R, int RPL, int CPL>
struct DeltaInput {
  typedef DeltaToken<R, RPL, CPL> Item;
  GlaInput<Keys, Values, Gates, GK, R, RPL, CPL> gla;
  Betas beta;

  FUNCTION long row(int t) const { return gla.row(t); }
  FUNCTION void load(thread Item& token, int t) const {
    gla.load(token.part, t);
    token.beta = float(beta[gla.row(t)]);
  }
};
