// Stores the gradient that the warps of a block hold of their rows of a head, in the operands'
// dtype or as float.
#pragma once

#include "cuda/tensor_core.h"

namespace hk::cuda {

// Columns that go through shared memory at a time.
constexpr int kPartColumns = 32;

// A warp's part of a gradient on its way: whole rows are written, and in a loop that is short.
template <int kGroups>
using GradientPart = Tile<float, kGroups * 16, kPartColumns>;

template <typename T, int kGroups>
HK_DEVICE void store_part(const GradientPart<kGroups>& part, const Tensor& grad, int b, int head,
                          int first_row, int column) {
  const Rows<T> rows = rows_of<T>(grad, b, head);
  const bool single = grad.dtype == DType::kFloat32;
  if (column >= rows.width) return;
  HK_ROLLED
  for (int row = 0; row < kGroups * 16 && first_row + row < rows.length; ++row) {
    const float value = *part.at(row, lane());
    if (single)
      rows_of<float>(grad, b, head).row(first_row + row)[column] = value;
    else
      rows.row(first_row + row)[column] = from_float<T>(value);
  }
}

// `values` [rows from first_row, kColumns from first_column] of this warp, times `factor`. All
// threads of the block come here and give up the start of the shared memory, a GradientPart a warp.
template <typename T, int kGroups, int kColumns>
HK_DEVICE void store_gradient(const Tensor& grad, int b, int head, int first_row, int first_column,
                              const Accumulator<kGroups, kColumns>& values, float factor) {
  static_assert(kColumns % kPartColumns == 0);
  using Part = GradientPart<kGroups>;
  const Part part = {reinterpret_cast<float*>(shared_memory()) +
                     warp() * Part::kRows * Part::kStride};
  sync_block();
  HK_UNROLL
  for (int first = 0; first < kColumns; first += kPartColumns) {
    HK_UNROLL
    for (int m = 0; m < kGroups; ++m) {
      HK_UNROLL
      for (int n = 0; n < kPartColumns / 8; ++n) {
        HK_UNROLL
        for (int e = 0; e < 4; ++e)
          *part.at(row_of(m, e), column_of(n, e)) = values.c[m][first / 8 + n][e] * factor;
      }
    }
    sync_warp();
    store_part<T, kGroups>(part, grad, b, head, first_row, first_column + first + lane());
    sync_warp();
  }
  sync_block();
}

}  // namespace hk::cuda
