// Stores the gradient of the rows of a head that the warps of a block hold, in the operands' dtype or as float.
#pragma once

#include "cuda/tensor_core.h"

namespace hk::cuda {

// A warp's part of a gradient in shared memory, through which whole rows are written, some columns at a time.
template <int kGroups, int kColumns>
using GradientPart = Tile<float, kGroups * 16, kColumns % 64 == 0 ? 64 : 32>;

// Stores `values` [rows from first_row, kColumns from first_column] of this warp, times `factor`. All threads of the
// block take part; the start of the shared memory, one GradientPart per warp, is overwritten.
template <typename T, int kGroups, int kColumns>
HK_DEVICE void store_gradient(const Tensor& grad, int b, int head, int first_row, int first_column,
                              const Accumulator<kGroups, kColumns>& values, float factor) {
  using Part = GradientPart<kGroups, kColumns>;
  static_assert(kColumns % Part::kColumns == 0);
  const Part part = {reinterpret_cast<float*>(shared_memory()) + warp() * Part::kRows * Part::kStride};
  sync_block();
  HK_UNROLL
  for (int first = 0; first < kColumns; first += Part::kColumns) {
    HK_UNROLL
    for (int m = 0; m < kGroups; ++m) {
      HK_UNROLL
      for (int n = 0; n < Part::kColumns / 8; ++n) {
        HK_UNROLL
        for (int e = 0; e < 4; ++e) *part.at(row_of(m, e), column_of(n, e)) = values.c[m][first / 8 + n][e] * factor;
      }
    }
    sync_warp();
    const auto store = [&](const auto& rows) {
      const int count = min_of(Part::kRows, rows.length - first_row);
      store_tile(part, rows, first_row, first_column + first, count, [](int) { return 1.0f; });
    };
    if (grad.dtype == DType::kFloat32)
      store(rows_of<float>(grad, b, head));
    else
      store(rows_of<T>(grad, b, head));
    sync_warp();
  }
  sync_block();
}

}  // namespace hk::cuda
