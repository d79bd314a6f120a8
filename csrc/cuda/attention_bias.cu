// The gradient of a bias, one kernel for both operators:
//
//   dscores = p * (dp - delta)
//   dbias = sum of dscores over what the bias broadcasts along; doffset_bias = its diagonals' sums
//
// tile_gradient.h has the other formulas.
#include "cuda/chunks.h"
#include "cuda/collaborative_tiles.h"
#include "cuda/launch.h"
#include "cuda/tile_gradient.h"

namespace hk::cuda {

// A block of threads owns sums of kBiasTile x kBiasTile pairs, in registers, and adds the tiles of dscores that belong
// to them, in order. With a dense bias it owns one tile of it: it adds tiles of the batches and heads that share this
// tile (a splits-th of them), and of all rows or keys if the bias broadcasts along them. With a table of offsets it
// owns a diagonal of tiles of a head: their diagonals belong to 2 kBiasTile - 1 offsets, some of which the next block
// computes too, so there are two parts. Features are loaded kStepWidth at a time, two steps on chip, first those of
// scores, then those of dp; so one kernel serves heads of any width.
template <typename T>
struct BiasGradient {
  using Params = BiasParams;
  static constexpr int kWarps = kBiasTile / 16, kThreads = kWarps * kWarp;
  using Rows64 = Tile<T, kBiasTile, kStepWidth>;
  using Scores = Accumulator<1, kBiasTile>;
  using Terms = ScoreTile<true, ScoreLayout::kRowsFirst, kBiasTile, kBiasTile>;
  using SumTile = Tile<float, kBiasTile, kBiasTile>;

  static_assert(SumTile::kBytes <= 4 * Rows64::kBytes);

  struct Memory : SharedMemory {
    Ring<Rows64> rows = tiles<Rows64>(2), keys = tiles<Rows64>(2);
    Terms terms = Terms(*this);
    Buffer<QueryRows<kBiasTile>> query_rows = take<QueryRows<kBiasTile>>();
    Buffer<float> content_bias = take<float>(kBiasTile);
    Features features;

    constexpr explicit Memory(int64_t Ds) : features(*this, Ds) {}
  };
  static constexpr int shared_bytes(int64_t Ds) { return Memory(Ds).bytes(); }

  // Sizes of the call, and in tiles.
  struct Sizes {
    int B, H, T_rows, S, row_tiles, key_tiles;

    HK_DEVICE explicit Sizes(const BiasParams& p)
        : B(static_cast<int>(p.query.size[0])),
          H(static_cast<int>(p.heads())),
          T_rows(static_cast<int>(p.rows())),
          S(static_cast<int>(p.keys())),
          row_tiles(ceil_div(T_rows, kBiasTile)),
          key_tiles(ceil_div(S, kBiasTile)) {}
  };

  HK_DEVICE static void run(const Params& p) {
    Memory on_chip(p.mixing.size[1]);
    const Sizes n(p);
    if (p.dbias)
      add_dense(p, n, on_chip);
    else
      add_diagonal(p, n, on_chip);
  }

 private:
  // A tile of a dense bias, or of one part of it.
  HK_DEVICE static void add_dense(const Params& p, const Sizes& n, Memory& on_chip) {
    const int64_t* const size = p.terms.bias.size;
    const bool all_rows = size[3] == 1, all_keys = size[4] == 1;
    const int own_rows = all_rows ? 1 : n.row_tiles, own_keys = all_keys ? 1 : n.key_tiles;
    const int own_key = static_cast<int>(block_index() % own_keys);
    int64_t rest = block_index() / own_keys;
    const int own_row = static_cast<int>(rest % own_rows);
    const int64_t entry = rest / own_rows;  // of [splits, B1, B2, H or 1]
    const int64_t own_head = entry % size[2], own_inner = entry / size[2] % size[1];
    const int64_t own_outer = entry / size[2] / size[1] % size[0];
    const int64_t split = entry / size[2] / size[1] / size[0];

    const int64_t inner = p.terms.bias_inner;
    const int64_t heads = size[2] == 1 ? n.H : 1, inners = size[1] == 1 ? inner : 1;
    const int64_t shares = heads * inners * (size[0] == 1 ? n.B / inner : 1);
    const int64_t count = ceil_div(shares, p.splits), stop = (split + 1) * count;
    Scores sums;
    for (int64_t i = split * count; i < stop && i < shares; ++i) {
      const int64_t b1 = size[0] == 1 ? i / heads / inners : own_outer;
      const int64_t b2 = size[1] == 1 ? i / heads % inners : own_inner;
      const int64_t h = size[2] == 1 ? i % heads : own_head;
      const Head at = {static_cast<int>(b1 * inner + b2), static_cast<int>(h), n.T_rows, n.S};
      if (!opens(p, at, on_chip)) continue;
      for (int row = own_row; row < (all_rows ? n.row_tiles : own_row + 1); ++row)
        for (int key = own_key; key < (all_keys ? n.key_tiles : own_key + 1); ++key)
          add_tile(p, n, on_chip, at, row * kBiasTile, key * kBiasTile, sums);
    }
    const SumTile tile = put(on_chip, sums);
    if (all_rows) add_up(tile, kBiasTile, SumTile::kStride, 1);
    if (all_keys) add_up(tile, all_rows ? 1 : kBiasTile, 1, SumTile::kStride);
    float* const to = static_cast<float*>(p.dbias.data) + entry * size[3] * size[4];
    const int rows = all_rows ? 1 : min_of(kBiasTile, n.T_rows - own_row * kBiasTile);
    const int keys = all_keys ? 1 : min_of(kBiasTile, n.S - own_key * kBiasTile);
    HK_ROLLED
    for (int i = thread_index(); i < rows * kBiasTile; i += kThreads) {
      const int row = i / kBiasTile, key = i % kBiasTile;
      if (key >= keys) continue;
      to[(int64_t{own_row} * kBiasTile + row) * size[4] + own_key * kBiasTile + key] = *tile.at(row, key);
    }
  }

  // The tiles of a head on one diagonal: the index of the tile of keys minus that of the tile of rows is the same.
  HK_DEVICE static void add_diagonal(const Params& p, const Sizes& n, Memory& on_chip) {
    const int blocks = n.row_tiles + n.key_tiles - 1;
    const int own = static_cast<int>(block_index() % blocks), first = own - (n.row_tiles - 1);
    const int64_t pair = block_index() / blocks;
    const Head at = {static_cast<int>(pair / n.H), static_cast<int>(pair % n.H), n.T_rows, n.S};
    Scores sums;
    if (opens(p, at, on_chip)) {
      for (int row = max_of(0, -first); row < min_of(n.row_tiles, n.key_tiles - first); ++row)
        add_tile(p, n, on_chip, at, row * kBiasTile, (first + row) * kBiasTile, sums);
    }
    const SumTile tile = put(on_chip, sums);
    // Offsets from 0 on are in the first part of this block; those before 0 are in the second part of the next one.
    const int64_t stride = int64_t{blocks + 1} * kBiasTile;
    float* const parts = static_cast<float*>(p.doffset_bias.data);
    HK_ROLLED
    for (int i = thread_index(); i < 2 * kBiasTile; i += kThreads) {
      const int offset = i - kBiasTile;  // key less row
      float sum = 0.0f;
      HK_ROLLED
      for (int row = max_of(0, -offset); row < min_of(kBiasTile, kBiasTile - offset); ++row)
        sum += *tile.at(row, row + offset);
      const int64_t part = offset >= 0 ? pair : int64_t{n.B} * n.H + pair;
      parts[part * stride + int64_t{own + 1} * kBiasTile + offset] = sum;
    }
  }

  // Whether a head is open; reads its list of features.
  HK_DEVICE static bool opens(const Params& p, const Head& at, Memory& on_chip) {
    if (Gate(p.gate, p.activation).closes(at.b, at.h)) return false;
    if (p.mixing.rank > 0) on_chip.features.template set<kThreads>(p.mixing, at.h);
    return true;
  }

  // Adds the dscores of a tile.
  HK_DEVICE static void add_tile(const Params& p, const Sizes& n, Memory& on_chip, const Head& at, int first_row,
                                 int first_key, Scores& sums) {
    if (p.mask.dense_cells && Terms::shown(p, at, first_row, first_key) == kHidden) return;
    const Visible visible(p.mask, at.b, at.h, n.T_rows, n.S);
    QueryRows<kBiasTile>& rows = *on_chip.query_rows;
    sync_block();  // no thread reads the tile before any more
    bool sees = false, cut = false;
    if (thread_index() < kBiasTile) {
      const QueryRow term(p, Gate(p.gate, p.activation), visible, at.b, at.h, n.H, first_row + thread_index());
      rows.template set<true>(thread_index(), term);
      on_chip.content_bias[thread_index()] = ContentBias(p.content_bias, at.b, at.h).at(first_key + thread_index());
      const int lo = first_key < visible.front() ? 0 : term.range.lo;
      sees = lo < first_key + kBiasTile && term.range.hi > first_key;
      cut = term.range.lo > first_key || term.range.hi < first_key + kBiasTile;
    }
    if (!any_in_block(sees)) return;
    const bool partial = any_in_block(cut) || visible.hides_keys();
    const bool hides = any_in_block(on_chip.terms.template stage<kThreads>(p, at, first_row, first_key));

    Scores scores, dscores;
    multiply(p, on_chip, at, first_row, first_key, scores, dscores);
    constexpr ScoreLayout kLayout = ScoreLayout::kRowsFirst;
    const int warp_row = warp() * 16;
    const TileRows<kLayout, kBiasTile> row = {rows, warp_row};
    const LeftOut<kLayout, 1, kBiasTile> left_out(p, visible, rows.range + warp_row, partial, on_chip.terms, hides,
                                                  at.b, at.h, first_row + warp_row, first_key);
    scores.each([&](float& value, int, int n, int e) { value += on_chip.content_bias[column_of(n, e)]; });
    centre(dscores, row, left_out);
    on_chip.terms.to_scores(p, scores);
    dscores.each([&](float& value, int m, int n, int e) {
      value *= rows.template probability<true>(scores.c[m][n][e], kLog2e, row(m, n, e));
    });
    left_out.hide(dscores);
    sums.each([&](float& sum, int m, int n, int e) { sum += dscores.c[m][n][e]; });
  }

  // The products of a tile: raw scores, which still lack the content bias, and dp.
  HK_DEVICE static void multiply(const Params& p, const Memory& on_chip, const Head& at, int first_row, int first_key,
                                 Scores& scores, Scores& dp) {
    const Features& features = on_chip.features;
    const bool mixes = p.mixing.rank > 0;
    const int of_keys = at.h / (static_cast<int>(p.heads()) / static_cast<int>(p.value.size[1]));
    const int of_scores = mixes ? features.steps() : ceil_div(static_cast<int>(p.query.size[3]), kStepWidth);
    const int steps = of_scores + ceil_div(static_cast<int>(p.value.size[3]), kStepWidth);
    const auto gathered = [&](int step) { return features.at(Step{0, step}); };
    const auto copy = [&](int step, int stage) {
      const bool is_score = step < of_scores;
      const Rows<T> rows = rows_of<T>(is_score ? p.query : p.dattended, at.b, at.h);
      const Rows<T> keys = rows_of<T>(is_score ? p.key : p.value, at.b, of_keys);
      if (is_score && mixes) {
        copy_features<kThreads>(on_chip.rows[stage], rows, first_row, gathered(step));
        copy_features<kThreads>(on_chip.keys[stage], keys, first_key, gathered(step));
      } else {
        const Slice slice = whole_step(is_score ? step : step - of_scores);
        copy_features<kThreads>(on_chip.rows[stage], rows, first_row, slice);
        copy_features<kThreads>(on_chip.keys[stage], keys, first_key, slice);
      }
    };
    each_step(steps, copy, [&](int step, int stage) {
      const bool is_score = step < of_scores;
      const Rows64 rows = on_chip.rows[stage], keys = on_chip.keys[stage];
      if (is_score && mixes) mix_features<kThreads>(rows, features.factors(), gathered(step));
      sync_block();
      if (is_score)
        multiply_rows(scores, rows, warp() * 16, keys, mixes ? gathered(step).count * kChunk : kStepWidth);
      else
        multiply_rows(dp, rows, warp() * 16, keys);
    });
  }

  // Writes the sums of all warps to shared memory, over tiles that are not read any more.
  HK_DEVICE static SumTile put(const Memory& on_chip, const Scores& sums) {
    const SumTile tile = {reinterpret_cast<float*>(on_chip.rows[0].data)};
    sync_block();
    sums.each(
        [&](const float& sum, int m, int n, int e) { *tile.at(warp() * 16 + row_of(m, e), column_of(n, e)) = sum; });
    sync_block();
    return tile;
  }

  // Adds up kBiasTile numbers `step` apart, in their order, of each of `count` lines `line` apart; the sum takes the
  // place of the first.
  HK_DEVICE static void add_up(const SumTile& tile, int count, int step, int line) {
    if (thread_index() < count) {
      float* const first = tile.data + thread_index() * line;
      float sum = 0.0f;
      HK_ROLLED
      for (int i = 0; i < kBiasTile; ++i) sum += first[i * step];
      *first = sum;
    }
    sync_block();
  }
};

template <typename T>
void Kernels<T>::attention_bias(const BiasParams& p, const LaunchTarget& target) {
  using Kernel = BiasGradient<T>;
  static_assert(Kernel::shared_bytes(kWidestShared) <= kLeastShared);
  const int64_t row_tiles = ceil_div(p.rows(), kBiasTile), key_tiles = ceil_div(p.keys(), kBiasTile);
  const int64_t* const size = p.terms.bias.size;
  const int64_t blocks =
      p.dbias ? p.splits * size[0] * size[1] * size[2] * (size[3] == 1 ? 1 : row_tiles) * (size[4] == 1 ? 1 : key_tiles)
      : row_tiles && key_tiles ? p.query.size[0] * p.heads() * (row_tiles + key_tiles - 1)
                               : 0;
  launch<Kernel>(blocks, Kernel::shared_bytes(p.mixing ? p.mixing.size[1] : 0), p, target);
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
