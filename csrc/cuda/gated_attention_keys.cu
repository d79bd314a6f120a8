// Gated attention backward by tiles of keys: dkey and dvalue.
//
//   dvalue = p^T dattended        dkey = scale * dscores^T query        dattended = g * dout
//
// tile_gradient.h has the other formulas.
#include <algorithm>

#include "cuda/grid.h"
#include "cuda/head_gradient.h"
#include "cuda/launch.h"
#include "cuda/tile_gradient.h"
#include "cuda/tiles.h"

namespace hk::cuda {

// Which sums a kernel holds in registers; only one of them for the widest heads.
enum class Sums { kBoth, kKey, kValue };

// A block of threads owns kBlockN keys of a key head and sums over the query heads that read it (a splits-th of them,
// if key heads alone would not fill the GPU). Key, value and both sums stay on chip; tiles of query rows are loaded two
// at a time. Scores are transposed, [keys, query rows], so that probabilities and dscores are left operands directly
// from registers, or are written to shared memory in the order in which they are read there (kWide).
template <typename T, int kWidth, bool kTerms, Sums kSums, bool kWide>
struct GatedKeys {
  using Params = KeysParams;
  using Sizes = std::conditional_t<kWide, WideKeysSizes, BackwardSizes<T, kWidth, kTerms>>;
  static constexpr int kGroups = Sizes::kGroups, kBlockM = Sizes::kOther;
  static constexpr int kThreads = Sizes::kWarps * kWarp;
  static constexpr int kAcross = Sizes::kAcross, kOwnKeys = kGroups * 16;
  static constexpr int kOwnRows = kBlockM / kAcross, kOwnColumns = kWidth / kAcross;
  static constexpr int kBlockN = Sizes::kWarps / kAcross * kOwnKeys;
  using KeyTile = Tile<T, kBlockN, kWidth>;
  using RowTile = Tile<T, kBlockM, kWidth>;
  using WeightTile = Tile<T, kBlockN, kBlockM>;
  using Scores = Accumulator<kGroups, kOwnRows>;
  using Sum = Accumulator<kGroups, kOwnColumns>;
  using Terms = ScoreTile<kTerms, ScoreLayout::kKeysFirst, kBlockM, kBlockN>;
  struct Memory : SharedMemory {
    Ring<KeyTile> key = tiles<KeyTile>(), value = tiles<KeyTile>();
    Ring<RowTile> query = tiles<RowTile>(2), dout = tiles<RowTile>(2);
    Ring<WeightTile> weights = tiles<WeightTile>(kWide ? 1 : 0);
    Buffer<QueryRows<kBlockM>> rows = take<QueryRows<kBlockM>>();
    Buffer<int> scratch = take<int>(Sizes::kWarps * 4);
    Terms terms = Terms(*this);
  };
  static constexpr int shared_bytes() {
    return std::max(Memory().bytes(), Sizes::kWarps * GradientPart<kGroups, kOwnColumns>::kBytes);
  }

  // A tile of query rows: `index` in the list of tiles, of head h.
  struct Step {
    int h, index;
  };

  HK_DEVICE static void run(const Params& p) {
    const int T_rows = static_cast<int>(p.query.size[2]), S = static_cast<int>(p.key.size[2]);
    const int H = static_cast<int>(p.query.size[1]), Hk = static_cast<int>(p.key.size[1]);
    const KeyHeadTile at(p.query.size[0], Hk, ceil_div(S, kBlockN));
    const int b = at.b, hk = at.head, first_key = at.tile * kBlockN, group = H / Hk;
    const int heads = ceil_div(group, p.splits), first_head = hk * group + at.split * heads;
    const int last_head = min_of(first_head + heads, (hk + 1) * group);
    // Constructed at each use, so that their pointers take no registers in between.
    const auto gate = [&] { return Gate(p.gate, p.activation); };
    const auto visible = [&](int h) { return Visible(p.mask, b, h, T_rows, S); };

    const Memory memory;
    const KeyTile key = memory.key[0], value = memory.value[0];
    const Ring<RowTile> query = memory.query, dout = memory.dout;
    QueryRows<kBlockM>& rows = *memory.rows;

    // The list for all heads: if intervals differ by head, a block has one head.
    const TileList list = tiles_that_see<kThreads, kBlockM, kBlockN>(visible(first_head), first_key, memory.scratch);
    const auto head_of = [&](int h) { return Head{b, h, T_rows, S}; };
    const auto open_from = [&](int h) {  // the first tile of the first open head
      while (h < last_head && (list.count() == 0 || gate().closes(b, h))) ++h;
      return Step{h, 0};
    };
    // The step itself, or the next one in which the dense mask shows a pair.
    const auto shown_from = [&](Step step) {
      if (!kTerms && step.index == list.count()) return open_from(step.h + 1);
      while (kTerms && step.h < last_head) {
        step.index = Terms::shown_from(step.index, list, first_key, p, head_of(step.h));
        if (step.index < list.count()) break;
        step = open_from(step.h + 1);
      }
      return step;
    };
    const auto copy = [&](const Step& step, int stage) {
      const int first_row = list[step.index] * kBlockM;
      copy_rows<kThreads>(query[stage], rows_of<T>(p.query, b, step.h), first_row);
      copy_rows<kThreads>(dout[stage], rows_of<T>(p.dattended, b, step.h), first_row);
    };
    const auto row_of_tile = [&](const Step& step) {
      const int row = list[step.index] * kBlockM + thread_index();
      return QueryRow(p, gate(), visible(step.h), b, step.h, H, row);
    };

    Sum dkey, dvalue;
    Step step = open_from(first_head);
    if constexpr (kTerms) step = shown_from(step);
    copy_rows<kThreads>(key, rows_of<T>(p.key, b, hk), first_key);
    copy_rows<kThreads>(value, rows_of<T>(p.value, b, hk), first_key);
    if (step.h < last_head) {
      copy(step, 0);
      if (thread_index() < kBlockM) rows.template set<kTerms>(thread_index(), row_of_tile(step));
    }
    commit_copies();
    for (int stage = 0; step.h < last_head; stage ^= 1) {
      const Step next = shown_from({step.h, step.index + 1});
      const int first_row = list[step.index] * kBlockM;
      QueryRow next_row;  // on its way while this tile is computed
      if (next.h < last_head) {
        copy(next, stage ^ 1);
        if (thread_index() < kBlockM) next_row = row_of_tile(next);
      }
      commit_copies();
      bool hides = memory.terms.template stage<kThreads>(p, head_of(step.h), first_row, first_key);
      wait_copies<1>();
      hides = sync_block_any<kTerms>(hides);
      const bool partial = !list.is_full(step.index) || hides;
      if (partial) leave_out_non_finite<kThreads>(rows, query[stage], dout[stage]);
      add_tile(p, visible(step.h), memory, query[stage], dout[stage], partial, hides, b, step.h, first_key, first_row,
               dkey, dvalue);
      sync_block();  // no thread reads this tile, nor its rows' numbers
      if (next.h < last_head && thread_index() < kBlockM) rows.template set<kTerms>(thread_index(), next_row);
      step = next;
    }
    wait_copies<0>();
    const int part = at.split * static_cast<int>(p.query.size[0]) + b;
    const int first = first_key + own_key(), column = warp() % kAcross * kOwnColumns;
    if (kSums != Sums::kValue && p.dkey.rank > 0)
      store_gradient<T>(p.dkey, part, hk, first, column, dkey, static_cast<float>(p.scale));
    if (kSums != Sums::kKey && p.dvalue.rank > 0) store_gradient<T>(p.dvalue, part, hk, first, column, dvalue, 1.0f);
  }

 private:
  // The first of the warp's keys.
  HK_DEVICE static int own_key() { return warp() / kAcross * kOwnKeys; }

  // Adds the terms of one tile of query rows.
  HK_DEVICE static void add_tile(const Params& p, const Visible& visible, const Memory& memory, const RowTile& query,
                                 const RowTile& dout, bool partial, bool hides, int b, int h, int first_key,
                                 int first_row, Sum& dkey, Sum& dvalue) {
    using OwnRows = Tile<T, kOwnRows, kWidth>;
    const KeyTile key = memory.key[0], value = memory.value[0];
    const QueryRows<kBlockM>& rows = *memory.rows;
    const int warp_row = own_key(), own_row = warp() % kAcross * kOwnRows;
    constexpr ScoreLayout kLayout = ScoreLayout::kKeysFirst;
    const TileRows<kLayout, kBlockM> row = {rows, own_row};
    const bool wants_dkey = kSums != Sums::kValue && p.dkey;
    Scores probabilities, dscores;
    multiply_rows(probabilities, key, warp_row, OwnRows{query.at(own_row, 0)});
    const LeftOut<kLayout, kGroups, kOwnRows> left_out(p, visible, rows.range + own_row, partial, memory.terms, hides,
                                                       b, h, first_row + own_row, first_key + warp_row);
    const auto to_dp = [&] {
      multiply_rows(dscores, value, warp_row, OwnRows{dout.at(own_row, 0)});
      centre(dscores, row, left_out);
    };
    if (kTerms && wants_dkey) to_dp();  // includes the slope of the scores
    memory.terms.to_scores(p, probabilities, &dscores);
    to_probabilities<kTerms>(probabilities, row, Terms::scale_log2(p));
    left_out.hide(probabilities);
    if (kSums != Sums::kKey && p.dvalue) {
      Scores weights = probabilities;
      gate_and_drop(weights, row, left_out);
      add_product(dvalue, weights, dout, memory);
    }
    if (wants_dkey) {
      if (!kTerms) to_dp();
      to_dscores(dscores, probabilities, left_out);
      add_product(dkey, dscores, query, memory);
    }
  }

  // sum += weights * rows, of all rows of the tile.
  HK_DEVICE static void add_product(Sum& sum, const Scores& weights, const RowTile& rows, const Memory& memory) {
    if constexpr (kWide) {
      const WeightTile tile = memory.weights[0];
      sync_block();  // no thread reads what stood there
      store_weights(tile, own_key(), warp() % kAcross * kOwnRows, weights);
      sync_block();
      multiply_tiles(sum, tile, own_key(), rows, warp() % kAcross * kOwnColumns);
    } else {
      multiply_weights(sum, weights, rows);
    }
  }
};

template <typename T>
bool Kernels<T>::runs_wide_keys(int device) {
  if constexpr (kHasWideKeys<T, 128, false>) {
    constexpr int kBytes = GatedKeys<T, 128, false, Sums::kBoth, true>::shared_bytes();
    return kBytes <= shared_memory_limits(device).per_block;
  }
  return false;
}

template <typename T>
void Kernels<T>::gated_attention_keys(const KeysParams& p, const LaunchTarget& target) {
  const auto run = [&](auto width, auto terms, auto sums, auto wide) {
    using Kernel = GatedKeys<T, width, terms, sums, wide>;
    constexpr int kBytes = Kernel::shared_bytes();
    static_assert(wide || kBytes <= kLeastShared);
    const int64_t tiles = ceil_div(p.key.size[2], Kernel::kBlockN);
    launch<Kernel>(p.key.size[0] * p.key.size[1] * tiles * p.splits, kBytes, p, target);
  };
  with_width<T>(p.query.size[3], p.value.size[3], has_terms(p), [&](auto width, auto terms) {
    constexpr auto both = std::integral_constant<Sums, Sums::kBoth>{};
    if constexpr (kHasWideKeys<T, width, terms>) {
      if (runs_wide_keys(target.device)) return run(width, terms, both, std::true_type{});
    }
    constexpr auto wide = std::false_type{};
    if constexpr (width <= 128) {
      run(width, terms, both, wide);
    } else {
      if (p.dkey) run(width, terms, std::integral_constant<Sums, Sums::kKey>{}, wide);
      if (p.dvalue) run(width, terms, std::integral_constant<Sums, Sums::kValue>{}, wide);
    }
  });
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
