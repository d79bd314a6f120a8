// Tiles of rows in shared memory, and how they are copied there from global memory.
//
// A row is padded by 16 bytes, so that the 8 rows of a matrix are in 8 different groups of four banks. Products in tf32
// read single words of rows, which are then in different banks too. Rows and columns that do not exist are 0 in a tile.
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
// A loop that is not unrolled: for code that does not run for every tile.
#define HK_ROLLED HK_UNROLL_BY(1)

namespace hk::cuda {

HK_DEVICE int lane() { return thread_index() % kWarp; }
HK_DEVICE int warp() { return thread_index() / kWarp; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

HK_DEVICE bool is_finite(float value) { return value - value == 0.0f; }

// A barrier of the block. With kVotes, returns whether any thread votes, otherwise false.
template <bool kVotes>
HK_DEVICE bool sync_block_any([[maybe_unused]] bool vote) {
  if constexpr (kVotes) return any_in_block(vote);
  sync_block();
  return false;
}

template <typename T, int kRowCount, int kColumnCount>
struct Tile {
  using Element = T;
  static constexpr int kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kStride = kColumns + 16 / static_cast<int>(sizeof(T));
  static constexpr int kBytes = kRows * kStride * static_cast<int>(sizeof(T));
  static_assert(kStride * sizeof(T) / 16 % 2 == 1, "rows of a matrix share banks");
  T* data;

  HK_DEVICE T* at(int row, int column) const { return data + row * kStride + column; }
};

// A buffer in the shared memory of a block.
template <typename T>
struct Buffer {
  int offset;  // in bytes

  HK_DEVICE operator T*() const { return reinterpret_cast<T*>(shared_memory() + offset); }
  HK_DEVICE T* operator->() const { return *this; }
};

// Consecutive tiles: one is read while the rows of the next arrive.
template <typename AnyTile>
struct Ring {
  Buffer<typename AnyTile::Element> first;

  HK_DEVICE AnyTile operator[](int index) const { return {first + index * AnyTile::kRows * AnyTile::kStride}; }
};

// Allocates the block's shared memory buffer by buffer: the base of the struct `Memory` of a kernel, from which the
// host takes the number of bytes and the device the buffers.
class SharedMemory {
 public:
  template <typename AnyTile>
  constexpr Ring<AnyTile> tiles(int count = 1) {
    return {take<typename AnyTile::Element>(count * AnyTile::kRows * AnyTile::kStride)};
  }

  template <typename T>
  constexpr Buffer<T> take(int count = 1) {
    const int offset = bytes_;
    bytes_ += (count * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
    return {offset};
  }

  constexpr int bytes() const { return bytes_; }

 private:
  int bytes_ = 0;
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
  return {first, stride, static_cast<int>(t.size[last - 1]), static_cast<int>(t.size[last]), aligned};
}

// The elements of 16 bytes.
template <typename T>
struct alignas(16) Unit {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};

// Loads the unit at element `column` of a row; elements beyond the row are 0.
template <typename T>
HK_DEVICE Unit<T> load_unit(const Rows<T>& rows, int row, int column) {
  const T* const from = rows.row(row) + column;
  if (rows.aligned && column + Unit<T>::kCount <= rows.width) return *reinterpret_cast<const Unit<T>*>(from);
  Unit<T> unit;
  HK_UNROLL
  for (int j = 0; j < Unit<T>::kCount; ++j) unit.values[j] = column + j < rows.width ? from[j] : T{};
  return unit;
}

// Stores the floats value(0), value(1), ... of a unit as T at element `column` of a row, up to the end of the row.
template <typename T, typename Value>
HK_DEVICE void store_unit(const Rows<T>& rows, int row, int column, Value&& value) {
  uint32_t words[4];
  HK_UNROLL
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(T) == 4)
      words[w] = float_bits(value(w));
    else
      words[w] = pack<T>(value(2 * w), value(2 * w + 1));
  }
  T* const to = rows.row(row) + column;
  if (rows.aligned && column + Unit<T>::kCount <= rows.width) return store_words(to, words);
  Unit<T> unit;
  std::memcpy(&unit, words, sizeof unit);
  HK_UNROLL
  for (int j = 0; j < Unit<T>::kCount; ++j)
    if (column + j < rows.width) to[j] = unit.values[j];
}

// Stores `count` rows of a tile of floats as T, each times factor(row): to the rows from `first_row` on, from column
// `first_column` up to their end. All lanes of a warp take part.
template <typename T, int kRows, int kColumns, typename Factor>
HK_DEVICE void store_tile(const Tile<float, kRows, kColumns>& tile, const Rows<T>& rows, int first_row,
                          int first_column, int count, Factor&& factor) {
  constexpr int kCount = Unit<T>::kCount, kUnits = kColumns / kCount;
  HK_ROLLED
  for (int i = lane(); i < count * kUnits; i += kWarp) {
    const int row = i / kUnits, from = i % kUnits * kCount;
    store_unit(rows, first_row + row, first_column + from,
               [&](int j) { return *tile.at(row, from + j) * factor(row); });
  }
}

// The units of a tile that a thread copies, and that only it reads until a barrier: those of some columns. The number
// of threads per row is its number of units, rounded up to a power of two.
template <int kThreads, typename AnyTile>
struct OwnUnits {
  using T = typename AnyTile::Element;
  static constexpr int kUnit = Unit<T>::kCount, kUnits = AnyTile::kColumns / kUnit;

  static constexpr int across() {
    int threads = 1;
    while (threads < kUnits && threads < kThreads) threads *= 2;
    return threads;
  }
  static constexpr int kAcross = across(), kRowStep = kThreads / kAcross;

  HK_DEVICE static int first_row() { return index() / kAcross; }

  // Calls f(column) with the first element of each of this thread's columns of units.
  template <typename F>
  HK_DEVICE static void each_column(F&& f) {
    HK_UNROLL
    for (int first = 0; first < kUnits; first += kAcross) {
      const int unit = first + index() % kAcross;
      if (kUnits % kAcross == 0 || unit < kUnits) f(unit * kUnit);
    }
  }

 private:
  HK_DEVICE static unsigned index() { return static_cast<unsigned>(thread_index()); }
};

// Starts to copy this thread's units of a column of a tile: of the rows from `first` on, from their element `feature`.
// Elements beyond the rows are 0. The copies are complete after this thread's wait for its copies.
template <int kThreads, typename T, int kRows, int kColumns>
HK_DEVICE void copy_column(const Tile<T, kRows, kColumns>& tile, int column, const Rows<T>& rows, int first,
                           int feature) {
  using Own = OwnUnits<kThreads, Tile<T, kRows, kColumns>>;
  const int row = Own::first_row(), there = rows.length - first - row;
  const int left = max_of(0, min_of(rows.width - feature, Own::kUnit));
  const T* from = rows.row(first + row) + feature;
  T* const to = tile.at(row, column);
  const int64_t step = Own::kRowStep * rows.stride;
  const auto is_own = [&](int i) { return kRows % Own::kRowStep == 0 || row + i < kRows; };
  if (rows.aligned) {
    const int bytes = left * static_cast<int>(sizeof(T));
    HK_UNROLL
    for (int i = 0; i < kRows; i += Own::kRowStep, from += step)
      if (is_own(i)) copy_async(to + i * tile.kStride, from, i < there ? bytes : 0);
    return;
  }
  HK_ROLLED
  for (int i = 0; i < kRows; i += Own::kRowStep, from += step) {
    Unit<T> unit;
    HK_UNROLL
    for (int j = 0; j < Own::kUnit; ++j) unit.values[j] = i < there && j < left ? from[j] : T{};
    if (is_own(i)) *reinterpret_cast<Unit<T>*>(to + i * tile.kStride) = unit;
  }
}

// Starts to copy the rows from `first` on into a tile, with all threads of the block.
template <int kThreads, typename T, int kRows, int kColumns>
HK_DEVICE void copy_rows(const Tile<T, kRows, kColumns>& tile, const Rows<T>& rows, int first) {
  OwnUnits<kThreads, Tile<T, kRows, kColumns>>::each_column(
      [&](int column) { copy_column<kThreads>(tile, column, rows, first, column); });
}

// Replaces numbers of a tile that are not finite by 0, since hidden ones have weight 0 in a product, and 0 * nan would
// reach every row. Returns false if all are finite. Otherwise `flags`, if it is given, says for every row whether it
// had such numbers. All threads of the block take part, after the tile has landed.
template <int kThreads, typename T, int kRows, int kColumns>
HK_DEVICE bool clean(const Tile<T, kRows, kColumns>& tile, bool* flags = nullptr) {
  constexpr int kCount = Unit<T>::kCount, kUnits = kColumns / kCount;
  bool found = false;
  HK_ROLLED
  for (int i = thread_index(); i < kRows * kUnits; i += kThreads) {
    const Unit<T> unit = *reinterpret_cast<const Unit<T>*>(tile.at(i / kUnits, i % kUnits * kCount));
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

// Sets the rows of a tile that are not `kept` to 0.
template <int kThreads, typename T, int kRows, int kColumns>
HK_DEVICE void keep_rows(const Tile<T, kRows, kColumns>& tile, const bool* kept) {
  HK_ROLLED
  for (int i = thread_index(); i < kRows * kColumns; i += kThreads)
    if (!kept[i / kColumns]) *tile.at(i / kColumns, i % kColumns) = T{};
}

}  // namespace hk::cuda
