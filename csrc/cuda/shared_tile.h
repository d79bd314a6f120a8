// Tiles of rows in shared memory, and their way there from global memory.
//
// A row is padded by 16 bytes, so that the 8 rows of a matrix are in 8 different groups of banks.
// What is not there, rows and columns, is 0 in a tile.
#pragma once

#include "common/params.h"
#include "cuda/hardware.h"

#ifdef __CUDACC__
#define HK_PRAGMA(x) _Pragma(#x)
#define HK_UNROLL HK_PRAGMA(unroll)
#define HK_UNROLL_BY(n) HK_PRAGMA(unroll n)
#else
#define HK_UNROLL
#define HK_UNROLL_BY(n)
#endif
// A loop that is short as code: outside of what runs for every tile.
#define HK_ROLLED HK_UNROLL_BY(1)

namespace hk::cuda {

HK_DEVICE int lane() { return thread_index() % kWarp; }
HK_DEVICE int warp() { return thread_index() / kWarp; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

HK_DEVICE bool is_finite(float value) { return value - value == 0.0f; }

template <typename T, int kRowCount, int kColumnCount>
struct Tile {
  using Element = T;
  static constexpr int kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kStride = kColumns + 16 / static_cast<int>(sizeof(T));
  static constexpr int kBytes = kRows * kStride * static_cast<int>(sizeof(T));
  T* data;

  HK_DEVICE T* at(int row, int column) const { return data + row * kStride + column; }
};

// Tiles one behind the other: of which one is computed with while the next one's rows arrive.
template <typename AnyTile>
struct Ring {
  AnyTile first;

  HK_DEVICE AnyTile operator[](int index) const {
    return {first.data + index * AnyTile::kRows * AnyTile::kStride};
  }
};

// Gives out the block's shared memory buffer by buffer; a kernel states the sum of them.
class SharedMemory {
 public:
  HK_DEVICE SharedMemory() : next_(shared_memory()) {}

  template <typename AnyTile>
  HK_DEVICE AnyTile tile() {
    return ring<AnyTile>(1).first;
  }

  template <typename AnyTile>
  HK_DEVICE Ring<AnyTile> ring(int count) {
    return {{take<typename AnyTile::Element>(count * AnyTile::kRows * AnyTile::kStride)}};
  }

  template <typename T>
  HK_DEVICE T* take(int count) {
    T* result = reinterpret_cast<T*>(next_);
    next_ += (count * sizeof(T) + 15) / 16 * 16;
    return result;
  }

 private:
  char* next_;
};

// The rows of a head, or those that all heads share, in global memory.
template <typename T>
struct Rows {
  T* first;
  int64_t stride;
  int length, width;
  bool aligned;  // every row starts at a multiple of 16 bytes

  HK_DEVICE T* row(int64_t index) const { return first + index * stride; }
};

// `t` is [B, heads, length, width], or [B, length, width] (then `head` is not read).
template <typename T>
HK_DEVICE Rows<T> rows_of(const Tensor& t, int b, int head) {
  const int last = t.rank - 1;
  int64_t offset = b * t.stride[0];
  if (t.rank == 4) offset += head * t.stride[1];
  T* first = static_cast<T*>(t.data) + offset;
  const int64_t stride = t.stride[last - 1];
  const bool aligned = (reinterpret_cast<uintptr_t>(first) | stride * sizeof(T)) % 16 == 0;
  return {first, stride, static_cast<int>(t.size[last - 1]), static_cast<int>(t.size[last]),
          aligned};
}

// The elements of 16 bytes. Copies of aligned units compile to one instruction.
template <typename T>
struct alignas(16) Unit {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};

// Copies the first `left` elements of a unit, and 0 behind them. It lands at the wait for this
// thread's copies.
template <typename T>
HK_DEVICE void copy_unit(T* to, const T* from, int left, bool aligned) {
  constexpr int kCount = Unit<T>::kCount;
  const int count = left < 0 ? 0 : left < kCount ? left : kCount;
  if (aligned) {
    copy_async(to, from, count * static_cast<int>(sizeof(T)));
  } else {
    Unit<T> unit;
    HK_UNROLL
    for (int i = 0; i < kCount; ++i) unit.values[i] = i < count ? from[i] : T{};
    *reinterpret_cast<Unit<T>*>(to) = unit;
  }
}

// Stores a unit from `column` on of a row, as far as the row goes.
template <typename T>
HK_DEVICE void store_unit(const Rows<T>& rows, int row, int column, const Unit<T>& unit) {
  T* const to = rows.row(row) + column;
  if (rows.aligned && column + Unit<T>::kCount <= rows.width) {
    *reinterpret_cast<Unit<T>*>(to) = unit;
    return;
  }
  HK_UNROLL
  for (int i = 0; i < Unit<T>::kCount; ++i)
    if (column + i < rows.width) to[i] = unit.values[i];
}

// Starts to copy rows `first` and on into a tile, with all threads of the block.
template <int kThreads, typename T, int kRows, int kColumns>
HK_DEVICE void copy_rows(const Tile<T, kRows, kColumns>& tile, const Rows<T>& rows, int first) {
  constexpr int kCount = Unit<T>::kCount, kUnits = kColumns / kCount;
  constexpr int kRowStep = kThreads / kUnits, kUnitStep = kThreads % kUnits;
  int row = thread_index() / kUnits, unit = thread_index() % kUnits;
  const T* from = rows.row(first + row) + unit * kCount;
  HK_ROLLED
  while (row < kRows) {
    const int left = first + row < rows.length ? rows.width - unit * kCount : 0;
    copy_unit(tile.at(row, unit * kCount), from, left, rows.aligned);
    row += kRowStep;
    from += kRowStep * rows.stride;
    if constexpr (kUnitStep != 0) {
      unit += kUnitStep;
      from += kUnitStep * kCount;
      if (unit >= kUnits) {
        ++row;
        unit -= kUnits;
        from += rows.stride - kColumns;
      }
    }
  }
}

// Puts 0 for what is not finite in a tile; false where all is finite. `flags`, where it is given,
// tells of every row whether it held such, but is not written where all is finite. Of a product
// with weights of 0 for what is hidden, 0 * nan would reach every row. All threads of the block
// come here after the tile has landed.
template <int kThreads, typename T, int kRows, int kColumns>
HK_DEVICE bool clean(const Tile<T, kRows, kColumns>& tile, bool* flags = nullptr) {
  constexpr int kCount = Unit<T>::kCount, kUnits = kColumns / kCount;
  bool found = false;
  HK_ROLLED
  for (int i = thread_index(); i < kRows * kUnits; i += kThreads) {
    const Unit<T> unit =
        *reinterpret_cast<const Unit<T>*>(tile.at(i / kUnits, i % kUnits * kCount));
    HK_UNROLL
    for (int j = 0; j < kCount; ++j) found |= !is_finite(to_float(unit.values[j]));
  }
  if (!any_in_block(found)) return false;
  HK_ROLLED
  for (int row = warp(); row < kRows; row += kThreads / kWarp) {
    bool bad = false;
    HK_ROLLED
    for (int column = lane(); column < kColumns; column += kWarp) {
      if (is_finite(to_float(*tile.at(row, column)))) continue;
      *tile.at(row, column) = T{};
      bad = true;
    }
    bad = any_in_warp(bad);
    if (flags && lane() == 0) flags[row] = bad;
  }
  sync_block();
  return true;
}

// Puts 0 into the rows of a tile that are not `kept`.
template <int kThreads, typename T, int kRows, int kColumns>
HK_DEVICE void keep_rows(const Tile<T, kRows, kColumns>& tile, const bool* kept) {
  HK_ROLLED
  for (int i = thread_index(); i < kRows * kColumns; i += kThreads)
    if (!kept[i / kColumns]) *tile.at(i / kColumns, i % kColumns) = T{};
}

}  // namespace hk::cuda
