// What a forward kernel stores for its rows of a head: the output and what the backward needs, or the rows of the
// gate's gradient. For both operators.
#pragma once

#include "cuda/gate.h"
#include "cuda/kernels.h"
#include "cuda/softmax.h"

namespace hk::cuda {

// Which rows of a head take part: all of an open head, or all of a closed one.
HK_DEVICE int rows_taking_part(const ForwardTask& p, bool closed, int T) {
  return closed == (p.stores == Stores::kClosedGradient) ? T : 0;
}

// The sink of a head, -inf without one: the lse of rows that see no key.
HK_DEVICE float sink_of(const AttentionParams& p, int h) {
  const Tensor& t = p.terms.sinks;
  return t.rank > 0 ? load_number(t.data, t.dtype, h * t.stride[0]) : -kInfinity;
}

// The index of row `row` of a head in the buffers of `splits`.
HK_DEVICE int64_t index_of_split(const ForwardTask& p, int split, int b, int h, int row) {
  const int64_t B = p.out.size[0], H = p.out.size[1], T = p.out.size[2];
  return ((split * B + b) * H + h) * T + row;
}

// Stores the sums of one split for the warp's rows, from `first_row` of head (b, h) up to row T.
template <int kGroups, int kWidth, bool kTerms>
HK_DEVICE void store_split(const ForwardTask& p, int split, int b, int h, int first_row, int T,
                           const Accumulator<kGroups, kWidth>& acc, const OnlineSoftmax<kGroups, kTerms>& softmax) {
  const int width = static_cast<int>(p.out.size[3]);
  each_row<kGroups>([&](int m, int half, int own) {
    const int row = first_row + own;
    const float sum = sum_of_row(softmax.row_sum[m][half]);
    if (row >= T || lane() % 4 != 0) return;
    const int64_t index = index_of_split(p, split, b, h, row);
    p.splits.row_max[index] = softmax.row_max[m][half];
    p.splits.row_sum[index] = sum;
  });
  acc.each([&](const float& value, int m, int n, int e) {
    const int row = first_row + row_of(m, e), column = column_of(n, e);
    if (row < T && column < width) p.splits.acc[index_of_split(p, split, b, h, row) * width + column] = value;
  });
}

// The rows of all warps go through shared memory (its start, which is overwritten), so that a warp reads and writes
// whole rows in global memory. There are sinks only with kTerms.
template <typename T, int kWarps, int kGroups, int kWidth, bool kTerms>
class HeadOutput {
 public:
  static constexpr int kWarpRows = kGroups * 16, kRows = kWarps * kWarpRows;
  using AttendedTile = Tile<float, kWarpRows, kWidth>;

  struct Memory : SharedMemory {
    Ring<AttendedTile> attended = tiles<AttendedTile>(kWarps);
    Buffer<float> lse = take<float>(kRows), factors = take<float>(kRows);
  };
  static constexpr int shared_bytes() { return Memory().bytes(); }

  // Stores `attended` and `lse` of the warp's rows; the block's first row of head (b, h) is `first_row`.
  HK_DEVICE static void store(const ForwardTask& p, const Gate& gate, int b, int h, int first_row,
                              const Accumulator<kGroups, kWidth>& attended, const float (&lse)[kGroups][2]) {
    const HeadOutput rows(warp());
    const AttendedTile tile = rows.tile;
    float* const row_lse = rows.lse;
    sync_block();
    each_row<kGroups>([&](int m, int half, int row) { row_lse[row] = lse[m][half]; });
    attended.each([&](const float& value, int m, int n, int e) { *tile.at(row_of(m, e), column_of(n, e)) = value; });
    sync_warp();
    rows.add_sink(p, h);
    const BlockCoord at = {b, h, first_row + warp() * kWarpRows};
    if (p.stores == Stores::kClosedGradient)
      rows.store_products(p, at);
    else
      rows.store_outputs(p, gate, at);
  }

  // A warp's rows in shared memory: attended and lse without the sink, and the factors with which they are stored.
  AttendedTile tile;
  float *lse, *factors;

  HK_DEVICE explicit HeadOutput(int warp) {
    const Memory memory;
    tile = memory.attended[warp];
    lse = memory.lse + warp * kWarpRows;
    factors = memory.factors + warp * kWarpRows;
  }

  // The place of a warp's first row, in head (b, h).
  struct BlockCoord {
    int b, h, first_row;

    HK_DEVICE int64_t index(const Tensor& out, int row) const {
      return (b * out.size[1] + h) * out.size[2] + first_row + row;
    }
    HK_DEVICE int count(int length) const { return length - first_row < kWarpRows ? length - first_row : kWarpRows; }
  };

  // The functions below are called by the warp that owns the rows.

  // Adds one more score, without a value, to every row that sees a key.
  HK_DEVICE void add_sink(const AttentionParams& p, int h) const {
    if (!kTerms || p.terms.sinks.rank == 0) return;
    const float sink = sink_of(p, h);
    HK_ROLLED
    for (int row = 0; row < kWarpRows; ++row) {
      const float own = lse[row], most = fmaxf(own, sink);
      if (own == -kInfinity) continue;
      const float sum = expf(own - most) + expf(sink - most), share = expf(own - most) / sum;
      sync_warp();
      if (lane() == 0) lse[row] = most + logf(sum);
      HK_ROLLED
      for (int column = lane(); column < kWidth; column += kWarp) *tile.at(row, column) *= share;
    }
    sync_warp();
  }

  HK_DEVICE void store_outputs(const ForwardTask& p, const Gate& gate, const BlockCoord& at) const {
    const Rows<T> out = rows_of<T>(p.out, at.b, at.h);
    const int count = at.count(out.length);
    HK_ROLLED
    for (int row = lane(); row < count; row += kWarp) {
      const bool fully_masked = lse[row] == -kInfinity;
      if (p.lse) {
        static_cast<float*>(p.lse.data)[at.index(p.out, row)] = kTerms && fully_masked ? sink_of(p, at.h) : lse[row];
      }
      // Rows that see no key are 0, even if their gate is NaN.
      factors[row] = fully_masked || gate.elementwise() ? 1.0f : gate.at(at.b, at.h, at.first_row + row);
    }
    sync_warp();
    if (p.attended) {
      store_tile(tile, rows_of<T>(p.attended, at.b, at.h), at.first_row, 0, count, [](int) { return 1.0f; });
    }
    if (gate.elementwise()) {
      sync_warp();
      HK_ROLLED
      for (int i = lane(); i < count * kWidth; i += kWarp) {
        const int row = i / kWidth, column = i % kWidth;
        if (column < out.width && lse[row] != -kInfinity)
          *tile.at(row, column) *= gate.at(at.b, at.h, at.first_row + row, column);
      }
      sync_warp();
    }
    store_tile(tile, out, at.first_row, 0, count, [&](int row) { return factors[row]; });
  }

  // Stores rowsum(dout * attended).
  HK_DEVICE void store_products(const ForwardTask& p, const BlockCoord& at) const {
    const Rows<T> dout = rows_of<T>(p.dout, at.b, at.h);
    HK_ROLLED
    for (int row = 0; row < at.count(dout.length); ++row) {
      float total = 0.0f;
      HK_ROLLED
      for (int column = lane(); column < dout.width; column += kWarp)
        total += *tile.at(row, column) * to_float(dout.row(at.first_row + row)[column]);
      for (int step = kWarp / 2; step; step /= 2) total += shuffle_xor(total, step);
      if (lane() == 0) {
        static_cast<float*>(p.dgate.data)[at.index(p.dout, row)] = lse[row] == -kInfinity ? 0.0f : total;
      }
    }
  }
};

}  // namespace hk::cuda
