// The adjoint of one turn (u', w') = gate R(c, s) (u, w): takes the gradient of its result to that of (u, w), and finds
// those of the gate, cosine and sine.
struct TurnGrads {
  float gate, c, s;
};

FUNCTION TurnGrads turn_back(thread float& du, thread float& dw, float gate, float c, float s, float u, float w) {
  const float along = fma(du, u, dw * w), across = fma(dw, u, -du * w);
  const TurnGrads found = {fma(c, along, s * across), gate * along, gate * across};
  const float back = gate * fma(c, du, s * dw);
  dw = gate * fma(c, dw, -s * du);
  du = back;
  return found;
}
