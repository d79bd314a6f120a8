// The online softmax of a transposed tile of scores: [keys][query rows], one query row per lane.
// Maxima and sums run along the keys, so nothing is reduced across lanes.
#pragma once

#include "common/params.h"
#include "common/philox.h"
#include "cpu/scores.h"

namespace hk::HK_LEVEL {

// Sets the scores of hidden pairs to -inf.
template <typename Real>
inline void hide(Real* scores, const KeySpan& keys, const VisibleRows<Real>& rows, int columns) {
  for (int n = 0; n < keys.count(); ++n) {
    Real* row = scores + n * BLOCK_M;
    for (int m = 0; m < columns; m += kLanes<Real>)
      store<Real>(row + m, rows.lanes_that_see(m, keys.begin + n) ? load(row + m)
                                                                  : splat<Real>(kHidden<Real>));
  }
}

// The reference of a row is set to its maximum only when the maximum exceeds it by more than this
// (heuristic): few tiles after the first rescale the sums, and no unnormalised probability exceeds
// e^5.5 = 245.
constexpr float kSlack = 5.5;

// Running reference (at most kSlack below the maximum) and sum of each query row.
template <typename Real>
struct OnlineSoftmax {
  alignas(64) Real reference[BLOCK_M];
  alignas(64) Real sum[BLOCK_M];
  alignas(64)
      Real rescale[BLOCK_M];  // what earlier contributions are multiplied by after the last `step`

  OnlineSoftmax() {
    for (int m = 0; m < BLOCK_M; ++m) {
      reference[m] = kHidden<Real>;
      sum[m] = 0;
      rescale[m] = 1;
    }
  }

  // Scores to unnormalised probabilities, in place; true where earlier sums
  // must be rescaled.
  bool step(Real* scores, int keys, int columns) {
    constexpr int L = kLanes<Real>;
    IntVec<Real> moved{};
    int m = 0;
    for (; columns - m >= 4 * L; m += 4 * L) moved |= step_vectors<4>(scores, keys, m);
    for (; m < columns; m += L) moved |= step_vectors<1>(scores, keys, m);
    return any_lane<Real>(moved);
  }

 private:
  // V vectors of query rows side by side: that many chains of maxima and sums hide each other's
  // latency. Lanes that must be rescaled as a vector mask.
  template <int V>
  IntVec<Real> step_vectors(Real* scores, int keys, int m) {
    constexpr int L = kLanes<Real>;
    Vec<Real> row_max[V], shift[V], row_sum[V];
    for (int v = 0; v < V; ++v) row_max[v] = splat<Real>(kHidden<Real>);
    for (int n = 0; n < keys; ++n) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const Vec<Real> s = load(scores + n * BLOCK_M + m + v * L);
        row_max[v] = s > row_max[v] ? s : row_max[v];
      }
    }
    IntVec<Real> moved{};
    for (int v = 0; v < V; ++v) {
      const int at = m + v * L;
      const Vec<Real> before = load(reference + at);
      const IntVec<Real> rises = row_max[v] > before + Real(kSlack);
      const Vec<Real> now = rises ? row_max[v] : before;
      moved |= rises & (before != kHidden<Real>);
      shift[v] = now == kHidden<Real> ? Vec<Real>{} : now;
      store<Real>(reference + at, now);
      store<Real>(rescale + at, exp<Real>(before - shift[v]));
      row_sum[v] = Vec<Real>{};
    }
    for (int n = 0; n < keys; ++n) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        Real* at = scores + n * BLOCK_M + m + v * L;
        const Vec<Real> p = exp<Real>(load(at) - shift[v]);
        store<Real>(at, p);
        row_sum[v] += p;
      }
    }
    for (int v = 0; v < V; ++v) {
      const int at = m + v * L;
      store<Real>(sum + at, load(sum + at) * load(rescale + at) + row_sum[v]);
    }
    return moved;
  }
};

// The random words of keys [4 group, 4 group + 4) of row i of head (b, h).
inline Philox4 dropout_words(const DropoutParams& dropout, int64_t b, int64_t h, int64_t i,
                             int64_t group) {
  const int64_t* const first = dropout.seed + 1;  // element (b, h, i, j)
  const auto word = [](int64_t index) { return static_cast<uint32_t>(index); };
  return philox(word(first[3] / 4 + group), word(first[2] + i), word(first[1] + h),
                word(first[0] + b), static_cast<uint64_t>(*dropout.seed));
}

// Dropout of a tile of probabilities [keys][query rows] of head (b, h): kept ones are multiplied by
// `scale`, others become 0. Applies the same to `target` unless it is null.
template <typename Real>
inline void drop(const DropoutParams& dropout, int64_t b, int64_t h, const KeySpan& keys,
                 int64_t first_row, int columns, Real scale, Real* tile, Real* target = nullptr) {
  for (int64_t group = keys.begin / 4; group * 4 < keys.end; ++group) {
    uint32_t words[4][BLOCK_M];
    for (int m = 0; m < columns; ++m) {
      const Philox4 random = dropout_words(dropout, b, h, first_row + m, group);
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
