// The first pass of the backward, for both operators: delta, and the gate's gradient by row, in one read.
//
//   dgate row = rowsum(dout * attended)   delta = rowsum(dattended * attended) - dlse
//   dattended = g * dout                  dsinks row = -exp(sink - lse) * delta
//
// g is the activated gate. For gates per head and per row, rowsum(dattended * attended) = g * (dgate row). For a gate
// per element, dout * attended is not summed, and dattended is written for the passes that follow. dlse, the gradient
// of lse, adds dlse * p to dscores = p * (dp - delta).
#include "cuda/grid.h"
#include "cuda/head_output.h"
#include "cuda/launch.h"
#include "cuda/scores.h"
#include "cuda/tiles.h"

namespace hk::cuda {

// A block of threads reads kBlockM rows of a head once, 16 bytes per lane. The number of lanes per row is the number of
// 16-byte units in it, rounded up to a power of two, so that a warp reads several narrow rows together. The last rows
// of a head come first, as in the forward. Rows that see no key get 0, even if dout is not finite there. Their lse is
// -inf, but with a sink it is the sink, which it can also be for other rows if their scores are small: then the keys of
// the row are searched, and if it sees none, delta is nan, so that the passes that follow skip the row like any row
// that is not finite.
template <typename T, bool kSinks, bool kElementwise>
struct AttentionRows {
  using Params = RowsParams;
  static constexpr int kThreads = 256;
  static constexpr int kBlockM = 64;  // so that divisions by numbers of the call are made once for 64
  static constexpr int kUnit = Unit<T>::kCount;

  HK_DEVICE static void run(const Params& p) {
    const int length = static_cast<int>(p.dout.size[2]), width = static_cast<int>(p.dout.size[3]);
    const HeadTile at(p.dout.size[1], ceil_div(length, kBlockM));
    int shift = 0;  // 2^shift lanes read a row
    while (1 << shift < kWarp && kUnit << shift < width) ++shift;
    const int last_row = min_of(length, (at.tile + 1) * kBlockM);
    HK_ROLLED
    for (int i = 0; i < kBlockM; i += kThreads >> shift)
      add_row(p, at, at.tile * kBlockM + i + (thread_index() >> shift), last_row, 1 << shift);
  }

 private:
  // A row from `across` lanes. Lanes whose row is beyond the last one take part in the sums.
  HK_DEVICE static void add_row(const Params& p, const HeadTile& at, int row, int last_row, int across) {
    const int b = at.b, h = at.h, own = lane() & (across - 1);
    const bool there = row < last_row;
    const Rows<T> dout = rows_of<T>(p.dout, b, h), attended = rows_of<T>(p.attended, b, h);
    const int64_t index = (int64_t{b} * at.H + h) * dout.length + row;  // among all
    const Gate gate(p.gate, p.activation);
    const float lse = there ? static_cast<const float*>(p.lse.data)[index] : -kInfinity;
    bool sees = lse != -kInfinity;
    const float sink = kSinks ? sink_of(p, h) : 0.0f;
    if constexpr (kSinks) {
      sees = there && !gate.closes(b, h);
      const bool asks = sees && (lse == -kInfinity || lse == sink);
      if (any_in_warp(asks)) {
        const bool found = sees_a_key(p, b, h, asks ? row : dout.length, own, across);
        if (asks) sees = found;
      }
    }
    float total = 0.0f;
    for (int column = own * kUnit; there && column < dout.width; column += across * kUnit) {
      const Unit<T> given = load_unit(dout, row, column);
      const Unit<T> output = load_unit(attended, row, column);
      const auto product = [&](int j) { return sees ? to_float(given.values[j]) * to_float(output.values[j]) : 0.0f; };
      if constexpr (kElementwise) {
        float g[kUnit];
        HK_UNROLL
        for (int j = 0; j < kUnit; ++j) g[j] = column + j < dout.width ? gate.at(b, h, row, column + j) : 0.0f;
        if (p.dgate) {
          const Rows<float> dgate = rows_of<float>(p.dgate, b, h);
          HK_UNROLL
          for (int j = 0; j < kUnit; j += Unit<float>::kCount)
            store_unit(dgate, row, column + j, [&](int k) { return product(j + k); });
        }
        store_unit(rows_of<T>(p.dattended, b, h), row, column, [&](int j) { return to_float(given.values[j]) * g[j]; });
        HK_UNROLL
        for (int j = 0; j < kUnit; ++j) total += sees ? product(j) * g[j] : 0.0f;
      } else {
        HK_UNROLL
        for (int j = 0; j < kUnit; ++j) total += product(j);
      }
    }
    HK_ROLLED
    for (int step = across / 2; step; step /= 2) total += shuffle_xor(total, step);
    if (!there || own != 0) return;
    if constexpr (!kElementwise) {
      if (p.dgate) static_cast<float*>(p.dgate.data)[index] = total;
      if (sees) total *= gate.at(b, h, row);
    }
    const float dlse = p.dlse ? static_cast<const float*>(p.dlse.data)[index] : 0.0f;
    if (sees) total -= dlse;
    if constexpr (kSinks) {
      // The lse of a row that sees no key is the sink.
      const float alone = lse == -kInfinity ? 0.0f : dlse;
      if (p.dsinks) static_cast<float*>(p.dsinks.data)[index] = sees ? -expf(sink - lse) * total : alone;
      if (!sees) total = NAN;
    }
    static_cast<float*>(p.delta.data)[index] = total;
  }

  // Whether the row of this lane, one of `across`, sees a key; a row beyond the last one sees none. All lanes of the
  // warp take part.
  HK_DEVICE static bool sees_a_key(const Params& p, int b, int h, int row, int own, int across) {
    const Head at = {b, h, static_cast<int>(p.dout.size[2]), static_cast<int>(p.keys())};
    const Visible visible(p.mask, at.b, h, at.T, at.S);
    const Range range = visible.range(row);
    const Addends addends(p, at);
    bool sees = false;
    const auto look = [&](int key, int end) {
      HK_ROLLED
      for (; key < end; key += across)
        sees |= visible.key(key) && addends.at(row, key, p.mask.dense != nullptr) != -kInfinity;
    };
    look(range.lo + own, range.hi);
    look(own, min_of(visible.front(), range.hi));
    for (int step = across / 2; step; step /= 2) sees |= shuffle_xor(int{sees}, step) != 0;
    return sees;
  }
};

template <typename T>
void Kernels<T>::attention_rows(const RowsParams& p, const LaunchTarget& target) {
  const int64_t heads = p.dout.size[0] * p.dout.size[1];
  with_terms(static_cast<bool>(p.terms.sinks), [&](auto sinks) {
    with_terms(p.gate.rank == 4 && p.gate.size[3] != 1, [&](auto elementwise) {
      using Kernel = AttentionRows<T, sinks, elementwise>;
      launch<Kernel>(heads * ceil_div(p.dout.size[2], Kernel::kBlockM), 0, p, target);
    });
  });
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
