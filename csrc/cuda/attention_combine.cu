// The second pass of a forward call whose keys are split: adds up the sums of the splits of a row, in their order, and
// stores the result as the forward kernel does.
#include "cuda/grid.h"
#include "cuda/head_output.h"
#include "cuda/launch.h"
#include "cuda/tiles.h"

namespace hk::cuda {

// A block of threads computes all rows of one head, which are few: a warp adds up one row after the other, each lane
// its columns, into shared memory, from where the first warp stores them. A closed head, which has no sums, gets zeros.
template <typename T, int kWidth, bool kTerms>
struct AttentionCombine {
  using Params = ForwardTask;
  static constexpr int kThreads = 256, kWarps = kThreads / kWarp;
  using Output = HeadOutput<T, 1, 1, kWidth, kTerms>;
  static constexpr int kMostRows = Output::kRows;

  HK_DEVICE static void run(const Params& p) {
    const int length = static_cast<int>(p.out.size[2]);
    const HeadTile at(p.out.size[1], 1);
    const Gate gate(p.gate, p.activation);
    const int splits = gate.closes(at.b, at.h) ? 0 : p.splits.count;
    const Output output(0);
    for (int row = warp(); row < length; row += kWarps) add_up(p, at, row, splits, output);
    sync_block();
    if (warp() != 0) return;
    output.add_sink(p, at.h);
    output.store_outputs(p, gate, {at.b, at.h, 0});
  }

 private:
  HK_DEVICE static void add_up(const Params& p, const HeadTile& at, int row, int splits, const Output& output) {
    const int width = static_cast<int>(p.out.size[3]);
    const auto index = [&](int split) { return index_of_split(p, split, at.b, at.h, row); };
    RowOfParts<kWidth, kTerms> sums;
    sums.add_up(
        splits, [&](int split) { return p.splits.row_max[index(split)]; },
        [&](int split) { return p.splits.row_sum[index(split)]; },
        [&](int split, int column) { return column < width ? p.splits.acc[index(split) * width + column] : 0.0f; });
    const float factor = sums.row_sum == 0.0f ? 0.0f : static_cast<float>(p.dropout.keep_scale) / sums.row_sum;
    sums.each_column([&](int i, int column) { *output.tile.at(row, column) = sums.acc[i] * factor; });
    if (lane() == 0) output.lse[row] = log_sum_exp<kTerms>(sums.row_max, sums.row_sum);
  }
};

template <typename T>
void Kernels<T>::attention_combine(const ForwardTask& p, const LaunchTarget& target) {
  with_terms(has_terms(p) || p.terms.sinks, [&](auto terms) {
    with_narrowest<64, 128, 256>(p.out.size[3], [&](auto width) {
      using Kernel = AttentionCombine<T, width, terms>;
      if (p.out.size[2] > Kernel::kMostRows)
        throw Error("keys are split for " + std::to_string(p.out.size[2]) + " query rows, but only up to " +
                    std::to_string(Kernel::kMostRows) + " can be combined");
      launch<Kernel>(p.out.size[0] * p.out.size[1], Kernel::Output::shared_bytes(), p, target);
    });
  });
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
