// S = exp(delta A) S + B (delta u)^T;  y = S^T C. A threadgroup runs SG simdgroups, each with its columns of one head's
// state. Reads u [B, L, H, P], delta [B, L, H], B, C [B, L, G, N], A [H, N] and S0 [B, H, P, N]; writes y like u and
// last like S0.
const int L = u_shape[1], H = u_shape[2], G = B_shape[2];
const long h = threadgroup_position_in_grid.y, b = threadgroup_position_in_grid.z;
const int simdgroup = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
const Lane<R, RPL, CPL> lane = lane_of<R, RPL, CPL, SG>(thread_index_in_simdgroup, N, P, simdgroup);
const SsdInput<decltype(u), decltype(delta), decltype(B), decltype(A), R, RPL, CPL> input = {
    u, delta, B, A, h, b * L * H + h, b * L * G + h / (H / G), H, G, lane};

float S[RPL][CPL];
load_state(S, S0 + (b * H + h) * P * N, 1, N, lane);
Token<RPL, CPL> token, next;
float query[RPL], next_query[RPL], out[CPL];
input.load(next, 0);
load_rows(next_query, C, input.group_row(0) * N, lane);
for (int t = 0; t < L; ++t) {
  token = next;
  for (int i = 0; i < RPL; ++i) query[i] = next_query[i];
  const int ahead = min(t + 1, L - 1);
  input.load(next, ahead);
  load_rows(next_query, C, input.group_row(ahead) * N, lane);

  advance(S, token);
  read_out<R>(out, S, query);
  store_columns(out, y, input.row(t) * P, lane);
}
store_state(S, last + (b * H + h) * P * N, 1, N, lane);
