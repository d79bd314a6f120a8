// Statistics of attention rows, one kernel for both operators: lse, the largest probability and its
// key, and the entropy, of scores that are never in memory.
#include "cuda/chunks.h"
#include "cuda/collaborative_tiles.h"
#include "cuda/grid.h"
#include "cuda/head_output.h"
#include "cuda/launch.h"
#include "cuda/scores.h"
#include "cuda/visible.h"

namespace hk::cuda {

// What is kept of the rows of a warp. A lane has its own part of sums and its own best key, of the
// columns that it holds.
struct RowStatistics {
  float row_max[2], row_sum[2];
  float energy[2];  // sum of p * (score - row_max) in base 2
  float best[2];    // the largest score of keys that are not excluded
  int best_key[2];

  HK_DEVICE RowStatistics() {
    HK_UNROLL
    for (int half = 0; half < 2; ++half) {
      row_max[half] = best[half] = -kInfinity;
      row_sum[half] = energy[half] = 0.0f;
      best_key[half] = INT_MAX;
    }
  }

  // Scores of a tile, hidden ones -inf; keys do not come in their order.
  template <int kColumns>
  HK_DEVICE void step(const Accumulator<1, kColumns>& scores, int first_key, const bool* excluded) {
    HK_UNROLL
    for (int half = 0; half < 2; ++half) {
      float most = -kInfinity;
      HK_UNROLL
      for (int n = 0; n < kColumns / 8; ++n)
        most = fmaxf(most, fmaxf(scores.c[0][n][2 * half], scores.c[0][n][2 * half + 1]));
      const float old = row_max[half];
      most = fmaxf(old, most_of_row(most));
      const float base = most == -kInfinity ? 0.0f : most;
      const float drop = old == -kInfinity ? 0.0f : (old - base) * kLog2e;
      const float alpha = old == -kInfinity ? 0.0f : exp2_approx(drop);
      float sum = row_sum[half] * alpha;
      // Where alpha is 0, drop may be -inf.
      float total = alpha == 0.0f ? 0.0f : (energy[half] + row_sum[half] * drop) * alpha;
      HK_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        HK_UNROLL
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const float score = scores.c[0][n][e], depth = (score - base) * kLog2e;
          const float p = exp2_approx(depth);
          const int column = column_of(n, e), key = first_key + column;
          sum += p;
          total += p == 0.0f ? 0.0f : p * depth;
          const bool better = score > best[half] || (score == best[half] && key < best_key[half]);
          if (better && !excluded[column]) {
            best[half] = score;
            best_key[half] = key;
          }
        }
      }
      row_max[half] = most;
      row_sum[half] = sum;
      energy[half] = total;
    }
  }

  // Of the four lanes of a row, in each of them.
  HK_DEVICE void sum_lanes() {
    HK_UNROLL
    for (int half = 0; half < 2; ++half) {
      row_sum[half] = sum_of_row(row_sum[half]);
      energy[half] = sum_of_row(energy[half]);
      HK_UNROLL
      for (int mask = 1; mask < 4; mask *= 2) {
        const float score = shuffle_xor(best[half], mask);
        const int key = shuffle_xor(best_key[half], mask);
        if (score > best[half] || (score == best[half] && key < best_key[half])) {
          best[half] = score;
          best_key[half] = key;
        }
      }
    }
  }
};

// A block of threads owns kBlock rows of a head, in the order of the forward kernel, and goes
// through tiles of as many keys. Features come kStepWidth at a time, two steps on chip: so heads of
// any width take the same kernel, with terms or without.
template <typename T>
struct Statistics {
  using Params = StatisticsPass;
  static constexpr int kBlock = 64, kWarps = kBlock / 16, kThreads = kWarps * kWarp;
  using Operand = Tile<T, kBlock, kStepWidth>;
  using Scores = Accumulator<1, kBlock>;
  using Terms = ScoreTile<true, ScoreLayout::kRowsFirst, kBlock, kBlock>;

  struct Memory {
    SharedMemory memory;
    Ring<Operand> rows = memory.tiles<Operand>(2), keys = memory.tiles<Operand>(2);
    Terms terms = Terms(memory);
    Buffer<Range> ranges = memory.take<Range>(kBlock);
    Buffer<float> content_bias = memory.take<float>(kBlock);
    Buffer<bool> excluded = memory.take<bool>(kBlock);
    Buffer<int> scratch = memory.take<int>(kWarps * 4);
    Features features;

    constexpr explicit Memory(int64_t Ds) : features(memory, Ds) {}
  };
  static constexpr int shared_bytes(int64_t Ds) { return Memory(Ds).memory.bytes(); }

  HK_DEVICE static void run(const Params& p) {
    Memory on_chip(p.mixing.size[1]);
    const bool mixes = p.mixing.rank > 0;
    const int T_rows = static_cast<int>(p.query.size[p.query.rank - 2]);
    const int S = static_cast<int>(p.key.size[p.key.rank - 2]);
    const HeadTile at(mixes ? p.mixing.size[0] : p.query.size[1], ceil_div(T_rows, kBlock));
    const int first_row = at.tile * kBlock, warp_row = warp() * 16;
    const Head head = {at.b, at.h, T_rows, S};
    const Visible visible(p.mask, at.b, at.h, T_rows, S);
    HK_ROLLED
    for (int i = thread_index(); i < kBlock; i += kThreads)
      on_chip.ranges[i] = visible.range(first_row + i);
    const TileList list = tiles_seen<kThreads, kBlock, kBlock>(visible, first_row, on_chip.scratch);
    if (mixes && list.count()) on_chip.features.template set<kThreads>(p.mixing, at.h);
    RowStatistics statistics;
    const auto from = [&](int index) { return Terms::shown_from(index, list, first_row, p, head); };
    for (int i = from(0); i < list.count(); i = from(i + 1)) {
      const int first_key = list[i] * kBlock;
      Scores scores;
      scores.clear();
      sync_block();  // no thread reads what belongs to the tile before
      bool hides = on_chip.terms.template stage<kThreads>(p, head, first_row, first_key);
      if (thread_index() < kBlock) {
        const int key = first_key + thread_index();
        on_chip.content_bias[thread_index()] = ContentBias(p.content_bias, at.b, at.h).at(key);
        on_chip.excluded[thread_index()] =
            p.excluded && key < S && p.excluded[at.b * p.excluded_stride + key] != 0;
      }
      hides = any_in_block(hides);
      multiply(p, on_chip, head, first_row, first_key, scores);
      scores.each(
          [&](float& score, int, int n, int e) { score += on_chip.content_bias[column_of(n, e)]; });
      on_chip.terms.to_scores(p, scores);
      if (!list.is_full(i) || hides) {
        Pairs<1, kBlock> hidden;
        add_hidden<ScoreLayout::kRowsFirst>(hidden, visible, on_chip.ranges + warp_row, first_key);
        if (hides) on_chip.terms.add_hidden(hidden);
        fill(scores, hidden, -kInfinity);
      }
      statistics.step(scores, first_key, on_chip.excluded);
    }
    statistics.sum_lanes();
    HK_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp_row + row_of(0, 2 * half);
      const int64_t index = (int64_t{at.b} * at.H + at.h) * T_rows + row;
      if (row < T_rows && lane() % 4 == 0) store(p, statistics, half, sink_of(p, at.h), index);
    }
  }

 private:
  // Raw products of a tile of rows and a tile of keys.
  HK_DEVICE static void multiply(const Params& p, const Memory& on_chip, const Head& at,
                                 int first_row, int first_key, Scores& scores) {
    const Features& features = on_chip.features;
    const bool mixes = p.mixing.rank > 0;
    const int group = mixes ? 1 : static_cast<int>(p.query.size[1] / p.key.size[1]);
    const int steps =
        mixes ? features.steps() : ceil_div(static_cast<int>(p.query.size[3]), kStepWidth);
    const auto gathered = [&](int step) { return features.at(Step{0, step}); };
    const Rows<T> rows = rows_of<T>(p.query, at.b, at.h),
                  keys = rows_of<T>(p.key, at.b, at.h / group);
    const auto copy = [&](int step, int stage) {
      const auto copy_both = [&](const auto& source) {
        copy_features<kThreads>(on_chip.rows[stage], rows, first_row, source);
        copy_features<kThreads>(on_chip.keys[stage], keys, first_key, source);
      };
      if (mixes)
        copy_both(gathered(step));
      else
        copy_both(whole_step(step));
    };
    each_step(steps, copy, [&](int step, int stage) {
      if (mixes) mix_features<kThreads>(on_chip.rows[stage], features.factors(), gathered(step));
      sync_block();
      multiply_rows(scores, on_chip.rows[stage], warp() * 16, on_chip.keys[stage],
                    mixes ? gathered(step).count * kChunk : kStepWidth);
    });
  }

  // A sink is one more score, to which no key belongs: probabilities are p = w * q, where q are
  // those without it, and so the entropy of the keys is w * (entropy of q - ln w).
  HK_DEVICE static void store(const Params& p, const RowStatistics& of, int half, float sink,
                              int64_t index) {
    const float sum = of.row_sum[half], most = of.row_max[half];
    const bool sees = sum != 0.0f, found = sees && of.best[half] > -kInfinity;
    float lse = sees ? most + logf(sum) : -kInfinity;
    float largest = found ? exp2_approx((of.best[half] - most) * kLog2e) / sum : 0.0f;
    float entropy = sees ? logf(sum) - of.energy[half] / sum * kLn2 : 0.0f;
    if (sink != -kInfinity) {
      const float top = fmaxf(lse, sink);
      const float with_sink = sees ? top + logf(expf(lse - top) + expf(sink - top)) : sink;
      const float weight = sees ? expf(lse - with_sink) : 0.0f;
      largest *= weight;
      entropy = weight == 0.0f ? 0.0f : weight * (entropy - (lse - with_sink));
      lse = with_sink;
    }
    static_cast<float*>(p.lse.data)[index] = lse;
    static_cast<float*>(p.max_prob.data)[index] = sum == sum ? largest : sum;
    static_cast<float*>(p.entropy.data)[index] = entropy;
    p.argmax[index] = found ? of.best_key[half] : -1;
  }
};

template <typename T>
void Kernels<T>::attention_statistics(const StatisticsPass& p, const LaunchTarget& target) {
  using Kernel = Statistics<T>;
  static_assert(Kernel::shared_bytes(kWidestShared) <= kLeastShared);
  const int64_t H = p.mixing ? p.mixing.size[0] : p.query.size[1];
  const int64_t tiles = ceil_div(p.query.size[p.query.rank - 2], Kernel::kBlock);
  launch<Kernel>(p.query.size[0] * H * tiles, Kernel::shared_bytes(p.mixing ? p.mixing.size[1] : 0),
                 p, target);
}

template struct Kernels<HK_DTYPE>;

}  // namespace hk::cuda
