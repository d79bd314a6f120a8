// The first pass of the backward, one for both operators: delta and the rows of the gate's gradient
// in one read.
//
//   dgate row = rowsum(dout * attended)   delta = rowsum(dattended * attended)   dattended = g *
//   dout                                  dsinks row = -exp(sink - lse) * delta
//
// g is the activated gate. For gates of heads and of rows delta = g * (dgate row); a gate of
// elements keeps dout * attended as it is, and its dattended is written for the passes that follow.
#include "cuda/grid.h"
#include "cuda/head_output.h"
#include "cuda/launch.h"
#include "cuda/passes.h"
#include "cuda/scores.h"
#include "cuda/tiles.h"

namespace hk::cuda {

// A warp reads one row of a head once; the last rows of a head come first, as in the forward. Rows
// that see nothing get 0, whatever stands in dout there. Their lse says so, -inf; with a sink it is
// the sink's, as that of a row whose keys weigh nothing beside the sink: their keys are looked
// through, and delta is nan where none is seen, so that the passes that follow leave the row out as
// they do any that is not finite.
template <typename T, bool kSinks>
struct AttentionRows {
  using Params = RowsParams;
  static constexpr int kThreads = 256, kRows = kThreads / kWarp;

  HK_DEVICE static void run(const Params& p) {
    const int length = static_cast<int>(p.dout.size[2]), width = static_cast<int>(p.dout.size[3]);
    const HeadTile at(p.dout.size[1], ceil_div(length, kRows));
    const int b = at.b, h = at.h, row = at.tile * kRows + warp();
    if (row >= length) return;
    const int64_t index = (int64_t{b} * at.H + h) * length + row;  // among all
    const Gate gate(p.gate, p.activation);
    const float lse = static_cast<const float*>(p.lse.data)[index];
    bool sees = lse != -kInfinity;
    const float sink = kSinks ? sink_of(p, h) : 0.0f;
    if constexpr (kSinks) {
      sees = !gate.closes(b, h);
      if (sees && (lse == -kInfinity || lse == sink)) sees = sees_a_key(p, b, h, row);
    }
    const T* dout = rows_of<T>(p.dout, b, h).row(row);
    const T* attended = rows_of<T>(p.attended, b, h).row(row);
    float* const dgate = static_cast<float*>(p.dgate.data);
    float total = 0.0f;
    for (int column = lane(); column < width; column += kWarp) {
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
    if constexpr (kSinks) {
      if (p.dsinks)
        static_cast<float*>(p.dsinks.data)[index] = sees ? -expf(sink - lse) * total : 0.0f;
      if (!sees) total = NAN;
    }
    static_cast<float*>(p.delta.data)[index] = total;
  }

 private:
  HK_DEVICE static bool sees_a_key(const Params& p, int b, int h, int row) {
    const Head at = {b, h, static_cast<int>(p.dout.size[2]),
                     static_cast<int>(p.key.size[p.key.rank - 2])};
    const Visible visible(p.mask, at.b, at.T, at.S);
    const Range range = visible.range(row);
    const Addends addends(p, at);
    bool sees = false;
    for (int key = range.lo + lane(); key < range.hi; key += kWarp) {
      sees |= visible.key(key) && addends.at(row, key, p.mask.dense != nullptr) != -kInfinity;
    }
    return any_in_warp(sees);
  }
};

template <typename T>
void rows_pass(const RowsParams& p, const LaunchTarget& target) {
  const int64_t heads = p.dout.size[0] * p.dout.size[1];
  with_terms(static_cast<bool>(p.terms.sinks), [&](auto sinks) {
    using Kernel = AttentionRows<T, sinks>;
    launch<Kernel>(heads * ceil_div(p.dout.size[2], Kernel::kRows), 0, p, target);
  });
}

template void rows_pass<HK_DTYPE>(const RowsParams&, const LaunchTarget&);

}  // namespace hk::cuda
