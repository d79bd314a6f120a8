// Statistics of attention rows, streamed over the keys: only one tile of scores is in memory.
#pragma once

#include "cpu/collaborative_attention.h"
#include "cpu/gated_attention.h"
#include "cpu/work_items.h"

namespace hk::HK_LEVEL {

// Running statistics of each query row of a tile.
template <typename Real>
struct RowStatistics {
  OnlineSoftmax<Real> softmax;
  alignas(64) Real energy[BLOCK_M];  // sum of p * (score - reference), p unnormalised
  alignas(64) Real best[BLOCK_M];    // largest score among the keys that are not excluded
  int64_t best_key[BLOCK_M];

  RowStatistics() {
    for (int m = 0; m < BLOCK_M; ++m) {
      energy[m] = 0;
      best[m] = kHidden<Real>;
      best_key[m] = -1;
    }
  }

  // `scores` is read; `probabilities` is scratch of the same shape.
  void step(const Real* scores, Real* probabilities, const KeySpan& keys, const uint8_t* excluded,
            int columns) {
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

// The state of a tile of query rows.
template <typename Real>
struct StatisticsTile {
  Head<Real> head;
  VisibleRows<Real> visible;
  RowStatistics<Real> statistics;
  PackedQuery<Real> query;  // scaled
};

template <typename Real>
inline void store_statistics(const StatisticsParams& params, const StatisticsTile<Real>& tile,
                             int64_t row) {
  const RowStatistics<Real>& statistics = tile.statistics;
  for (int m = 0; m < tile.visible.count; ++m) {
    const Real sum = statistics.softmax.sum[m], reference = statistics.softmax.reference[m];
    const bool sees = tile.visible.sees(m) && sum != Real(0);
    const double sink = tile.head.terms.sink(tile.visible.first + m);
    // lse = top + log(total): their sum would lose the second where scores are large.
    const double top = sees ? std::max<double>(reference, sink) : sink;
    const double share = sees ? std::exp(reference - top) : 0;
    const double total = sees ? share * sum + std::exp(sink - top) : 1;
    const bool found = sees && statistics.best_key[m] >= 0;
    static_cast<Real*>(params.lse.data)[row + m] = static_cast<Real>(top + std::log(total));
    static_cast<Real*>(params.max_prob.data)[row + m] =
        found                ? static_cast<Real>(std::exp(statistics.best[m] - top) / total)
        : sees && sum != sum ? sum
                             : Real(0);
    // -sum p log p, of p = e^(score - reference) share / total and energy = sum e^(score -
    // reference) (score - reference)
    const double rest = sees && share > 0 ? std::log(total) - (reference - top) : 0;
    static_cast<Real*>(params.entropy.data)[row + m] =
        sees ? static_cast<Real>((rest * sum - statistics.energy[m]) * share / total) : Real(0);
    params.argmax[row + m] = found ? statistics.best_key[m] : -1;
  }
}

// `Operator` is GatedAttention<Real, Real> or CollaborativeAttention<Real, Real>: it packs a query
// tile of a head and describes the head.
template <typename Real, typename Operator>
void attention_statistics_of(const StatisticsParams& params) {
  const Operator op(params);
  const int64_t query_count = round_up(op.D, kLanes<Real>) * BLOCK_M;
  const int64_t tile_bytes =
      buffer_bytes<char>(sizeof(StatisticsTile<Real>)) + buffer_bytes<Real>(query_count);
  const WorkItems items(op, tiles_in_cache(tile_bytes), kItemsPerThread * params.threads);
  const int64_t bytes = items.size * tile_bytes + TileScratch<Real, Real>::bytes(op, 1) +
                        buffer_bytes<Real>(BLOCK_N * BLOCK_M);
  parallel_for(items.count(), params.threads, op.multiply_adds(), bytes,
               [&](int64_t item, Workspace& workspace) {
                 TileScratch<Real, Real> scratch(workspace, op, 1, items.size);
                 Real* probabilities = workspace.take<Real>(BLOCK_N * BLOCK_M);
                 auto* tiles = workspace.take_objects<StatisticsTile<Real>>(items.size);
                 int64_t count = 0;
                 for (const TilePlace& at : items.tiles(item)) {
                   StatisticsTile<Real>* tile = new (tiles + count++)
                       StatisticsTile<Real>{op.head(at.b, at.h),
                                            {params.mask, at.b, at.h, at.first_row, op.T, op.S},
                                            {},
                                            {workspace.take<Real>(query_count), nullptr}};
                   if (tile->visible.any)
                     op.pack(at.b, at.h, tile->visible, scratch.rows, tile->query);
                 }
                 const KeySpan all{0, op.S};
                 for_visible_pairs(
                     tiles, count, all,
                     [&](StatisticsTile<Real>& tile, const KeySpan& window, const KeySpan& keys) {
                       const int columns = tile.visible.columns;
                       if (!score_tile(tile.head, tile.query, tile.visible, keys,
                                       scratch.key.rows(tile.head.key, window, keys), scratch)
                                .any)
                         return;
                       if (!keys.full) hide(scratch.scores, keys, tile.visible, columns);
                       const uint8_t* excluded =
                           params.excluded ? params.excluded + tile.head.b * params.excluded_stride
                                           : nullptr;
                       tile.statistics.step(scratch.scores, probabilities, keys, excluded, columns);
                     });
                 for (int64_t i = 0; i < count; ++i) {
                   const StatisticsTile<Real>& tile = tiles[i];
                   const int64_t head = tile.head.b * op.H + tile.head.h;
                   store_statistics(params, tile, head * op.T + tile.visible.first);
                 }
               });
}

template <typename Real>
void attention_statistics(const StatisticsParams& params) {
  if (params.mixing) {
    attention_statistics_of<Real, CollaborativeAttention<Real, Real>>(params);
  } else {
    attention_statistics_of<Real, GatedAttention<Real, Real>>(params);
  }
}

}  // namespace hk::HK_LEVEL
