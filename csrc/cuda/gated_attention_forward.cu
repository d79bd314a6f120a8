// Gated attention forward: out = act(gate) * softmax(scale * Q K^T under the mask) V.
#include <algorithm>

#include "cuda/grid.h"
#include "cuda/head_output.h"
#include "cuda/launch.h"
#include "cuda/pairs.h"
#include "cuda/passes.h"
#include "cuda/tiles.h"
#include "cuda/visible.h"

namespace hk::cuda {

// A block of threads computes kBlockM rows of one head: heads in order, of each the last rows (the
// longest of a causal mask) first. A closed head writes its zeros and is done. On chip stay the
// query, one tile of keys and one of values, scores and the accumulator: the values arrive while
// scores are computed, the next keys during the softmax and the product with the values.
template <typename T, int kWidth>
struct GatedForward {
  using Params = AttendParams;
  using Sizes = ForwardSizes<T, kWidth>;
  static constexpr int kGroups = Sizes::kGroups, kBlockN = Sizes::kBlockN;
  static constexpr int kThreads = Sizes::kWarps * kWarp;
  static constexpr int kBlockM = Sizes::kWarps * kGroups * 16;
  using QueryTile = Tile<T, kBlockM, kWidth>;
  using KeyTile = Tile<T, kBlockN, kWidth>;
  using Output = HeadOutput<T, Sizes::kWarps, kGroups, kWidth>;
  static constexpr int kLoopBytes = QueryTile::kBytes + 2 * KeyTile::kBytes +
                                    kBlockM * static_cast<int>(sizeof(Range)) + Sizes::kWarps * 16 +
                                    kBlockN;
  static constexpr int kSharedBytes = std::max(kLoopBytes, Output::kSharedBytes);
  static_assert(kSharedBytes <= kLeastShared);

  HK_DEVICE static void run(const Params& p) {
    const int T_rows = static_cast<int>(p.query.size[2]), S = static_cast<int>(p.key.size[2]);
    const HeadTile at(p.query.size[1], ceil_div(T_rows, kBlockM));
    const int b = at.b, h = at.h, hk = h / (at.H / static_cast<int>(p.key.size[1]));
    const int first_row = at.tile * kBlockM;
    const Gate gate(p.gate, p.activation);
    const bool closed = gate.closes(b, h);
    if (p.dgate.rank > 0 && !closed) return;
    const Visible visible(p.mask, b, rows_taking_part(p, closed, T_rows), S);

    SharedMemory memory;
    const auto query = memory.tile<QueryTile>();
    const auto key = memory.tile<KeyTile>(), value = memory.tile<KeyTile>();
    Range* const ranges = memory.take<Range>(kBlockM);
    int* const scratch = memory.take<int>(Sizes::kWarps * 4);
    bool* const bad = memory.take<bool>(kBlockN);

    HK_ROLLED
    for (int i = thread_index(); i < kBlockM; i += kThreads)
      ranges[i] = visible.range(first_row + i);
    const TileList list = tiles_seen<kThreads, kBlockM, kBlockN>(visible, first_row, scratch);
    const Rows<T> keys = rows_of<T>(p.key, b, hk), values = rows_of<T>(p.value, b, hk);
    const float scale = static_cast<float>(p.scale);
    const float steepness = fmaxf(fabsf(scale) * kLog2e, kSmallest);
    const int warp_row = warp() * kGroups * 16;
    Accumulator<kGroups, kWidth> attended;
    attended.clear();
    OnlineSoftmax<kGroups> softmax;

    if (list.count()) {
      copy_rows<kThreads>(query, rows_of<T>(p.query, b, h), first_row);
      copy_rows<kThreads>(key, keys, list[0] * kBlockN);
    }
    commit_copies();
    for (int i = 0; i < list.count(); ++i) {
      const int first_key = list[i] * kBlockN;
      wait_copies<0>();
      sync_block();  // the keys have landed, and no thread reads the values before them
      copy_rows<kThreads>(value, values, first_key);
      commit_copies();
      Accumulator<kGroups, kBlockN> scores;
      scores.clear();
      multiply_rows(scores, query, warp_row, key);
      if (scale < 0.0f) scores.each([](float& score, int, int, int) { score = -score; });
      wait_copies<0>();
      sync_block();  // the values have landed, and no thread reads these keys
      if (i + 1 < list.count()) copy_rows<kThreads>(key, keys, list[i + 1] * kBlockN);
      commit_copies();
      if (!list.is_full(i)) {
        Pairs<kGroups, kBlockN> hidden;
        add_hidden<Lie::kRowsFirst>(hidden, visible, ranges + warp_row, first_key);
        fill(scores, hidden, -kInfinity);
        if (clean<kThreads>(value, bad)) poison(attended, hidden, bad);
      }
      softmax.step(scores, attended, steepness);
      if (p.dropout.active) {
        Pairs<kGroups, kBlockN> dropped;
        add_dropped<Lie::kRowsFirst>(dropped, p.dropout, b, h, first_row + warp_row, first_key);
        fill(scores, dropped, 0.0f);
      }
      multiply_weights(attended, scores, value);
    }
    softmax.finish(attended, steepness, static_cast<float>(p.dropout.keep_scale));
    Output::store(p, gate, b, h, first_row, attended, softmax.top);
  }
};

template <typename T>
void gated_forward(const AttendParams& p, const Where& where) {
  with_width<T>(p.query.size[3], p.value.size[3], [&](auto width) {
    using Kernel = GatedForward<T, width>;
    const int64_t tiles = ceil_div(p.query.size[2], Kernel::kBlockM);
    launch<Kernel>(p.query.size[0] * p.query.size[1] * tiles, Kernel::kSharedBytes, p, where);
  });
}

template void gated_forward<HK_DTYPE>(const AttendParams&, const Where&);

}  // namespace hk::cuda
