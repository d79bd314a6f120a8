// The online softmax of a tile of scores that stands transposed: [keys][query rows], one query row
// a lane. Maxima and sums run down the keys, so nothing is reduced across lanes.
#pragma once

#include "common/params.h"
#include "common/philox.h"
#include "cpu/visible.h"

namespace hk::HK_LEVEL {

// Score of a hidden pair.
template <typename Real>
constexpr Real kHidden = -__builtin_inff();

// Scores of hidden pairs become -inf, whatever stood there.
template <typename Real>
inline void hide(Real* scores, const KeyTile& keys, const VisibleRows<Real>& rows, int columns,
                 Real hidden) {
  for (int n = 0; n < keys.count(); ++n) {
    Real* row = scores + n * BLOCK_M;
    for (int m = 0; m < columns; m += kLanes<Real>)
      store<Real>(row + m,
                  rows.lanes_that_see(m, keys.begin + n) ? load(row + m) : splat<Real>(hidden));
  }
}

// Running maximum (base 2) and sum of each query row.
template <typename Real>
struct OnlineSoftmax {
  alignas(64) Real maximum[BLOCK_M];
  alignas(64) Real sum[BLOCK_M];
  alignas(64)
      Real rescale[BLOCK_M];  // what earlier contributions are multiplied by after the last `step`

  OnlineSoftmax() {
    for (int m = 0; m < BLOCK_M; ++m) {
      maximum[m] = kHidden<Real>;
      sum[m] = 0;
      rescale[m] = 1;
    }
  }

  // Scores (base-2 logarithms) to unnormalised probabilities, in place; true where earlier sums
  // must be rescaled.
  bool step(Real* scores, int keys, int columns) {
    constexpr int L = kLanes<Real>;
    bool moved = false;
    int m = 0;
    for (; columns - m >= 4 * L; m += 4 * L) moved |= step_vectors<4>(scores, keys, m);
    for (; m < columns; m += L) moved |= step_vectors<1>(scores, keys, m);
    return moved;
  }

 private:
  // V vectors of query rows side by side: that many chains of maxima and sums hide each other's
  // latency.
  template <int V>
  bool step_vectors(Real* scores, int keys, int m) {
    constexpr int L = kLanes<Real>;
    Vec<Real> top[V], shift[V], total[V];
    for (int v = 0; v < V; ++v) top[v] = load(maximum + m + v * L);
    for (int n = 0; n < keys; ++n) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const Vec<Real> s = load(scores + n * BLOCK_M + m + v * L);
        top[v] = s > top[v] ? s : top[v];
      }
    }
    for (int v = 0; v < V; ++v) {
      shift[v] = top[v] == kHidden<Real> ? Vec<Real>{} : top[v];
      total[v] = Vec<Real>{};
    }
    for (int n = 0; n < keys; ++n) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        Real* at = scores + n * BLOCK_M + m + v * L;
        const Vec<Real> p = exp2<Real>(load(at) - shift[v]);
        store<Real>(at, p);
        total[v] += p;
      }
    }
    bool moved = false;
    for (int v = 0; v < V; ++v) {
      const int at = m + v * L;
      const Vec<Real> before = load(maximum + at);
      const Vec<Real> factor = exp2<Real>(before - shift[v]);
      store<Real>(maximum + at, top[v]);
      store<Real>(rescale + at, factor);
      store<Real>(sum + at, load(sum + at) * factor + total[v]);
      moved |= any_lane<Real>(before != top[v]);
    }
    return moved;
  }
};

// Dropout of a tile of probabilities [keys][query rows] of head (b, h): kept ones are scaled,
// others become 0. With `target` another tile is treated by the same mask too.
template <typename Real>
inline void drop(const DropoutParams& dropout, int64_t b, int64_t h, const KeyTile& keys,
                 int64_t first_row, int columns, Real* tile, Real* target = nullptr) {
  const Real scale = static_cast<Real>(dropout.keep_scale);
  for (int64_t group = keys.begin / 4; group * 4 < keys.end; ++group) {
    uint32_t words[4][BLOCK_M];
    for (int m = 0; m < columns; ++m) {
      const Philox4 random =
          philox(static_cast<uint32_t>(group), static_cast<uint32_t>(first_row + m),
                 static_cast<uint32_t>(h), static_cast<uint32_t>(b), dropout.seed);
      for (int w = 0; w < 4; ++w) words[w][m] = random.word[w];
    }
    for (int w = 0; w < 4; ++w) {
      const int64_t key = group * 4 + w;
      if (key < keys.begin || key >= keys.end) continue;
      const int64_t n = (key - keys.begin) * BLOCK_M;
      for (int m = 0; m < columns; ++m) {
        const bool keep = words[w][m] >= dropout.threshold;
        tile[n + m] = keep ? tile[n + m] * scale : Real(0);
        if (target) target[n + m] = keep ? target[n + m] * scale : Real(0);
      }
    }
  }
}

}  // namespace hk::HK_LEVEL
