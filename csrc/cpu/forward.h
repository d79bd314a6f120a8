// The forward pass of an operator: its query tiles over the threads.
#pragma once

#include "cpu/attend.h"
#include "cpu/parallel.h"

namespace hk::HK_LEVEL {

// The i-th piece of work of an operator that has `query_tiles` for each of B x H heads. Tiles of
// one head follow each other, so that its keys and values stay in the second-level cache; later
// tiles come first, since under a causal mask they are the longest.
struct WorkItem {
  int64_t b, h, first_row;

  template <typename Operator>
  WorkItem(const Operator& op, int64_t i)
      : b(i / (op.query_tiles * op.H)),
        h(i / op.query_tiles % op.H),
        first_row((op.query_tiles - 1 - i % op.query_tiles) * BLOCK_M) {}
};

// `Operator` describes a head (`head`), packs a query tile of it (`pack`) and knows sizes and gate.
template <typename Real, typename Operator>
void attention_forward(const ForwardParams& params, const Operator& op) {
  const int64_t items = op.query_tiles * op.B * op.H;
  parallel_for(
      items, params.threads, op.multiply_adds(), TileScratch<Real>::bytes(op.D, op.Dv),
      [&](int64_t i, Workspace& workspace) {
        const auto [b, h, first_row] = WorkItem(op, i);
        const Outputs outputs{
            rows_at(params.out, b, h), rows_at(params.attended, b, h),
            params.lse ? static_cast<Real*>(params.lse.data) + (b * op.H + h) * op.T : nullptr};
        const VisibleRows<Real> visible(params.mask, b, first_row, op.T, op.S);
        if (op.gate.closed(b, h) || !visible.any)
          return store_blind_rows<Real>(outputs, first_row, visible.count, op.Dv);
        const TileScratch<Real> scratch(workspace, op.D, op.Dv);
        const Head<Real> head = op.head(b, h);
        OnlineSoftmax<Real> softmax;
        op.pack(b, h, visible, scratch);
        attend(head, params.dropout, visible, scratch, softmax);
        finish_tile(head, op.gate, visible, scratch, softmax, outputs);
      });
}

}  // namespace hk::HK_LEVEL
