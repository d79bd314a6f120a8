// Tests products of pairs and the packing of their operands on random numbers and sizes, at the HK_LEVEL of the
// including file.
#pragma once

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cpu/gemm.h"

namespace hk::HK_LEVEL {

// Random floats, NaN and infinity among them, rounded by vectors and by `narrow_bfloat`.
inline std::string test_rounding(std::mt19937& random) {
  constexpr int L = kLanes<Pair>;
  float x[2 * L];
  Pair neighbours[L], couples[L];
  for (float& one : x) {
    const uint32_t bits = random() | (random() % 4 ? 0 : 0x7f800000);
    std::memcpy(&one, &bits, 4);
  }
  store(neighbours, narrow_neighbours(load(x), load(x + L)));
  store(couples, narrow_couples(load(x), load(x + L)));
  for (int i = 0; i < 2 * L; ++i) {
    const uint32_t beside = neighbours[i / 2].bits >> (i % 2 * 16);
    const uint32_t behind = couples[i % L].bits >> (i / L * 16);
    const uint16_t expected = narrow_bfloat(x[i]);
    if (static_cast<uint16_t>(beside) != expected || static_cast<uint16_t>(behind) != expected)
      return "lane " + std::to_string(i) + " of " + std::to_string(x[i]);
  }
  return "";
}

// Random matrices A [rows][depth] and B [depth][columns] of floats; C (+)= A B with A packed along its rows or
// transposed from its columns. Returns what is wrong with C, or an empty string.
inline std::string test_product(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int64_t>(random() % n); };
  const auto number = [&] { return static_cast<float>(random() % 4096) / 1024 - 2; };
  const int64_t rows = 1 + below(65), depth = 1 + below(65), vectors = 1 + below(64 / kLanes<Pair>);
  const int64_t columns = vectors * kLanes<Pair>, first = below(2);
  const bool accumulate = below(2), turned = below(2);
  constexpr int64_t kWide = 128;  // more than any size, in pairs of whole vectors
  std::vector<float> a(kWide * kWide), b(kWide * kWide), c(kWide * kWide, 0.5f);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < depth; ++k) a[turned ? k * kWide + i : i * kWide + k] = number();
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t j = 0; j < columns; ++j) b[k * kWide + j] = number();

  std::vector<Pair> left(kWide * kWide), right(kWide * kWide), scratch(kWide * kWide);
  // `first` numbers of the depth come before: 0 on the one side, anything on the other.
  const int64_t begin = turned ? first : 0, words = ceil_div(begin + depth, 2);
  std::vector<float> shifted(kWide * kWide, 3.0f);
  if (turned) {
    std::copy(a.begin(), a.end() - begin * kWide, shifted.begin() + begin * kWide);
    pair_columns(shifted.data(), kWide, kWide, kWide, scratch.data(), kWide / 2);
    std::vector<Pair> between(kWide * kWide);
    transpose_pairs(scratch.data(), kWide / 2, left.data(), kWide / 2, kWide, kWide, between.data());
  } else {
    pair_columns(a.data(), kWide, rows, kWide, left.data(), kWide / 2);
  }
  pair_rows(b.data(), kWide, begin, depth, columns, right.data(), kWide);
  const TileUnit<Pair> unit;
  multiply(rows, columns, words, rows_of<Pair>(left.data(), kWide / 2), right.data(), kWide, c.data(), kWide,
           accumulate);

  const auto rounded = [](float x) { return static_cast<double>(widen_bfloat(narrow_bfloat(x))); };
  for (int64_t i = 0; i < kWide; ++i) {
    for (int64_t j = 0; j < kWide; ++j) {
      double sum = 0.5, size = 0.5;
      if (i < rows && j < columns) {
        if (!accumulate) sum = size = 0;
        for (int64_t k = 0; k < depth; ++k) {
          const double x = rounded(a[turned ? k * kWide + i : i * kWide + k]);
          const double product = x * rounded(b[k * kWide + j]);
          sum += product, size += std::abs(product);
        }
      }
      // Roundings of partial sums: 2^-24 of each, at most 65 and the first.
      const double error = std::abs(c[i * kWide + j] - sum), bound = std::ldexp(66 * size, -24);
      if (error <= bound) continue;
      char text[160];
      std::snprintf(text, sizeof text, "rows %d, columns %d, depth %d: C[%d][%d] is %g, not %g; bound %.2g",
                    static_cast<int>(rows), static_cast<int>(columns), static_cast<int>(depth), static_cast<int>(i),
                    static_cast<int>(j), c[i * kWide + j], sum, bound);
      return text;
    }
  }
  return "";
}

}  // namespace hk::HK_LEVEL
