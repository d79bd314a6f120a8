// The matrix product of all kernels: C (+)= A B, with blocks of C held in registers.
//
// B and C are rows of vectors (whole lanes; the caller pads), A is read element by element and
// broadcast, so A may be stored by rows (the keys) or by columns (a transposed tile). The choice is
// a template argument, which is 15 to 25 % faster than a choice at run time.
#pragma once

#include <algorithm>

#include "cpu/tile_unit.h"

namespace hk::HK_LEVEL {

// The matrix A: A[r][k] at data[r * stride + k], or (`kDown`) at data[k * stride + r].
template <typename Operand, bool kDown>
struct Left {
  const Operand* data;
  int64_t stride;
  const Operand* row(int64_t r) const { return data + (kDown ? r : r * stride); }
  const Operand* depth(int64_t k) const { return data + (kDown ? k * stride : k); }
};

// The matrix stored at `data`.
template <typename Operand>
inline Left<Operand, false> rows_of(const Operand* data, int64_t stride) {
  return {data, stride};
}

// The transpose of the matrix stored at `data`.
template <typename Operand>
inline Left<Operand, true> columns_of(const Operand* data, int64_t stride) {
  return {data, stride};
}

// C[R][V * lanes] (+)= A[R][depth] B[depth][V * lanes]; one register tile. The product is summed
// from zero and then added to C: a long sum over many tiles rounds once per tile.
template <typename Operand, int R, int V, bool kDown>
__attribute__((always_inline)) inline void multiply_block(Left<Operand, kDown> a, const Operand* b, int64_t ldb,
                                                          RealOf<Operand>* c, int64_t ldc, int64_t depth,
                                                          bool accumulate) {
  using Real = RealOf<Operand>;
  constexpr int L = kLanes<Operand>;
  Vec<Real> sum[R][V] = {};
  const Operand* left = a.data;
  // K steps along the depth. `done(r)` runs after those of row r.
  const auto steps = [&](auto count, auto done) __attribute__((always_inline)) {
    constexpr int K = count;
    Vec<Operand> right[K][V];
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) right[k][v] = load(b + k * ldb + v * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int k = 0; k < K; ++k) {
        const Vec<Operand> x = splat<Operand>(kDown ? left[k * a.stride + r] : left[r * a.stride + k]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = add_product<Operand>(x, right[k][v], sum[r][v]);
      }
      done(r);
    }
    left += kDown ? K * a.stride : K;
    b += K * ldb;
  };
  const auto step = [&]() __attribute__((always_inline)) {  // else the sums go to memory
    steps(std::integral_constant<int, 1>{}, [](int) {});
  };
  const auto store_row = [&](int r) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      Real* at = c + r * ldc + v * L;
      store<Real>(at, accumulate ? load(at) + sum[r][v] : sum[r][v]);
    }
  };
  // The last step, of pairs the last two, goes row by row: the stores of a row overlap with the products of the next
  // one (pairs: 96 to 99.5 % of the peak at depth 32, Zen 4; floats: 2 % of the time at depth 64).
  constexpr int kLast = kNumbers<Operand> == 2 ? 2 : 1;
  const bool by_rows = depth >= kLast;
  const int64_t before = by_rows ? depth - kLast : depth;
  // Unrolled by four: branch predictors predict the end of 16 iterations, but not of 64 (11 %).
  for (int64_t turn = before / 4; turn > 0; --turn) {
    step();
    step();
    step();
    step();
  }
  for (int64_t rest = before % 4; rest > 0; --rest) step();
  if (by_rows) return steps(std::integral_constant<int, kLast>{}, store_row);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store_row(r);
}

// All rows for V vectors of columns. Rows of a register tile: as many as leave registers for the V
// columns of B and one broadcast of A (32 registers: 6 x 4 + 4 + 1; 16 registers: 6 x 2 + 2 + 1).
// With pairs 4 x 4 + 2 x 4 + 1: two steps at the end, and tiles of 64 rows leave no remainder.
template <typename Operand, int V, bool kDown>
inline void multiply_columns(int64_t rows, Left<Operand, kDown> a, const Operand* b, int64_t ldb, RealOf<Operand>* c,
                             int64_t ldc, int64_t depth, bool accumulate) {
  constexpr int kWidest = kNumbers<Operand> == 2 && V == 4 ? 4 : 6;
  constexpr int R = V == 1 || (HK_VECTOR_REGISTERS == 32 && V == 2) ? 12 : V == 3 ? 8 : kWidest;
  int64_t r = 0;
  const auto run = [&](auto count) {
    const Left<Operand, kDown> left{a.row(r), a.stride};
    multiply_block<Operand, count, V, kDown>(left, b, ldb, c + r * ldc, ldc, depth, accumulate);
    r += count;
  };
  while (rows - r >= R) run(std::integral_constant<int, R>{});
  if constexpr (R > 8) {
    if (rows - r >= 8) run(std::integral_constant<int, 8>{});
  }
  if (rows - r >= 4) run(std::integral_constant<int, 4>{});
  if (rows - r >= 2) run(std::integral_constant<int, 2>{});
  if (rows - r >= 1) run(std::integral_constant<int, 1>{});
}

// A panel of B of this depth and 64 columns (16 KiB of float) stays in the first-level cache while all rows of A pass.
constexpr int64_t kPanelDepth = 64;

// The same for one or two rows, whose few numbers don't average out the error of a long chain of additions. It costs
// little: the sums of so few rows stay in the first-level cache.
constexpr int64_t kPanelDepthOfFew = 8;

// C[rows][columns] (+)= A[rows][depth] B[depth][columns] by vectors; `columns` in whole ones.
template <typename Operand, bool kDown>
void multiply_vectors(int64_t rows, int64_t columns, int64_t depth, Left<Operand, kDown> a, const Operand* b,
                      int64_t ldb, RealOf<Operand>* c, int64_t ldc, bool accumulate) {
  constexpr int L = kLanes<Operand>;
  constexpr int kWidest = HK_VECTOR_REGISTERS == 32 ? 4 : 2;
  if (depth == 0 && !accumulate)
    for (int64_t r = 0; r < rows; ++r) std::memset(c + r * ldc, 0, sizeof *c * columns);
  const int64_t deepest = rows > 2 ? kPanelDepth : kPanelDepthOfFew;
  for (int64_t k = 0; k < depth; k += deepest) {
    const int64_t panel = std::min(deepest, depth - k);
    const Left<Operand, kDown> left{a.depth(k), a.stride};
    const bool add = accumulate || k > 0;
    int64_t column = 0;
    const auto run = [&](auto multiply_columns, int vectors) {
      multiply_columns(rows, left, b + k * ldb + column, ldb, c + column, ldc, panel, add);
      column += vectors * L;
    };
    if constexpr (kWidest == 4) {
      while (columns - column >= 4 * L) run(multiply_columns<Operand, 4, kDown>, 4);
      if (columns - column >= 3 * L) run(multiply_columns<Operand, 3, kDown>, 3);
    }
    while (columns - column >= 2 * L) run(multiply_columns<Operand, 2, kDown>, 2);
    if (columns - column >= L) run(multiply_columns<Operand, 1, kDown>, 1);
  }
}

// The same; a tile unit, if there is one, computes whole tiles and vectors the remainder.
template <typename Operand, bool kDown>
void multiply(int64_t rows, int64_t columns, int64_t depth, Left<Operand, kDown> a, const Operand* b, int64_t ldb,
              RealOf<Operand>* c, int64_t ldc, bool accumulate) {
  if constexpr (kTiled<Operand>) {
    static_assert(!kDown, "the rows of a tile are rows in memory");
    const int64_t r = whole_tiles(rows), v = whole_tiles(columns), k = whole_tiles(depth);
    if (r && v && k) {
      multiply_tiles(r, v, k, a.data, a.stride, b, ldb, c, ldc, accumulate);
      // An empty remainder costs 40 ns, a tenth of the products of a pair of tiles.
      if (k < depth) multiply_vectors(r, v, depth - k, rows_of(a.depth(k), a.stride), b + k * ldb, ldb, c, ldc, true);
      if (v < columns) multiply_vectors(r, columns - v, depth, a, b + v, ldb, c + v, ldc, accumulate);
      if (r < rows)
        multiply_vectors(rows - r, columns, depth, rows_of(a.row(r), a.stride), b, ldb, c + r * ldc, ldc, accumulate);
      return;
    }
  }
  multiply_vectors(rows, columns, depth, a, b, ldb, c, ldc, accumulate);
}

}  // namespace hk::HK_LEVEL
