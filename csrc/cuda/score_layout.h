// Which pairs of a query row and a key a tile leaves out: hidden ones, and those that dropout drops.
#pragma once

#include <type_traits>

#include "common/params.h"
#include "common/philox.h"
#include "cuda/softmax.h"
#include "cuda/visible.h"

namespace hk::cuda {

// Tiles of scores are [query rows, keys], or in the pass by keys [keys, query rows].
enum class ScoreLayout { kRowsFirst, kKeysFirst };

// A set of the elements that a lane holds of an Accumulator<kGroups, kColumns>: a word per row, and in it bit 8 n + e %
// 2. Sets are filled in loops that are not unrolled, so that code that few tiles run takes no registers from the
// others.
template <int kGroups, int kColumns>
class Pairs {
 public:
  static_assert(kColumns <= 64);
  using Word = std::conditional_t<kColumns <= 32, uint32_t, uint64_t>;

  HK_DEVICE Word& word(int m, int half) { return words_[m][half]; }
  HK_DEVICE void add(int m, int n, int e) { words_[m][e / 2] |= Word{1} << (8 * n + e % 2); }
  HK_DEVICE bool holds(int m, int n, int e) const { return words_[m][e / 2] >> (8 * n + e % 2) & 1; }

  // Bits [0, end).
  HK_DEVICE static Word below(int end) {
    constexpr int kBits = 8 * sizeof(Word);
    return end <= 0 ? 0 : end >= kBits ? ~Word{0} : (Word{1} << end) - 1;
  }

 private:
  Word words_[kGroups][2] = {};
};

// Calls f(bit, column) for every column that a lane holds of a tile.
template <int kColumns, typename F>
HK_DEVICE void each_column(F&& f) {
  HK_ROLLED
  for (int i = 0; i < kColumns / 4; ++i) f(i / 2 * 8 + i % 2, column_of(i / 2, i % 2));
}

// Adds pairs that are hidden; `ranges` are those of the tile's query rows, `first_key` its first key. The first
// front_of(row) keys do not have to be in the range of a row.
template <ScoreLayout kLayout, int kGroups, int kColumns, typename FrontOf>
HK_DEVICE void add_hidden(Pairs<kGroups, kColumns>& pairs, const Visible& visible, const Range* ranges, int first_key,
                          FrontOf&& front_of) {
  using Set = Pairs<kGroups, kColumns>;
  using Word = typename Set::Word;
  if constexpr (kLayout == ScoreLayout::kRowsFirst) {
    Word shown = ~Word{0};
    if (visible.hides_keys()) {
      shown = 0;
      each_column<kColumns>([&](int bit, int column) {
        if (visible.key(first_key + column)) shown |= Word{1} << bit;
      });
    }
    const int first = first_key + column_of(0, 0);  // of the lane's columns
    each_row<kGroups>([&](int m, int half, int row) {
      const Range range = ranges[row];
      const Word above = ~Set::below(range.lo - first) | Set::below(front_of(row) - first);
      const Word seen = Set::below(range.hi - first) & above & shown;
      pairs.word(m, half) |= ~seen;
    });
  } else {
    each_column<kColumns>([&](int bit, int column) {
      const Range range = ranges[column];
      const int front = min_of(front_of(column), range.hi);
      each_row<kGroups>([&](int m, int half, int row) {
        const int key = first_key + row;
        if (!range.holds(key) && key >= front) pairs.word(m, half) |= Word{1} << bit;
      });
    });
    each_row<kGroups>([&](int m, int half, int row) {
      if (!visible.key(first_key + row)) pairs.word(m, half) = ~Word{0};
    });
  }
}

// The same for rows of one head.
template <ScoreLayout kLayout, int kGroups, int kColumns>
HK_DEVICE void add_hidden(Pairs<kGroups, kColumns>& pairs, const Visible& visible, const Range* ranges, int first_key) {
  const int front = visible.front();
  add_hidden<kLayout>(pairs, visible, ranges, first_key, [&](int) { return front; });
}

// Query row i of head h.
struct HeadRow {
  int h, i;
};

// Dropout of probabilities: Philox of the seed and the element (b, h, row, key) decides.
class Dropout {
 public:
  HK_DEVICE explicit Dropout(const DropoutParams& p)
      : seed_(static_cast<uint64_t>(p.seed[0])), threshold_(p.threshold) {
    HK_UNROLL
    for (int i = 0; i < 4; ++i) first_[i] = static_cast<uint32_t>(p.seed[1 + i]);
  }

  // Which of the four keys from `first_key` on, a multiple of 4, are dropped: one bit each.
  HK_DEVICE uint32_t drops(int b, int h, int row, int first_key) const {
    const Philox4 drawn = philox(first_[3] / 4 + first_key / 4, first_[2] + row, first_[1] + h, first_[0] + b, seed_);
    uint32_t bits = 0;
    HK_UNROLL
    for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(drawn.word[i] < threshold_) << i;
    return bits;
  }

 private:
  uint64_t seed_;
  uint32_t first_[4];  // (b, h, row, key) of the call's first element in the whole
  uint32_t threshold_;
};

// The elements that dropout drops of those that a lane holds: bit 4 (m kTiles + n) + e of a word.
template <int kGroups, int kColumns>
class Dropped {
 public:
  static constexpr int kTiles = kColumns / 8;
  static_assert(kGroups * kTiles <= 16);
  using Word = std::conditional_t<kGroups * kTiles <= 8, uint32_t, uint64_t>;

  HK_DEVICE bool holds(int m, int n, int e) const { return word_ >> (4 * (m * kTiles + n) + e) & 1; }

  // Adds the elements of a tile of head (b, h) that dropout drops; `first_key` is a multiple of 4. One draw decides
  // about four keys of a row. Two lanes hold two of them each, or with kKeysFirst four lanes one each; together these
  // lanes hold as many groups of four keys as there are lanes, so each lane draws for one group.
  template <ScoreLayout kLayout>
  HK_DEVICE void draw(const DropoutParams& params, int b, int h, int first_row, int first_key) {
    draw<kLayout>(params, b, [&](int row) { return HeadRow{h, first_row + row}; }, first_key);
  }

  // The same for a tile whose rows are head_row(row) of a batch.
  template <ScoreLayout kLayout, typename RowOf>
  HK_DEVICE void draw(const DropoutParams& params, int b, RowOf&& head_row, int first_key) {
    const Dropout dropout(params);
    const auto drops = [&](const HeadRow& at, int key) { return dropout.drops(b, at.h, at.i, first_key + key); };
    constexpr bool kRowsFirst = kLayout == ScoreLayout::kRowsFirst;
    const int own = kRowsFirst ? lane() % 2 : lane() / 4 % 4;  // this lane among those that share
    HK_ROLLED
    for (int i = 0; i < kGroups * kTiles; ++i) {
      const int m = i / kTiles, n = i % kTiles;
      uint32_t bits;  // of elements 0 to 3
      if constexpr (kRowsFirst) {
        const int row = row_of(m, 2 * own), key = column_of(n, 0) / 4 * 4;
        bits = drops(head_row(row), key) << 4 * own;
        bits = (bits | shuffle_xor(bits, 1)) >> 2 * own;
        bits = (bits & 3) | (bits >> 2 & 12);
      } else {
        const int row = column_of(n, own % 2), key = row_of(m, own / 2 * 2) / 4 * 4;
        bits = drops(head_row(row), key) << 4 * own;
        bits |= shuffle_xor(bits, 4);
        bits = (bits | shuffle_xor(bits, 8)) >> own;
        bits = (bits & 1) | (bits >> 3 & 2) | (bits >> 6 & 4) | (bits >> 9 & 8);
      }
      word_ |= Word{bits} << 4 * i;
    }
  }

 private:
  Word word_ = 0;
};

// Elements of a set become `value`.
template <int kGroups, int kColumns, typename Set>
HK_DEVICE void fill(Accumulator<kGroups, kColumns>& tile, const Set& set, float value) {
  tile.each([&](float& element, int m, int n, int e) {
    if (set.holds(m, n, e)) element = value;
  });
}

// What a tile of the backward leaves out: in a full tile only what its terms hide, and nothing is dropped without
// dropout.
template <ScoreLayout kLayout, int kGroups, int kColumns>
class LeftOut {
 public:
  // `ranges` are those of the tile's query rows, `first_row` and `first_key` its first ones.
  template <typename Terms>
  HK_DEVICE LeftOut(const AttentionParams& p, const Visible& visible, const Range* ranges, bool partial,
                    const Terms& terms, bool hides, int b, int h, int first_row, int first_key)
      : partial_(partial || hides), drops_(p.dropout.active), keep_scale_(static_cast<float>(p.dropout.keep_scale)) {
    if (partial_) add_hidden<kLayout>(hidden_, visible, ranges, first_key);
    if (hides) terms.add_hidden(hidden_);
    if (drops_) dropped_.template draw<kLayout>(p.dropout, b, h, first_row, first_key);
  }

  HK_DEVICE void hide(Accumulator<kGroups, kColumns>& tile) const {
    if (partial_) fill(tile, hidden_, 0.0f);
  }
  HK_DEVICE void drop(Accumulator<kGroups, kColumns>& tile) const {
    if (drops_) fill(tile, dropped_, 0.0f);
  }
  HK_DEVICE float keep_scale() const { return keep_scale_; }

 private:
  bool partial_, drops_;
  float keep_scale_;
  Pairs<kGroups, kColumns> hidden_;
  Dropped<kGroups, kColumns> dropped_;
};

// Rows that see a key whose value is flagged `bad` (its numbers are 0 in the tile) become nan, in every column.
template <int kGroups, int kColumns, int kWidth>
HK_DEVICE void poison(Accumulator<kGroups, kWidth>& attended, const Pairs<kGroups, kColumns>& hidden, const bool* bad) {
  float addend[kGroups][2] = {};
  HK_UNROLL
  for (int m = 0; m < kGroups; ++m) {
    HK_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      HK_UNROLL
      for (int e = 0; e < 4; ++e)
        if (!hidden.holds(m, n, e) && bad[column_of(n, e)]) addend[m][e / 2] = NAN;
    }
  }
  each_row<kGroups>([&](int m, int half, int) { addend[m][half] = sum_of_row(addend[m][half]); });
  attended.each([&](float& value, int m, int, int e) { value += addend[m][e / 2]; });
}

}  // namespace hk::cuda
