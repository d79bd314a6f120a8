// The online softmax of a transposed tile of scores: [keys][query rows], one query row per lane. Maxima and sums run
// along the keys, so nothing is reduced across lanes.
#pragma once

#include <algorithm>

#include "common/params.h"
#include "common/philox.h"
#include "cpu/pair.h"
#include "cpu/scores.h"

namespace hk::HK_LEVEL {

// Sets the scores of hidden pairs to -inf.
template <typename Real>
inline void hide(Real* scores, const KeySpan& keys, const VisibleRows<Real>& rows, int columns) {
  for (int n = 0; n < keys.count(); ++n) {
    Real* row = scores + n * BLOCK_M;
    for (int m = 0; m < columns; m += kLanes<Real>)
      store<Real>(row + m, rows.lanes_that_see(m, keys.begin + n) ? load(row + m) : splat<Real>(kHidden<Real>));
  }
}

// The reference of a row is set to its maximum only when the maximum exceeds it by more than this (heuristic): few
// tiles after the first rescale the sums, and no unnormalised probability exceeds e^5.5 = 245.
constexpr float kSlack = 5.5;

// The weights of so many keys are summed first, and then added to the sum of a tile: after a large weight, every
// addition of a small one would round to the precision of the large sum.
constexpr int kKeysPerSum = 8;

// Running reference (at most kSlack below the maximum) and sum of each query row.
template <typename Real>
struct OnlineSoftmax {
  alignas(64) Real reference[BLOCK_M];
  alignas(64) Real sum[BLOCK_M] = {};
  alignas(64) Real rescale[BLOCK_M];  // the factor of earlier contributions after the last `step`

  OnlineSoftmax() {
    std::fill_n(reference, BLOCK_M, kHidden<Real>);
    std::fill_n(rescale, BLOCK_M, Real(1));
  }

  // Scores to unnormalised probabilities, in place; true if earlier sums must be rescaled.
  bool step(Real* scores, int keys, int columns) {
    return for_vectors(columns, [&](auto vectors, int m) {
      constexpr int V = vectors;
      Vec<Real> shift[V], row_sum[V] = {};
      const IntVec<Real> moved = raise<V>(scores, keys, m, Real(1), shift);
      for (int first = 0; first < keys; first += kKeysPerSum) {
        Vec<Real> part[V] = {};
        for (int n = first; n < std::min(first + kKeysPerSum, keys); ++n) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            Real* at = scores + n * BLOCK_M + m + v * kLanes<Real>;
            const Vec<Real> p = exp<Real>(load(at) - shift[v]);
            store<Real>(at, p);
            part[v] += p;
          }
        }
        for (int v = 0; v < V; ++v) row_sum[v] += part[v];
      }
      add_sums<V>(m, row_sum);
      return moved;
    });
  }

  // The same of scores times `factor`, for probabilities that are factors of products of pairs: `words` receives them
  // after `first` keys of weight 0. `keep`: the scores become numbers too.
  bool step_packed(Real* scores, int first, int keys, int columns, Real factor, bool keep, Pair* words) {
    const bool whole = first == 0 && keys % 2 == 0 && !keep;
    return whole ? step_packed<true>(scores, 0, keys, columns, factor, false, words)
                 : step_packed<false>(scores, first, keys, columns, factor, keep, words);
  }

 private:
  // kWhole: an even number of keys from the first on, nothing to keep.
  template <bool kWhole>
  bool step_packed(Real* scores, int first, int keys, int columns, Real factor, bool keep, Pair* words) {
    return for_vectors(columns, [&](auto vectors, int m) {
      constexpr int V = vectors;
      Vec<Real> shift[V], row_sum[V] = {};
      const IntVec<Real> moved = raise<V>(scores, keys, m, factor, shift);
      for (int r = -first; r < keys; r += 2) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const int lane = m + v * kLanes<Real>;
          Vec<Real> p[2] = {};
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) {
            if (!kWhole && (r + i < 0 || r + i == keys)) continue;
            Real* at = scores + (r + i) * BLOCK_M + lane;
            p[i] = exp_of_score<Pair>(rounded_product<Real>(load(at) * factor) - shift[v]);
            if (!kWhole && keep) store<Real>(at, p[i]);
            row_sum[v] += p[i];
          }
          store(words + (r + first) / 2 * BLOCK_M + lane, narrow_couples(p[0], p[1]));
        }
      }
      add_sums<V>(m, row_sum);
      return moved;
    });
  }

  // Calls body(V, m) for the lanes from m on, V vectors of query rows side by side: that many chains of maxima and sums
  // hide each other's latency. Returns whether it returns any lane.
  template <typename Body>
  static bool for_vectors(int columns, Body body) {
    constexpr int L = kLanes<Real>;
    IntVec<Real> moved{};
    int m = 0;
    for (; columns - m >= 4 * L; m += 4 * L) moved |= body(std::integral_constant<int, 4>{}, m);
    for (; m < columns; m += L) moved |= body(std::integral_constant<int, 1>{}, m);
    return any_lane<Real>(moved);
  }

  // Raises the references to the maxima where needed, and sets what is subtracted from scores. Returns the lanes that
  // must be rescaled as a vector mask.
  template <int V>
  IntVec<Real> raise(const Real* scores, int keys, int m, Real factor, Vec<Real>* shift) {
    constexpr int L = kLanes<Real>;
    Vec<Real> row_max[V];
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
      row_max[v] *= factor;
      const Vec<Real> before = load(reference + at);
      const IntVec<Real> rises = row_max[v] > before + Real(kSlack);
      const Vec<Real> now = rises ? row_max[v] : before;
      moved |= rises & (before != kHidden<Real>);
      shift[v] = now == kHidden<Real> ? Vec<Real>{} : now;
      store<Real>(reference + at, now);
      store<Real>(rescale + at, exp<Real>(before - shift[v]));
    }
    return moved;
  }

  template <int V>
  void add_sums(int m, const Vec<Real>* row_sum) {
    for (int v = 0; v < V; ++v) {
      const int at = m + v * kLanes<Real>;
      store<Real>(sum + at, load(sum + at) * load(rescale + at) + row_sum[v]);
    }
  }
};

// The random words of keys [4 group, 4 group + 4) of row i of head (b, h).
inline Philox4 dropout_words(const DropoutParams& dropout, int64_t b, int64_t h, int64_t i, int64_t group) {
  const int64_t* const first = dropout.seed + 1;  // element (b, h, i, j)
  const auto word = [](int64_t index) { return static_cast<uint32_t>(index); };
  return philox(word(first[3] / 4 + group), word(first[2] + i), word(first[1] + h), word(first[0] + b),
                static_cast<uint64_t>(*dropout.seed));
}

}  // namespace hk::HK_LEVEL
