// The adjoint of ssd_forward. dS = C dy^T + decay' dS', with decay' and dS' of the next token; dC = S dy, dB = dS v and
// dv = dS^T B with v = delta u, and e = decay * rows of dS * (S before the token) is the gradient of delta A. The
// states come from checkpoints that this kernel writes first. Sums over columns run over the simdgroups of a
// threadgroup. A head is blocks of SG simdgroups, shared by as many threadgroups as the grid has (parts): each takes
// some one after another and adds them up in its own dB, dC [parts, B, L, H, N], ddelta [parts, B, L, H] and dA
// [parts, B, H, N]. du is like u, dS0 like S0.
const int L = u_shape[1], H = u_shape[2], G = B_shape[2];
const long h = threadgroup_position_in_grid.y, b = threadgroup_position_in_grid.z;
const int part = threadgroup_position_in_grid.x, parts = threadgroups_per_grid.x;
const long batch = threadgroups_per_grid.z;
const int own = simdgroup_index_in_threadgroup, thread_index = own * 32 + int(thread_index_in_simdgroup);
constexpr int block_columns = SG * (32 / R) * CPL;

const int segments = (L + SEG - 1) / SEG;
const long place = ((b * H + h) * parts + part) * SG + own;
const long share = checkpoint_slots<SEG, SUB>(segments) * (32 * RPL * CPL);
const Checkpoints<SEG, SUB, RPL, CPL> states = {kept + place * share + thread_index % 32, segments};

// Two buffers, so that one barrier a token is enough: a buffer is written again only after the next barrier. A lone
// simdgroup exchanges nothing, so that no N is too large.
threadgroup float shared[2][SG][2][SG > 1 ? R * RPL : 1];
threadgroup float shared_step[2][SG];
for (int block = part; block * block_columns < P; block += parts) {
  const Lane<R, RPL, CPL> lane = lane_of<R, RPL, CPL, SG>(thread_index % 32, N, P, block * SG + own);
  const SsdInput<decltype(u), decltype(delta), decltype(B), decltype(A), R, RPL, CPL> input = {
      u, delta, B, A, h, b * L * H + h, b * L * G + h / (H / G), H, G, lane};
  const bool is_first = block_columns >= P || block == part;

  float S[RPL][CPL], dS[RPL][CPL], rates[RPL], rate_grads[RPL] = {};
  load_state(S, S0 + (b * H + h) * P * N, 1, N, lane);
  load_state(dS, dlast + (b * H + h) * P * N, 1, N, lane);
  load_rows(rates, A, h * N, lane);
  sweep<SEG>(S, 0, L, input, states);

  for (int start = (segments - 1) * SEG; start >= 0; start -= SEG) {
    const int end = min(start + SEG, L);
    states.load(S, start);
    sweep<SUB>(S, start, end, input, states);
    for (int from = start + (end - start - 1) / SUB * SUB; from >= start; from -= SUB) {
      const int to = min(from + SUB, end);
      states.load(S, from);
      sweep<1>(S, from, to, input, states);
      for (int t = to - 1; t >= from; --t) {
        Token<RPL, CPL> token;
        float query[RPL], grad[CPL], plain[CPL], before[RPL][CPL];
        input.load(token, t);
        load_rows(query, C, input.group_row(t) * N, lane);
        load_columns(grad, dy, input.row(t) * P, lane);
        load_columns(plain, u, input.row(t) * P, lane);
        states.load(before, t);
        const float step = float(delta[input.row(t)]);

        float rows[2][RPL] = {}, columns[CPL] = {};  // dC, dB; dv
        float step_grad = 0.0f;
        for (int i = 0; i < RPL; ++i) {
          float e = 0.0f;
          for (int j = 0; j < CPL; ++j) {
            dS[i][j] = fma(query[i], grad[j], dS[i][j]);
            rows[0][i] = fma(S[i][j], grad[j], rows[0][i]);
            rows[1][i] = fma(dS[i][j], token.v[j], rows[1][i]);
            columns[j] = fma(dS[i][j], token.k[i], columns[j]);
            dS[i][j] *= token.decay[i];
            e = fma(dS[i][j], before[i][j], e);
            S[i][j] = before[i][j];
          }
          rate_grads[i] = fma(step, e, rate_grads[i]);
          step_grad = fma(rates[i], e, step_grad);
        }
        for (int j = 0; j < CPL; ++j) {
          step_grad = fma(plain[j], columns[j], step_grad);
          columns[j] = step * sum_lanes<1, R>(columns[j]);
        }
        store_columns(columns, du, input.row(t) * P, lane);

        const long at = part * batch * L * H + input.row(t);
        for (int i = 0; i < RPL; ++i) {
          const float dc = sum_lanes<R, 32>(rows[0][i]), db = sum_lanes<R, 32>(rows[1][i]);
          if (lane.index < R) {
            if (SG > 1) {
              shared[t % 2][own][0][lane.row(i)] = dc;
              shared[t % 2][own][1][lane.row(i)] = db;
            } else if (lane.has_row(i)) {
              put(dC, at * N + lane.row(i), dc, is_first);
              put(dB, at * N + lane.row(i), db, is_first);
            }
          }
        }
        step_grad = simd_sum(step_grad);
        if (lane.index == 0) {
          if (SG > 1)
            shared_step[t % 2][own] = step_grad;
          else
            put(ddelta, at, step_grad, is_first);
        }
        if (SG > 1) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          for (int r = thread_index; r < N; r += 32 * SG) {
            float sums[2] = {};
            for (int g = 0; g < SG; ++g)
              for (int n = 0; n < 2; ++n) sums[n] += shared[t % 2][g][n][r];
            put(dC, at * N + r, sums[0], is_first);
            put(dB, at * N + r, sums[1], is_first);
          }
          if (thread_index == 0) {
            float sum = 0.0f;
            for (int g = 0; g < SG; ++g) sum += shared_step[t % 2][g];
            put(ddelta, at, sum, is_first);
          }
        }
      }
    }
  }
  store_state(dS, dS0 + (b * H + h) * P * N, 1, N, lane);

  // the barrier: other simdgroups may still read the buffers for the first tokens
  if (SG > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
  const long rate = ((part * batch + b) * H + h) * N;
  for (int i = 0; i < RPL; ++i) {
    const float sum = sum_lanes<R, 32>(rate_grads[i]);
    if (lane.index < R) {
      if (SG > 1)
        shared[0][own][0][lane.row(i)] = sum;
      else if (lane.has_row(i))
        put(dA, rate + lane.row(i), sum, is_first);
    }
  }
  if (SG > 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = thread_index; r < N; r += 32 * SG) {
      float sum = 0.0f;
      for (int g = 0; g < SG; ++g) sum += shared[0][g][0][r];
      put(dA, rate + r, sum, is_first);
    }
    // and again before the next block writes them
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
