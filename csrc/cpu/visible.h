// Which keys a tile of query rows may see: the hull of its intervals, the part that all rows see,
// and the holes.
#pragma once

#include <algorithm>
#include <cstring>

#include "common/params.h"
#include "cpu/simd.h"

namespace hk::HK_LEVEL {

constexpr int BLOCK_M =
    64;  // query rows of a tile: four vectors of 16 float lanes, the widest register tile
constexpr int BLOCK_N =
    64;  // keys of a tile: scores [64][64] and one key tile of D = 64 fit the first-level cache

// Rows [first, first + count) of one batch. A row that sees nothing has lo = hi = 0; so have the
// lanes past `count`.
template <typename Real>
struct VisibleRows {
  int64_t first = 0;
  int count = 0;
  int columns = 0;   // lanes worth computing: up to the last row that sees a key, in whole vectors
  bool any = false;  // some row sees some key
  bool all_rows = false;             // every lane of `columns` is a row that sees some key
  int64_t hull_lo = 0, hull_hi = 0;  // keys that some row sees lie in here
  int64_t core_lo = 0, core_hi = 0;  // keys that every row (which sees any) sees, holes aside
  const uint8_t* key_visible = nullptr;
  alignas(64) Int<Real> lo[BLOCK_M];
  alignas(64) Int<Real> hi[BLOCK_M];

  VisibleRows(const MaskParams& mask, int64_t b, int64_t first_row, int64_t T, int64_t S)
      : first(first_row) {
    count = static_cast<int>(std::min<int64_t>(BLOCK_M, T - first_row));
    key_visible = mask.key_visible ? mask.key_visible + b * mask.visible_stride : nullptr;
    const int32_t* k_lo = mask.k_lo ? mask.k_lo + b * mask.interval_stride : nullptr;
    const int32_t* k_hi = mask.k_hi ? mask.k_hi + b * mask.interval_stride : nullptr;
    hull_lo = core_hi = S;
    int rows_that_see = 0;
    for (int m = 0; m < BLOCK_M; ++m) {
      const int64_t i = first + m;
      int64_t low = 0, high = 0;
      if (m < count) {
        low = std::max<int64_t>(0, i + mask.band_lo);
        high = std::min<int64_t>(S, i + mask.band_hi);
        if (k_lo) low = std::max<int64_t>(low, k_lo[i]);
        if (k_hi) high = std::min<int64_t>(high, k_hi[i]);
      }
      if (low >= high) low = high = 0;
      lo[m] = static_cast<Int<Real>>(low);
      hi[m] = static_cast<Int<Real>>(high);
      if (low < high) {
        ++rows_that_see;
        columns = static_cast<int>(round_up(m + 1, kLanes<Real>));
        hull_lo = std::min(hull_lo, low);
        hull_hi = std::max(hull_hi, high);
        core_lo = std::max(core_lo, low);
        core_hi = std::min(core_hi, high);
      }
    }
    any = rows_that_see > 0;
    all_rows = rows_that_see == columns;
  }

  bool sees(int m) const { return lo[m] < hi[m]; }

  bool row_sees_key(int m, int64_t key) const {
    return key >= lo[m] && key < hi[m] && (!key_visible || key_visible[key]);
  }

  // Keys [begin, end) are seen by every row: no mask arithmetic is needed.
  bool full(int64_t begin, int64_t end) const {
    return begin >= core_lo && end <= core_hi &&
           (!key_visible || !std::memchr(key_visible + begin, 0, static_cast<size_t>(end - begin)));
  }

  // No key of [begin, end) is seen by anyone.
  bool hidden(int64_t begin, int64_t end) const {
    return key_visible && !std::memchr(key_visible + begin, 1, static_cast<size_t>(end - begin));
  }

  // Lanes [m, m + lanes) that see the key, as a vector mask.
  IntVec<Real> lanes_that_see(int m, int64_t key) const {
    if (key_visible && !key_visible[key]) return IntVec<Real>{};
    const Int<Real> k = static_cast<Int<Real>>(key);
    return (load_int<Real>(lo + m) <= k) & (load_int<Real>(hi + m) > k);
  }
};

// One tile of keys that is worth computing.
struct KeyTile {
  int64_t begin = 0;
  int64_t end = 0;
  bool full = false;
  int count() const { return static_cast<int>(end - begin); }
};

// Calls body(KeyTile) for every tile of keys in [begin, end) that some row sees, in ascending
// order. Tiles stand on multiples of BLOCK_N whatever the lengths, so that more padding changes no
// sum.
template <typename Real, typename Body>
inline void for_visible_tiles(const VisibleRows<Real>& rows, int64_t begin, int64_t end,
                              Body body) {
  begin = std::max(begin, rows.hull_lo);
  end = std::min(end, rows.hull_hi);
  while (begin < end) {
    const int64_t next = std::min(end, (begin / BLOCK_N + 1) * BLOCK_N);
    if (!rows.hidden(begin, next)) body(KeyTile{begin, next, rows.full(begin, next)});
    begin = next;
  }
}

}  // namespace hk::HK_LEVEL
