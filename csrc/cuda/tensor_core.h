// Products of tiles on tensor cores: what a warp holds of a tile, and how it multiplies.
//
// A warp owns rows of an accumulator in groups of 16. Its left operand comes from a tile of rows in shared memory or
// directly from an accumulator in registers; its right operand from a tile of rows, as [columns, depth] or as [depth,
// columns]. bfloat16 and float16 need one product; float needs three in tf32, of the parts of x = high + low, which
// leaves an error of 2^-21 of each product, and adds them to the accumulator outside of the tensor cores.
#pragma once

#include <cmath>

#include "cuda/shared_tile.h"

namespace hk::cuda {

// Element e of group [m][n] of a lane is in row 16 m + lane / 4 + 8 (e / 2) and column
// 8 n + 2 (lane % 4) + e % 2 of the warp's tile.
template <int kGroups, int kColumns>
struct Accumulator {
  static constexpr int kTiles = kColumns / 8;
  float c[kGroups][kTiles][4];

  HK_DEVICE Accumulator() { clear(); }

  HK_DEVICE void clear() {
    each([](float& value, int, int, int) { value = 0.0f; });
  }

  // f(value, m, n, e) for every element of this lane.
  template <typename F>
  HK_DEVICE void each(F&& f) {
    each_of(c, f);
  }
  template <typename F>
  HK_DEVICE void each(F&& f) const {
    each_of(c, f);
  }

 private:
  // `values` are c, const or not.
  template <typename Values, typename F>
  HK_DEVICE static void each_of(Values& values, F&& f) {
    HK_UNROLL
    for (int m = 0; m < kGroups; ++m) {
      HK_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        HK_UNROLL
        for (int e = 0; e < 4; ++e) f(values[m][n][e], m, n, e);
      }
    }
  }
};

// The row and the column of element [m][n][e] in the warp's tile.
HK_DEVICE int row_of(int m, int e) { return 16 * m + lane() / 4 + 8 * (e / 2); }
HK_DEVICE int column_of(int n, int e) { return 8 * n + 2 * (lane() % 4) + e % 2; }

// Calls f(m, half, row) for every row that a lane holds of a tile.
template <int kGroups, typename F>
HK_DEVICE void each_row(F&& f) {
  HK_UNROLL
  for (int m = 0; m < kGroups; ++m) {
    HK_UNROLL
    for (int half = 0; half < 2; ++half) f(m, half, row_of(m, 2 * half));
  }
}

// The part of a lane in 16 rows times a depth, and in a depth times 16 columns: columns 0 to 7 in b[0] and b[1].
struct Left {
  uint32_t a[4];
};
struct Right {
  uint32_t b[4];
};

// How operands of T are held in registers. 16 bits an element: m16n8k16.
template <typename T>
struct TensorCore {
  static constexpr int kDepth = 16;

  // Columns `kDepth * k` and on of an accumulator, rounded to T.
  template <int kTiles>
  HK_DEVICE static void take(Left& left, const float (&c)[kTiles][4], int k) {
    HK_UNROLL
    for (int half = 0; half < 2; ++half) {
      left.a[2 * half] = pack<T>(c[2 * k + half][0], c[2 * k + half][1]);
      left.a[2 * half + 1] = pack<T>(c[2 * k + half][2], c[2 * k + half][3]);
    }
  }

  // Of rows [kDepth from k, 16 columns from n].
  template <typename Tile>
  HK_DEVICE static void load_transposed(Right& right, const Tile& tile, int k, int n) {
    load_matrices<true>(right.b, tile.at(k + lane() % 8 + lane() / 8 % 2 * 8, n + lane() / 16 * 8));
  }

  // Registers as the products take them.
  struct Operand {
    uint32_t bits[4];
  };

  HK_DEVICE static Operand operand(const uint32_t (&bits)[4]) { return {{bits[0], bits[1], bits[2], bits[3]}}; }

  HK_DEVICE static void multiply(float (&c0)[4], float (&c1)[4], const Operand& left, const Operand& right) {
    multiply_add<T>(c0, left.bits, right.bits[0], right.bits[1]);
    multiply_add<T>(c1, left.bits, right.bits[2], right.bits[3]);
  }
};

// float: m16n8k8, three times.
template <>
struct TensorCore<float> {
  static constexpr uint32_t kBelowTf32 = 0x1fff;      // bits of a float that tf32 lacks
  static constexpr uint32_t kHalfOfTf32 = 0x1000;     // half of the last bit that it has
  static constexpr float kLargest = 0x1.ffdffep127f;  // that rounds to a finite tf32

  static constexpr int kDepth = 8;

  template <int kTiles>
  HK_DEVICE static void take(Left& left, const float (&c)[kTiles][4], int k) {
    const int order[4] = {0, 2, 1, 3};  // elements of an accumulator as a left operand has them
    HK_UNROLL
    for (int i = 0; i < 4; ++i) left.a[i] = float_bits(c[k][order[i]]);
  }

  // Row 2 i of the depth is i of the product and row 2 i + 1 is i + 4, as `take` has them.
  template <typename Tile>
  HK_DEVICE static void load_transposed(Right& right, const Tile& tile, int k, int n) {
    HK_UNROLL
    for (int i = 0; i < 4; ++i)
      right.b[i] = float_bits(*tile.at(k + 2 * (lane() % 4) + i % 2, n + lane() / 4 + i / 2 * 8));
  }

  struct Operand {
    uint32_t high[4], low[4];
  };

  // The high part is rounded to the nearest, so that the omitted product of two low parts has either sign: with
  // truncation the error would be two to three times that of float. The low part is the exact rest. A number that is
  // not finite is in the low part only, which is multiplied by one part of the other factor and not by both, whose
  // signs may differ.
  HK_DEVICE static Operand operand(const uint32_t (&bits)[4]) {
    Operand result;
    HK_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float value = bits_float(bits[i]);
      const float finite = fminf(fmaxf(value, -kLargest), kLargest);
      result.high[i] = (float_bits(finite) + kHalfOfTf32) & ~kBelowTf32;
      result.low[i] = float_bits(value - bits_float(result.high[i]));
    }
    return result;
  }

  // Small products first. Tensor cores round toward zero: accumulated there, the errors of all steps would add up with
  // one sign. The sum of a step starts from zero and is added rounded to nearest.
  HK_DEVICE static void multiply(float (&c0)[4], float (&c1)[4], const Operand& left, const Operand& right) {
    float step0[4] = {}, step1[4] = {};
    multiply_add<tf32>(step0, left.low, right.high[0], right.high[1]);
    multiply_add<tf32>(step1, left.low, right.high[2], right.high[3]);
    multiply_add<tf32>(step0, left.high, right.low[0], right.low[1]);
    multiply_add<tf32>(step1, left.high, right.low[2], right.low[3]);
    multiply_add<tf32>(step0, left.high, right.high[0], right.high[1]);
    multiply_add<tf32>(step1, left.high, right.high[2], right.high[3]);
    HK_UNROLL
    for (int e = 0; e < 4; ++e) {
      c0[e] += step0[e];
      c1[e] += step1[e];
    }
  }
};

// 16 rows from `row`, a depth of features from `k`. A matrix has 8 rows of 16 bytes, half a depth.
template <typename T, int kRows, int kColumns>
HK_DEVICE void load(Left& left, const Tile<T, kRows, kColumns>& tile, int row, int k) {
  constexpr int kHalf = TensorCore<T>::kDepth / 2;
  load_matrices<false>(left.a, tile.at(row + lane() % 16, k + lane() / 16 * kHalf));
}

// 16 columns from n, each a row of the tile, a depth of features from k.
template <typename T, int kRows, int kColumns>
HK_DEVICE void load(Right& right, const Tile<T, kRows, kColumns>& tile, int n, int k) {
  constexpr int kHalf = TensorCore<T>::kDepth / 2;
  load_matrices<false>(right.b, tile.at(n + lane() % 8 + lane() / 16 * 8, k + lane() / 8 % 2 * kHalf));
}

// Left operands of one depth, a group of 16 rows each.
template <typename T, int kGroups>
using LeftOperands = typename TensorCore<T>::Operand[kGroups];

// Those of rows [row, row + 16 kGroups) of a tile, a depth of features from k.
template <typename T, int kGroups, int kRows, int kColumns>
HK_DEVICE void load(LeftOperands<T, kGroups>& left, const Tile<T, kRows, kColumns>& tile, int row, int k) {
  HK_UNROLL
  for (int m = 0; m < kGroups; ++m) {
    Left loaded;
    load(loaded, tile, row + 16 * m, k);
    left[m] = TensorCore<T>::operand(loaded.a);
  }
}

// acc [.., 16 columns from n] += left * right, of one depth.
template <typename T, int kGroups, int kColumns>
HK_DEVICE void multiply_depth(Accumulator<kGroups, kColumns>& acc, int n, const LeftOperands<T, kGroups>& left,
                              const Right& right) {
  using Core = TensorCore<T>;
  const typename Core::Operand b = Core::operand(right.b);
  HK_UNROLL
  for (int m = 0; m < kGroups; ++m) Core::multiply(acc.c[m][n / 8], acc.c[m][n / 8 + 1], left[m], b);
}

// acc += left [rows from `row`, kDepth from k] * right [kColumns, kDepth from k]^T
template <int kGroups, int kColumns, typename T, int kLeftRows, int kTileColumns>
HK_DEVICE void multiply_rows_at(Accumulator<kGroups, kColumns>& acc, const Tile<T, kLeftRows, kTileColumns>& left,
                                int row, const Tile<T, kColumns, kTileColumns>& right, int k) {
  LeftOperands<T, kGroups> a;
  load<T, kGroups>(a, left, row, k);
  HK_UNROLL
  for (int n = 0; n < kColumns; n += 16) {
    Right b;
    load(b, right, n, k);
    multiply_depth<T>(acc, n, a, b);
  }
}

// acc += left [rows from `row`, kTileColumns] * right [kColumns, kTileColumns]^T
template <int kGroups, int kColumns, typename T, int kLeftRows, int kTileColumns>
HK_DEVICE void multiply_rows(Accumulator<kGroups, kColumns>& acc, const Tile<T, kLeftRows, kTileColumns>& left, int row,
                             const Tile<T, kColumns, kTileColumns>& right) {
  HK_UNROLL_BY(sizeof(T) == 4 ? 2 : 8)
  for (int k = 0; k < kTileColumns; k += TensorCore<T>::kDepth) multiply_rows_at(acc, left, row, right, k);
}

// The same for the first `width` columns. Whole tiles, the usual case, are straight code: a loop of unknown length
// would expose the latency of every load.
template <int kGroups, int kColumns, typename T, int kLeftRows, int kTileColumns>
HK_DEVICE void multiply_rows(Accumulator<kGroups, kColumns>& acc, const Tile<T, kLeftRows, kTileColumns>& left, int row,
                             const Tile<T, kColumns, kTileColumns>& right, int width) {
  if (width == kTileColumns) {
    multiply_rows(acc, left, row, right);
  } else {
    HK_ROLLED
    for (int k = 0; k < width; k += TensorCore<T>::kDepth) multiply_rows_at(acc, left, row, right, k);
  }
}

// acc += weights [.., kDepth] * right [kDepth, kColumns], the weights rounded to T; of the 16 columns from n on only
// where used(n), which is one answer for the whole warp.
template <int kGroups, int kColumns, int kDepth, typename T, typename Used>
HK_DEVICE void multiply_weights(Accumulator<kGroups, kColumns>& acc, const Accumulator<kGroups, kDepth>& weights,
                                const Tile<T, kDepth, kColumns>& right, Used&& used) {
  using Core = TensorCore<T>;
  HK_UNROLL
  for (int k = 0; k < kDepth; k += Core::kDepth) {
    LeftOperands<T, kGroups> a;
    HK_UNROLL
    for (int m = 0; m < kGroups; ++m) {
      Left taken;
      Core::take(taken, weights.c[m], k / Core::kDepth);
      a[m] = Core::operand(taken.a);
    }
    HK_UNROLL
    for (int n = 0; n < kColumns; n += 16) {
      if (!used(n)) continue;
      Right b;
      Core::load_transposed(b, right, k, n);
      multiply_depth<T>(acc, n, a, b);
    }
  }
}

template <int kGroups, int kColumns, int kDepth, typename T>
HK_DEVICE void multiply_weights(Accumulator<kGroups, kColumns>& acc, const Accumulator<kGroups, kDepth>& weights,
                                const Tile<T, kDepth, kColumns>& right) {
  multiply_weights(acc, weights, right, [](int) { return true; });
}

// Writes a warp's weights, rounded to T, to a tile from (row, column) on.
template <typename T, int kRows, int kTileColumns, int kGroups, int kColumns>
HK_DEVICE void store_weights(const Tile<T, kRows, kTileColumns>& tile, int row, int column,
                             const Accumulator<kGroups, kColumns>& weights) {
  static_assert(sizeof(T) == 2);
  HK_UNROLL
  for (int m = 0; m < kGroups; ++m) {
    HK_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      HK_UNROLL
      for (int e = 0; e < 4; e += 2) {
        *reinterpret_cast<uint32_t*>(tile.at(row + row_of(m, e), column + column_of(n, e))) =
            pack<T>(weights.c[m][n][e], weights.c[m][n][e + 1]);
      }
    }
  }
}

// acc += left [rows from `row`, kDepth] * right [kDepth, columns from `column`]
template <int kGroups, int kColumns, typename T, int kRows, int kDepth, int kRightColumns>
HK_DEVICE void multiply_tiles(Accumulator<kGroups, kColumns>& acc, const Tile<T, kRows, kDepth>& left, int row,
                              const Tile<T, kDepth, kRightColumns>& right, int column) {
  using Core = TensorCore<T>;
  HK_UNROLL
  for (int k = 0; k < kDepth; k += Core::kDepth) {
    LeftOperands<T, kGroups> a;
    load<T, kGroups>(a, left, row, k);
    HK_UNROLL
    for (int n = 0; n < kColumns; n += 16) {
      Right b;
      Core::load_transposed(b, right, k, column + n);
      multiply_depth<T>(acc, n, a, b);
    }
  }
}

}  // namespace hk::cuda
