// Statistics of attention rows, streamed over the keys: nothing but a tile of scores is in memory.
#pragma once

#include "cpu/collaborative_attention.h"
#include "cpu/gated_attention.h"

namespace hk::HK_LEVEL {

// Running statistics of each query row of a tile, scores as base-2 logarithms.
template <typename T>
struct RowStatistics {
  OnlineSoftmax<T> softmax;
  alignas(64) T energy[kBlockM];  // sum of p * (score - maximum), p unnormalised
  alignas(64) T best[kBlockM];    // largest score among the keys that are not excluded
  int64_t best_key[kBlockM];

  RowStatistics() {
    for (int m = 0; m < kBlockM; ++m) {
      energy[m] = 0;
      best[m] = kHidden<T>;
      best_key[m] = -1;
    }
  }

  // `scores` is read; `probabilities` is scratch of the same shape.
  void step(const T* scores, T* probabilities, const KeyTile& keys, const uint8_t* excluded, int columns) {
    for (int n = 0; n < keys.count(); ++n) {
      if (excluded && excluded[keys.begin + n]) continue;
      for (int m = 0; m < columns; ++m) {
        const T s = scores[n * kBlockM + m];
        best_key[m] = s > best[m] ? keys.begin + n : best_key[m];
        best[m] = s > best[m] ? s : best[m];
      }
    }
    alignas(64) T before_maximum[kBlockM], before_sum[kBlockM];
    std::memcpy(before_maximum, softmax.maximum, sizeof before_maximum);
    std::memcpy(before_sum, softmax.sum, sizeof before_sum);
    std::memcpy(probabilities, scores, sizeof(T) * kBlockM * keys.count());
    softmax.step(probabilities, keys.count(), columns);
    for (int m = 0; m < columns; m += kLanes<T>) {
      const Vec<T> top = load(softmax.maximum + m), before = load(before_maximum + m);
      const Vec<T> drop = before == kHidden<T> ? Vec<T>{} : before - top;
      Vec<T> total = load(softmax.rescale + m) * (load(energy + m) + load(before_sum + m) * drop);
      for (int n = 0; n < keys.count(); ++n) {
        const Vec<T> p = load(probabilities + n * kBlockM + m);
        total += p == T(0) ? Vec<T>{} : p * (load(scores + n * kBlockM + m) - top);
      }
      store<T>(energy + m, total);
    }
  }
};

// `Operator` is GatedAttention<T> or CollaborativeAttention<T>: it packs a query tile of a head and describes the head.
template <typename T, typename Operator>
void attention_statistics_of(const StatisticsParams& params) {
  const Operator op(params);
  const int64_t items = op.query_tiles * op.B * op.H;
  const int64_t bytes = TileScratch<T>::bytes(op.D, 1) + piece<T>(kBlockN * kBlockM);
  parallel_for(items, params.threads, op.multiply_adds(), bytes, [&](int64_t item, Workspace& workspace) {
    const auto [b, h, first_row] = WorkItem(op, item);
    const VisibleRows<T> visible(params.mask, b, first_row, op.T_, op.S);
    const TileScratch<T> scratch(workspace, op.D, 1);
    T* probabilities = workspace.take<T>(kBlockN * kBlockM);
    const uint8_t* excluded = params.excluded ? params.excluded + b * params.excluded_stride : nullptr;
    const Head<T> head = op.head(b, h);
    RowStatistics<T> statistics;
    if (visible.any) {
      op.pack(b, h, visible, scratch);
      for_visible_tiles(visible, 0, op.S, [&](const KeyTile& keys) {
        score_tile(head, scratch.query, keys, visible.columns, scratch.widened, scratch.scores);
        if (!keys.full) hide(scratch.scores, keys, visible, visible.columns, kHidden<T>);
        statistics.step(scratch.scores, probabilities, keys, excluded, visible.columns);
      });
    }
    const int64_t row = (b * op.H + h) * op.T_ + visible.first;
    for (int m = 0; m < visible.count; ++m) {
      const T sum = statistics.softmax.sum[m];
      const bool sees = visible.sees(m) && sum != T(0);
      const T log2_sum = static_cast<T>(std::log2(sum));
      const T lse = statistics.softmax.maximum[m] + log2_sum;
      const bool found = sees && statistics.best_key[m] >= 0;
      static_cast<T*>(params.lse.data)[row + m] = sees ? lse * static_cast<T>(kLn2) : kHidden<T>;
      static_cast<T*>(params.max_prob.data)[row + m] = found ? std::exp2(statistics.best[m] - lse) : sees && sum != sum ? sum : T(0);
      static_cast<T*>(params.entropy.data)[row + m] =
          sees ? static_cast<T>(kLn2) * (log2_sum - statistics.energy[m] / sum) : T(0);
      params.argmax[row + m] = found ? statistics.best_key[m] : -1;
    }
  });
}

template <typename T>
void attention_statistics(const StatisticsParams& params) {
  if (params.mixing) {
    attention_statistics_of<T, CollaborativeAttention<T>>(params);
  } else {
    attention_statistics_of<T, GatedAttention<T>>(params);
  }
}

}  // namespace hk::HK_LEVEL
