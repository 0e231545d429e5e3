// The selective scan with a state of N for each of D channels: S = exp(delta A) S + B delta u;  y = S^T C. A lane's
// columns are channels. Reads u, delta [B, L, D], B, C [B, L, N] and A [D, N]; writes y like u and every state
// [B, L, D, N].
const int L = u_shape[1];
const long b = threadgroup_position_in_grid.z;
const int simdgroup = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
const Lane<R, RPL, CPL> lane = lane_of<R, RPL, CPL, SG>(thread_index_in_simdgroup, N, D, simdgroup);

float S[RPL][CPL] = {}, rates[RPL][CPL], write[RPL], query[RPL], step[CPL], value[CPL], out[CPL];
load_state(rates, A, 1, N, lane);
for (int t = 0; t < L; ++t) {
  const long at = b * L + t;
  load_rows(write, B, at * N, lane);
  load_rows(query, C, at * N, lane);
  load_columns(step, delta, at * D, lane);
  load_columns(value, u, at * D, lane);
  for (int i = 0; i < RPL; ++i)
    for (int j = 0; j < CPL; ++j)
      S[i][j] = fma(exp(step[j] * rates[i][j]), S[i][j], write[i] * (step[j] * value[j]));
  store_state(S, states + at * D * N, 1, N, lane);
  read_out<R>(out, S, query);
  store_columns(out, y, at * D, lane);
}
