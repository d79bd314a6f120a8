// Stores the gradient that the warps of a block hold of their rows of a head, in the operands'
// dtype or as float.
#pragma once

#include "cuda/tensor_core.h"

namespace hk::cuda {

// A warp's part of a gradient on its way through shared memory: whole rows are written, some
// columns at a time.
template <int kGroups, int kColumns>
using GradientPart = Tile<float, kGroups * 16, kColumns % 64 == 0 ? 64 : 32>;

template <typename T, typename Part>
HK_DEVICE void store_part(const Part& part, const Rows<T>& rows, int first_row, int first_column) {
  constexpr int kCount = Unit<T>::kCount, kUnits = Part::kColumns / kCount;
  HK_ROLLED
  for (int i = lane(); i < Part::kRows * kUnits; i += kWarp) {
    const int row = i / kUnits, column = i % kUnits * kCount;
    if (first_row + row >= rows.length) return;
    Unit<T> unit;
    HK_UNROLL
    for (int j = 0; j < kCount; ++j) unit.values[j] = from_float<T>(*part.at(row, column + j));
    store_unit(rows, first_row + row, first_column + column, unit);
  }
}

// `values` [rows from first_row, kColumns from first_column] of this warp, times `factor`. All
// threads of the block come here and give up the start of the shared memory, a GradientPart a warp.
template <typename T, int kGroups, int kColumns>
HK_DEVICE void store_gradient(const Tensor& grad, int b, int head, int first_row, int first_column,
                              const Accumulator<kGroups, kColumns>& values, float factor) {
  using Part = GradientPart<kGroups, kColumns>;
  static_assert(kColumns % Part::kColumns == 0);
  const Part part = {reinterpret_cast<float*>(shared_memory()) +
                     warp() * Part::kRows * Part::kStride};
  sync_block();
  HK_UNROLL
  for (int first = 0; first < kColumns; first += Part::kColumns) {
    HK_UNROLL
    for (int m = 0; m < kGroups; ++m) {
      HK_UNROLL
      for (int n = 0; n < Part::kColumns / 8; ++n) {
        HK_UNROLL
        for (int e = 0; e < 4; ++e)
          *part.at(row_of(m, e), column_of(n, e)) = values.c[m][first / 8 + n][e] * factor;
      }
    }
    sync_warp();
    const int column = first_column + first;
    if (grad.dtype == DType::kFloat32)
      store_part<float>(part, rows_of<float>(grad, b, head), first_row, column);
    else
      store_part<T>(part, rows_of<T>(grad, b, head), first_row, column);
    sync_warp();
  }
  sync_block();
}

}  // namespace hk::cuda
