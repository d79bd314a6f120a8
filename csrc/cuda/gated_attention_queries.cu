// Gated attention backward by tiles of query rows: dquery = scale * dscores key. tile_gradient.h has the other
// formulas.
#include <algorithm>

#include "cuda/grid.h"
#include "cuda/head_gradient.h"
#include "cuda/launch.h"
#include "cuda/tile_gradient.h"
#include "cuda/tiles.h"

namespace hk::cuda {

// A block of threads owns kBlockM query rows of a head, in the order of the forward kernel. The rows of query and dout,
// and the sum, stay on chip; tiles of keys and values are loaded two at a time. For a closed head a block only writes
// zeros.
template <typename T, int kWidth, bool kTerms>
struct GatedQueries {
  using Params = QueriesParams;
  using Sizes = BackwardSizes<T, kWidth, kTerms>;
  static constexpr int kGroups = Sizes::kGroups, kBlockN = Sizes::kOther;
  static constexpr int kThreads = Sizes::kWarps * kWarp;
  static constexpr int kBlockM = Sizes::kWarps * kGroups * 16;
  using RowTile = Tile<T, kBlockM, kWidth>;
  using KeyTile = Tile<T, kBlockN, kWidth>;
  using Scores = Accumulator<kGroups, kBlockN>;
  using Terms = ScoreTile<kTerms, ScoreLayout::kRowsFirst, kBlockM, kBlockN>;
  struct Memory : SharedMemory {
    Ring<RowTile> query = tiles<RowTile>(), dout = tiles<RowTile>();
    Ring<KeyTile> key = tiles<KeyTile>(2), value = tiles<KeyTile>(2);
    Buffer<QueryRows<kBlockM>> rows = take<QueryRows<kBlockM>>();
    Buffer<int> scratch = take<int>(Sizes::kWarps * 4);
    Terms terms = Terms(*this);
  };
  static constexpr int shared_bytes() {
    return std::max(Memory().bytes(), Sizes::kWarps * GradientPart<kGroups, kWidth>::kBytes);
  }

  HK_DEVICE static void run(const Params& p) {
    const int T_rows = static_cast<int>(p.query.size[2]), S = static_cast<int>(p.key.size[2]);
    const HeadTile at(p.query.size[1], ceil_div(T_rows, kBlockM));
    const int b = at.b, h = at.h, hk = h / (at.H / static_cast<int>(p.key.size[1]));
    const int first_row = at.tile * kBlockM;
    const Gate gate(p.gate, p.activation);
    const Visible visible(p.mask, b, h, gate.closes(b, h) ? 0 : T_rows, S);

    const Memory memory;
    const RowTile query = memory.query[0], dout = memory.dout[0];
    const Ring<KeyTile> key = memory.key, value = memory.value;
    QueryRows<kBlockM>& rows = *memory.rows;

    HK_ROLLED
    for (int i = thread_index(); i < kBlockM; i += kThreads)
      rows.template set<kTerms>(i, QueryRow(p, gate, visible, b, h, at.H, first_row + i));
    const TileList list = tiles_seen<kThreads, kBlockM, kBlockN>(visible, first_row, memory.scratch);
    const Rows<T> keys = rows_of<T>(p.key, b, hk), values = rows_of<T>(p.value, b, hk);
    const auto copy = [&](int index, int stage) {
      copy_rows<kThreads>(key[stage], keys, list[index] * kBlockN);
      copy_rows<kThreads>(value[stage], values, list[index] * kBlockN);
    };
    const Head head = {b, h, visible.T(), S};
    const auto from = [&](int index) { return Terms::shown_from(index, list, first_row, p, head); };
    int i = from(0);
    if (i < list.count()) {
      copy_rows<kThreads>(query, rows_of<T>(p.query, b, h), first_row);
      copy_rows<kThreads>(dout, rows_of<T>(p.dattended, b, h), first_row);
      copy(i, 0);
    }
    commit_copies();
    const int warp_row = warp() * kGroups * 16;
    const float scale = static_cast<float>(p.scale);
    constexpr ScoreLayout kLayout = ScoreLayout::kRowsFirst;
    const TileRows<kLayout, kBlockM> row = {rows, warp_row};
    Accumulator<kGroups, kWidth> dquery;
    for (int stage = 0, next; i < list.count(); stage ^= 1, i = next) {
      next = from(i + 1);
      const int first_key = list[i] * kBlockN;
      if (next < list.count()) copy(next, stage ^ 1);
      commit_copies();
      bool hides = memory.terms.template stage<kThreads>(p, head, first_row, first_key);
      wait_copies<1>();
      hides = sync_block_any<kTerms>(hides);
      const bool partial = !list.is_full(i) || hides;
      Scores scores, dscores;
      multiply_rows(scores, query, warp_row, key[stage]);
      multiply_rows(dscores, dout, warp_row, value[stage]);
      // 0 * nan is nan: keys that a row does not see must not reach its sum.
      if (partial) clean<kThreads>(key[stage]);
      const LeftOut<kLayout, kGroups, kBlockN> left_out(p, visible, rows.range + warp_row, partial, memory.terms, hides,
                                                        b, h, first_row + warp_row, first_key);
      centre(dscores, row, left_out);
      memory.terms.to_scores(p, scores, &dscores);
      to_probabilities<kTerms>(scores, row, Terms::scale_log2(p));
      to_dscores(dscores, scores, left_out);
      multiply_weights(dquery, dscores, key[stage]);
      sync_block();
    }
    // Rows that see no key are 0, even if keys of their tiles are not finite.
    dquery.each([&](float& sum, int m, int, int e) {
      if (rows.lse[warp_row + row_of(m, e)] == kInfinity) sum = 0.0f;
    });
    store_gradient<T>(p.dquery, b, h, first_row + warp_row, 0, dquery, scale);
  }
};

template <typename T>
void Kernels<T>::gated_attention_queries(const QueriesParams& p, const LaunchTarget& target) {
  with_width<T>(p.query.size[3], p.value.size[3], has_terms(p), [&](auto width, auto terms) {
    using Kernel = GatedQueries<T, width, terms>;
    constexpr int kBytes = Kernel::shared_bytes();
    static_assert(kBytes <= kLeastShared);
    constexpr int kLeastBlocks = blocks_by_memory(kBytes) <= 2 ? 1 : 0;
    const int64_t tiles = ceil_div(p.query.size[2], Kernel::kBlockM);
    launch<Kernel, kLeastBlocks>(p.query.size[0] * p.query.size[1] * tiles, kBytes, p, target);
  });
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
