// What a forward kernel stores of its rows of a head: the output, what the backward needs of it, or
// the rows of the gate's gradient. One for both operators.
#pragma once

#include "cuda/gate.h"
#include "cuda/kernels.h"
#include "cuda/softmax.h"

namespace hk::cuda {

// Which rows of a head take part in a forward kernel's work: all of an open head, and of a closed
// one all where its gate's gradient is asked for.
HK_DEVICE int rows_taking_part(const AttendParams& p, bool closed, int T) {
  return closed == static_cast<bool>(p.dgate) ? T : 0;
}

// The rows of all warps go through shared memory (its start, whatever stood there before), so that
// a warp reads and writes whole rows in global memory.
template <typename T, int kWarps, int kGroups, int kWidth>
class HeadOutput {
 public:
  static constexpr int kRows = kWarps * kGroups * 16;
  using AttendedTile = Tile<float, kRows, kWidth>;
  static constexpr int kSharedBytes = AttendedTile::kBytes + kRows * sizeof(float);

  // `attended` and `lse` of the warp's rows; the block's first row of head (b, h) is `first_row`.
  HK_DEVICE static void store(const AttendParams& p, const Gate& gate, int b, int h, int first_row,
                              const Accumulator<kGroups, kWidth>& attended,
                              const float (&lse)[kGroups][2]) {
    SharedMemory memory;
    const auto tile = memory.tile<AttendedTile>();
    float* const row_lse = memory.take<float>(kRows);
    const int warp_row = warp() * kGroups * 16;
    sync_block();
    HK_UNROLL
    for (int m = 0; m < kGroups; ++m) {
      HK_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int row = warp_row + row_of(m, e);
        row_lse[row] = lse[m][e / 2];
        HK_UNROLL
        for (int n = 0; n < kWidth / 8; ++n) *tile.at(row, column_of(n, e)) = attended.c[m][n][e];
      }
    }
    sync_warp();
    const int length = static_cast<int>((p.dgate ? p.dout : p.out).size[2]);
    HK_ROLLED
    for (int row = warp_row; row < warp_row + kGroups * 16 && first_row + row < length; ++row) {
      if (p.dgate)
        store_products(p, b, h, first_row + row, tile.at(row, 0), row_lse[row]);
      else
        store_row(p, gate, b, h, first_row + row, tile.at(row, 0), row_lse[row]);
    }
  }

 private:
  HK_DEVICE static int64_t index_of(const Tensor& out, int b, int h, int row) {
    return (b * out.size[1] + h) * out.size[2] + row;
  }

  // Rows that see nothing are 0, whatever their gate.
  HK_DEVICE static void store_row(const AttendParams& p, const Gate& gate, int b, int h, int row,
                                  const float* attended, float lse) {
    const Rows<T> out = rows_of<T>(p.out, b, h);
    const bool sees = lse != -kInfinity;
    const float row_gate = gate.elementwise() ? 1.0f : gate.at(b, h, row);
    HK_ROLLED
    for (int column = lane(); column < out.width; column += kWarp) {
      const float g = gate.elementwise() ? gate.at(b, h, row, column) : row_gate;
      out.row(row)[column] = from_float<T>(sees ? attended[column] * g : 0.0f);
    }
    if (p.attended) {
      T* const kept = rows_of<T>(p.attended, b, h).row(row);
      HK_ROLLED
      for (int column = lane(); column < out.width; column += kWarp)
        kept[column] = from_float<T>(attended[column]);
    }
    if (p.lse && lane() == 0) static_cast<float*>(p.lse.data)[index_of(p.out, b, h, row)] = lse;
  }

  // rowsum(dout * attended).
  HK_DEVICE static void store_products(const AttendParams& p, int b, int h, int row,
                                       const float* attended, float lse) {
    const Rows<T> dout = rows_of<T>(p.dout, b, h);
    float total = 0.0f;
    HK_ROLLED
    for (int column = lane(); column < dout.width; column += kWarp)
      total += attended[column] * to_float(dout.row(row)[column]);
    for (int step = kWarp / 2; step; step /= 2) total += shuffle_xor(total, step);
    if (lane() == 0) {
      static_cast<float*>(p.dgate.data)[index_of(p.dout, b, h, row)] =
          lse == -kInfinity ? 0.0f : total;
    }
  }
};

}  // namespace hk::cuda
