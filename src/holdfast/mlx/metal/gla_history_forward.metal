// gla_forward that keeps the state before every token and the last one, as history.metal reads them.
const int L = q_shape[1], H = q_shape[2];
const long h = threadgroup_position_in_grid.y, b = threadgroup_position_in_grid.z;
const int simdgroup = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
const Lane<R, RPL, CPL> lane = lane_of<R, RPL, CPL, SG>(thread_index_in_simdgroup, K, V, simdgroup);
const GlaInput<decltype(k), decltype(v), decltype(gates), GK, R, RPL, CPL> input = {k, v, gates, b * L * H + h, H, lane};

const long place = (b * H + h) * threadgroups_per_grid.x * SG + simdgroup;
const long slots = long((L + SEG - 1) / SEG) * SEG + 1;
device float* to = kept + place * slots * (32 * RPL * CPL) + lane.index;
float S[RPL][CPL] = {}, query[RPL], out[CPL];
Token<RPL, CPL> token;
for (int t = 0; t <= L; ++t) {
  for (int i = 0; i < RPL; ++i)
    for (int j = 0; j < CPL; ++j) to[32 * (i * CPL + j)] = S[i][j];
  to += 32 * RPL * CPL;
  if (t < L) {
    input.load(token, t);
    load_rows(query, q, input.row(t) * K, lane);
    advance(S, token);
    read_out<R>(out, S, query);
    store_columns(out, y, input.row(t) * V, lane);
  }
}
