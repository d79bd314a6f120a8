// Gated attention forward: out = act(gate) * softmax(scores under the mask) V; scores follow from scale * Q K^T as in
// scores.h.
#include <algorithm>

#include "cuda/grid.h"
#include "cuda/head_output.h"
#include "cuda/launch.h"
#include "cuda/scores.h"
#include "cuda/tiles.h"
#include "cuda/visible.h"

namespace hk::cuda {

// A block of threads computes kBlockM rows of one head. Heads are in order, the last rows of each (the longest under a
// causal mask) first. For a closed head a block only writes zeros. On chip stay the query, one tile of keys and one of
// values, scores and the accumulator: values are loaded while scores are computed, the next keys during the softmax and
// the product with the values.
template <typename T, int kWidth, bool kTerms, bool kSmall>
struct GatedForward {
  using Params = ForwardTask;
  using Sizes = ForwardSizes<T, kWidth, kTerms, kSmall>;
  static constexpr int kGroups = Sizes::kGroups, kBlockN = Sizes::kBlockN;
  static constexpr int kThreads = Sizes::kWarps * kWarp;
  static constexpr int kBlockM = Sizes::kWarps * kGroups * 16;
  using QueryTile = Tile<T, kBlockM, kWidth>;
  using KeyTile = Tile<T, kBlockN, kWidth>;
  using Terms = ScoreTile<kTerms, ScoreLayout::kRowsFirst, kBlockM, kBlockN>;
  using Output = HeadOutput<T, Sizes::kWarps, kGroups, kWidth, kTerms>;

  // The work of a block: which tiles are copied, and from where. It is in shared memory, where it takes no registers
  // between uses.
  struct Work {
    Rows<T> key, value;
    TileList list;
    Head head;  // of the rows that take part
    int first_row;
  };

  struct Memory : SharedMemory {
    Ring<QueryTile> query = tiles<QueryTile>();
    Ring<KeyTile> key = tiles<KeyTile>(), value = tiles<KeyTile>();
    Buffer<Range> ranges = take<Range>(kBlockM);
    Buffer<int> scratch = take<int>(Sizes::kWarps * 4);
    Buffer<bool> bad = take<bool>(kBlockN);
    Buffer<Work> work = take<Work>();
    Terms terms = Terms(*this);
  };
  static constexpr int shared_bytes() { return std::max(Memory().bytes(), Output::shared_bytes()); }

  HK_DEVICE static void run(const Params& p) {
    const int T_rows = static_cast<int>(p.query.size[2]), S = static_cast<int>(p.key.size[2]);
    const HeadTile at(p.query.size[1], ceil_div(T_rows, kBlockM));
    const int b = at.b, h = at.h, hk = h / (at.H / static_cast<int>(p.key.size[1]));
    const int first_row = at.tile * kBlockM;
    const bool closed = Gate(p.gate, p.activation).closes(b, h);
    if (p.stores == Stores::kClosedGradient && !closed) return;
    // Constructed at each use, like the gate, so that its pointers take no registers in between.
    const auto visible = [&](const Head& head) { return Visible(p.mask, head.b, head.h, head.T, head.S); };
    const Head own = {b, h, rows_taking_part(p, closed, T_rows), S};

    const Memory memory;
    const QueryTile query = memory.query[0];
    const KeyTile key = memory.key[0], value = memory.value[0];
    Work& work = *memory.work;

    HK_ROLLED
    for (int i = thread_index(); i < kBlockM; i += kThreads) memory.ranges[i] = visible(own).range(first_row + i);
    const TileList seen = tiles_seen<kThreads, kBlockM, kBlockN>(visible(own), first_row, memory.scratch);
    if (thread_index() == 0) work = {rows_of<T>(p.key, b, hk), rows_of<T>(p.value, b, hk), seen, own, first_row};
    sync_block();
    const TileList& list = work.list;
    const float scale = static_cast<float>(p.scale);
    const float scale_log2 = softmax_scale(p.scale, kTerms);
    const int warp_row = warp() * kGroups * 16;
    Accumulator<kGroups, kWidth> attended;
    OnlineSoftmax<kGroups, kTerms> softmax;

    const auto from = [&](int index) { return Terms::shown_from(index, list, work.first_row, p, work.head); };
    const int count = list.count();
    int i = from(0), first_key = i < count ? list[i] * kBlockN : 0;
    if (i < count) {
      copy_rows<kThreads>(query, rows_of<T>(p.query, b, h), first_row);
      copy_rows<kThreads>(key, work.key, first_key);
    }
    commit_copies();
    for (int next, next_key; i < count; i = next, first_key = next_key) {
      next = from(i + 1);
      wait_copies<0>();
      sync_block();  // the keys have landed, and no thread reads the values before them
      copy_rows<kThreads>(value, work.value, first_key);
      commit_copies();
      bool hides = memory.terms.template stage<kThreads>(p, work.head, work.first_row, first_key);
      Accumulator<kGroups, kBlockN> scores;
      multiply_rows(scores, query, warp_row, key);
      if (!kTerms && scale < 0.0f) scores.each([](float& score, int, int, int) { score = -score; });
      wait_copies<0>();
      // The values and the terms have landed, and no thread reads these keys.
      hides = sync_block_any<kTerms>(hides);
      next_key = next < count ? list[next] * kBlockN : 0;
      if (next < count) copy_rows<kThreads>(key, work.key, next_key);
      commit_copies();
      memory.terms.to_scores(p, scores);
      if (!list.is_full(i) || hides) {
        Pairs<kGroups, kBlockN> hidden;
        add_hidden<ScoreLayout::kRowsFirst>(hidden, visible(work.head), memory.ranges + warp_row, first_key);
        if (hides) memory.terms.add_hidden(hidden);
        fill(scores, hidden, -kInfinity);
        if (clean<kThreads>(value, memory.bad)) poison(attended, hidden, memory.bad);
      }
      softmax.step(scores, attended, scale_log2);
      if (p.dropout.active) {
        Dropped<kGroups, kBlockN> dropped;
        dropped.template draw<ScoreLayout::kRowsFirst>(p.dropout, work.head.b, work.head.h, work.first_row + warp_row,
                                                       first_key);
        fill(scores, dropped, 0.0f);
      }
      multiply_weights(attended, scores, value);
    }
    softmax.normalize(attended, static_cast<float>(p.dropout.keep_scale));
    Output::store(p, Gate(p.gate, p.activation), work.head.b, work.head.h, work.first_row, attended, softmax.row_max);
  }
};

template <typename T>
void Kernels<T>::gated_attention_forward(const ForwardTask& p, const LaunchTarget& target) {
  const auto run = [&](auto width, auto terms, auto small) {
    using Kernel = GatedForward<T, width, terms, small>;
    constexpr int kBytes = Kernel::shared_bytes();
    static_assert(kBytes <= kLeastShared);
    static_assert(!small || 2 * (kBytes + kSharedOfBlock) <= kLeastOfMultiprocessor);
    const int64_t tiles = ceil_div(p.query.size[2], Kernel::kBlockM);
    launch<Kernel>(p.query.size[0] * p.query.size[1] * tiles, kBytes, p, target);
  };
  with_width<T>(p.query.size[3], p.value.size[3], has_terms(p) || p.terms.sinks, [&](auto width, auto terms) {
    if constexpr (kHasSmall<T, width, terms>) {
      constexpr int kBytes = GatedForward<T, width, terms, false>::shared_bytes();
      if (!two_blocks_fit(kBytes, target.device)) return run(width, terms, std::true_type{});
    }
    run(width, terms, std::false_type{});
  });
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
