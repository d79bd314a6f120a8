// Collaborative attention backward by tiles of keys: dkey, dvalue and dcontent_bias.
//
//   dvalue_h = p^T dattended     dcontent_bias_h = scale * colsum(dscores)
//   dkey = scale * sum over h of dscores_h^T (query * mixing_h)
//
// tile_gradient.h has the other formulas.
#include "cuda/chunks.h"
#include "cuda/collaborative_tiles.h"
#include "cuda/head_gradient.h"
#include "cuda/launch.h"
#include "cuda/tile_gradient.h"

namespace hk::cuda {

// A block of threads owns a slice of the features of kBlockN keys and sums dkey over the heads (a splits-th of them, in
// whole groups that share a value head) in registers. The block of the first slice also stores dvalue of every group
// and dcontent_bias of every head; if a slice is narrower than Ds, every slice recomputes the scores. On chip stay a
// head's features of the keys (if they fit), its values and all sums. Scores are transposed, [keys, query rows], so
// that probabilities and dscores are left operands directly from registers.
template <typename T, int kWidth, bool kTerms>
struct CollaborativeKeys {
  struct Params : KeysParams {
    bool keeps_key;
  };
  using Sizes = CollaborativeKeysSizes<T, kWidth>;
  static constexpr int kGroups = Sizes::kGroups, kBlockM = Sizes::kOther, kSlice = Sizes::kSlice;
  static constexpr int kThreads = Sizes::kWarps * kWarp;
  static constexpr int kBlockN = Sizes::kWarps * kGroups * 16;
  using KeyTile = Tile<T, kBlockN, kStepWidth>;
  using QueryTile = Tile<T, kBlockM, kStepWidth>;
  using SliceTile = Tile<T, kBlockM, kSlice>;
  using ValueTile = Tile<T, kBlockN, kWidth>;
  using DoutTile = Tile<T, kBlockM, kWidth>;
  using Scores = Accumulator<kGroups, kBlockM>;
  using Terms = ScoreTile<kTerms, ScoreLayout::kKeysFirst, kBlockM, kBlockN>;

  // The work of a block.
  struct BlockCoord {
    int b, first_head, last_head, first_key, column, part;

    HK_DEVICE explicit BlockCoord(const Params& p) {
      const int B = static_cast<int>(p.query.size[0]), H = static_cast<int>(p.mixing.size[0]);
      const int tiles = ceil_div(static_cast<int>(p.key.size[1]), kBlockN), slices = slices_of(p);
      const int64_t rest = block_index() / tiles / slices;  // batches, then splits
      const int group = heads_per_value(p), split = static_cast<int>(rest / B);
      const int heads = static_cast<int>(ceil_div(H / group, p.splits)) * group;
      b = static_cast<int>(rest % B);
      first_head = split * heads;
      last_head = min_of(first_head + heads, H);
      first_key = static_cast<int>(block_index() % tiles) * kBlockN;
      column = static_cast<int>(block_index() / tiles % slices) * kSlice;
      part = split * B + b;
    }

    // Its block stores dvalue and dcontent_bias.
    HK_DEVICE bool is_first_slice() const { return column == 0; }
  };

  // The sources of copies. They are in shared memory, as BlockCoord and the list of tiles are, where they take no
  // registers between uses.
  struct Sources {
    Rows<T> query, key, dout;
    Gate gate;
  };

  struct Memory : SharedMemory {
    Ring<QueryTile> query = tiles<QueryTile>(2);
    Ring<SliceTile> slice = tiles<SliceTile>(2);
    Ring<DoutTile> dout = tiles<DoutTile>(2);
    Ring<ValueTile> value = tiles<ValueTile>();
    Buffer<QueryRows<kBlockM>> query_rows = take<QueryRows<kBlockM>>();
    Buffer<int> scratch = take<int>(Sizes::kWarps * 4);
    Buffer<Sources> sources = take<Sources>();
    Buffer<BlockCoord> at = take<BlockCoord>();
    Buffer<TileList> list = take<TileList>();
    Terms terms = Terms(*this);
    Features features;
    Ring<KeyTile> key;  // of each step, or of a stage

    constexpr Memory(int64_t Ds, bool keeps_key)
        : features(*this, Ds), key(tiles<KeyTile>(owned_tiles(Ds, keeps_key))) {}
  };
  static constexpr int shared_bytes(int64_t Ds, bool keeps_key) { return Memory(Ds, keeps_key).bytes(); }

  // store_gradient overwrites only tiles between heads.
  static_assert(Sizes::kWarps * GradientPart<kGroups, kSlice>::kBytes <=
                2 * (QueryTile::kBytes + SliceTile::kBytes + DoutTile::kBytes) + ValueTile::kBytes);

  struct Sums {
    Accumulator<kGroups, kSlice> dkey;
    Accumulator<kGroups, kWidth> dvalue;  // of the heads so far that share a value head
    float dbias[kGroups][2];              // this lane's part of a key's sum
  };

  HK_DEVICE static void run(const Params& p) {
    Memory on_chip(p.key.size[2], p.keeps_key);
    if (thread_index() == 0) *on_chip.at = BlockCoord(p);
    sync_block();
    const BlockCoord& at = *on_chip.at;
    const TileList& list = *on_chip.list;
    const int warp_row = warp() * kGroups * 16;
    Sums sums;
    const int group = heads_per_value(p);
    for (int h = at.first_head; h < at.last_head; ++h) {
      if (h % group == 0) sums.dvalue.clear();  // of the next value head
      for (auto& of_group : sums.dbias) of_group[0] = of_group[1] = 0.0f;
      if (h == at.first_head || p.mask.by_head()) {
        const TileList seen_by =
            tiles_that_see<kThreads, kBlockM, kBlockN>(visible_of(p, at.b, h), at.first_key, on_chip.scratch);
        if (thread_index() == 0) *on_chip.list = seen_by;
        sync_block();
      }
      add_head(p, list, on_chip, at, h, sums);
      if (!at.is_first_slice()) continue;
      if (p.dvalue && (h + 1) % group == 0)
        store_gradient<T>(p.dvalue, at.b, h / group, at.first_key + warp_row, 0, sums.dvalue, 1.0f);
      if (p.dcontent_bias) store_bias(p, at, h, sums.dbias);
    }
    if (p.dkey) {
      store_gradient<T>(p.dkey, at.part, 0, at.first_key + warp_row, at.column, sums.dkey, static_cast<float>(p.scale));
    }
  }

  static constexpr int slices_of(const KeysParams& p) {
    return p.dkey ? ceil_div(static_cast<int>(p.key.size[2]), kSlice) : 1;
  }

 private:
  // Adds all tiles of query rows of a head; none if the head is closed, or if it does not use the slice and the slice
  // is not the first.
  HK_DEVICE static void add_head(const Params& p, const TileList& list, Memory& on_chip, const BlockCoord& at, int h,
                                 Sums& sums) {
    if (list.count() == 0 || Gate(p.gate, p.activation).closes(at.b, h)) return;
    Features& features = on_chip.features;
    features.set<kThreads>(p.mixing, h);
    Slice slice = features.slice<kSlice>(at.column, false);
    if (!at.is_first_slice() && !slice.used) return;
    if (!p.dkey) slice.used = 0;
    const int H = static_cast<int>(p.mixing.size[0]);
    const auto from = [&](int index) { return Terms::shown_from(index, list, at.first_key, p, head_of(p, at.b, h)); };
    const int first_tile = from(0);
    if (kTerms && first_tile == list.count()) return;
    const Sources& sources = *on_chip.sources;
    if (thread_index() == 0) {
      *on_chip.sources = {rows_of<T>(p.query, at.b, 0), rows_of<T>(p.key, at.b, 0), rows_of<T>(p.dattended, at.b, h),
                          Gate(p.gate, p.activation)};
    }
    sync_block();

    const auto key_at = [&](const Step& step) { return on_chip.key[p.keeps_key ? step.place : step.stage]; };
    const auto copy = [&](const Step& step) {
      const int first_row = list[step.tile] * kBlockM;
      if (!p.keeps_key || step.tile == first_tile)
        copy_features<kThreads>(key_at(step), sources.key, at.first_key, features.at(step));
      copy_features<kThreads>(on_chip.query[step.stage], sources.query, first_row, features.at(step));
      if (!features.ends(step)) return;
      const int half = step.template half<kTerms>();
      copy_features<kThreads>(on_chip.slice[half], sources.query, first_row, slice);
      copy_rows<kThreads>(on_chip.dout[half], sources.dout, first_row);
    };
    const auto mix = [&](const Step& step) {
      mix_features<kThreads>(on_chip.query[step.stage], features.factors(), features.at(step));
      if (features.ends(step))
        mix_features<kThreads>(on_chip.slice[step.template half<kTerms>()], features.factors(), slice);
    };
    const auto stage = [&](const Step& step) {
      return on_chip.terms.template stage<kThreads>(p, head_of(p, at.b, h), list[step.tile] * kBlockM, at.first_key);
    };
    const auto row_of_tile = [&](const Step& step) {
      const int row = list[step.tile] * kBlockM + thread_index();
      return QueryRow(p, sources.gate, visible_of(p, at.b, h), at.b, h, H, row);
    };

    copy_rows<kThreads>(on_chip.value[0], rows_of<T>(p.value, at.b, h / heads_per_value(p)), at.first_key);
    Scores scores;
    const auto use = [&](const Step& step, bool hides) {
      multiply_rows(scores, key_at(step), warp() * kGroups * 16, on_chip.query[step.stage], features.width(step));
      if (!features.ends(step)) return;
      add_tile(p, list, on_chip, slice, at, h, step.tile, step.template half<kTerms>(), hides, scores, sums);
      scores.clear();
    };
    each_tile_step<kTerms, kBlockM>(
        features, first_tile, list, from, copy, mix, stage, use, row_of_tile,
        [&](const QueryRow& row) { on_chip.query_rows->template set<kTerms>(thread_index(), row); });
  }

  // Adds one tile of query rows, from its scores without the content bias.
  HK_DEVICE static void add_tile(const Params& p, const TileList& list, const Memory& on_chip, const Slice& slice,
                                 const BlockCoord& at, int h, int tile, int half, bool hides, Scores& probabilities,
                                 Sums& sums) {
    const SliceTile query = on_chip.slice[half];
    const DoutTile dout = on_chip.dout[half];
    const QueryRows<kBlockM>& query_rows = *on_chip.query_rows;
    const int warp_row = warp() * kGroups * 16, first_key = at.first_key + warp_row;
    const int first_row = list[tile] * kBlockM;
    const bool partial = !list.is_full(tile) || hides;
    const bool wants_dscores = p.dkey.rank > 0 || p.dcontent_bias.rank > 0;
    if (partial) leave_out_non_finite<kThreads>(query_rows, query, dout);

    constexpr ScoreLayout kLayout = ScoreLayout::kKeysFirst;
    const TileRows<kLayout, kBlockM> row = {query_rows, 0};
    const ContentBias content_bias(p.content_bias, at.b, h);
    float bias[kGroups][2];
    each_row<kGroups>([&](int m, int half, int own) { bias[m][half] = content_bias.at(first_key + own); });
    probabilities.each([&](float& value, int m, int, int e) { value += bias[m][e / 2]; });
    Scores dscores;
    const LeftOut<kLayout, kGroups, kBlockM> left_out(p, visible_of(p, at.b, h), query_rows.range, partial,
                                                      on_chip.terms, hides, at.b, h, first_row, first_key);
    const auto to_dp = [&] {
      multiply_rows(dscores, on_chip.value[0], warp_row, dout);
      centre(dscores, row, left_out);
    };
    if (kTerms && wants_dscores) to_dp();  // includes the slope of the scores
    on_chip.terms.to_scores(p, probabilities, &dscores);
    to_probabilities<kTerms>(probabilities, row, Terms::scale_log2(p));
    left_out.hide(probabilities);
    if (p.dvalue.rank > 0 && at.is_first_slice()) {
      Scores weights = probabilities;
      gate_and_drop(weights, row, left_out);
      multiply_weights(sums.dvalue, weights, dout);
    }
    if (wants_dscores) {
      if (!kTerms) to_dp();
      to_dscores(dscores, probabilities, left_out);
      dscores.each([&](float& value, int m, int, int e) { sums.dbias[m][e / 2] += value; });
      multiply_weights(sums.dkey, dscores, query, [&](int n) { return slice.has(n); });
    }
  }

  HK_DEVICE static void store_bias(const Params& p, const BlockCoord& at, int h, const float (&dbias)[kGroups][2]) {
    const int S = static_cast<int>(p.key.size[1]);
    float* const of_head = static_cast<float*>(p.dcontent_bias.data) + (at.b * p.mixing.size[0] + h) * S;
    each_row<kGroups>([&](int m, int half, int row) {
      const int key = at.first_key + warp() * kGroups * 16 + row;
      const float sum = sum_of_row(dbias[m][half]);
      if (key < S && lane() % 4 == 0) of_head[key] = sum * static_cast<float>(p.scale);
    });
  }
};

template <typename T>
void Kernels<T>::collaborative_attention_keys(const KeysParams& p, const LaunchTarget& target) {
  with_value_width<T>(p.value.size[3], has_terms(p), [&](auto width, auto terms) {
    using Kernel = CollaborativeKeys<T, width, terms>;
    static_assert(Kernel::shared_bytes(kWidestShared, false) <= kLeastShared);
    const int64_t tiles = ceil_div(p.key.size[1], Kernel::kBlockN), Ds = p.key.size[2];
    const bool keeps_key = keeps_rows<Kernel>(Ds, target.device);
    launch<Kernel>(p.key.size[0] * tiles * Kernel::slices_of(p) * p.splits, Kernel::shared_bytes(Ds, keeps_key),
                   {p, keeps_key}, target);
  });
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
