// Collaborative attention backward by tiles of query rows: dquery and dmixing.
//
//   dmixed_h = dscores_h key
//   dquery = sum over h of mixing_h * dmixed_h        dmixing_h = colsum(query * dmixed_h)
//
// tile_gradient.h has the other formulas.
#include "cuda/chunks.h"
#include "cuda/collaborative_tiles.h"
#include "cuda/launch.h"
#include "cuda/tile_gradient.h"

namespace hk::cuda {

// A block of threads owns a slice of the features of kBlockM query rows and processes the heads (a splits-th of them).
// The term of a head is added to dquery in memory, in float, once per head: dmixing needs the sum of a single head, and
// there are not enough registers for both sums. With closed_grad false, or without dmixing, chunks that a head does not
// use are skipped.
template <typename T, int kWidth, bool kTerms>
struct CollaborativeQueries {
  struct Params : QueriesParams {
    bool keeps_query;
  };
  using Sizes = CollaborativeQueriesSizes<T, kWidth, kTerms>;
  static constexpr int kGroups = Sizes::kGroups, kBlockN = Sizes::kOther, kSlice = Sizes::kSlice;
  static constexpr int kThreads = Sizes::kWarps * kWarp;
  static constexpr int kBlockM = Sizes::kWarps * kGroups * 16;
  using QueryTile = Tile<T, kBlockM, kStepWidth>;
  using KeyTile = Tile<T, kBlockN, kStepWidth>;
  using SliceTile = Tile<T, kBlockN, kSlice>;
  using DoutTile = Tile<T, kBlockM, kWidth>;
  using ValueTile = Tile<T, kBlockN, kWidth>;
  using Scores = Accumulator<kGroups, kBlockN>;
  using Sum = Accumulator<kGroups, kSlice>;
  using Terms = ScoreTile<kTerms, ScoreLayout::kRowsFirst, kBlockM, kBlockN>;

  // The work of a block.
  struct BlockCoord {
    int b, first_head, last_head, tile, column, part;

    HK_DEVICE explicit BlockCoord(const Params& p) {
      const int B = static_cast<int>(p.query.size[0]), H = static_cast<int>(p.mixing.size[0]);
      const int slices = ceil_div(static_cast<int>(p.query.size[2]), kSlice), tiles = tiles_of(p);
      const int64_t rest = block_index() / slices / tiles;  // batches, then splits
      const int split = static_cast<int>(rest / B), heads = ceil_div(H, p.splits);
      b = static_cast<int>(rest % B);
      first_head = split * heads;
      last_head = min_of(first_head + heads, H);
      tile = tiles - 1 - static_cast<int>(block_index() / slices % tiles);
      column = static_cast<int>(block_index() % slices) * kSlice;
      part = split * B + b;
    }

    HK_DEVICE int first_row() const { return tile * kBlockM; }
  };

  struct Memory : SharedMemory {
    Ring<KeyTile> key = tiles<KeyTile>(2);
    Ring<SliceTile> slice = tiles<SliceTile>(2);
    Ring<ValueTile> value = tiles<ValueTile>(2);
    Ring<DoutTile> dout = tiles<DoutTile>();
    Buffer<QueryRows<kBlockM>> query_rows = take<QueryRows<kBlockM>>();
    Buffer<float> sums = take<float>(Sizes::kWarps * kSlice);
    Buffer<float> bias = take<float>(kBlockN);
    Buffer<int> scratch = take<int>(Sizes::kWarps * 4);
    Buffer<QuerySources<T>> sources = take<QuerySources<T>>();
    Buffer<BlockCoord> at = take<BlockCoord>();
    Terms terms = Terms(*this);
    Features features;
    Ring<QueryTile> query;  // of each step, or of a stage

    constexpr Memory(int64_t Ds, bool keeps_query)
        : features(*this, Ds), query(tiles<QueryTile>(owned_tiles(Ds, keeps_query))) {}
  };
  static constexpr int shared_bytes(int64_t Ds, bool keeps_query) { return Memory(Ds, keeps_query).bytes(); }

  HK_DEVICE static void run(const Params& p) {
    Memory on_chip(p.query.size[2], p.keeps_query);
    if (thread_index() == 0) *on_chip.at = BlockCoord(p);
    sync_block();
    const BlockCoord& at = *on_chip.at;
    TileList list = {0, 0, 0, 0};
    Features& features = on_chip.features;
    for (int h = at.first_head; h < at.last_head; ++h) {
      if (h == at.first_head || p.mask.by_head())
        list = tiles_seen<kThreads, kBlockM, kBlockN>(visible_of(p, at.b, h), at.first_row(), on_chip.scratch);
      features.set<kThreads>(p.mixing, h);
      Slice slice = features.slice<kSlice>(at.column, p.dmixing.rank > 0 && p.closed_grad);
      if (list.count() == 0 || Gate(p.gate, p.activation).closes(at.b, h)) slice.used = 0;
      Sum dmixed;
      if (slice.used) add_tiles(p, list, on_chip, slice, at, h, dmixed);
      if (p.dquery && (slice.used || h == at.first_head))
        add_dquery(p, features.factors(), at, h == at.first_head, dmixed);
      if (p.dmixing) store_dmixing(p, on_chip, at, h, dmixed);
    }
  }

 private:
  HK_DEVICE static int tiles_of(const Params& p) { return ceil_div(static_cast<int>(p.query.size[1]), kBlockM); }

  // Computes dmixed of a head, over all tiles of keys.
  HK_DEVICE static void add_tiles(const Params& p, const TileList& list, const Memory& on_chip, const Slice& slice,
                                  const BlockCoord& at, int h, Sum& dmixed) {
    const Features& features = on_chip.features;
    const int H = static_cast<int>(p.mixing.size[0]);
    const auto from = [&](int index) { return Terms::shown_from(index, list, at.first_row(), p, head_of(p, at.b, h)); };
    const int first_tile = from(0);
    if (kTerms && first_tile == list.count()) return;
    const QuerySources<T>& sources = *on_chip.sources;
    if (thread_index() == 0) {
      *on_chip.sources = {rows_of<T>(p.query, at.b, 0), rows_of<T>(p.key, at.b, 0),
                          rows_of<T>(p.value, at.b, h / heads_per_value(p))};
    }
    sync_block();
    const ContentBias content_bias(p.content_bias, at.b, h);

    const auto query_at = [&](const Step& step) { return on_chip.query[p.keeps_query ? step.place : step.stage]; };
    const auto copies_query = [&](const Step& step) { return !p.keeps_query || step.tile == first_tile; };
    const auto copy = [&](const Step& step) {
      const int first_key = list[step.tile] * kBlockN;
      if (copies_query(step)) copy_features<kThreads>(query_at(step), sources.query, at.first_row(), features.at(step));
      copy_features<kThreads>(on_chip.key[step.stage], sources.key, first_key, features.at(step));
      if (!features.ends(step)) return;
      const int half = step.template half<kTerms>();
      copy_features<kThreads>(on_chip.slice[half], sources.key, first_key, slice);
      copy_rows<kThreads>(on_chip.value[half], sources.value, first_key);
    };
    const auto mix = [&](const Step& step) {
      if (copies_query(step)) mix_features<kThreads>(query_at(step), features.factors(), features.at(step));
    };
    const auto stage = [&](const Step& step) {
      return on_chip.terms.template stage<kThreads>(p, head_of(p, at.b, h), at.first_row(), list[step.tile] * kBlockN);
    };
    const auto bias_of = [&](const Step& step) { return content_bias.at(list[step.tile] * kBlockN + thread_index()); };

    for (int i = thread_index(); i < kBlockM; i += kThreads) {
      const Gate gate(p.gate, p.activation);
      on_chip.query_rows->template set<kTerms>(
          i, QueryRow(p, gate, visible_of(p, at.b, h), at.b, h, H, at.first_row() + i));
    }
    copy_rows<kThreads>(on_chip.dout[0], rows_of<T>(p.dattended, at.b, h), at.first_row());
    Scores scores;
    const auto use = [&](const Step& step, bool hides) {
      multiply_rows(scores, query_at(step), warp() * kGroups * 16, on_chip.key[step.stage], features.width(step));
      if (!features.ends(step)) return;
      add_tile(p, list, on_chip, slice, at, h, step, hides, scores, dmixed);
      scores.clear();
    };
    each_tile_step<kTerms, kBlockN>(features, first_tile, list, from, copy, mix, stage, use, bias_of,
                                    [&](float number) { on_chip.bias[thread_index()] = number; });
    // Rows that see no key take part in no sum, even if keys of their tiles are not finite.
    dmixed.each([&](float& sum, int m, int, int e) {
      if (on_chip.query_rows->lse[warp() * kGroups * 16 + row_of(m, e)] == kInfinity) sum = 0.0f;
    });
  }

  // Adds one tile of keys, from its scores without the content bias.
  HK_DEVICE static void add_tile(const Params& p, const TileList& list, const Memory& on_chip, const Slice& slice,
                                 const BlockCoord& at, int h, const Step& step, bool hides, Scores& scores,
                                 Sum& dmixed) {
    const int half = step.template half<kTerms>();
    const SliceTile key = on_chip.slice[half];
    const QueryRows<kBlockM>& query_rows = *on_chip.query_rows;
    const int warp_row = warp() * kGroups * 16, first_key = list[step.tile] * kBlockN;
    constexpr ScoreLayout kLayout = ScoreLayout::kRowsFirst;
    const TileRows<kLayout, kBlockM> row = {query_rows, warp_row};
    const bool partial = !list.is_full(step.tile) || hides;
    // 0 * nan is nan: keys that a row does not see must not reach its sum.
    if (partial) clean<kThreads>(key);
    Scores dscores;
    multiply_rows(dscores, on_chip.dout[0], warp_row, on_chip.value[half]);
    const LeftOut<kLayout, kGroups, kBlockN> left_out(p, visible_of(p, at.b, h), query_rows.range + warp_row, partial,
                                                      on_chip.terms, hides, at.b, h, at.first_row() + warp_row,
                                                      first_key);
    scores.each([&](float& value, int, int n, int e) { value += on_chip.bias[column_of(n, e)]; });
    centre(dscores, row, left_out);
    on_chip.terms.to_scores(p, scores, &dscores);
    to_probabilities<kTerms>(scores, row, Terms::scale_log2(p));
    to_dscores(dscores, scores, left_out);
    multiply_weights(dmixed, dscores, key, [&](int n) { return slice.has(n); });
  }

  // `factor` times a sum of scores' gradients; 0 if the sum is 0, even if the factor is not finite.
  HK_DEVICE static float times(float factor, float sum) { return sum == 0.0f ? 0.0f : factor * sum; }

  // Stores the term of the first head and adds those of the others; only to elements of this thread.
  HK_DEVICE static void add_dquery(const Params& p, const float* factors, const BlockCoord& at, bool is_first,
                                   const Sum& dmixed) {
    const Rows<float> dquery = rows_of<float>(p.dquery, at.part, 0);
    const float scale = static_cast<float>(p.scale);
    HK_UNROLL
    for (int m = 0; m < kGroups; ++m) {
      HK_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int row = at.first_row() + warp() * kGroups * 16 + row_of(m, e);
        if (row >= dquery.length) continue;
        float* const sums = dquery.row(row);
        HK_UNROLL
        for (int n = 0; n < kSlice / 8; ++n) {
          const int feature = at.column + column_of(n, e);
          if (feature >= dquery.width) continue;
          const float term = times(factors[feature] * scale, dmixed.c[m][n][e]);
          sums[feature] = is_first ? term : sums[feature] + term;
        }
      }
    }
  }

  // Sums the rows of a warp in registers, then the warps in their order.
  HK_DEVICE static void store_dmixing(const Params& p, const Memory& on_chip, const BlockCoord& at, int h,
                                      const Sum& dmixed) {
    const Rows<T> queries = rows_of<T>(p.query, at.b, 0);
    const int width = queries.width - at.column;
    const T* rows[kGroups][2];  // of this lane; a row beyond the last one is replaced by another
    each_row<kGroups>([&](int m, int half, int row) {
      const int of_warp = at.first_row() + warp() * kGroups * 16;
      rows[m][half] = queries.row(min_of(of_warp + row, queries.length - 1)) + at.column;
    });
    HK_UNROLL
    for (int n = 0; n < kSlice / 8; ++n) {
      HK_UNROLL
      for (int side = 0; side < 2; ++side) {
        const int column = column_of(n, side);
        float sum = 0.0f;
        each_row<kGroups>([&](int m, int half, int) {
          const float query = column < width ? to_float(rows[m][half][column]) : 0.0f;
          sum += times(query, dmixed.c[m][n][2 * half + side]);
        });
        for (int mask = 4; mask < kWarp; mask *= 2) sum += shuffle_xor(sum, mask);
        if (lane() < 4) on_chip.sums[warp() * kSlice + column] = sum;
      }
    }
    sync_block();
    float* const of_head = static_cast<float*>(p.dmixing.data) +
                           ((int64_t{at.b} * tiles_of(p) + at.tile) * p.mixing.size[0] + h) * queries.width;
    for (int d = thread_index(); d < kSlice && at.column + d < queries.width; d += kThreads) {
      float sum = 0.0f;
      for (int w = 0; w < Sizes::kWarps; ++w) sum += on_chip.sums[w * kSlice + d];
      of_head[at.column + d] = sum * static_cast<float>(p.scale);
    }
  }
};

template <typename T>
void Kernels<T>::collaborative_attention_queries(const QueriesParams& p, const LaunchTarget& target) {
  with_value_width<T>(p.value.size[3], has_terms(p), [&](auto width, auto terms) {
    using Kernel = CollaborativeQueries<T, width, terms>;
    static_assert(Kernel::shared_bytes(kWidestShared, false) <= kLeastShared);
    const int64_t tiles = ceil_div(p.query.size[1], Kernel::kBlockM), Ds = p.query.size[2];
    const bool keeps_query = keeps_rows<Kernel>(Ds, target.device);
    launch<Kernel>(p.query.size[0] * tiles * ceil_div(Ds, Kernel::kSlice) * p.splits,
                   Kernel::shared_bytes(Ds, keeps_query), {p, keeps_query}, target);
  });
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
