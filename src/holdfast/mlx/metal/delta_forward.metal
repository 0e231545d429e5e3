// S = diag(gate) S;  S = S + k (beta (v - S^T k))^T;  y = S^T q. A threadgroup runs SG simdgroups, each with its columns
// of one head's state. Reads q, k [B, L, H, K], v [B, L, H, V], gates [B, L, H, GK], beta [B, L, H] and S0 [B, H, K, V];
// writes y like v and last like S0.
const int L = q_shape[1], H = q_shape[2];
const long h = threadgroup_position_in_grid.y, b = threadgroup_position_in_grid.z;
const int simdgroup = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
const Lane<R, RPL, CPL> lane = lane_of<R, RPL, CPL, SG>(thread_index_in_simdgroup, K, V, simdgroup);
const DeltaInput<decltype(k), decltype(v), decltype(gates), decltype(beta), GK, R, RPL, CPL> input = {
    {k, v, gates, b * L * H + h, H, lane}, beta};

float S[RPL][CPL];
load_state(S, S0 + (b * H + h) * K * V, V, 1, lane);
DeltaToken<R, RPL, CPL> token, next;
float query[RPL], next_query[RPL], out[CPL];
input.load(next, 0);
load_rows(next_query, q, input.row(0) * K, lane);
for (int t = 0; t < L; ++t) {
  token = next;
  for (int i = 0; i < RPL; ++i) query[i] = next_query[i];
  const int ahead = min(t + 1, L - 1);
  input.load(next, ahead);
  load_rows(next_query, q, input.row(ahead) * K, lane);

  advance(S, token);
  read_out<R>(out, S, query);
  store_columns(out, y, input.row(t) * V, lane);
}
store_state(S, last + (b * H + h) * K * V, V, 1, lane);
