// The forward pass of an operator: its query tiles over the threads.
#pragma once

#include "cpu/attend.h"
#include "cpu/parallel.h"

namespace hk::HK_LEVEL {

// The i-th piece of work of an operator that has `query_tiles` for each of B x H heads. Later tiles
// come first: under a causal mask they are the longest.
struct WorkItem {
  int64_t b, h, first_row;

  template <typename Operator>
  WorkItem(const Operator& op, int64_t i)
      : b(i / op.H % op.B),
        h(i % op.H),
        first_row((op.query_tiles - 1 - i / (op.H * op.B)) * BLOCK_M) {}
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
        if (op.gate.closed(b, h)) {
          store_zeros<Real>(outputs.out, first_row, std::min<int64_t>(BLOCK_M, op.T - first_row),
                            op.Dv);
          return;
        }
        const VisibleRows<Real> visible(params.mask, b, first_row, op.T, op.S);
        const TileScratch<Real> scratch(workspace, op.D, op.Dv);
        const Head<Real> head = op.head(b, h);
        OnlineSoftmax<Real> softmax;
        if (visible.any) {
          op.pack(b, h, visible, scratch);
          attend(head, params.dropout, visible, scratch, softmax);
        }
        finish_tile(head, op.gate, visible, scratch, softmax, outputs);
      });
}

}  // namespace hk::HK_LEVEL
