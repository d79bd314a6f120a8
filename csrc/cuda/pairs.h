// Which pairs of a query row and a key a tile leaves out: hidden ones, and those that dropout
// drops.
#pragma once

#include "cuda/dropout.h"
#include "cuda/tensor_core.h"
#include "cuda/visible.h"

namespace hk::cuda {

// A set of the elements that a lane holds of an Accumulator<kGroups, kColumns>, a bit each. It is
// made in a loop that is not unrolled: code that few tiles run shall not take the others'
// registers.
template <int kGroups, int kColumns>
class Pairs {
 public:
  static_assert(kGroups * kColumns / 2 <= 64);

  // Those of which is_in(row, column) holds; both count in the warp's tile.
  template <typename F>
  HK_DEVICE void add(F&& is_in) {
    HK_ROLLED
    for (int i = 0; i < kGroups * kColumns / 2; ++i) {
      const int m = i / (kColumns / 2), n = i / 4 % (kColumns / 8), e = i % 4;
      if (is_in(row_of(m, e), column_of(n, e))) bits_ |= uint64_t{1} << i;
    }
  }

  HK_DEVICE bool holds(int m, int n, int e) const {
    return bits_ >> ((m * (kColumns / 8) + n) * 4 + e) & 1;
  }

 private:
  uint64_t bits_ = 0;
};

// Tiles of scores lie as [query rows, keys], or in the pass by keys as [keys, query rows].
enum class Lie { kRowsFirst, kKeysFirst };

// Adds pairs that are hidden; `ranges` are those of the tile's query rows, `first_key` its first
// key.
template <Lie kLie, int kGroups, int kColumns>
HK_DEVICE void add_hidden(Pairs<kGroups, kColumns>& pairs, const Visible& visible,
                          const Range* ranges, int first_key) {
  pairs.add([&](int row, int column) {
    const int query = kLie == Lie::kRowsFirst ? row : column;
    const int key = first_key + (kLie == Lie::kRowsFirst ? column : row);
    return !ranges[query].holds(key) || !visible.key(key);
  });
}

// Adds pairs that dropout drops of head (b, h).
template <Lie kLie, int kGroups, int kColumns>
HK_DEVICE void add_dropped(Pairs<kGroups, kColumns>& pairs, const DropoutParams& params, int b,
                           int h, int first_row, int first_key) {
  const Dropout dropout(params);
  pairs.add([&](int row, int column) {
    const int query = first_row + (kLie == Lie::kRowsFirst ? row : column);
    const int key = first_key + (kLie == Lie::kRowsFirst ? column : row);
    return !dropout.keeps(b, h, query, key);
  });
}

// Rows that see a key whose value is flagged `bad` (its numbers are gone from the tile) become nan,
// as they would by the product.
template <int kGroups, int kColumns, int kWidth>
HK_DEVICE void poison(Accumulator<kGroups, kWidth>& attended,
                      const Pairs<kGroups, kColumns>& hidden, const bool* bad) {
  float addend[kGroups][2] = {};
  HK_UNROLL
  for (int m = 0; m < kGroups; ++m) {
    HK_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      HK_UNROLL
      for (int e = 0; e < 4; ++e)
        if (!hidden.holds(m, n, e) && bad[column_of(n, e)]) addend[m][e / 2] = NAN;
    }
    HK_UNROLL
    for (int half = 0; half < 2; ++half) {
      addend[m][half] += shuffle_xor(addend[m][half], 1);
      addend[m][half] += shuffle_xor(addend[m][half], 2);
    }
  }
  attended.each([&](float& value, int m, int, int e) { value += addend[m][e / 2]; });
}

}  // namespace hk::cuda
