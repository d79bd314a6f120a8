// Converts tiles of Real into operands of products: float and double are used in place, pairs are rounded and packed.
#pragma once

#include "cpu/gemm.h"
#include "cpu/stored.h"
#include "cpu/visible.h"

namespace hk::HK_LEVEL {

// Words of a row of `width` numbers, in whole vectors.
template <typename Operand>
constexpr int64_t packed(int64_t width) {
  return round_up(ceil_div(width, kNumbers<Operand>), kLanes<Operand>);
}

// A size of a product, with AMX up to a whole tile: operands are 0 past `n`, and what is computed there is not read.
template <typename Operand>
constexpr int64_t in_tiles(int64_t n) {
  return kTiled<Operand> ? round_up(n, kLanes<Operand>) : n;
}

// Rows of sums over `keys` keys: products add 0 behind a tile of keys, up to a whole one.
template <typename Operand>
constexpr int64_t sum_rows(int64_t keys) {
  return keys + in_tiles<Operand>(1) - 1;
}

// Clears packed weights behind those of `keys` keys, as `in_tiles` requires.
inline void clear_weights(Pair* words, int64_t keys) {
  std::memset(words + keys * (BLOCK_M / 2), 0, sizeof *words * (in_tiles<Pair>(keys) - keys) * (BLOCK_M / 2));
}

// Weights [keys][64] as the factor that is broadcast; pairs are packed into `buffer`.
template <typename Real>
inline Left<Real, false> left_operand(const Real* weights, int64_t, int64_t, Real*) {
  return rows_of(weights, BLOCK_M);
}
inline Left<Pair, false> left_operand(const float* weights, int64_t keys, int64_t columns, Pair* buffer) {
  pair_columns(weights, BLOCK_M, keys, columns, buffer, BLOCK_M / 2);
  clear_weights(buffer, keys);
  return rows_of<Pair>(buffer, BLOCK_M / 2);
}

// Weights [keys][64] as the factor that is read by vectors, after `first` keys of weight 0.
template <typename Real>
inline const Real* right_operand(const Real* weights, int64_t, int64_t, int64_t, Real*) {
  return weights;
}
inline const Pair* right_operand(const float* weights, int64_t first, int64_t keys, int64_t columns, Pair* buffer) {
  pair_rows(weights, BLOCK_M, first, keys, columns, buffer, BLOCK_M);
  return buffer;
}

// Rounds a row to bfloat16 if Operand is Pair; `width` in whole vectors.
template <typename Operand, typename Real>
inline void round_row(Real* row, int64_t width) {
  if constexpr (kNumbers<Operand> == 2)
    for (int64_t i = 0; i < width; i += kLanes<Real>) store(row + i, rounded(load(row + i)));
}

// The buffer for rows that `pack_rows` converts: `operand` itself if no conversion is needed, else `rows`.
template <typename Real>
inline Real* staging(Real* operand, Real*) {
  return operand;
}
inline float* staging(Pair*, float* rows) { return rows; }

// Clears the rows of pairs after those of `count` numbers, as `in_tiles` requires.
inline void clear_rows(Pair* operand, int64_t stride, int64_t count) {
  const int64_t rows = ceil_div(count, 2), rest = in_tiles<Pair>(rows) - rows;
  std::memset(operand + rows * stride, 0, sizeof *operand * rest * stride);
}

// rows [count][stride] as the factor that is read by vectors; `width` in whole vectors.
template <typename Real>
inline void pack_rows(const Real*, int64_t, int64_t, int64_t, Real*) {}
inline void pack_rows(const float* rows, int64_t stride, int64_t count, int64_t width, Pair* operand) {
  pair_rows(rows, stride, 0, count, width, operand, stride);
  clear_rows(operand, stride, count);
}

// The same of rows that are pairs already, in whole vectors of them; false if a number is not finite.
inline bool couple_rows(const Pair* rows, int64_t stride, int64_t count, int64_t width, Pair* operand) {
  bool finite = true;
  for (int64_t r = 0; r < count; ++r) finite = finite && all_finite(rows + r * stride, packed<Pair>(width));
  for (int64_t r = 0; finite && r < count; r += 2) {
    for (int64_t c = 0; c < width; c += 2 * kLanes<Pair>) {
      const Vec<Pair> a = load(rows + r * stride + c / 2);
      const Vec<Pair> b = load(rows + (r + 1) * stride + c / 2);
      Pair* both = operand + r / 2 * stride + c;
      store(both, couple<0>(a, b));
      if (c + kLanes<Pair> < width) store(both + kLanes<Pair>, couple<1>(a, b));
    }
  }
  clear_rows(operand, stride, count);
  return finite;
}

// rows [count][stride] transposed, [width][64], as the factor that is read by vectors; both sizes in whole vectors of
// Real. Pairs past the width are 0, in whole vectors. `scratch` is as large as the rows, and may be the rows.
template <typename Real>
inline void pack_transposed(const Real* rows, int64_t stride, int64_t count, int64_t width, Real*, Real* operand) {
  transpose(rows, stride, operand, BLOCK_M, count, width);
}
inline void pack_transposed(const float* rows, int64_t stride, int64_t count, int64_t width, float* scratch,
                            Pair* operand) {
  Pair* words = reinterpret_cast<Pair*>(scratch);
  pair_columns(rows, stride, count, width, words, stride);
  transpose(words, stride, operand, BLOCK_M, count, packed<Pair>(width));
}

}  // namespace hk::HK_LEVEL
