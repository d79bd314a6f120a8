// The gradient of a bias: the heads that share each entry, and the pass over them.
#pragma once

#include "cpu/entmax_backward.h"
#include "cpu/parallel.h"
#include "cpu/work_items.h"

namespace hk::HK_LEVEL {

// The entries [T][S] of a dense bias, and which heads share them.
struct BiasEntries {
  const Tensor& dbias;  // [B1, B2, H, T, S]
  int64_t inner;

  explicit BiasEntries(const BackwardParams& p) : dbias(p.dbias), inner(p.terms.bias_inner) {}
  int64_t count() const { return dbias.size[0] * dbias.size[1] * dbias.size[2]; }

  // Calls body(b, h) for the heads that read an entry, batch by batch.
  template <typename Body>
  void for_readers(int64_t entry, int64_t B, int64_t H, Body body) const {
    const int64_t* size = dbias.size;
    const int64_t of_inner = entry / size[2] % size[1], of_outer = entry / size[2] / size[1];
    for (int64_t b = 0; b < B; ++b) {
      if (size[0] != 1 && b / inner != of_outer) continue;
      if (size[1] != 1 && b % inner != of_inner) continue;
      for (int64_t h = 0; h < H; ++h)
        if (size[2] == 1 || h == entry % size[2]) body(b, h);
    }
  }

  // The accumulators of an entry, with rows [begin, end) zeroed (all of them if it broadcasts over rows).
  template <typename Real>
  BiasGradient<Real> cleared(int64_t entry, int64_t begin, int64_t end) const {
    const int64_t T = dbias.size[3], S = dbias.size[4];
    const BiasGradient<Real> sums{static_cast<Real*>(dbias.data) + entry * T * S, T == 1 ? 0 : S, S == 1 ? 0 : 1};
    std::fill_n(sums.data + begin * sums.row_stride, (T == 1 ? 1 : end - begin) * S, Real(0));
    return sums;
  }
};

// The gradient of a bias in a separate pass. One thread sums a block of rows of one entry over the heads that share it,
// in their order. If the bias broadcasts over rows, and for offsets (summed over batches afterwards), it sums all rows.
template <typename Real, typename Operand>
void bias_backward(const Attention<Real, Operand>& op, const BackwardParams& p) {
  if (!p.dbias && !p.doffset_bias) return;
  const BiasEntries dense(p);
  const int64_t entries = p.dbias ? dense.count() : op.B * op.H;
  const int64_t tile_bytes = BackwardTile<Real, Operand>::bytes(op);
  const bool all_rows = p.doffset_bias || p.dbias.size[3] == 1;
  // Sums over all rows are formed in groups of `tiles_together`, which then must not depend on the number of threads.
  const int64_t wanted = all_rows ? 1 : kItemsPerThread * p.threads;
  const int64_t most =
      std::min(tiles_in_cache(BackwardTile<Real, Operand>::cached_bytes(op)), std::max<int64_t>(1, op.query_tiles));
  const int64_t tiles_together = std::clamp<int64_t>(op.query_tiles * entries / wanted, 1, most);
  const int64_t parts = all_rows ? 1 : ceil_div(op.query_tiles, tiles_together);
  const int64_t bytes = BackwardScratch<Real, Operand>::bytes(op) + tiles_together * tile_bytes;

  parallel_for(entries * parts, p.threads, 2 * op.multiply_adds(), bytes, [&](int64_t item, Workspace& workspace) {
    BackwardScratch<Real, Operand> scratch(workspace, op, tiles_together);
    const int64_t entry = item / parts;
    const int64_t begin = all_rows ? 0 : item % parts * tiles_together * BLOCK_M;
    const int64_t end = all_rows ? op.T : std::min(op.T, begin + tiles_together * BLOCK_M);
    const auto head_rows = [&](int64_t b, int64_t h, const BiasGradient<Real>& sums) {
      const KeyGradients<Real> keys{0, nullptr, nullptr, nullptr, sums};
      const HeadGradients<Real> read = head_gradients(op, p, b, h, false);
      for (int64_t first = begin; first < end; first += tiles_together * BLOCK_M) {
        const size_t mark = workspace.mark();
        auto* tiles = workspace.take<BackwardTile<Real, Operand>>(tiles_together);
        int64_t count = 0;
        const int64_t last = std::min(end, first + tiles_together * BLOCK_M);
        for (int64_t row = first; row < last; row += BLOCK_M) {
          const VisibleRows<Real> visible(p.mask, b, h, row, op.T, op.S);
          auto* tile = new (tiles + count) BackwardTile<Real, Operand>(workspace, op, b, h, visible);
          count += prepare_tile(op, read, *tile, scratch);
        }
        attend_all_backward<Real>(tiles, count, p, Real(1), {0, op.S}, Ranges{}, keys, nullptr, nullptr, scratch);
        workspace.rewind(mark);
      }
    };
    if (p.dbias) {
      const BiasGradient<Real> sums = dense.cleared<Real>(entry, begin, end);
      dense.for_readers(entry, op.B, op.H, [&](int64_t b, int64_t h) { head_rows(b, h, sums); });
    } else {
      const int64_t count = p.doffset_bias.size[2];
      Real* sums = static_cast<Real*>(p.doffset_bias.data) + entry * count;
      std::fill_n(sums, count, Real(0));
      head_rows(entry / op.H, entry % op.H, {nullptr, 0, 0, sums, op.T - 1});
    }
  });
}

}  // namespace hk::HK_LEVEL
