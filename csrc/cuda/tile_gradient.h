// From the scores of a tile to the gradient of its scores.
//
//   p = exp(scores - lse)        dp = dattended value^T        dscores = p * (dp - delta)
//
// The gate is still to be applied to dattended, and so to dp and to the weights p of dvalue; dropout multiplies both by
// 0 or its scale. With a cap, dscores are those of the scores before it.
#pragma once

#include "cuda/gate.h"
#include "cuda/kernels.h"
#include "cuda/score_layout.h"
#include "cuda/scores.h"

namespace hk::cuda {

// The numbers of one row in global memory: lse is -inf if the row does not exist or sees no key.
struct QueryRow {
  float lse = -kInfinity, delta = 0.0f, gate = 1.0f;
  Range range = {0, 0};

  HK_DEVICE QueryRow() {}
  HK_DEVICE QueryRow(const GradientParams& p, const Gate& row_gate, const Visible& visible, int b, int h, int64_t H,
                     int row) {
    if (row >= visible.T()) return;
    const int64_t index = (int64_t{b} * H + h) * visible.T() + row;
    lse = static_cast<const float*>(p.lse.data)[index];
    delta = static_cast<const float*>(p.delta.data)[index];
    gate = row_gate.at(b, h, row);
    range = visible.range(row);
  }
};

// A row counts as finite if it sees a key and its numbers are finite. A row that sees a key and is not finite has lse
// nan, and so p nan for every key that it sees: with its query and dout read as 0, exactly the gradients of these keys
// become nan.
template <int kRows>
struct QueryRows {
  float lse[kRows];  // without terms in base 2; +inf for rows that see nothing: p is 0 there
  float delta[kRows], gate[kRows];
  Range range[kRows];
  bool finite_row[kRows];

  template <bool kTerms>
  HK_DEVICE void set(int i, const QueryRow& row) {
    const bool finite = is_finite(row.lse) && is_finite(row.delta);
    finite_row[i] = finite;
    const float own = kTerms ? row.lse : row.lse * kLog2e;
    lse[i] = row.lse == -kInfinity ? kInfinity : own + row.delta * 0.0f;
    delta[i] = finite ? row.delta : 0.0f;
    gate[i] = finite ? row.gate : 0.0f;
    range[i] = row.range;
  }

  // p of a score of row i.
  template <bool kTerms>
  HK_DEVICE float probability(float score, float scale_log2, int i) const {
    return weight_of<kTerms>(score, lse[i], scale_log2);
  }
};

// Sets rows of `query` and `dout` that are not finite to 0, if there are any. All threads of the block take part, after
// both tiles have landed.
template <int kThreads, int kRows, typename QueryTile, typename DoutTile>
HK_DEVICE void leave_out_non_finite(const QueryRows<kRows>& rows, const QueryTile& query, const DoutTile& dout) {
  bool non_finite = false;
  HK_ROLLED
  for (int i = thread_index(); i < kRows; i += kThreads) non_finite |= !rows.finite_row[i];
  if (!any_in_block(non_finite)) return;
  keep_rows<kThreads>(query, rows.finite_row);
  keep_rows<kThreads>(dout, rows.finite_row);
  sync_block();
}

// The numbers of query rows for the elements of a tile: by its rows from `first`, or by its columns.
template <ScoreLayout kLayout, int kRows>
struct TileRows {
  const QueryRows<kRows>& rows;
  int first;

  HK_DEVICE int operator()(int m, int n, int e) const {
    return first + (kLayout == ScoreLayout::kRowsFirst ? row_of(m, e) : column_of(n, e));
  }
};

// Scores become probabilities. Those of hidden pairs are not 0: the other factor must hide them.
template <bool kTerms, ScoreLayout kLayout, int kRows, int kGroups, int kColumns>
HK_DEVICE void to_probabilities(Accumulator<kGroups, kColumns>& scores, const TileRows<kLayout, kRows>& row,
                                float scale_log2) {
  scores.each([&](float& value, int m, int n, int e) {
    value = row.rows.template probability<kTerms>(value, scale_log2, row(m, n, e));
  });
}

// Applies dropout and the gate to probabilities, or to dp.
template <ScoreLayout kLayout, int kRows, int kGroups, int kColumns>
HK_DEVICE void gate_and_drop(Accumulator<kGroups, kColumns>& tile, const TileRows<kLayout, kRows>& row,
                             const LeftOut<kLayout, kGroups, kColumns>& left_out) {
  tile.each([&](float& value, int m, int n, int e) { value *= row.rows.gate[row(m, n, e)] * left_out.keep_scale(); });
  left_out.drop(tile);
}

// dp becomes the factor of the probabilities.
template <ScoreLayout kLayout, int kRows, int kGroups, int kColumns>
HK_DEVICE void centre(Accumulator<kGroups, kColumns>& dp, const TileRows<kLayout, kRows>& row,
                      const LeftOut<kLayout, kGroups, kColumns>& left_out) {
  gate_and_drop(dp, row, left_out);
  dp.each([&](float& value, int m, int n, int e) { value -= row.rows.delta[row(m, n, e)]; });
}

// Centred dp becomes dscores, 0 where it is hidden.
template <ScoreLayout kLayout, int kGroups, int kColumns>
HK_DEVICE void to_dscores(Accumulator<kGroups, kColumns>& dp, const Accumulator<kGroups, kColumns>& probabilities,
                          const LeftOut<kLayout, kGroups, kColumns>& left_out) {
  dp.each([&](float& value, int m, int n, int e) { value *= probabilities.c[m][n][e]; });
  left_out.hide(dp);
}

}  // namespace hk::cuda
