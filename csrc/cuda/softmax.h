// The softmax of a row, tile by tile, in base 2: p = 2^(scale_log2 * score - row_max), where scale_log2 is |scale| *
// log2(e). Scores stay unscaled until this multiply-add. Scores with terms (kTerms) are final and may be large: p =
// 2^((score - row_max) * log2(e)), since their product with log2(e) may overflow, while their difference is exact near
// the maximum. row_max is finite from the start, so differences of two infinities do not occur.
#pragma once

#include <cmath>

#include "cuda/tensor_core.h"

namespace hk::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kInfinity = INFINITY;
// row_max of a row that has seen no key.
constexpr float kLowest = -3.402823466e38f;
// The smallest normal float replaces a scale of 0: -inf * 0 is nan.
constexpr float kSmallest = 1.17549435e-38f;

// The factor of scores in the softmax, above 0; scores with terms are final.
HK_DEVICE float softmax_scale(double scale, bool terms) {
  return terms ? kLog2e : fmaxf(fabsf(static_cast<float>(scale)) * kLog2e, kSmallest);
}

// lse of a row, -inf if it sees no key.
template <bool kTerms>
HK_DEVICE float log_sum_exp(float row_max, float row_sum) {
  return row_sum == 0.0f ? -kInfinity : (kTerms ? row_max : row_max * kLn2) + logf(row_sum);
}

// p of a score.
template <bool kTerms>
HK_DEVICE float weight_of(float score, float row_max, float scale_log2) {
  return exp2_approx(kTerms ? (score - row_max) * kLog2e : score * scale_log2 - row_max);
}

// The factor that makes sums relative to `row_max` sums relative to a larger maximum.
template <bool kTerms>
HK_DEVICE float rescaling(float row_max, float larger) {
  return exp2_approx(kTerms ? (row_max - larger) * kLog2e : row_max - larger);
}

// The largest value and the sum of a row's four lanes.
HK_DEVICE float most_of_row(float value) {
  value = fmaxf(value, shuffle_xor(value, 1));
  return fmaxf(value, shuffle_xor(value, 2));
}
HK_DEVICE float sum_of_row(float value) {
  value += shuffle_xor(value, 1);
  return value + shuffle_xor(value, 2);
}

template <int kGroups, bool kTerms>
struct OnlineSoftmax {
  float row_max[kGroups][2];  // the largest score so far; without terms times scale_log2
  float row_sum[kGroups][2];  // this lane's part of the sum of probabilities

  HK_DEVICE OnlineSoftmax() {
    each_row<kGroups>([&](int m, int half, int) {
      row_max[m][half] = kLowest;
      row_sum[m][half] = 0.0f;
    });
  }

  // Scores, hidden ones -inf, become probabilities relative to the new row_max; earlier sums are rescaled to it.
  template <int kColumns, int kWidth>
  HK_DEVICE void step(Accumulator<kGroups, kColumns>& scores, Accumulator<kGroups, kWidth>& acc, float scale_log2) {
    float alpha[kGroups][2];
    each_row<kGroups>([&](int m, int half, int) {
      float most = -kInfinity;
      HK_UNROLL
      for (int n = 0; n < kColumns / 8; ++n)
        most = fmaxf(most, fmaxf(scores.c[m][n][2 * half], scores.c[m][n][2 * half + 1]));
      const float old = row_max[m][half];
      most = most_of_row(most);
      most = fmaxf(old, kTerms ? most : most * scale_log2);
      alpha[m][half] = rescaling<kTerms>(old, most);
      row_max[m][half] = most;
      row_sum[m][half] *= alpha[m][half];
    });
    scores.each([&](float& value, int m, int, int e) {
      value = weight_of<kTerms>(value, row_max[m][e / 2], scale_log2);
      row_sum[m][e / 2] += value;
    });
    acc.each([&](float& value, int m, int, int e) { value *= alpha[m][e / 2]; });
  }

  // Divides the accumulator by the sums and returns lse in `row_max`: -inf for a row that sees no key, whose
  // accumulator is 0.
  template <int kWidth>
  HK_DEVICE void normalize(Accumulator<kGroups, kWidth>& acc, float keep_scale) {
    each_row<kGroups>([&](int m, int half, int) {
      const float sum = sum_of_row(row_sum[m][half]);
      row_sum[m][half] = sum == 0.0f ? 0.0f : keep_scale / sum;
      row_max[m][half] = log_sum_exp<kTerms>(row_max[m][half], sum);
    });
    acc.each([&](float& value, int m, int, int e) { value *= row_sum[m][e / 2]; });
  }
};

// The sums of a row whose keys were split into parts, in a warp: each lane has every 32nd column of `acc`.
template <int kWidth, bool kTerms>
struct RowOfParts {
  float row_max = kLowest, row_sum = 0.0f, acc[kWidth / kWarp] = {};

  // f(i, column) for each of this lane's columns, in acc[i].
  template <typename F>
  HK_DEVICE static void each_column(F&& f) {
    HK_UNROLL
    for (int i = 0; i < kWidth / kWarp; ++i) f(i, i * kWarp + lane());
  }

  // Adds up `count` parts in their order, from row_max_of(part), row_sum_of(part) and acc_of(part, column).
  template <typename RowMaxOf, typename RowSumOf, typename AccOf>
  HK_DEVICE void add_up(int count, RowMaxOf&& row_max_of, RowSumOf&& row_sum_of, AccOf&& acc_of) {
    HK_UNROLL_BY(4)
    for (int part = 0; part < count; ++part) row_max = fmaxf(row_max, row_max_of(part));
    HK_UNROLL_BY(4)
    for (int part = 0; part < count; ++part) {
      const float share = rescaling<kTerms>(row_max_of(part), row_max);
      row_sum += share * row_sum_of(part);
      each_column([&](int i, int column) { acc[i] += share * acc_of(part, column); });
    }
  }
};

}  // namespace hk::cuda
