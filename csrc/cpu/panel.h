// Keys or values of one window of a head, as the products read them.
#pragma once

#include <vector>

#include "cpu/operand.h"
#include "cpu/workspace.h"

namespace hk::HK_LEVEL {

// Rows of a matrix as the operand of a sum over them: [columns][first + rows]. Nonfinite rows are left out, since a
// hidden row has weight 0 but 0 * NaN is not 0.
template <typename Operand>
struct Summands {
  Left<Operand, kNumbers<Operand> == 1> matrix;  // pairs run along the sum
  int64_t first;                                 // rows that come before: 0 or 1
  int64_t steps;                                 // of `matrix` that can be read, finite past the rows
  const std::vector<int64_t>* aside;             // rows of the window that were left out
};

// Which rows a panel holds: the data and the stride of their tensor, and the window. The address of the first row does
// not identify them: if rows overlap or the stride is 0, windows of other keys may start at the same address.
struct Held {
  const char* data = nullptr;
  int64_t stride = 0, begin = 0, end = 0;

  bool operator==(const Held& other) const {
    return data == other.data && stride == other.stride && begin == other.begin && end == other.end;
  }

  // Records these rows as held; returns whether they already were.
  bool hold(const Rows& source, const KeySpan& window) {
    const Held now{source.data, source.stride, window.begin, window.end};
    const bool same = *this == now;
    *this = now;
    return same;
  }
};

// A window of up to `keys` rows in Real. Rows that several query tiles read are copied once, next to each other (rows
// in the projections' layout [B, T, H, D] are a page apart, and reading them there costs more than the copy); rows of
// another dtype are widened; others are read in place.
template <typename Real>
class Panel {
 public:
  // `shared`: more than one query tile reads a window.
  Panel(Workspace& workspace, int64_t width, bool shared, int64_t keys = BLOCK_N)
      : buffer_(workspace.take<Real>(keys * row_stride<Real>(width))),
        finite_(workspace.take<Real>(keys * row_stride<Real>(width))),
        stride_(row_stride<Real>(width)),
        width_(width),
        shared_(shared) {}

  // Called where other rows are in the place of those of an earlier window.
  void forget() { held_ = {}; }

  // How many rows products may read from the first key of a tile on.
  static int64_t padded(const KeySpan& tile) { return tile.count(); }

  // Rows [tile.begin, tile.end), which are in [window.begin, window.end).
  Left<Real, false> rows(const Rows& source, const KeySpan& window, const KeySpan& tile) {
    const bool same = source.dtype == kDTypeOf<Real>;
    if (same && (!shared_ || source.stride == width_)) {
      for (int64_t r = tile.begin; r < tile.end; ++r) prefetch_next_head<false>(source, r, width_);
      return rows_of(reinterpret_cast<const Real*>(source.at(tile.begin)), source.stride);
    }
    if (!held_.hold(source, window))
      for (int64_t r = 0; r < window.count(); ++r) read_row(source, window.begin + r, width_, buffer_ + r * stride_);
    return rows_of<Real>(buffer_ + (tile.begin - window.begin) * stride_, stride_);
  }

  // The same rows as summands, limited to `columns`. A full tile keeps its nonfinite rows, since all of it is visible.
  Summands<Real> summands(const Rows& source, const KeySpan& window, const KeySpan& tile, Range columns) {
    Left<Real, false> matrix = rows(source, window, tile);
    matrix.data += columns.begin;
    const int64_t width = columns.end - columns.begin;
    aside_.clear();
    if (!tile.full && has_nonfinite(matrix.data, tile.count(), width, matrix.stride)) {
      for (int64_t n = 0; n < tile.count(); ++n) {
        const Real* row = matrix.data + n * matrix.stride;
        if (has_nonfinite(row, 1, width, 0)) {
          aside_.push_back(tile.begin + n);
          std::memset(finite_ + n * stride_, 0, width * sizeof(Real));
        } else {
          std::memcpy(finite_ + n * stride_, row, width * sizeof(Real));
        }
      }
      matrix = {finite_, stride_};
    }
    return {columns_of(matrix.data, matrix.stride), 0, tile.count(), &aside_};
  }

 private:
  Real* buffer_;  // [keys][stride_]
  Real* finite_;  // [keys][stride_] without NaN and infinity
  int64_t stride_, width_;
  bool shared_;
  Held held_{};  // in the buffer
  std::vector<int64_t> aside_;
};

// A window of bfloat16 rows in pairs, along the rows and, on demand, transposed.
template <>
class Panel<Pair> {
 public:
  Panel(Workspace& workspace, int64_t width, bool, int64_t keys = BLOCK_N)
      : rows_(workspace.take<Pair>(keys * stride(width))),
        transposed_(workspace.take<Pair>(packed<Pair>(width) * keys)),
        scratch_(workspace.take<Pair>(packed<Pair>(width) * keys)),
        half_(keys / 2),
        width_(width) {}

  void forget() { held_ = {}; }

  // With AMX in whole tiles, also of rows that fill a window up. They depend on the keys alone: tiles and vectors add
  // in another order, and `window` depends on the tiles that share it.
  static int64_t padded(const KeySpan& tile) {
    return (kTiled<Pair> ? round_up(tile.end, kProductUnit<Pair>) : tile.end) - tile.begin;
  }

  Left<Pair, false> rows(const Rows& source, const KeySpan& window, const KeySpan& tile) {
    if (!held_.hold(source, window)) {
      const bool contiguous = source.stride == width_;
      for (int64_t r = 0; r < window.count(); ++r) {
        prefetch_next_head<false>(source, window.begin + r, width_);
        // The next window arrives from memory while tiles read this one.
        const char* next = source.at(window.end + r);
        for (int64_t at = 0; contiguous && at < 2 * width_; at += 64) __builtin_prefetch(next + at, 0, 2);
        copy_words(reinterpret_cast<const BFloat16*>(source.at(window.begin + r)), width_, rows_ + r * stride(width_));
      }
      const int64_t rest = filled(window) - window.count();
      std::memset(rows_ + window.count() * stride(width_), 0, sizeof *rows_ * rest * stride(width_));
      turned_ = false;
    }
    return rows_of<Pair>(rows_ + (tile.begin - window.begin) * stride(width_), stride(width_));
  }

  Summands<Pair> summands(const Rows& source, const KeySpan& window, const KeySpan& tile, Range columns) {
    rows(source, window, tile);
    if (!turned_) transpose_window(window);
    turned_ = true;
    const int64_t offset = tile.begin - window.begin, first = offset % 2;
    const int64_t steps = ceil_div(padded({tile.begin - first, tile.end}), 2);
    return {rows_of(transposed_ + columns.begin * half_ + offset / 2, half_), first, steps, &aside_};
  }

 private:
  Pair* rows_;        // [keys][stride(width_)]
  Pair* transposed_;  // [width_][half_]
  Pair* scratch_;     // [width_ / 2][keys]
  int64_t half_, width_;
  Held held_{};
  bool turned_ = false;  // `transposed_` holds the window
  std::vector<int64_t> aside_;

  static int64_t stride(int64_t width) { return packed<Pair>(width); }
  // Rows of a window, with rows of 0 that fill it up.
  static int64_t filled(const KeySpan& window) { return round_up(padded(window), 2 * kLanes<Pair>); }

  void transpose_window(const KeySpan& window) {
    transpose_pairs(rows_, stride(width_), transposed_, half_, filled(window), 2 * packed<Pair>(width_), scratch_);
    aside_.clear();
    for (int64_t r = 0; r < window.count(); ++r) {
      if (all_finite(rows_ + r * stride(width_), packed<Pair>(width_))) continue;
      aside_.push_back(window.begin + r);
      const uint32_t others = r % 2 ? 0x0000ffffu : 0xffff0000u;
      for (int64_t w = 0; w < width_; ++w) transposed_[w * half_ + r / 2].bits &= others;
    }
  }
};

}  // namespace hk::HK_LEVEL
