// Gated attention forward for a few query rows, as in decoding: the sums from which attention_combine.cu computes the
// outputs. gated_attention_forward.cu has the formulas.
#include <algorithm>

#include "cuda/grid.h"
#include "cuda/head_output.h"
#include "cuda/launch.h"
#include "cuda/scores.h"
#include "cuda/tiles.h"
#include "cuda/visible.h"

namespace hk::cuda {

// A block of threads visits a share of the keys of one key head, for kBlockM of the query rows that read it: rows of
// all its query heads, head after head, so that a key is read once for all of them. Every warp computes all rows, over
// 16 keys of each tile; the sums of the warps are added up at the end. On chip stay the query, one tile of keys and one
// of values, scores and the accumulators; copies overlap as in the forward kernel.
template <typename T, int kWidth, bool kTerms>
struct GatedDecode {
  using Params = ForwardTask;
  using Sizes = DecodeSizes<T, kWidth>;
  static constexpr int kWarps = Sizes::kWarps, kThreads = kWarps * kWarp;
  static constexpr int kBlockM = Sizes::kBlockM, kOwn = Sizes::kOwn, kBlockN = kWarps * kOwn;
  using QueryTile = Tile<T, kBlockM, kWidth>;
  using KeyTile = Tile<T, kBlockN, kWidth>;
  using OwnKeys = Tile<T, kOwn, kWidth>;  // of a warp
  using SumTile = Tile<float, kBlockM, kWidth>;
  using Terms = ScoreTile<kTerms, ScoreLayout::kRowsFirst, kBlockM, kBlockN>;

  struct Memory : SharedMemory {
    Ring<QueryTile> query = tiles<QueryTile>();
    Ring<KeyTile> key = tiles<KeyTile>(), value = tiles<KeyTile>();
    Buffer<Range> ranges = take<Range>(kBlockM);
    Buffer<HeadRow> head_rows = take<HeadRow>(kBlockM);
    Buffer<int> scratch = take<int>(kWarps * 4);
    Buffer<bool> bad = take<bool>(kBlockN);
  };
  // Used at the end.
  struct SumMemory : SharedMemory {
    Ring<SumTile> acc = tiles<SumTile>(kWarps);
    Buffer<float> row_max = take<float>(kWarps * kBlockM);
    Buffer<float> row_sum = take<float>(kWarps * kBlockM);
  };
  static constexpr int shared_bytes() { return std::max(Memory().bytes(), SumMemory().bytes()); }

  // The rows of a block, from `first` of the `count` ones of the heads from `first_head`, each of which has `length`.
  struct RowsOfGroup {
    int b, first_head, first, count, length;

    HK_DEVICE HeadRow operator()(int row) const {
      return {first_head + (first + row) / length, (first + row) % length};
    }
    HK_DEVICE bool has(int row) const { return first + row < count; }
  };

  HK_DEVICE static void run(const Params& p) {
    const int T_rows = static_cast<int>(p.query.size[2]), S = static_cast<int>(p.key.size[2]);
    const int Hk = static_cast<int>(p.key.size[1]);
    const int group = static_cast<int>(p.query.size[1]) / Hk, count = group * T_rows;
    const HeadTile at(Hk, ceil_div(count, kBlockM), p.splits.count);
    const int b = at.b;
    const RowsOfGroup rows = {b, at.h * group, at.tile * kBlockM, count, T_rows};

    const Memory memory;
    const QueryTile query = memory.query[0];
    const KeyTile key = memory.key[0], value = memory.value[0];

    bool open = false;
    if (thread_index() < kBlockM) {
      const HeadRow row = rows(thread_index());
      open = rows.has(thread_index()) && !Gate(p.gate, p.activation).closes(b, row.h);
      memory.head_rows[thread_index()] = row;
      memory.ranges[thread_index()] = open ? Visible(p.mask, b, row.h, T_rows, S).range(row.i) : Range{0, 0};
    }
    const Visible visible(p.mask, b, 0, T_rows, S);
    int front = 0;
    for (int h = rows.first_head; p.mask.first_keys && h < rows.first_head + group; ++h)
      front = max_of(front, visible.front_of(h));
    const TileList list =
        tiles_of_ranges<kThreads, kBlockM, kBlockN>(
            visible, [&](int) { return open; }, [&](int row) { return memory.ranges[row]; }, front, memory.scratch)
            .share(at.split, p.splits.count);
    const Rows<T> keys = rows_of<T>(p.key, b, at.h), values = rows_of<T>(p.value, b, at.h);
    const float scale = static_cast<float>(p.scale), scale_log2 = softmax_scale(p.scale, kTerms);
    const int own = warp() * kOwn;  // of the keys of a tile
    Accumulator<1, kWidth> attended;
    OnlineSoftmax<1, kTerms> softmax;

    const auto from = [&](int index) {
      while (index < list.count() && !shows(p, rows, S, list[index] * kBlockN)) ++index;
      return index;
    };
    int i = from(0);
    if (i < list.count()) {
      load_query(query, p.query, rows);
      copy_rows<kThreads>(key, keys, list[i] * kBlockN);
    }
    commit_copies();
    for (int next; i < list.count(); i = next) {
      next = from(i + 1);
      const int first_key = list[i] * kBlockN;
      wait_copies<0>();
      sync_block();  // the keys have landed, and no thread reads the values before them
      copy_rows<kThreads>(value, values, first_key);
      commit_copies();
      Accumulator<1, kOwn> addends;
      bool hides = false;
      if constexpr (kTerms) hides = add_terms(p, rows, S, first_key + own, memory.head_rows, addends);
      Accumulator<1, kOwn> scores;
      multiply_rows(scores, query, 0, OwnKeys{key.at(own, 0)});
      if (!kTerms && scale < 0.0f) scores.each([](float& score, int, int, int) { score = -score; });
      wait_copies<0>();
      // The values have landed, and no thread reads these keys.
      hides = sync_block_any<kTerms>(hides);
      if (next < list.count()) copy_rows<kThreads>(key, keys, list[next] * kBlockN);
      commit_copies();
      if constexpr (kTerms) {
        Terms::cap(p, scores);
        scores.each([&](float& score, int m, int n, int e) { score += addends.c[m][n][e]; });
      }
      if (!list.is_full(i) || hides) {
        Pairs<1, kOwn> hidden;
        add_hidden<ScoreLayout::kRowsFirst>(hidden, visible, memory.ranges, first_key + own, [&](int row) {
          return memory.ranges[row].empty() ? 0 : visible.front_of(memory.head_rows[row].h);
        });
        if (hides) {
          addends.each([&](float& addend, int m, int n, int e) {
            if (addend == -kInfinity) hidden.add(m, n, e);
          });
        }
        fill(scores, hidden, -kInfinity);
        if (clean<kThreads>(value, memory.bad)) poison(attended, hidden, memory.bad + own);
      }
      softmax.step(scores, attended, scale_log2);
      if (p.dropout.active) {
        Dropped<1, kOwn> dropped;
        dropped.template draw<ScoreLayout::kRowsFirst>(
            p.dropout, b, [&](int row) { return memory.head_rows[row]; }, first_key + own);
        fill(scores, dropped, 0.0f);
      }
      multiply_weights(attended, scores, OwnKeys{value.at(own, 0)});
    }
    wait_copies<0>();
    store(p, at.split, rows, attended, softmax);
  }

 private:
  // Whether the dense mask shows a pair of a tile of keys to one of the rows' heads.
  HK_DEVICE static bool shows(const Params& p, const RowsOfGroup& rows, int S, int first_key) {
    if (!kTerms || !p.mask.dense_cells) return true;
    const int last = min_of(rows.first + kBlockM, rows.count) - 1 - rows.first;
    for (int h = rows(0).h; h <= rows(last).h; ++h) {
      if (Terms::shown(p, {rows.b, h, rows.length, S}, 0, first_key) != kHidden) return true;
    }
    return false;
  }

  // Fills places without rows with zeros.
  HK_DEVICE static void load_query(const QueryTile& tile, const Tensor& query, const RowsOfGroup& rows) {
    constexpr int kCount = Unit<T>::kCount, kUnits = kWidth / kCount;
    HK_ROLLED
    for (int i = thread_index(); i < kBlockM * kUnits; i += kThreads) {
      const int row = i / kUnits, column = i % kUnits * kCount;
      const HeadRow at = rows(row);
      Unit<T> unit = {};
      if (rows.has(row)) unit = load_unit(rows_of<T>(query, rows.b, at.h), at.i, column);
      *reinterpret_cast<Unit<T>*>(tile.at(row, column)) = unit;
    }
  }

  // Sets `addends`, which are zeros, to the terms of the warp's keys, from `first_key` on; returns whether this lane
  // found a hidden pair.
  HK_DEVICE static bool add_terms(const Params& p, const RowsOfGroup& rows, int S, int first_key,
                                  const HeadRow* head_rows, Accumulator<1, kOwn>& addends) {
    bool hides = false;
    if (!p.mask.dense && !p.terms.bias && !p.terms.offset_bias) return false;
    addends.each([&](float& addend, int m, int n, int e) {
      const int row = row_of(m, e), key = first_key + column_of(n, e);
      if (!rows.has(row) || key >= S) return;
      const HeadRow at = head_rows[row];
      addend = Addends(p, {rows.b, at.h, rows.length, S}).at(at.i, key, p.mask.dense != nullptr);
      hides |= addend == -kInfinity;
    });
    return hides;
  }

  // Adds up the sums of the warps and stores them as those of one split. All threads of the block take part; the shared
  // memory is overwritten.
  HK_DEVICE static void store(const Params& p, int split, const RowsOfGroup& rows,
                              const Accumulator<1, kWidth>& attended, const OnlineSoftmax<1, kTerms>& softmax) {
    sync_block();
    const SumMemory memory;
    float *const row_max = memory.row_max, *const row_sum = memory.row_sum;
    attended.each([&](const float& value, int m, int n, int e) {
      *memory.acc[warp()].at(row_of(m, e), column_of(n, e)) = value;
    });
    each_row<1>([&](int m, int half, int row) {
      const int index = warp() * kBlockM + row;
      row_max[index] = softmax.row_max[m][half];
      row_sum[index] = sum_of_row(softmax.row_sum[m][half]);
    });
    sync_block();
    const int width = static_cast<int>(p.out.size[3]);
    HK_ROLLED
    for (int row = warp(); row < kBlockM && rows.has(row); row += kWarps) {
      RowOfParts<kWidth, kTerms> sums;
      sums.add_up(
          kWarps, [&](int part) { return row_max[part * kBlockM + row]; },
          [&](int part) { return row_sum[part * kBlockM + row]; },
          [&](int part, int column) { return *memory.acc[part].at(row, column); });
      const HeadRow at = rows(row);
      const int64_t index = index_of_split(p, split, rows.b, at.h, at.i);
      sums.each_column([&](int i, int column) {
        if (column < width) p.splits.acc[index * width + column] = sums.acc[i];
      });
      if (lane() != 0) continue;
      p.splits.row_max[index] = sums.row_max;
      p.splits.row_sum[index] = sums.row_sum;
    }
  }
};

template <typename T>
void Kernels<T>::gated_attention_decode(const ForwardTask& p, const LaunchTarget& target) {
  with_terms(has_terms(p) || p.terms.sinks, [&](auto terms) {
    with_decode_width(p.query.size[3], p.value.size[3], [&](auto width) {
      using Kernel = GatedDecode<T, width, terms>;
      const int64_t B = p.query.size[0], H = p.query.size[1], Hk = p.key.size[1];
      const int64_t rows = Hk > 0 ? H / Hk * p.query.size[2] : 0;
      static_assert(Kernel::shared_bytes() <= kLeastShared);
      launch<Kernel>(B * Hk * ceil_div(rows, Kernel::kBlockM) * p.splits.count, Kernel::shared_bytes(), p, target);
    });
  });
}

HK_INSTANTIATE_KERNELS

}  // namespace hk::cuda
