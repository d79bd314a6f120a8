// Statistics of attention rows, streamed over the keys: nothing but a tile of scores is in memory.
#pragma once

#include "cpu/collaborative_attention.h"
#include "cpu/gated_attention.h"

namespace hk::HK_LEVEL {

// Running statistics of each query row of a tile, scores as base-2 logarithms.
template <typename Real>
struct RowStatistics {
  OnlineSoftmax<Real> softmax;
  alignas(64) Real energy[BLOCK_M];  // sum of p * (score - maximum), p unnormalised
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
  void step(const Real* scores, Real* probabilities, const KeyTile& keys, const uint8_t* excluded,
            int columns) {
    for (int n = 0; n < keys.count(); ++n) {
      if (excluded && excluded[keys.begin + n]) continue;
      for (int m = 0; m < columns; ++m) {
        const Real s = scores[n * BLOCK_M + m];
        best_key[m] = s > best[m] ? keys.begin + n : best_key[m];
        best[m] = s > best[m] ? s : best[m];
      }
    }
    alignas(64) Real before_maximum[BLOCK_M], before_sum[BLOCK_M];
    std::memcpy(before_maximum, softmax.maximum, sizeof before_maximum);
    std::memcpy(before_sum, softmax.sum, sizeof before_sum);
    std::memcpy(probabilities, scores, sizeof(Real) * BLOCK_M * keys.count());
    softmax.step(probabilities, keys.count(), columns);
    for (int m = 0; m < columns; m += kLanes<Real>) {
      const Vec<Real> top = load(softmax.maximum + m), before = load(before_maximum + m);
      const Vec<Real> drop = before == kHidden<Real> ? Vec<Real>{} : before - top;
      Vec<Real> total =
          load(softmax.rescale + m) * (load(energy + m) + load(before_sum + m) * drop);
      for (int n = 0; n < keys.count(); ++n) {
        const Vec<Real> p = load(probabilities + n * BLOCK_M + m);
        total += p == Real(0) ? Vec<Real>{} : p * (load(scores + n * BLOCK_M + m) - top);
      }
      store<Real>(energy + m, total);
    }
  }
};

// `Operator` is GatedAttention<Real> or CollaborativeAttention<Real>: it packs a query tile of a
// head and describes the head.
template <typename Real, typename Operator>
void attention_statistics_of(const StatisticsParams& params) {
  const Operator op(params);
  const int64_t items = op.query_tiles * op.B * op.H;
  const int64_t bytes = TileScratch<Real>::bytes(op.D, 1) + piece<Real>(BLOCK_N * BLOCK_M);
  parallel_for(
      items, params.threads, op.multiply_adds(), bytes, [&](int64_t item, Workspace& workspace) {
        const auto [b, h, first_row] = WorkItem(op, item);
        const VisibleRows<Real> visible(params.mask, b, first_row, op.T, op.S);
        const TileScratch<Real> scratch(workspace, op.D, 1);
        Real* probabilities = workspace.take<Real>(BLOCK_N * BLOCK_M);
        const uint8_t* excluded =
            params.excluded ? params.excluded + b * params.excluded_stride : nullptr;
        const Head<Real> head = op.head(b, h);
        RowStatistics<Real> statistics;
        if (visible.any) {
          op.pack(b, h, visible, scratch);
          for_visible_tiles(visible, 0, op.S, [&](const KeyTile& keys) {
            score_tile(head, scratch.query, keys, visible.columns, scratch.widened, scratch.scores);
            if (!keys.full) hide(scratch.scores, keys, visible, visible.columns, kHidden<Real>);
            statistics.step(scratch.scores, probabilities, keys, excluded, visible.columns);
          });
        }
        const int64_t row = (b * op.H + h) * op.T + visible.first;
        for (int m = 0; m < visible.count; ++m) {
          const Real sum = statistics.softmax.sum[m];
          const bool sees = visible.sees(m) && sum != Real(0);
          const Real log2_sum = static_cast<Real>(std::log2(sum));
          const Real lse = statistics.softmax.maximum[m] + log2_sum;
          const bool found = sees && statistics.best_key[m] >= 0;
          static_cast<Real*>(params.lse.data)[row + m] =
              sees ? lse * static_cast<Real>(kLn2) : kHidden<Real>;
          static_cast<Real*>(params.max_prob.data)[row + m] =
              found                ? std::exp2(statistics.best[m] - lse)
              : sees && sum != sum ? sum
                                   : Real(0);
          static_cast<Real*>(params.entropy.data)[row + m] =
              sees ? static_cast<Real>(kLn2) * (log2_sum - statistics.energy[m] / sum) : Real(0);
          params.argmax[row + m] = found ? statistics.best_key[m] : -1;
        }
      });
}

template <typename Real>
void attention_statistics(const StatisticsParams& params) {
  if (params.mixing) {
    attention_statistics_of<Real, CollaborativeAttention<Real>>(params);
  } else {
    attention_statistics_of<Real, GatedAttention<Real>>(params);
  }
}

}  // namespace hk::HK_LEVEL
