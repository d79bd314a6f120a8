// Gated attention backward by tiles of keys: dkey and dvalue.
//
//   dvalue = p^T dattended        dkey = scale * dscores^T query        dattended = g * dout
//
// The other formulas stand in tile_gradient.h.
#include "cuda/grid.h"
#include "cuda/head_gradient.h"
#include "cuda/launch.h"
#include "cuda/passes.h"
#include "cuda/tile_gradient.h"
#include "cuda/tiles.h"

namespace hk::cuda {

// Which sums a kernel holds in registers; of the widest heads one alone.
enum class Sums { kBoth, kKey, kValue };

// A block of threads owns kBlockN keys of a key head and sums over the query heads that read it (a
// splits-th of them, where key heads alone would not fill the GPU). Key, value and both sums stay
// on chip; tiles of query rows come two at a time. Scores lie transposed, [keys, query rows], so
// that probabilities and dscores are left operands as they stand in registers.
template <typename T, int kWidth, Sums kSums>
struct GatedKeys {
  using Params = KeysParams;
  using Sizes = BackwardSizes<T, kWidth>;
  static constexpr int kGroups = Sizes::kGroups, kBlockM = Sizes::kOther;
  static constexpr int kThreads = Sizes::kWarps * kWarp;
  static constexpr int kBlockN = Sizes::kWarps * kGroups * 16;
  using KeyTile = Tile<T, kBlockN, kWidth>;
  using RowTile = Tile<T, kBlockM, kWidth>;
  using Scores = Accumulator<kGroups, kBlockM>;
  using Sum = Accumulator<kGroups, kWidth>;
  static constexpr int kSharedBytes = 2 * KeyTile::kBytes + 4 * RowTile::kBytes +
                                      2 * sizeof(RowTerms<kBlockM>) + 16 + Sizes::kWarps * 16;
  static_assert(kSharedBytes <= kLeastShared);
  static_assert(Sizes::kWarps * GradientPart<kGroups, kWidth>::kBytes <= kSharedBytes);

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
    const Gate gate(p.gate, p.activation);
    const Visible visible(p.mask, b, T_rows, S);

    SharedMemory memory;
    const auto key = memory.tile<KeyTile>(), value = memory.tile<KeyTile>();
    const Ring<RowTile> query = memory.ring<RowTile>(2);
    const Ring<RowTile> dout = memory.ring<RowTile>(2);
    RowTerms<kBlockM>* const terms = memory.take<RowTerms<kBlockM>>(2);
    int* const scratch = memory.take<int>(Sizes::kWarps * 4);

    const TileList list = tiles_that_see<kThreads, kBlockM, kBlockN>(visible, first_key, scratch);
    const auto open_from = [&](int h) {  // the first tile of the first open head
      while (h < last_head && (list.count() == 0 || gate.closes(b, h))) ++h;
      return Step{h, 0};
    };
    const auto copy = [&](const Step& step, int stage) {
      const int first_row = list[step.index] * kBlockM;
      copy_rows<kThreads>(query[stage], rows_of<T>(p.query, b, step.h), first_row);
      copy_rows<kThreads>(dout[stage], rows_of<T>(p.dattended, b, step.h), first_row);
    };
    const auto term_of = [&](const Step& step) {
      const int row = list[step.index] * kBlockM + thread_index();
      return RowTerm(p, gate, visible, b, step.h, H, row);
    };

    Sum dkey, dvalue;
    dkey.clear();
    dvalue.clear();
    Step step = open_from(first_head);
    copy_rows<kThreads>(key, rows_of<T>(p.key, b, hk), first_key);
    copy_rows<kThreads>(value, rows_of<T>(p.value, b, hk), first_key);
    if (step.h < last_head) {
      copy(step, 0);
      if (thread_index() < kBlockM) terms[0].set(thread_index(), term_of(step));
    }
    commit_copies();
    for (int stage = 0; step.h < last_head; stage ^= 1) {
      Step next = {step.h, step.index + 1};
      if (next.index == list.count()) next = open_from(step.h + 1);
      RowTerm term;  // on its way while this tile is computed
      if (next.h < last_head) {
        copy(next, stage ^ 1);
        if (thread_index() < kBlockM) term = term_of(next);
      }
      commit_copies();
      wait_copies<1>();
      sync_block();
      const bool partial = !list.is_full(step.index);
      if (partial) leave_out_unsound<kThreads>(terms[stage], query[stage], dout[stage]);
      add_tile(p, visible, key, value, query[stage], dout[stage], terms[stage], partial, b, step.h,
               first_key, list[step.index] * kBlockM, dkey, dvalue);
      if (next.h < last_head && thread_index() < kBlockM)
        terms[stage ^ 1].set(thread_index(), term);
      sync_block();
      step = next;
    }
    wait_copies<0>();
    const int part = at.split * static_cast<int>(p.query.size[0]) + b;
    const int first = first_key + warp() * kGroups * 16;
    if (kSums != Sums::kValue && p.dkey.rank > 0)
      store_gradient<T>(p.dkey, part, hk, first, 0, dkey, static_cast<float>(p.scale));
    if (kSums != Sums::kKey && p.dvalue.rank > 0)
      store_gradient<T>(p.dvalue, part, hk, first, 0, dvalue, 1.0f);
  }

 private:
  // Adds what one tile of query rows gives.
  HK_DEVICE static void add_tile(const Params& p, const Visible& visible, const KeyTile& key,
                                 const KeyTile& value, const RowTile& query, const RowTile& dout,
                                 const RowTerms<kBlockM>& terms, bool partial, int b, int h,
                                 int first_key, int first_row, Sum& dkey, Sum& dvalue) {
    const int warp_row = warp() * kGroups * 16;
    const float steepness = static_cast<float>(p.scale) * kLog2e;
    const float keep_scale = static_cast<float>(p.dropout.keep_scale);
    constexpr Lie kLie = Lie::kKeysFirst;
    const TileTerms<kLie, kBlockM> row = {terms, 0};
    Scores probabilities;
    probabilities.clear();
    multiply_rows(probabilities, key, warp_row, query);
    to_probabilities(probabilities, row, steepness);
    const LeftOut<kLie, kGroups, kBlockM> left_out(p, visible, terms.range, partial, b, h,
                                                   first_row, first_key + warp_row);
    left_out.hide(probabilities);
    if (kSums != Sums::kKey && p.dvalue) {
      Scores weights = probabilities;
      weigh(weights, row, left_out, keep_scale);
      multiply_weights(dvalue, weights, dout);
    }
    if (kSums != Sums::kValue && p.dkey) {
      Scores dscores;
      dscores.clear();
      multiply_rows(dscores, value, warp_row, dout);
      to_dscores(dscores, probabilities, row, left_out, keep_scale);
      multiply_weights(dkey, dscores, query);
    }
  }
};

template <typename T>
void gated_keys(const KeysParams& p, const Where& where) {
  with_width<T>(p.query.size[3], p.value.size[3], [&](auto width) {
    const auto run = [&](auto sums) {
      using Kernel = GatedKeys<T, width, sums>;
      const int64_t tiles = ceil_div(p.key.size[2], Kernel::kBlockN);
      launch<Kernel>(p.key.size[0] * p.key.size[1] * tiles * p.splits, Kernel::kSharedBytes, p,
                     where);
    };
    if constexpr (width <= 128) {
      run(std::integral_constant<Sums, Sums::kBoth>{});
    } else {
      if (p.dkey) run(std::integral_constant<Sums, Sums::kKey>{});
      if (p.dvalue) run(std::integral_constant<Sums, Sums::kValue>{});
    }
  });
}

template void gated_keys<HK_DTYPE>(const KeysParams&, const Where&);

}  // namespace hk::cuda
