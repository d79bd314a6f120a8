// What the backward passes read of a tile of query rows beside query and dout: lse, delta, the gate
// and the range of visible keys, a number a row in shared memory.
#pragma once

#include "cuda/gate.h"
#include "cuda/kernels.h"
#include "cuda/softmax.h"
#include "cuda/visible.h"

namespace hk::cuda {

// Of one row as it is in global memory: lse -inf where the row is not there or sees nothing.
struct RowTerm {
  float lse = -kInfinity, delta = 0.0f, gate = 1.0f;
  Range range = {0, 0};

  HK_DEVICE RowTerm() {}
  HK_DEVICE RowTerm(const GradientParams& p, const Gate& row_gate, const Visible& visible, int b,
                    int h, int64_t H, int row) {
    if (row >= visible.T()) return;
    const int64_t index = (int64_t{b} * H + h) * visible.T() + row;
    lse = static_cast<const float*>(p.lse.data)[index];
    delta = static_cast<const float*>(p.delta.data)[index];
    gate = row_gate.at(b, h, row);
    range = visible.range(row);
  }
};

// A row counts as finite if it sees something and its numbers are finite. One that sees something
// and is not finite has lse nan, and so has p wherever it sees a key: with its query and dout left
// out, what it poisons are the keys that it sees and no others.
template <int kRows>
struct RowTerms {
  float lse[kRows];  // without terms in base 2; +inf for rows that see nothing: p is 0 there
  float delta[kRows], gate[kRows];
  Range range[kRows];
  bool finite_row[kRows];

  template <bool kTerms>
  HK_DEVICE void set(int i, const RowTerm& term) {
    const bool finite = is_finite(term.lse) && is_finite(term.delta);
    finite_row[i] = finite;
    const float own = kTerms ? term.lse : term.lse * kLog2e;
    lse[i] = term.lse == -kInfinity ? kInfinity : own + term.delta * 0.0f;
    delta[i] = finite ? term.delta : 0.0f;
    gate[i] = finite ? term.gate : 0.0f;
    range[i] = term.range;
  }

  // p of a score of row i.
  template <bool kTerms>
  HK_DEVICE float probability(float score, float scale_log2, int i) const {
    return weight_of<kTerms>(score, lse[i], scale_log2);
  }
};

// Leaves out rows of `query` and `dout` that are not finite, where there are any. All threads of
// the block come here, after both tiles have landed.
template <int kThreads, int kRows, typename QueryTile, typename DoutTile>
HK_DEVICE void leave_out_non_finite(const RowTerms<kRows>& terms, const QueryTile& query,
                                    const DoutTile& dout) {
  bool non_finite = false;
  HK_ROLLED
  for (int i = thread_index(); i < kRows; i += kThreads) non_finite |= !terms.finite_row[i];
  if (!any_in_block(non_finite)) return;
  keep_rows<kThreads>(query, terms.finite_row);
  keep_rows<kThreads>(dout, terms.finite_row);
  sync_block();
}

}  // namespace hk::cuda
