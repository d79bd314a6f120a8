// The first pass of the backward, one for both operators: delta and the rows of the gate's gradient
// in one read.
//
//   dgate row = rowsum(dout * attended)   delta = rowsum(dattended * attended)   dattended = g *
//   dout
//
// g is the activated gate. For gates of heads and of rows delta = g * (dgate row); a gate of
// elements keeps dout * attended as it is, and its dattended is written for the passes that follow.
#include "cuda/gate.h"
#include "cuda/launch.h"
#include "cuda/passes.h"
#include "cuda/softmax.h"

namespace hk::cuda {

// A warp reads one row of a head once. Rows that see nothing get 0, whatever stands in dout there.
template <typename T>
struct AttentionRows {
  using Params = RowsParams;
  static constexpr int kThreads = 256, kRows = kThreads / kWarp;

  HK_DEVICE static void run(const Params& p) {
    const int64_t H = p.dout.size[1], length = p.dout.size[2], width = p.dout.size[3];
    const int64_t index = block_index() * kRows + warp();  // of a row among all
    if (index >= p.dout.size[0] * H * length) return;
    const int64_t row = index % length, h = index / length % H, b = index / (length * H);
    const Gate gate(p.gate, p.activation);
    const bool sees = static_cast<const float*>(p.lse.data)[index] != -kInfinity;
    const T* dout = rows_of<T>(p.dout, b, h).row(row);
    const T* attended = rows_of<T>(p.attended, b, h).row(row);
    float* const dgate = static_cast<float*>(p.dgate.data);
    float total = 0.0f;
    for (int64_t column = lane(); column < width; column += kWarp) {
      const float dout_value = to_float(dout[column]);
      float product = sees ? dout_value * to_float(attended[column]) : 0.0f;
      if (gate.elementwise()) {
        const float g = gate.at(b, h, row, column);
        if (p.dgate) dgate[index * width + column] = product;
        rows_of<T>(p.dattended, b, h).row(row)[column] = from_float<T>(dout_value * g);
        product *= g;
      }
      total += sees ? product : 0.0f;
    }
    for (int step = kWarp / 2; step; step /= 2) total += shuffle_xor(total, step);
    if (lane() != 0) return;
    if (!gate.elementwise()) {
      if (p.dgate) dgate[index] = total;
      if (sees) total *= gate.at(b, h, row);
    }
    static_cast<float*>(p.delta.data)[index] = total;
  }
};

template <typename T>
void rows_pass(const RowsParams& p, const Where& where) {
  const int64_t rows = p.dout.size[0] * p.dout.size[1] * p.dout.size[2];
  using Kernel = AttentionRows<T>;
  launch<Kernel>((rows + Kernel::kRows - 1) / Kernel::kRows, 0, p, where);
}

template void rows_pass<HK_DTYPE>(const RowsParams&, const Where&);

}  // namespace hk::cuda
