// The adjoint of gla_forward. dS = q dy^T + diag(gate') dS', with gate' and dS' of the next token; dq = S dy,
// dk = dS v, dv = dS^T k, dgate = rows of dS * (S before the token). The states come from checkpoints that this kernel
// writes first. Sums over columns run over the simdgroups of a threadgroup. A head is blocks of SG simdgroups, shared by
// as many threadgroups as the grid has (parts): each takes some one after another and adds them up in its own dq, dk
// [parts, B, L, H, K] and dgates [parts, B, L, H, GK]. dv is like v, dS0 like S0.
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

// Row sums of each simdgroup for the others: dq, dk and, with a gate a key channel, dgates; one gate a head has one sum.
// Two buffers, so that one barrier a token is enough: a buffer is written again only after the next barrier. A lone
// simdgroup exchanges nothing, so that no K is too large.
constexpr int SUMS = GK > 1 ? 3 : 2;
threadgroup float shared[2][SG][SUMS][SG > 1 ? R * RPL : 1];
threadgroup float shared_gate[2][SG];
for (int block = part; block * block_columns < V; block += parts) {
  const Lane<R, RPL, CPL> lane = lane_of<R, RPL, CPL, SG>(thread_index % 32, K, V, block * SG + own);
  const GlaInput<decltype(k), decltype(v), decltype(gates), GK, R, RPL, CPL> input = {
      k, v, gates, b * L * H + h, H, lane};
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
        Token<RPL, CPL> token;
        float query[RPL], grad[CPL], before[RPL][CPL];
        input.load(token, t);
        load_rows(query, q, input.row(t) * K, lane);
        load_columns(grad, dy, input.row(t) * V, lane);
        states.load(before, t);

        float rows[SUMS][RPL] = {}, columns[CPL] = {};  // dq, dk, dgates; dv
        float gate_grad = 0.0f;
        for (int i = 0; i < RPL; ++i)
          for (int j = 0; j < CPL; ++j) {
            dS[i][j] = fma(query[i], grad[j], dS[i][j]);
            rows[0][i] = fma(S[i][j], grad[j], rows[0][i]);
            rows[1][i] = fma(dS[i][j], token.v[j], rows[1][i]);
            if (GK > 1)
              rows[SUMS - 1][i] = fma(dS[i][j], before[i][j], rows[SUMS - 1][i]);
            else
              gate_grad = fma(dS[i][j], before[i][j], gate_grad);
            columns[j] = fma(dS[i][j], token.k[i], columns[j]);
            dS[i][j] *= token.decay[i];
            S[i][j] = before[i][j];
          }

        for (int j = 0; j < CPL; ++j) columns[j] = sum_lanes<1, R>(columns[j]);
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
        if (GK == 1) {
          gate_grad = simd_sum(gate_grad);
          if (lane.index == 0) {
            if (SG > 1)
              shared_gate[t % 2][own] = gate_grad;
            else
              put(dgates, at, gate_grad, is_first);
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
          if (GK == 1 && thread_index == 0) {
            float sum = 0.0f;
            for (int g = 0; g < SG; ++g) sum += shared_gate[t % 2][g];
            put(dgates, at, sum, is_first);
          }
        }
      }
    }
  }
  store_state(dS, dS0 + (b * H + h) * K * V, V, 1, lane);
  // the buffers may still be read
  if (SG > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
}
