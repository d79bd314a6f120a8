// Statistics of attention rows, streamed over the keys, and the attention that keys receive, in a second pass over the
// rows: only one tile of scores is in memory.
#pragma once

#include <vector>

#include "cpu/attend.h"
#include "cpu/parallel.h"
#include "cpu/work_items.h"

namespace hk::HK_LEVEL {

// A tile of query rows with the running statistics of each.
template <typename Real>
struct StatisticsTile : QueryTile<Real, Real> {
  alignas(64) Real energy[BLOCK_M] = {};  // sum of p * (score - reference), p unnormalised
  alignas(64) Real best[BLOCK_M];         // largest score among the keys that are not excluded
  int64_t best_key[BLOCK_M];

  StatisticsTile(Workspace& w, const Attention<Real, Real>& op, int64_t b, int64_t h, const VisibleRows<Real>& rows)
      : QueryTile<Real, Real>(w, op, b, h, rows) {
    std::fill_n(best, BLOCK_M, kHidden<Real>);
    std::fill_n(best_key, BLOCK_M, int64_t{-1});
  }

  // `scores` is read; `probabilities` is scratch of the same shape.
  void step(const Real* scores, Real* probabilities, const KeySpan& keys, const uint8_t* excluded) {
    OnlineSoftmax<Real>& softmax = this->softmax;
    const int columns = this->visible.columns;
    for (int n = 0; n < keys.count(); ++n) {
      if (excluded && excluded[keys.begin + n]) continue;
      for (int m = 0; m < columns; ++m) {
        const Real s = scores[n * BLOCK_M + m];
        best_key[m] = s > best[m] ? keys.begin + n : best_key[m];
        best[m] = s > best[m] ? s : best[m];
      }
    }
    alignas(64) Real before_reference[BLOCK_M], before_sum[BLOCK_M];
    std::memcpy(before_reference, softmax.reference, sizeof before_reference);
    std::memcpy(before_sum, softmax.sum, sizeof before_sum);
    std::memcpy(probabilities, scores, sizeof(Real) * BLOCK_M * keys.count());
    softmax.step(probabilities, keys.count(), columns);
    for (int m = 0; m < columns; m += kLanes<Real>) {
      const Vec<Real> top = load(softmax.reference + m), before = load(before_reference + m);
      const Vec<Real> drop = before == kHidden<Real> ? Vec<Real>{} : before - top;
      const Vec<Real> rescale = load(softmax.rescale + m);
      Vec<Real> total = rescale == Real(0)  // where the drop may be -inf
                            ? Vec<Real>{}
                            : rescale * (load(energy + m) + load(before_sum + m) * drop);
      for (int n = 0; n < keys.count(); ++n) {
        const Vec<Real> p = load(probabilities + n * BLOCK_M + m);
        total += p == Real(0) ? Vec<Real>{} : p * (load(scores + n * BLOCK_M + m) - top);
      }
      store<Real>(energy + m, total);
    }
  }
};

// Results of the pass by rows for the pass by keys: the product of a row's weight and a probability is exp(score -
// reference) * share. A share of 0 leaves the row out.
template <typename Real>
struct RowShares {
  std::vector<Real> reference, share;  // [B, H, T]; empty if `received` is not requested
};

template <typename Real>
inline void store_statistics(const StatisticsParams& params, const StatisticsTile<Real>& tile, int64_t row,
                             RowShares<Real>& rows) {
  for (int m = 0; m < tile.visible.count; ++m) {
    const Real sum = tile.softmax.sum[m], reference = tile.softmax.reference[m];
    const bool sees = tile.visible.sees(m) && sum != Real(0);
    const double sink = tile.head.terms.sink(tile.visible.first + m);
    // lse = top + log(total); if scores are large, rounding of the sum would lose log(total).
    const double top = sees ? std::max<double>(reference, sink) : sink;
    const double share = sees ? std::exp(reference - top) : 0;
    const double total = sees ? share * sum + std::exp(sink - top) : 1;
    const bool found = sees && tile.best_key[m] >= 0;
    static_cast<Real*>(params.lse.data)[row + m] = static_cast<Real>(top + std::log(total));
    static_cast<Real*>(params.max_score.data)[row + m] = sees && sum != sum ? sum
                                                         : found            ? tile.best[m]
                                                                            : kHidden<Real>;
    static_cast<Real*>(params.max_prob.data)[row + m] = found ? static_cast<Real>(std::exp(tile.best[m] - top) / total)
                                                        : sees && sum != sum ? sum
                                                                             : Real(0);
    // -sum p log p, of p = e^(score - reference) share / total and energy = sum e^(score - reference) (score -
    // reference)
    const double rest = sees && share > 0 ? std::log(total) - (reference - top) : 0;
    static_cast<Real*>(params.entropy.data)[row + m] =
        sees ? static_cast<Real>((rest * sum - tile.energy[m]) * share / total) : Real(0);
    params.argmax[row + m] = found ? tile.best_key[m] : -1;
    if (params.received) {
      Real weight = 0;
      if (sees) {
        const int64_t* const stride = params.row_weights.stride;
        const int64_t i = tile.visible.first + m;
        const int64_t at = tile.head.b * stride[0] + tile.head.h * stride[1] + i * stride[2];
        weight = static_cast<const Real*>(params.row_weights.data)[at];
      }
      rows.reference[row + m] = sees ? reference : Real(0);
      rows.share[row + m] = weight == Real(0) ? Real(0) : static_cast<Real>(weight * (share / total));
    }
  }
}

// A tile of query rows in the pass by keys.
template <typename Real>
struct SharesTile : QueryTile<Real, Real> {
  const Real *reference, *share;  // of the rows, as in RowShares

  using QueryTile<Real, Real>::QueryTile;

  // Adds to sum[n] what key n receives from the rows; `scores` [keys][64], hidden ones -inf.
  void add(const Real* scores, int keys, double* sum) const {
    const VisibleRows<Real>& visible = this->visible;
    alignas(64) Real own_reference[BLOCK_M] = {}, own_share[BLOCK_M] = {};
    std::memcpy(own_reference, reference, sizeof(Real) * visible.count);
    std::memcpy(own_share, share, sizeof(Real) * visible.count);
    for (int n = 0; n < keys; ++n) {
      Vec<Real> total{};
      for (int m = 0; m < visible.columns; m += kLanes<Real>) {
        const Vec<Real> score = load(scores + n * BLOCK_M + m), part = load(own_share + m);
        const Vec<Real> p = exp<Real>(score - load(own_reference + m));
        total += (part == Real(0)) | (score == kHidden<Real>) ? Vec<Real>{} : p * part;
      }
      sum[n] += sum_lanes<Real>(total);
    }
  }
};

// One thread sums what its keys receive, in the order of the query tiles: the result does not depend bitwise on how the
// keys are split.
template <typename Real>
void received_by_keys(const StatisticsParams& params, const Attention<Real, Real>& op, const RowShares<Real>& rows) {
  const int64_t tile_bytes = buffer_bytes<SharesTile<Real>>(1) + QueryTile<Real, Real>::bytes(op);
  const int64_t size = std::min(tiles_in_cache(tile_bytes), std::max<int64_t>(1, op.query_tiles));
  const int64_t heads = op.B * op.H, windows = ceil_div(op.S, BLOCK_N);
  const int64_t wanted = ceil_div(kItemsPerThread * params.threads, heads);
  const int64_t each = ceil_div(windows, std::min(windows, wanted)) * BLOCK_N;  // keys of an item
  const int64_t parts = ceil_div(op.S, each);
  const int64_t bytes = size * tile_bytes + TileScratch<Real, Real>::bytes(op) + buffer_bytes<double>(each);
  parallel_for(heads * parts, params.threads, op.multiply_adds(), bytes, [&](int64_t item, Workspace& workspace) {
    const int64_t head = item / parts, b = head / op.H, h = head % op.H;
    const KeySpan range{item % parts * each, std::min(op.S, (item % parts + 1) * each)};
    TileScratch<Real, Real> scratch(workspace, op, size);
    double* const sum = workspace.take<double>(each);
    std::fill_n(sum, each, 0.0);
    const size_t mark = workspace.mark();
    for (int64_t first = 0; first < op.query_tiles; first += size, workspace.rewind(mark)) {
      auto* tiles = workspace.take<SharesTile<Real>>(size);
      int64_t count = 0;
      for (int64_t i = first; i < std::min(op.query_tiles, first + size); ++i) {
        const VisibleRows<Real> visible(params.mask, b, h, i * BLOCK_M, op.T, op.S);
        if (!visible.meets(range)) continue;
        const int64_t row = head * op.T + visible.first;
        auto* tile = new (tiles + count++) SharesTile<Real>(workspace, op, b, h, visible);
        tile->reference = rows.reference.data() + row;
        tile->share = rows.share.data() + row;
        op.pack(b, h, tile->visible, scratch.rows, tile->query);
      }
      for_visible_pairs(tiles, count, range, BLOCK_N, [&](auto& tile, const KeySpan& window, const KeySpan& keys) {
        if (!score_tile(tile, window, keys, scratch).any) return;
        if (!keys.full) hide(scratch.scores, keys, tile.visible, tile.visible.columns);
        tile.add(scratch.scores, keys.count(), sum + keys.begin - range.begin);
      });
    }
    Real* const received = static_cast<Real*>(params.received.data) + head * op.S;
    for (int64_t key = range.begin; key < range.end; ++key) received[key] = static_cast<Real>(sum[key - range.begin]);
  });
}

template <typename Real>
void attention_statistics(const StatisticsParams& params) {
  const Attention<Real, Real> op(params);
  RowShares<Real> rows;
  if (params.received) {
    rows.reference.resize(op.B * op.H * op.T);
    rows.share.resize(op.B * op.H * op.T);
  }
  const int64_t tile_bytes = buffer_bytes<StatisticsTile<Real>>(1) + QueryTile<Real, Real>::bytes(op);
  const WorkItems items(op, tiles_in_cache(tile_bytes), kItemsPerThread * params.threads);
  const int64_t bytes =
      items.size * tile_bytes + TileScratch<Real, Real>::bytes(op) + buffer_bytes<Real>(BLOCK_N * BLOCK_M);
  parallel_for(items.count(), params.threads, op.multiply_adds(), bytes, [&](int64_t item, Workspace& workspace) {
    TileScratch<Real, Real> scratch(workspace, op, items.size);
    Real* probabilities = workspace.take<Real>(BLOCK_N * BLOCK_M);
    auto* tiles = workspace.take<StatisticsTile<Real>>(items.size);
    int64_t count = 0;
    const Range places = items.tiles(item);
    for (int64_t i = places.begin; i < places.end; ++i) {
      const TilePlace at = items.place(i);
      const VisibleRows<Real> visible(params.mask, at.b, at.h, at.first_row, op.T, op.S);
      auto* tile = new (tiles + count++) StatisticsTile<Real>(workspace, op, at.b, at.h, visible);
      if (visible.any) op.pack(at.b, at.h, visible, scratch.rows, tile->query);
    }
    const KeySpan all{0, op.S};
    for_visible_pairs(tiles, count, all, BLOCK_N, [&](auto& tile, const KeySpan& window, const KeySpan& keys) {
      if (!score_tile(tile, window, keys, scratch).any) return;
      if (!keys.full) hide(scratch.scores, keys, tile.visible, tile.visible.columns);
      const uint8_t* excluded = params.excluded ? params.excluded + tile.head.b * params.excluded_stride : nullptr;
      tile.step(scratch.scores, probabilities, keys, excluded);
    });
    for (int64_t i = 0; i < count; ++i) {
      const StatisticsTile<Real>& tile = tiles[i];
      const int64_t head = tile.head.b * op.H + tile.head.h;
      store_statistics(params, tile, head * op.T + tile.visible.first, rows);
    }
  });
  if (params.received) received_by_keys(params, op, rows);
}

}  // namespace hk::HK_LEVEL
