// The adjoint of selective_forward, from the states that it kept. Blocks of channels each write their own part of
// dB, dC [blocks, B, L, N]; du, ddelta [B, L, D]; dA [B, D, N].
const int L = u_shape[1];
const long b = threadgroup_position_in_grid.z, block = threadgroup_position_in_grid.x, batch = threadgroups_per_grid.z;
const int own = simdgroup_index_in_threadgroup, thread_index = own * 32 + int(thread_index_in_simdgroup);
const int simdgroup = block * SG + own;
const Lane<R, RPL, CPL> lane = lane_of<R, RPL, CPL, SG>(thread_index_in_simdgroup, N, D, simdgroup);

float S[RPL][CPL], before[RPL][CPL], dS[RPL][CPL] = {}, rates[RPL][CPL], rate_grads[RPL][CPL] = {};
float write[RPL], query[RPL], step[CPL], value[CPL], grad[CPL];
// Two buffers, so that one barrier a token is enough: a buffer is written again only after the next barrier. A lone
// simdgroup exchanges nothing, so that no N is too large.
threadgroup float shared[2][SG][2][SG > 1 ? R * RPL : 1];
load_state(rates, A, 1, N, lane);
load_state(S, states + (b * L + L - 1) * D * N, 1, N, lane);
for (int t = L - 1; t >= 0; --t) {
  const long at = b * L + t;
  load_rows(write, B, at * N, lane);
  load_rows(query, C, at * N, lane);
  load_columns(step, delta, at * D, lane);
  load_columns(value, u, at * D, lane);
  load_columns(grad, dy, at * D, lane);
  load_state(before, states + max(at - 1, 0l) * D * N, 1, N, lane);

  float rows[2][RPL] = {}, values[CPL] = {}, steps[CPL] = {};  // dC, dB; gradients of delta u and of delta
  for (int i = 0; i < RPL; ++i)
    for (int j = 0; j < CPL; ++j) {
      if (t == 0) before[i][j] = 0.0f;
      dS[i][j] = fma(query[i], grad[j], dS[i][j]);
      rows[0][i] = fma(S[i][j], grad[j], rows[0][i]);
      rows[1][i] = fma(dS[i][j], step[j] * value[j], rows[1][i]);
      values[j] = fma(dS[i][j], write[i], values[j]);
      dS[i][j] *= exp(step[j] * rates[i][j]);
      const float e = dS[i][j] * before[i][j];
      rate_grads[i][j] = fma(step[j], e, rate_grads[i][j]);
      steps[j] = fma(rates[i][j], e, steps[j]);
      S[i][j] = before[i][j];
    }
  for (int j = 0; j < CPL; ++j) {
    values[j] = sum_lanes<1, R>(values[j]);
    steps[j] = fma(value[j], values[j], sum_lanes<1, R>(steps[j]));
    values[j] *= step[j];
  }
  store_columns(values, du, at * D, lane);
  store_columns(steps, ddelta, at * D, lane);

  const long row = (block * batch * L + at) * N;
  for (int i = 0; i < RPL; ++i) {
    const float dc = sum_lanes<R, 32>(rows[0][i]), db = sum_lanes<R, 32>(rows[1][i]);
    if (lane.index < R) {
      if (SG > 1) {
        shared[t % 2][own][0][lane.row(i)] = dc;
        shared[t % 2][own][1][lane.row(i)] = db;
      } else if (lane.has_row(i)) {
        dC[row + lane.row(i)] = static_cast<DC>(dc);
        dB[row + lane.row(i)] = static_cast<DB>(db);
      }
    }
  }
  if (SG > 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = thread_index; r < N; r += 32 * SG) {
      float sums[2] = {};
      for (int g = 0; g < SG; ++g)
        for (int n = 0; n < 2; ++n) sums[n] += shared[t % 2][g][n][r];
      dC[row + r] = static_cast<DC>(sums[0]);
      dB[row + r] = static_cast<DB>(sums[1]);
    }
  }
}
store_state(rate_grads, dA + b * D * N, 1, N, lane);
