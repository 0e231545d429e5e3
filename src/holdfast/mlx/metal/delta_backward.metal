// The adjoint of delta_forward. With S' the decayed state that a token finds, w = v - S'^T k and dS = q dy^T + what comes
// from the next token: dq = S dy, du = dS^T k, dv = beta du, dbeta = du . w, dS' = dS - k (beta du)^T,
// dk = dS (beta w) - S' (beta du), dgate = rows of dS' * (S before the token). The states come from checkpoints that this
// kernel writes first. A head is blocks of SG simdgroups, shared by as many threadgroups as the grid has (parts): each
// takes some one after another and adds them up in its own dq, dk [parts, B, L, H, K], dgates [parts, B, L, H, GK] and
// dbeta [parts, B, L, H]. dv is like v, dS0 like S0.
const int L = q_shape[1], H = q_shape[2];
const long h = threadgroup_position_in_grid.y, b = threadgroup_position_in_grid.z;
const int part = threadgroup_position_in_grid.x, parts = threadgroups_per_grid.x;
const long B = threadgroups_per_grid.z;
const int own = simdgroup_index_in_threadgroup, thread_index = own * 32 + int(thread_index_in_simdgroup);
constexpr int block_columns = SG * (32 / R) * CPL;

const int segments = (L + SEG - 1) / SEG;
const long place = ((b * H + h) * parts + part) * SG + own;
const long share = checkpoint_slots<SEG, SUB>(segments) * (32 * RPL * CPL);
const Checkpoints<SEG, SUB, RPL, CPL> states = {kept + place * share + thread_index % 32, segments};

// Row sums of each simdgroup for the others, in two buffers, so that one barrier a token is enough.
constexpr int SUMS = GK > 1 ? 3 : 2;
threadgroup float shared[2][SG][SUMS][SG > 1 ? R * RPL : 1];
threadgroup float shared_gate[2][SG], shared_beta[2][SG];
for (int block = part; block * block_columns < V; block += parts) {
  const Lane<R, RPL, CPL> lane = lane_of<R, RPL, CPL, SG>(thread_index % 32, K, V, block * SG + own);
  const DeltaInput<decltype(k), decltype(v), decltype(gates), decltype(beta), GK, R, RPL, CPL> input = {
      {k, v, gates, b * L * H + h, H, lane}, beta};
  const bool is_first = block_columns >= V || block == part;

  float S[RPL][CPL], dS[RPL][CPL];
  load_state(S, S0 + (b * H + h) * K * V, V, 1, lane);
  load_state(dS, dlast + (b * H + h) * K * V, V, 1, lane);
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
        DeltaToken<R, RPL, CPL> token;
        float query[RPL], grad[CPL], before[RPL][CPL];
        input.load(token, t);
        load_rows(query, q, input.row(t) * K, lane);
        load_columns(grad, dy, input.row(t) * V, lane);
        states.load(before, t);
        const thread Token<RPL, CPL>& at_token = token.part;

        float rows[SUMS][RPL] = {}, columns[CPL];  // dq, dk, dgates; dv
        float gate_grad = 0.0f, beta_grad = 0.0f;
        for (int j = 0; j < CPL; ++j) {
          float found = 0.0f, du = 0.0f;
          for (int i = 0; i < RPL; ++i) {
            dS[i][j] = fma(query[i], grad[j], dS[i][j]);
            rows[0][i] = fma(S[i][j], grad[j], rows[0][i]);
            found = fma(at_token.k[i], at_token.decay[i] * before[i][j], found);
            du = fma(dS[i][j], at_token.k[i], du);
          }
          du = sum_lanes<1, R>(du);
          const float missing = at_token.v[j] - sum_lanes<1, R>(found);
          columns[j] = token.beta * du;
          beta_grad = fma(du, missing, beta_grad);
          const float write = token.beta * missing;
          for (int i = 0; i < RPL; ++i) {
            rows[1][i] = fma(dS[i][j], write, rows[1][i]);
            rows[1][i] = fma(-columns[j], at_token.decay[i] * before[i][j], rows[1][i]);
            dS[i][j] = fma(-at_token.k[i], columns[j], dS[i][j]);
            if (GK > 1)
              rows[SUMS - 1][i] = fma(dS[i][j], before[i][j], rows[SUMS - 1][i]);
            else
              gate_grad = fma(dS[i][j], before[i][j], gate_grad);
            dS[i][j] *= at_token.decay[i];
            S[i][j] = before[i][j];
          }
        }
        store_columns(columns, dv, input.row(t) * V, lane);

        const long at = part * B * L * H + input.row(t);
        for (int i = 0; i < RPL; ++i) {
          float sums[SUMS];
          for (int n = 0; n < SUMS; ++n) sums[n] = sum_lanes<R, 32>(rows[n][i]);
          if (lane.index < R) {
            if (SG > 1) {
              for (int n = 0; n < SUMS; ++n) shared[t % 2][own][n][lane.row(i)] = sums[n];
            } else if (lane.has_row(i)) {
              put(dq, at * K + lane.row(i), sums[0], is_first);
              put(dk, at * K + lane.row(i), sums[1], is_first);
              if (GK > 1) put(dgates, at * K + lane.row(i), sums[SUMS - 1], is_first);
            }
          }
        }
        // every row lane has the sum of its columns
        beta_grad = sum_lanes<R, 32>(beta_grad);
        if (GK == 1) gate_grad = simd_sum(gate_grad);
        if (lane.index == 0) {
          if (SG > 1) {
            shared_beta[t % 2][own] = beta_grad;
            if (GK == 1) shared_gate[t % 2][own] = gate_grad;
          } else {
            put(dbeta, at, beta_grad, is_first);
            if (GK == 1) put(dgates, at, gate_grad, is_first);
          }
        }
        if (SG > 1) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          for (int r = thread_index; r < K; r += 32 * SG) {
            float sums[SUMS] = {};
            for (int g = 0; g < SG; ++g)
              for (int n = 0; n < SUMS; ++n) sums[n] += shared[t % 2][g][n][r];
            put(dq, at * K + r, sums[0], is_first);
            put(dk, at * K + r, sums[1], is_first);
            if (GK > 1) put(dgates, at * K + r, sums[SUMS - 1], is_first);
          }
          if (thread_index == 0) {
            float gate_sum = 0.0f, beta_sum = 0.0f;
            for (int g = 0; g < SG; ++g) {
              beta_sum += shared_beta[t % 2][g];
              if (GK == 1) gate_sum += shared_gate[t % 2][g];
            }
            put(dbeta, at, beta_sum, is_first);
            if (GK == 1) put(dgates, at, gate_sum, is_first);
          }
        }
      }
    }
  }
  store_state(dS, dS0 + (b * H + h) * K * V, V, 1, lane);
  // the buffers may still be read
  if (SG > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
}
