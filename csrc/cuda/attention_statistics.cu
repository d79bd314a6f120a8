// Statistics of attention rows, one kernel for both operators: lse, the largest score, its probability and its key, and
// the entropy, of scores that are never in memory. A second kernel sums over rows what every key receives.
#include "cuda/chunks.h"
#include "cuda/collaborative_tiles.h"
#include "cuda/grid.h"
#include "cuda/head_output.h"
#include "cuda/launch.h"
#include "cuda/scores.h"
#include "cuda/visible.h"

namespace hk::cuda {

// Running statistics of the rows of a warp. A lane has the part of sums, and the best key, of the columns that it
// holds.
struct RowStatistics {
  float row_max[2] = {-kInfinity, -kInfinity}, row_sum[2] = {};
  float energy[2] = {};                      // sum of p * (score - row_max) in base 2
  float best[2] = {-kInfinity, -kInfinity};  // the largest score of keys that are not excluded
  int best_key[2] = {INT_MAX, INT_MAX};

  // Adds the scores of a tile, hidden ones -inf. Tiles are not visited in the order of their keys.
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
      // If alpha is 0, drop may be -inf.
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

  // Combines the four lanes of a row; each of them gets the result.
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

// A tile of scores of kBlock rows and as many keys. Features are loaded kStepWidth at a time, two steps on chip; so the
// same kernels serve heads of any width, with terms or without.
template <typename T, ScoreLayout kLayout>
struct StatisticsTile {
  using Params = StatisticsPass;
  static constexpr int kBlock = 64, kWarps = kBlock / 16, kThreads = kWarps * kWarp;
  using Operand = Tile<T, kBlock, kStepWidth>;
  using Scores = Accumulator<1, kBlock>;
  using Terms = ScoreTile<true, kLayout, kBlock, kBlock>;

  struct Memory : SharedMemory {
    Ring<Operand> rows = tiles<Operand>(2), keys = tiles<Operand>(2);
    Terms terms = Terms(*this);
    Buffer<Range> ranges = take<Range>(kBlock);
    Buffer<float> content_bias = take<float>(kBlock);
    Buffer<bool> excluded = take<bool>(kBlock);
    Buffer<float> reference = take<float>(kBlock), share = take<float>(kBlock);
    Buffer<int> scratch = take<int>(kWarps * 4);
    Features features;

    constexpr explicit Memory(int64_t Ds) : features(*this, Ds) {}
  };
  static constexpr int shared_bytes(int64_t Ds) { return Memory(Ds).bytes(); }

  // The scores of a tile of rows and a tile of keys, before any mask.
  HK_DEVICE static void score(const Params& p, const Memory& on_chip, const Head& at, int first_row, int first_key,
                              Scores& scores) {
    const Features& features = on_chip.features;
    const bool mixes = p.mixing.rank > 0;
    const int group = mixes ? 1 : static_cast<int>(p.query.size[1] / p.key.size[1]);
    const int steps = mixes ? features.steps() : ceil_div(static_cast<int>(p.query.size[3]), kStepWidth);
    const auto gathered = [&](int step) { return features.at(Step{0, step}); };
    const Rows<T> rows = rows_of<T>(p.query, at.b, at.h), keys = rows_of<T>(p.key, at.b, at.h / group);
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
    constexpr bool kRowsFirst = kLayout == ScoreLayout::kRowsFirst;
    const auto &own = kRowsFirst ? on_chip.rows : on_chip.keys, &other = kRowsFirst ? on_chip.keys : on_chip.rows;
    each_step(steps, copy, [&](int step, int stage) {
      if (mixes) mix_features<kThreads>(on_chip.rows[stage], features.factors(), gathered(step));
      sync_block();
      multiply_rows(scores, own[stage], warp() * 16, other[stage], mixes ? gathered(step).count * kChunk : kStepWidth);
    });
    scores.each([&](float& score, int m, int n, int e) {
      score += on_chip.content_bias[kRowsFirst ? column_of(n, e) : warp() * 16 + row_of(m, e)];
    });
    on_chip.terms.to_scores(p, scores);
  }
};

// A block of threads owns kBlock rows of a head, in the order of the forward kernel, and visits tiles of as many keys.
template <typename T>
struct Statistics : StatisticsTile<T, ScoreLayout::kRowsFirst> {
  using Base = StatisticsTile<T, ScoreLayout::kRowsFirst>;
  using Base::kBlock, Base::kThreads;
  using typename Base::Memory, typename Base::Params, typename Base::Scores, typename Base::Terms;

  HK_DEVICE static void run(const Params& p) {
    Memory on_chip(p.mixing.size[1]);
    const bool mixes = p.mixing.rank > 0;
    const int T_rows = static_cast<int>(p.rows()), S = static_cast<int>(p.keys());
    const HeadTile at(p.heads(), ceil_div(T_rows, kBlock));
    const int first_row = at.tile * kBlock, warp_row = warp() * 16;
    const Head head = {at.b, at.h, T_rows, S};
    const Visible visible(p.mask, at.b, at.h, T_rows, S);
    HK_ROLLED
    for (int i = thread_index(); i < kBlock; i += kThreads) on_chip.ranges[i] = visible.range(first_row + i);
    const TileList list = tiles_seen<kThreads, kBlock, kBlock>(visible, first_row, on_chip.scratch);
    if (mixes && list.count()) on_chip.features.template set<kThreads>(p.mixing, at.h);
    RowStatistics statistics;
    const auto from = [&](int index) { return Terms::shown_from(index, list, first_row, p, head); };
    for (int i = from(0); i < list.count(); i = from(i + 1)) {
      const int first_key = list[i] * kBlock;
      Scores scores;
      sync_block();  // no thread reads what belongs to the tile before
      bool hides = on_chip.terms.template stage<kThreads>(p, head, first_row, first_key);
      if (thread_index() < kBlock) {
        const int key = first_key + thread_index();
        on_chip.content_bias[thread_index()] = ContentBias(p.content_bias, at.b, at.h).at(key);
        on_chip.excluded[thread_index()] = p.excluded && key < S && p.excluded[at.b * p.excluded_stride + key] != 0;
      }
      hides = any_in_block(hides);
      Base::score(p, on_chip, head, first_row, first_key, scores);
      if (!list.is_full(i) || hides) {
        Pairs<1, kBlock> hidden;
        add_hidden<ScoreLayout::kRowsFirst>(hidden, visible, on_chip.ranges + warp_row, first_key);
        if (hides) on_chip.terms.add_hidden(hidden);
        fill(scores, hidden, -kInfinity);
      }
      statistics.step(scores, first_key, on_chip.excluded);
    }
    statistics.sum_lanes();
    each_row<1>([&](int, int half, int own) {
      const int row = first_row + warp_row + own;
      const int64_t index = (int64_t{at.b} * at.H + at.h) * T_rows + row;
      if (row < T_rows && lane() % 4 == 0)
        store(p, statistics, half, sink_of(p, at.h), index, row_weight(p, at.b, at.h, row));
    });
  }

 private:
  // A sink is one more score without a key. With q the probabilities without it, probabilities are p = w * q, and the
  // entropy of the keys is w * (entropy of q - ln w).
  HK_DEVICE static void store(const Params& p, const RowStatistics& of, int half, float sink, int64_t index,
                              float row_weight) {
    const float sum = of.row_sum[half], most = of.row_max[half];
    const bool sees = sum != 0.0f, found = sees && of.best[half] > -kInfinity;
    float lse = sees ? most + logf(sum) : -kInfinity;
    float largest = found ? exp2_approx((of.best[half] - most) * kLog2e) / sum : 0.0f;
    float entropy = sees ? logf(sum) - of.energy[half] / sum * kLn2 : 0.0f;
    float share = sees ? 1.0f / sum : 0.0f;
    if (sink != -kInfinity) {
      const float top = fmaxf(lse, sink);
      const float with_sink = sees ? top + logf(expf(lse - top) + expf(sink - top)) : sink;
      const float weight = sees ? expf(lse - with_sink) : 0.0f;
      largest *= weight;
      share *= weight;
      entropy = weight == 0.0f ? 0.0f : weight * (entropy - (lse - with_sink));
      lse = with_sink;
    }
    static_cast<float*>(p.lse.data)[index] = lse;
    static_cast<float*>(p.max_score.data)[index] = sum != sum ? sum : found ? of.best[half] : -kInfinity;
    static_cast<float*>(p.max_prob.data)[index] = sum == sum ? largest : sum;
    static_cast<float*>(p.entropy.data)[index] = entropy;
    p.argmax[index] = found ? of.best_key[half] : -1;
    if (!p.share) return;
    p.reference[index] = sees ? most : 0.0f;
    p.share[index] = sees && row_weight != 0.0f ? share * row_weight : 0.0f;
  }

  // 0 if `received` is not requested.
  HK_DEVICE static float row_weight(const Params& p, int b, int h, int row) {
    const Tensor& t = p.row_weights;
    if (!p.share) return 0.0f;
    return static_cast<const float*>(t.data)[b * t.stride[0] + h * t.stride[1] + row * t.stride[2]];
  }
};

// A block of threads owns kBlock keys of a head and sums over the tiles of rows that see them, in their order,
// probabilities times the weights of rows. Scores are transposed, [keys, query rows]: a lane sums along its rows, and
// four lanes are added at the end.
template <typename T>
struct Received : StatisticsTile<T, ScoreLayout::kKeysFirst> {
  using Base = StatisticsTile<T, ScoreLayout::kKeysFirst>;
  using Base::kBlock, Base::kThreads;
  using typename Base::Memory, typename Base::Params, typename Base::Scores, typename Base::Terms;

  HK_DEVICE static void run(const Params& p) {
    Memory on_chip(p.mixing.size[1]);
    const bool mixes = p.mixing.rank > 0;
    const int T_rows = static_cast<int>(p.rows()), S = static_cast<int>(p.keys());
    const int H = static_cast<int>(p.heads());
    const KeyHeadTile at(p.query.size[0], H, ceil_div(S, kBlock));
    const int first_key = at.tile * kBlock;
    const Head head = {at.b, at.head, T_rows, S};
    const int64_t first_index = (int64_t{at.b} * H + at.head) * T_rows;
    const Visible visible(p.mask, at.b, at.head, T_rows, S);
    const TileList list = tiles_that_see<kThreads, kBlock, kBlock>(visible, first_key, on_chip.scratch);
    if (mixes && list.count()) on_chip.features.template set<kThreads>(p.mixing, at.head);
    if (thread_index() < kBlock)
      on_chip.content_bias[thread_index()] = ContentBias(p.content_bias, at.b, at.head).at(first_key + thread_index());
    float received[2] = {};
    const auto from = [&](int index) { return Terms::shown_from(index, list, first_key, p, head); };
    for (int i = from(0); i < list.count(); i = from(i + 1)) {
      const int first_row = list[i] * kBlock;
      Scores scores;
      sync_block();  // no thread reads what belongs to the tile before
      bool hides = on_chip.terms.template stage<kThreads>(p, head, first_row, first_key);
      if (thread_index() < kBlock) {
        const int row = first_row + thread_index();
        on_chip.ranges[thread_index()] = visible.range(row);
        on_chip.reference[thread_index()] = row < T_rows ? p.reference[first_index + row] : 0.0f;
        on_chip.share[thread_index()] = row < T_rows ? p.share[first_index + row] : 0.0f;
      }
      hides = any_in_block(hides);
      Base::score(p, on_chip, head, first_row, first_key, scores);
      scores.each([&](float& score, int, int n, int e) {
        const float share = on_chip.share[column_of(n, e)];
        const float depth = (score - on_chip.reference[column_of(n, e)]) * kLog2e;
        score = share == 0.0f ? 0.0f : exp2_approx(depth) * share;
      });
      if (!list.is_full(i) || hides) {
        Pairs<1, kBlock> hidden;
        add_hidden<ScoreLayout::kKeysFirst>(hidden, visible, on_chip.ranges, first_key + warp() * 16);
        if (hides) on_chip.terms.add_hidden(hidden);
        fill(scores, hidden, 0.0f);
      }
      float sum[2] = {};
      scores.each([&](float& part, int, int, int e) { sum[e / 2] += part; });
      received[0] += sum[0];
      received[1] += sum[1];
    }
    each_row<1>([&](int, int half, int row) {
      const float total = sum_of_row(received[half]);
      const int key = first_key + warp() * 16 + row;
      if (key < S && lane() % 4 == 0)
        static_cast<float*>(p.received.data)[(int64_t{at.b} * H + at.head) * S + key] = total;
    });
  }
};

template <typename T>
void Kernels<T>::attention_statistics(const StatisticsPass& p, const LaunchTarget& target) {
  using Kernel = Statistics<T>;
  static_assert(Kernel::shared_bytes(kWidestShared) <= kLeastShared);
  const int64_t heads = p.query.size[0] * p.heads();
  const int bytes = Kernel::shared_bytes(p.mixing ? p.mixing.size[1] : 0);
  launch<Kernel>(heads * ceil_div(p.rows(), Kernel::kBlock), bytes, p, target);
  if (!p.received) return;
  launch<Received<T>>(heads * ceil_div(p.keys(), Kernel::kBlock), bytes, p, target);
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
