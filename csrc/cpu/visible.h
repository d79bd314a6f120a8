// The keys visible to a tile of query rows: from intervals, hidden keys (holes) and a dense mask.
#pragma once

#include <algorithm>
#include <cstring>

#include "common/params.h"
#include "cpu/simd.h"

namespace hk::HK_LEVEL {

constexpr int BLOCK_M = 64;  // query rows of a tile: four vectors of 16 float lanes, the widest register tile
// Keys of a window, unless a pass takes more: scores [64][64] and one key tile of D = 64 fit the first-level cache.
constexpr int BLOCK_N = 64;

// Products of a tile leave out blocks of this many keys and rows where intervals hide all of them.
constexpr int kUnit = 16;

// [begin, end): features of a row, or keys or lanes of a tile.
struct Range {
  int64_t begin;
  int64_t end;
  bool operator==(const Range& other) const { return begin == other.begin && end == other.end; }
};

// Keys [begin, end), and whether every row (which sees any) sees all of them.
struct KeySpan {
  int64_t begin = 0;
  int64_t end = 0;
  bool full = false;
  int count() const { return static_cast<int>(end - begin); }
};

// Keys [begin, begin + 64) as bits, the first the lowest: those of [lo, hi), and those before `front` that are below
// hi.
inline uint64_t interval_bits(int64_t lo, int64_t hi, int64_t front, int64_t begin) {
  const auto below = [&](int64_t key) {  // the bits of keys before `key`
    const int64_t n = key - begin;
    return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
  };
  return below(hi) & (~below(lo) | below(front));
}

// The dense mask of one head: one byte per pair, nonzero if visible.
struct DenseMask {
  const uint8_t* data = nullptr;
  int64_t row_stride = 0, key_stride = 0;

  explicit operator bool() const { return data != nullptr; }
  const uint8_t* at(int64_t row, int64_t key) const { return data + row * row_stride + key * key_stride; }

  // Keys [begin, begin + count) of a row as bits, the first the lowest; count is at most 64.
  uint64_t bits(int64_t row, int64_t begin, int count) const {
    const uint8_t* bytes = at(row, begin);
    uint64_t found = 0;
    int n = 0;
    if (key_stride == 1) {
#ifdef __SSE2__
      for (; n + 16 <= count; n += 16) {
        const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + n));
        const int hidden = _mm_movemask_epi8(_mm_cmpeq_epi8(sixteen, _mm_setzero_si128()));
        found |= static_cast<uint64_t>(~hidden & 0xffff) << n;
      }
#endif
      for (; n + 8 <= count; n += 8) {
        uint64_t eight;
        std::memcpy(&eight, bytes + n, sizeof eight);
        // The highest bit of every byte that is not 0, moved to the lowest, then the eight gathered.
        constexpr uint64_t kLow7 = 0x7f7f7f7f7f7f7f7f;
        eight = (((eight & kLow7) + kLow7) | eight) >> 7 & 0x0101010101010101;
        found |= (eight * 0x0102040810204080 >> 56) << n;
      }
    }
    for (; n < count; ++n) found |= static_cast<uint64_t>(bytes[n * key_stride] != 0) << n;
    return found;
  }
};

// Rows [first, first + count) of one head. Row m sees keys of [lo[m], hi[m]), and those of [0, front) that are below
// hi[m]. Rows that see no key and lanes past `count` have lo = hi = 0.
template <typename Real>
struct VisibleRows {
  int64_t first = 0;
  int count = 0;
  int columns = 0;                   // lanes worth computing: up to the last row that sees a key, in whole vectors
  bool any = false;                  // some row sees some key
  bool all_rows = false;             // every lane of `columns` is a row that sees some key
  int64_t hull_lo = 0, hull_hi = 0;  // contains all keys that some row sees, but for [0, front)
  int64_t core_lo = 0, core_hi = 0;  // keys that every row (which sees any) sees, holes aside
  int64_t front = 0;                 // the first keys of the head, at most hull_hi
  const uint8_t* key_visible = nullptr;
  DenseMask dense;
  Range units[BLOCK_M / kUnit];  // contain the keys that some row of a unit sees, likewise
  alignas(64) Int<Real> lo[BLOCK_M];
  alignas(64) Int<Real> hi[BLOCK_M];

  VisibleRows(const MaskParams& mask, int64_t b, int64_t h, int64_t first_row, int64_t T, int64_t S)
      : first(first_row), count(static_cast<int>(std::min<int64_t>(BLOCK_M, T - first_row))) {
    key_visible = mask.key_visible ? mask.key_visible + b * mask.visible_stride : nullptr;
    if (mask.dense)
      dense = {mask.dense + b * mask.dense_stride[0] + h * mask.dense_stride[1], mask.dense_stride[2],
               mask.dense_stride[3]};
    const Int<Real> keys = static_cast<Int<Real>>(S);
    // Plain loops without branches, which the compiler turns into vectors.
    const Int<Real> band_lo = static_cast<Int<Real>>(first + mask.band_lo);
    const Int<Real> band_hi = static_cast<Int<Real>>(first + mask.band_hi);
    for (int m = 0; m < BLOCK_M; ++m) {
      lo[m] = std::max<Int<Real>>(0, band_lo + m);
      hi[m] = std::min<Int<Real>>(keys, band_hi + m);
    }
    if (mask.k_lo) {
      const int64_t at = b * mask.interval_stride + h * mask.interval_head_stride + first;
      const int32_t *k_lo = mask.k_lo + at, *k_hi = mask.k_hi + at;
      for (int m = 0; m < count; ++m) {
        lo[m] = std::max<Int<Real>>(lo[m], k_lo[m]);
        hi[m] = std::min<Int<Real>>(hi[m], k_hi[m]);
      }
    }
    if (mask.first_keys) join_first_keys(mask.first_keys[h * mask.first_stride]);
    Int<Real> hull_begin = keys, hull_end = 0, core_begin = 0, core_end = keys, rows = 0, last = -1;
    for (int m = 0; m < BLOCK_M; ++m) {
      const bool visible = m < count && lo[m] < hi[m];
      lo[m] = visible ? lo[m] : 0;
      hi[m] = visible ? hi[m] : 0;
      hull_begin = std::min(hull_begin, visible ? lo[m] : keys);
      hull_end = std::max(hull_end, hi[m]);
      core_begin = std::max(core_begin, lo[m]);
      core_end = std::min(core_end, visible ? hi[m] : keys);
      rows += visible;
      last = visible ? m : last;
    }
    for (int u = 0; u < BLOCK_M / kUnit; ++u) {
      Int<Real> begin = keys, end = 0;
      for (int m = u * kUnit; m < (u + 1) * kUnit; ++m) {
        begin = std::min(begin, lo[m] < hi[m] ? lo[m] : keys);
        end = std::max(end, hi[m]);
      }
      units[u] = {begin, end};
    }
    hull_lo = hull_begin;
    hull_hi = hull_end;
    core_lo = core_begin;
    core_hi = core_end;
    front = std::min(front, hull_hi);
    columns = static_cast<int>(round_up(last + 1, kLanes<Real>));
    any = rows > 0;
    all_rows = rows == columns;
  }

  bool sees(int m) const { return lo[m] < hi[m]; }

  // x in the lanes [m, m + lanes) of rows that see a key, else 0.
  Vec<Real> seeing(int m, Vec<Real> x) const {
    return load_int<Real>(lo + m) < load_int<Real>(hi + m) ? x : Vec<Real>{};
  }

  bool row_sees_key(int m, int64_t key) const {
    return (key >= lo[m] || key < front) && key < hi[m] && (!key_visible || key_visible[key]) &&
           (!dense || *dense.at(first + m, key));
  }

  // No row sees a key before this one.
  int64_t begin() const { return front > 0 ? 0 : hull_lo; }

  // Whether a row may see one of these keys.
  bool meets(const KeySpan& keys) const {
    return keys.begin < front || std::max(keys.begin, hull_lo) < std::min(keys.end, hull_hi);
  }

  // The visible part of a window; empty if the rows see none of it. `lanes_that_see` is valid for keys of the last part
  // returned.
  KeySpan part(const KeySpan& window) {
    int64_t begin = std::max(window.begin, hull_lo), end = std::min(window.end, hull_hi);
    if (window.begin < front) {
      if (begin >= end) end = std::min(window.end, front);
      begin = window.begin;
    }
    if (begin >= end) return {};
    if (dense) {
      const auto [some, all] = read_bits(begin, static_cast<int>(end - begin));
      return some ? KeySpan{begin, end, all} : KeySpan{};
    }
    bool full = (begin >= core_lo || end <= front) && end <= core_hi;
    if (key_visible) {
      const int64_t seen =
          std::count_if(key_visible + begin, key_visible + end, [](uint8_t visible) { return visible != 0; });
      if (seen == 0) return {};
      full = full && seen == end - begin;
    }
    return {begin, end, full};
  }

  // Calls body(keys, lanes) for runs of keys of a tile, counted from its first, with the lanes that may see some of
  // them; both in steps of `U`, a multiple of kUnit.
  template <int U, typename Body>
  void for_keys(const KeySpan& tile, Body body) const {
    const int64_t count = tile.count();
    if (tile.full || tile.begin < front) return body(Range{0, count}, Range{0, columns});
    const auto lanes_of = [&](int64_t n) {
      Range lanes{columns, 0};
      for (int m = 0; m < columns; m += kUnit) {
        const auto [begin, end] = units[m / kUnit];
        if (std::max(begin, tile.begin + n) >= std::min(end, tile.begin + n + U)) continue;
        lanes.begin = std::min<int64_t>(lanes.begin, m / U * U);
        lanes.end = std::min<int64_t>(columns, m / U * U + U);
      }
      return lanes;
    };
    for (int64_t n = 0, end; n < count; n = end) {
      const Range lanes = lanes_of(n);
      for (end = n + U; end < count && lanes_of(end) == lanes;) end += U;
      if (lanes.begin < lanes.end) body(Range{n, std::min(end, count)}, lanes);
    }
  }

  // The same for runs of all lanes, with the keys that they may see.
  template <int U, typename Body>
  void for_lanes(const KeySpan& tile, Body body) const {
    const int64_t count = tile.count();
    if (tile.full || tile.begin < front) return body(Range{0, columns}, Range{0, count});
    const auto keys_of = [&](int64_t first) {
      Range keys{count, 0};
      for (int64_t m = first; m < std::min<int64_t>(columns, first + U); m += kUnit) {
        const auto [begin, end] = units[m / kUnit];
        keys.begin = std::min(keys.begin, std::max<int64_t>(0, begin - tile.begin) / U * U);
        keys.end = std::max(keys.end, std::min(count, round_up(end - tile.begin, U)));
      }
      return keys.begin < keys.end ? keys : Range{0, 0};
    };
    for (int64_t m = 0, end; m < columns; m = end) {
      const Range keys = keys_of(m);
      for (end = m + U; end < columns && keys_of(end) == keys;) end += U;
      body(Range{m, std::min<int64_t>(end, columns)}, keys);
    }
  }

  // Lanes [m, m + lanes) that see the key, as a vector mask.
  IntVec<Real> lanes_that_see(int m, int64_t key) const {
    if (dense) {
      const int n = static_cast<int>(key - bits_begin);
      return (load_int<Real>(bits[n / kBits] + m) & Int<Real>{1} << n % kBits) != 0;
    }
    if (key_visible && !key_visible[key]) return IntVec<Real>{};
    const Int<Real> k = static_cast<Int<Real>>(key);
    if (key < front) return load_int<Real>(hi + m) > k;
    return (load_int<Real>(lo + m) <= k) & (load_int<Real>(hi + m) > k);
  }

 private:
  static constexpr int kBits = 8 * sizeof(Int<Real>);

  // With a dense mask: bit n % kBits of bits[n / kBits][m] says whether row m sees key bits_begin + n, all masks
  // combined.
  int64_t bits_begin = 0;
  alignas(64) Int<Real> bits[BLOCK_N / kBits][BLOCK_M];

  struct Seen {
    bool some, all;
  };

  // If the first keys reach the interval of a row, or it has none, its interval begins at 0.
  void join_first_keys(int64_t first_keys) {
    front = first_keys;
    const Int<Real> last = static_cast<Int<Real>>(front);
    for (int m = 0; m < BLOCK_M && front > 0; ++m) {
      const bool empty = lo[m] >= hi[m];
      hi[m] = empty ? std::min(hi[m], last) : hi[m];
      lo[m] = empty || lo[m] <= last ? 0 : lo[m];
    }
  }

  // Fills `bits` for keys [begin, begin + count). Returns whether some row sees a key, and whether all rows with a
  // nonempty interval see all keys.
  Seen read_bits(int64_t begin, int count) {
    const uint64_t every = interval_bits(begin, begin + count, 0, begin);
    const uint64_t keys = key_visible ? DenseMask{key_visible, 0, 1}.bits(0, begin, count) : every;
    uint64_t some = 0, all = every;
    bits_begin = begin;
    for (int m = 0; m < columns; ++m) {
      const bool row = m < this->count && sees(m);
      const uint64_t range = row ? interval_bits(lo[m], hi[m], front, begin) & keys : 0;
      const uint64_t seen = range ? dense.bits(first + m, begin, count) & range : 0;
      some |= seen;
      all &= row ? seen : every;
      for (int w = 0; w < BLOCK_N / kBits; ++w) bits[w][m] = static_cast<Int<Real>>(seen >> (w * kBits % 64));
    }
    return {some != 0, all == every};
  }
};

// Calls body(tile, window, keys) for every query tile and window in `range`, window by window in ascending order;
// `keys` is the nonempty part that the tile sees. Windows end at multiples of `width`, so that padding changes no sum.
template <typename QueryTile, typename Body>
inline void for_visible_pairs(QueryTile* tiles, int64_t count, const KeySpan& range, int64_t width, Body body) {
  int64_t begin = range.end, end = range.begin;
  for (int64_t i = 0; i < count; ++i) {
    begin = std::min(begin, std::max(range.begin, tiles[i].visible.begin()));
    end = std::max(end, std::min(range.end, tiles[i].visible.hull_hi));
  }
  begin -= begin % 2;  // pairs of keys are the same whatever the tiles
  while (begin < end) {
    const KeySpan window{begin, std::min(end, (begin / width + 1) * width)};
    for (int64_t i = 0; i < count; ++i) {
      const KeySpan keys = tiles[i].visible.part(window);
      if (keys.begin < keys.end) body(tiles[i], window, keys);
    }
    begin = window.end;
  }
}

}  // namespace hk::HK_LEVEL
