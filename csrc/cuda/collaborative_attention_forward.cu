// Collaborative attention forward: out_h = act(gate_h) * attended_h, where
//
//   attended_h = softmax(scores_h under the mask) value_h
//
// and scores_h follow from scale * ((query * mixing_h) key^T + content_bias_h) as in scores.h.
#include <algorithm>

#include "cuda/chunks.h"
#include "cuda/collaborative_tiles.h"
#include "cuda/head_output.h"
#include "cuda/launch.h"
#include "cuda/scores.h"
#include "cuda/visible.h"

namespace hk::cuda {

// A block of threads computes kBlockM rows of one head. Consecutive blocks are the heads of one tile of rows, because
// they read the same query and key; the last rows (the longest under a causal mask) come first. For a closed head a
// block only writes zeros. With splits, a block visits its share of the tiles of keys and writes sums for
// attention_combine.cu. On chip stay the mixed query (if there is space, else it is copied again with every tile of
// keys), scores and the accumulator, two steps of keys and two tiles of values.
template <typename T, int kWidth, bool kTerms>
struct CollaborativeForward {
  struct Params : ForwardTask {
    bool keeps_query;
  };
  using Sizes = CollaborativeForwardSizes<T, kWidth, kTerms>;
  static constexpr int kGroups = Sizes::kGroups, kBlockN = Sizes::kBlockN;
  static constexpr int kThreads = Sizes::kWarps * kWarp;
  static constexpr int kBlockM = Sizes::kWarps * kGroups * 16;
  using QueryTile = Tile<T, kBlockM, kStepWidth>;
  using KeyTile = Tile<T, kBlockN, kStepWidth>;
  using ValueTile = Tile<T, kBlockN, kWidth>;
  using Output = HeadOutput<T, Sizes::kWarps, kGroups, kWidth, kTerms>;
  using Terms = ScoreTile<kTerms, ScoreLayout::kRowsFirst, kBlockM, kBlockN>;

  // The work of a block.
  struct BlockCoord {
    int split, b, h, first_row;

    HK_DEVICE explicit BlockCoord(const Params& p) {
      const int tiles = ceil_div(static_cast<int>(p.query.size[1]), kBlockM);
      const int64_t H = p.mixing.size[0], splits = p.splits.count;
      const int64_t of_heads = block_index() / H, of_splits = of_heads / splits;
      h = static_cast<int>(block_index() % H);
      split = static_cast<int>(of_heads % splits);
      b = static_cast<int>(of_splits / tiles);
      first_row = (tiles - 1 - static_cast<int>(of_splits % tiles)) * kBlockM;
    }
  };

  struct Memory : SharedMemory {
    Ring<KeyTile> key = tiles<KeyTile>(2);
    Ring<ValueTile> value = tiles<ValueTile>(2);
    Buffer<Range> ranges = take<Range>(kBlockM);
    Buffer<float> bias = take<float>(kBlockN);
    Buffer<int> scratch = take<int>(Sizes::kWarps * 4);
    Buffer<bool> bad = take<bool>(kBlockN);
    Buffer<QuerySources<T>> sources = take<QuerySources<T>>();
    Buffer<BlockCoord> at = take<BlockCoord>();
    Terms terms = Terms(*this);
    Features features;
    Ring<QueryTile> query;  // of each step, or of a stage

    constexpr Memory(int64_t Ds, bool keeps_query)
        : features(*this, Ds), query(tiles<QueryTile>(owned_tiles(Ds, keeps_query))) {}
  };
  static constexpr int shared_bytes(int64_t Ds, bool keeps_query) {
    return std::max(Memory(Ds, keeps_query).bytes(), Output::shared_bytes());
  }

  HK_DEVICE static void run(const Params& p) {
    const Memory memory(p.query.size[2], p.keeps_query);
    QuerySources<T>& rows = *memory.sources;
    BlockCoord& at = *memory.at;
    Features features = memory.features;

    if (thread_index() == 0) {
      at = BlockCoord(p);
      rows = {rows_of<T>(p.query, at.b, 0), rows_of<T>(p.key, at.b, 0),
              rows_of<T>(p.value, at.b, at.h / heads_per_value(p))};
    }
    sync_block();
    const bool closed = Gate(p.gate, p.activation).closes(at.b, at.h);
    if (p.stores == Stores::kClosedGradient && !closed) return;
    const auto visible = [&] {
      const int T_rows = static_cast<int>(p.query.size[1]);
      return Visible(p.mask, at.b, at.h, rows_taking_part(p, closed, T_rows), static_cast<int>(p.key.size[1]));
    };
    for (int i = thread_index(); i < kBlockM; i += kThreads) memory.ranges[i] = visible().range(at.first_row + i);
    const TileList list =
        tiles_seen<kThreads, kBlockM, kBlockN>(visible(), at.first_row, memory.scratch).share(at.split, p.splits.count);
    if (list.count()) features.set<kThreads>(p.mixing, at.h);
    const float scale = static_cast<float>(p.scale);
    const float scale_log2 = softmax_scale(p.scale, kTerms);
    const int warp_row = warp() * kGroups * 16;

    const auto from = [&](int index) {
      return Terms::shown_from(index, list, at.first_row, p, head_of(p, at.b, at.h));
    };
    const auto query_at = [&](const Step& step) { return memory.query[p.keeps_query ? step.place : step.stage]; };
    const int first_tile = from(0);
    const auto copies_query = [&](const Step& step) { return !p.keeps_query || step.tile == first_tile; };
    const auto copy = [&](const Step& step) {
      const int first_key = list[step.tile] * kBlockN;
      if (copies_query(step)) copy_features<kThreads>(query_at(step), rows.query, at.first_row, features.at(step));
      copy_features<kThreads>(memory.key[step.stage], rows.key, first_key, features.at(step));
      if (features.ends(step)) copy_rows<kThreads>(memory.value[step.template half<kTerms>()], rows.value, first_key);
    };
    const auto mix = [&](const Step& step) {
      if (copies_query(step)) mix_features<kThreads>(query_at(step), features.factors(), features.at(step));
    };
    const auto stage = [&](const Step& step) {
      return memory.terms.template stage<kThreads>(p, head_of(p, at.b, at.h), at.first_row, list[step.tile] * kBlockN);
    };
    const auto bias_of = [&](const Step& step) {
      return ContentBias(p.content_bias, at.b, at.h).at(list[step.tile] * kBlockN + thread_index());
    };

    Accumulator<kGroups, kWidth> attended;
    Accumulator<kGroups, kBlockN> scores;
    OnlineSoftmax<kGroups, kTerms> softmax;
    const auto use = [&](const Step& step, bool hides) {
      multiply_rows(scores, query_at(step), warp_row, memory.key[step.stage], features.width(step));
      if (!features.ends(step)) return;
      const int first_key = list[step.tile] * kBlockN;
      const ValueTile tile_value = memory.value[step.template half<kTerms>()];
      if (p.content_bias.rank > 0) {
        scores.each([&](float& score, int, int n, int e) { score += memory.bias[column_of(n, e)]; });
      }
      if (!kTerms && scale < 0.0f) scores.each([](float& score, int, int, int) { score = -score; });
      memory.terms.to_scores(p, scores);
      if (!list.is_full(step.tile) || hides) {
        Pairs<kGroups, kBlockN> hidden;
        add_hidden<ScoreLayout::kRowsFirst>(hidden, visible(), memory.ranges + warp_row, first_key);
        if (hides) memory.terms.add_hidden(hidden);
        fill(scores, hidden, -kInfinity);
        if (clean<kThreads>(tile_value, memory.bad)) poison(attended, hidden, memory.bad);
      }
      softmax.step(scores, attended, scale_log2);
      if (p.dropout.active) {
        Dropped<kGroups, kBlockN> dropped;
        dropped.template draw<ScoreLayout::kRowsFirst>(p.dropout, at.b, at.h, at.first_row + warp_row, first_key);
        fill(scores, dropped, 0.0f);
      }
      multiply_weights(attended, scores, tile_value);
      scores.clear();
    };
    if (first_tile < list.count()) {
      each_tile_step<kTerms, kBlockN>(features, first_tile, list, from, copy, mix, stage, use, bias_of,
                                      [&](float number) { memory.bias[thread_index()] = number; });
    }
    if (p.stores == Stores::kSplits) {
      store_split(p, at.split, at.b, at.h, at.first_row + warp_row, visible().T(), attended, softmax);
      return;
    }
    softmax.normalize(attended, static_cast<float>(p.dropout.keep_scale));
    const BlockCoord block = at;  // its memory is overwritten below
    Output::store(p, Gate(p.gate, p.activation), block.b, block.h, block.first_row, attended, softmax.row_max);
  }
};

template <typename T>
void Kernels<T>::collaborative_attention_forward(const ForwardTask& p, const LaunchTarget& target) {
  with_value_width<T>(p.value.size[3], has_terms(p) || p.terms.sinks, [&](auto width, auto terms) {
    using Kernel = CollaborativeForward<T, width, terms>;
    static_assert(Kernel::shared_bytes(kWidestShared, false) <= kLeastShared);
    const int64_t B = p.query.size[0], T_rows = p.query.size[1], Ds = p.query.size[2];
    const bool keeps_query = keeps_rows<Kernel>(Ds, target.device);
    launch<Kernel>(B * p.mixing.size[0] * ceil_div(T_rows, Kernel::kBlockM) * p.splits.count,
                   Kernel::shared_bytes(Ds, keeps_query), {p, keeps_query}, target);
  });
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
