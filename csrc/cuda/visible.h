// Which keys a tile of query rows sees, and which query rows see a tile of keys.
//
// A query row sees the keys of one half-open range and first keys of its head before that, less those that
// `key_visible` hides. Tiles outside of every range are never visited; tiles inside the ranges of all their rows need
// no mask arithmetic. A kernel visits the full tiles first, then the partial ones, which it masks pair by pair.
#pragma once

#include <climits>

#include "cuda/shared_tile.h"

namespace hk::cuda {

struct Range {
  int lo, hi;

  HK_DEVICE bool empty() const { return lo >= hi; }
  HK_DEVICE bool holds(int key) const { return key >= lo && key < hi; }
};

// The mask of one head.
class Visible {
 public:
  // A head whose rows take no part has T 0.
  HK_DEVICE Visible(const MaskParams& mask, int b, int h, int T, int S)
      : mask_(mask), h_(h), T_(T), S_(S), k_lo_(nullptr), k_hi_(nullptr), keys_(nullptr) {
    if (mask.k_lo) {
      const int64_t at = b * mask.interval_stride + h * mask.interval_head_stride;
      k_lo_ = mask.k_lo + at;
      k_hi_ = mask.k_hi + at;
    }
    if (mask.key_visible) keys_ = mask.key_visible + b * mask.visible_stride;
  }

  HK_DEVICE int T() const { return T_; }
  HK_DEVICE int S() const { return S_; }
  HK_DEVICE bool by_data() const { return k_lo_ != nullptr; }
  HK_DEVICE bool hides_keys() const { return keys_ != nullptr; }

  // Rows see the keys before this one if their range ends after them.
  HK_DEVICE int front() const { return front_of(h_); }
  HK_DEVICE int front_of(int h) const { return mask_.first_keys ? mask_.first_keys[h * mask_.first_stride] : 0; }

  // {0, 0} if the row sees no key or does not exist. If the first keys reach the range of a row, or the row has no
  // other keys, its range begins at 0.
  HK_DEVICE Range range(int row) const {
    if (row >= T_) return {0, 0};
    int lo = clamp(row + mask_.band_lo, S_), hi = clamp(row + mask_.band_hi, S_);
    if (k_lo_) {
      lo = max_of(lo, k_lo_[row]);
      hi = min_of(hi, k_hi_[row]);
    }
    if (mask_.first_keys) {
      const int first = front();
      if (lo >= hi) hi = min_of(hi, first);
      if (lo >= hi || lo <= first) lo = 0;
    }
    return lo < hi ? Range{lo, hi} : Range{0, 0};
  }

  HK_DEVICE bool key(int index) const { return !keys_ || (index < S_ && keys_[index] != 0); }

  // First and last row that the band lets see one of the keys [first, last), or all of them.
  HK_DEVICE Range rows_of_any(int first, int last) const {
    return {clamp(first - mask_.band_hi + 1, T_), clamp(last - mask_.band_lo, T_)};
  }
  HK_DEVICE Range rows_of_all(int first, int last) const {
    return {clamp(last - mask_.band_hi, T_), clamp(first - mask_.band_lo + 1, T_)};
  }

 private:
  HK_DEVICE static int clamp(int64_t value, int most) {
    return static_cast<int>(value < 0 ? 0 : value > most ? most : value);
  }

  const MaskParams& mask_;
  int h_, T_, S_;
  const int32_t *k_lo_, *k_hi_;
  const uint8_t* keys_;
};

// The minimum of each of four numbers over the block; `scratch` has four ints per warp. All threads take part; there is
// a barrier before the first write and after the last read.
template <int kThreads>
HK_DEVICE void least_of_block(int (&values)[4], int* scratch) {
  constexpr int kWarps = kThreads / kWarp;
  HK_UNROLL
  for (int i = 0; i < 4; ++i) {
    HK_UNROLL
    for (int step = kWarp / 2; step; step /= 2) values[i] = min_of(values[i], shuffle_xor(values[i], step));
  }
  sync_block();
  if (lane() == 0) {
    HK_UNROLL
    for (int i = 0; i < 4; ++i) scratch[warp() * 4 + i] = values[i];
  }
  sync_block();
  HK_UNROLL
  for (int i = 0; i < 4; ++i)
    for (int w = 0; w < kWarps; ++w) values[i] = min_of(values[i], scratch[w * 4 + i]);
  sync_block();
}

// Tiles [full_start, full_end) are full, those of [start, full_start), [full_end, end) and [0, front) partial.
class TileList {
 public:
  HK_DEVICE TileList(int start, int full_start, int full_end, int end, int front = 0)
      : start_(min_of(start, end)),
        full_start_(min_of(max_of(full_start, start_), end)),
        full_end_(max_of(min_of(full_end, end), full_start_)),
        end_(end),
        front_(min_of(front, start_)) {}

  // Share `split` of `splits`: consecutive tiles, the same number in each, fewer or none in the last. The tiles of
  // first keys are in the first share.
  HK_DEVICE TileList share(int split, int splits) const {
    const int each = static_cast<int>(ceil_div(end_ - start_, splits));
    const int first = min_of(start_ + split * each, end_);
    return {first, full_start_, full_end_, min_of(first + each, end_), split ? 0 : front_};
  }

  HK_DEVICE int count() const { return end_ - start_ + front_; }
  HK_DEVICE bool is_full(int index) const { return index < full_end_ - full_start_; }
  HK_DEVICE int operator[](int index) const {
    const int full = full_end_ - full_start_, before = full_start_ - start_;
    if (index < full) return full_start_ + index;
    if (index - full < before) return start_ + index - full;
    const int number = full_end_ + index - full - before;
    return number < end_ ? number : number - end_;
  }

 private:
  int start_, full_start_, full_end_, end_, front_;
};

// The tiles of `kBlockN` keys that kBlockM rows see: row i has range_of(i) if there(i), and before it at most the first
// `front` keys. Rows beyond the last one are not stored, so they need no mask.
template <int kThreads, int kBlockM, int kBlockN, typename There, typename RangeOf>
HK_DEVICE TileList tiles_of_ranges(const Visible& visible, There&& there, RangeOf&& range_of, int front, int* scratch) {
  // least lo and -hi of rows that see, -lo and hi of rows that are there
  int least[4] = {INT_MAX, 0, 0, INT_MAX};
  HK_ROLLED
  for (int i = thread_index(); i < kBlockM && there(i); i += kThreads) {
    const Range range = range_of(i);
    if (!range.empty()) least[0] = min_of(least[0], range.lo);
    least[1] = min_of(least[1], -range.hi);
    least[2] = min_of(least[2], -range.lo);
    least[3] = min_of(least[3], range.hi);
  }
  least_of_block<kThreads>(least, scratch);
  const int start = least[0] / kBlockN, end = ceil_div(-least[1], kBlockN);
  const int full_start = ceil_div(-least[2], kBlockN);
  int full_end = least[3] / kBlockN;
  if (visible.hides_keys()) {  // full tiles end at the first hidden key
    int hole[4] = {min_of(full_end, end) * kBlockN, 0, 0, 0};
    const int stop = hole[0];
    HK_UNROLL_BY(4)
    for (int key = full_start * kBlockN + thread_index(); key < stop; key += kThreads)
      if (!visible.key(key)) hole[0] = min_of(hole[0], key);
    least_of_block<kThreads>(hole, scratch);
    full_end = hole[0] / kBlockN;
  }
  const int in_front = ceil_div(front, kBlockN);
  return {start, full_start, full_end, end, in_front};
}

// The same of rows `first_row` to `first_row + kBlockM - 1` of a head.
template <int kThreads, int kBlockM, int kBlockN>
HK_DEVICE TileList tiles_seen(const Visible& visible, int first_row, int* scratch) {
  return tiles_of_ranges<kThreads, kBlockM, kBlockN>(
      visible, [&](int i) { return first_row + i < visible.T(); }, [&](int i) { return visible.range(first_row + i); },
      visible.front(), scratch);
}

// The tiles of `kBlockM` query rows that see keys `first_key` to `first_key + kBlockN - 1`. With k_lo, all rows between
// the first and the last that see every key must see every key too, else all tiles are partial.
template <int kThreads, int kBlockM, int kBlockN>
HK_DEVICE TileList tiles_that_see(const Visible& visible, int first_key, int* scratch) {
  const int last_key = min_of(first_key + kBlockN, visible.S());
  Range any = visible.rows_of_any(first_key, last_key);
  Range all = visible.rows_of_all(first_key, last_key);
  bool whole = true;
  if (visible.by_data()) {
    const int front = visible.front();
    int least[4] = {INT_MAX, 0, INT_MAX, 0}, count = 0;
    HK_UNROLL_BY(4)
    for (int row = thread_index(); row < visible.T(); row += kThreads) {
      const Range range = visible.range(row);
      if ((range.lo < last_key || first_key < front) && range.hi > first_key) {
        least[0] = min_of(least[0], row);
        least[1] = min_of(least[1], -row - 1);
      }
      if ((range.lo <= first_key || last_key <= front) && range.hi >= last_key) {
        least[2] = min_of(least[2], row);
        least[3] = min_of(least[3], -row - 1);
        ++count;
      }
    }
    least_of_block<kThreads>(least, scratch);
    any = {least[0], -least[1]};
    all = {least[2], -least[3]};
    // If there is a gap between full rows, a thread counts fewer of its rows than expected.
    int expected = 0;
    HK_ROLLED
    for (int row = thread_index(); row < all.hi; row += kThreads) expected += row >= all.lo;
    whole = !any_in_block(count != expected);
  }
  if (visible.hides_keys()) {
    bool hidden = false;
    HK_ROLLED
    for (int key = first_key + thread_index(); key < last_key; key += kThreads) hidden |= !visible.key(key);
    whole = !any_in_block(hidden) && whole;
  }
  const int end = any.empty() ? 0 : ceil_div(any.hi, kBlockM);
  const int full_end = whole && !all.empty() ? all.hi / kBlockM : 0;
  const int full_start = all.empty() ? 0 : ceil_div(all.lo, kBlockM);
  return {any.empty() ? 0 : any.lo / kBlockM, full_start, full_end, end};
}

}  // namespace hk::cuda
