// Keys or values of one window of a head, as the products read them.
#pragma once

#include "cpu/rows.h"
#include "cpu/visible.h"
#include "cpu/workspace.h"

namespace hk::HK_LEVEL {

// Rows of a matrix in Real: row r at data + r * stride.
template <typename Real>
struct Tile {
  const Real* data;
  int64_t stride;
};

// A window of up to BLOCK_N rows in Real. Rows that several query tiles read are copied next to
// each other once (rows of the projections' layout [B, T, H, D] are a page apart, and reading them
// costs more than the copy); rows of another dtype are widened; others are read in place.
template <typename Real>
class Panel {
 public:
  static int64_t bytes(int64_t width) { return piece<Real>(BLOCK_N * row_stride<Real>(width)); }

  // `shared`: more than one query tile reads a window.
  Panel(Workspace& workspace, int64_t width, bool shared)
      : buffer_(workspace.take<Real>(BLOCK_N * row_stride<Real>(width))),
        stride_(row_stride<Real>(width)),
        width_(width),
        shared_(shared) {}

  // Rows [tile.begin, tile.end), which lie in [window.begin, window.end).
  Tile<Real> rows(const Rows& source, const KeyTile& window, const KeyTile& tile) {
    const bool same = source.dtype == kDTypeOf<Real>;
    if (same && (!shared_ || source.stride == width_))
      return {reinterpret_cast<const Real*>(source.at(tile.begin)), source.stride};
    const char* first = source.at(window.begin);
    if (packed_ != first || packed_count_ != window.count()) {
      for (int64_t r = 0; r < window.count(); ++r)
        read_row(source, window.begin + r, width_, buffer_ + r * stride_);
      packed_ = first;
      packed_count_ = window.count();
    }
    return {buffer_ + (tile.begin - window.begin) * stride_, stride_};
  }

 private:
  Real* buffer_;  // [BLOCK_N][stride_]
  int64_t stride_, width_;
  bool shared_;
  const char* packed_ = nullptr;  // the row that the buffer starts with
  int packed_count_ = 0;
};

}  // namespace hk::HK_LEVEL
