// The online softmax of a tile of scores that stands transposed: [keys][query rows], one query row a lane. Maxima and
// sums run down the keys, so nothing is reduced across lanes.
#pragma once

#include "common/params.h"
#include "common/philox.h"
#include "cpu/visible.h"

namespace hk::HK_LEVEL {

// Score of a hidden pair.
template <typename T>
constexpr T kHidden = -__builtin_inff();

// Scores of hidden pairs become -inf, whatever stood there.
template <typename T>
inline void hide(T* scores, const KeyTile& keys, const VisibleRows<T>& rows, int columns, T hidden) {
  for (int n = 0; n < keys.count(); ++n) {
    T* row = scores + n * kBlockM;
    for (int m = 0; m < columns; m += kLanes<T>)
      store<T>(row + m, rows.lanes_that_see(m, keys.begin + n) ? load(row + m) : splat<T>(hidden));
  }
}

// Running maximum (base 2) and sum of each query row.
template <typename T>
struct OnlineSoftmax {
  alignas(64) T maximum[kBlockM];
  alignas(64) T sum[kBlockM];
  alignas(64) T rescale[kBlockM];  // what earlier contributions are multiplied by after the last `step`

  OnlineSoftmax() {
    for (int m = 0; m < kBlockM; ++m) {
      maximum[m] = kHidden<T>;
      sum[m] = 0;
      rescale[m] = 1;
    }
  }

  // Scores (base-2 logarithms) to unnormalised probabilities, in place; true where earlier sums must be rescaled.
  bool step(T* scores, int keys, int columns) {
    bool moved = false;
    for (int m = 0; m < columns; m += kLanes<T>) {
      const Vec<T> before = load(maximum + m);
      Vec<T> top = before;
      for (int n = 0; n < keys; ++n) {
        const Vec<T> s = load(scores + n * kBlockM + m);
        top = s > top ? s : top;
      }
      const Vec<T> shift = top == kHidden<T> ? Vec<T>{} : top;
      Vec<T> total{};
      for (int n = 0; n < keys; ++n) {
        const Vec<T> p = exp2<T>(load(scores + n * kBlockM + m) - shift);
        store(scores + n * kBlockM + m, p);
        total += p;
      }
      const Vec<T> factor = exp2<T>(before - shift);
      store(maximum + m, top);
      store(rescale + m, factor);
      store(sum + m, load(sum + m) * factor + total);
      const IntVec<T> stays = before == top;
      for (int i = 0; i < kLanes<T>; ++i) moved |= !stays[i];
    }
    return moved;
  }
};

// Dropout of a tile of probabilities [keys][query rows] of head (b, h): kept ones are scaled, others become 0. With
// `target` another tile is treated by the same mask too.
template <typename T>
inline void drop(const DropoutParams& dropout, int64_t b, int64_t h, const KeyTile& keys, int64_t first_row, int columns,
                 T* tile, T* target = nullptr) {
  const T scale = static_cast<T>(dropout.keep_scale);
  for (int64_t group = keys.begin / 4; group * 4 < keys.end; ++group) {
    uint32_t words[4][kBlockM];
    for (int m = 0; m < columns; ++m) {
      const Philox4 random = philox(static_cast<uint32_t>(group), static_cast<uint32_t>(first_row + m),
                                    static_cast<uint32_t>(h), static_cast<uint32_t>(b), dropout.seed);
      for (int w = 0; w < 4; ++w) words[w][m] = random.word[w];
    }
    for (int w = 0; w < 4; ++w) {
      const int64_t key = group * 4 + w;
      if (key < keys.begin || key >= keys.end) continue;
      const int64_t n = (key - keys.begin) * kBlockM;
      for (int m = 0; m < columns; ++m) {
        const bool keep = words[w][m] >= dropout.threshold;
        tile[n + m] = keep ? tile[n + m] * scale : T(0);
        if (target) target[n + m] = keep ? target[n + m] * scale : T(0);
      }
    }
  }
}

}  // namespace hk::HK_LEVEL
