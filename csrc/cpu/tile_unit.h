// Products of pairs by a tile unit (AMX): registers of 16 rows of 16 words, and an instruction that
// multiplies two of them. `HK_EMULATE_TILES` replaces the instructions with plain C++, so that the
// loops around them can be tested on any machine.
#pragma once

#include "cpu/pair.h"

#if defined(__AMX_BF16__) || defined(HK_EMULATE_TILES)
#define HK_TILES 1
#else
#define HK_TILES 0
#endif

namespace hk::HK_LEVEL {

constexpr int kTile = 16;  // rows of a tile, and words of a row

constexpr int64_t whole_tiles(int64_t n) { return n / kTile * kTile; }

// Whether a tile unit multiplies these operands.
template <typename Operand>
constexpr bool kTiled = false;

// The steps of keys and query rows in which products leave out what intervals hide (VisibleRows).
template <typename Operand>
constexpr int kProductUnit = kTiled<Operand> ? 2 * kTile : kTile;

// Configures the tiles of this thread while the object lives (one at a time); does nothing for operands without tiles.
template <typename Operand>
struct TileUnit {
  TileUnit() {}  // not trivial: avoids warnings about an unused variable
};

#if HK_TILES

template <>
constexpr bool kTiled<Pair> = true;

#if defined(__AMX_BF16__)

// All eight tiles have the full size. PyTorch's own kernels use them on the same threads, so they
// are configured in every call.
template <>
struct TileUnit<Pair> {
  TileUnit() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int t = 0; t < 8; ++t) shape.row_bytes[t] = 4 * kTile, shape.rows[t] = kTile;
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~TileUnit() { asm volatile("tilerelease"); }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;
};

// The compiler's intrinsics are macros that take no template argument; `stride` counts words.
template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* words, int64_t stride) {
  asm volatile("tileloadd (%0,%1,4), %%tmm%c2" ::"r"(words), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* words, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,4)" ::"r"(words), "r"(stride), "i"(T) : "memory");
}
// C += A B.
template <int C, int A, int B>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

using Tile = uint32_t[kTile][kTile];

inline Tile& tile(int t) {
  thread_local Tile tiles[8];
  return tiles[t];
}

template <int T>
inline void tile_zero() {
  std::memset(tile(T), 0, sizeof tile(T));
}
template <int T>
inline void tile_load(const void* words, int64_t stride) {
  for (int r = 0; r < kTile; ++r) std::memcpy(tile(T)[r], static_cast<const char*>(words) + 4 * r * stride, 4 * kTile);
}
template <int T>
inline void tile_store(void* words, int64_t stride) {
  for (int r = 0; r < kTile; ++r) std::memcpy(static_cast<char*>(words) + 4 * r * stride, tile(T)[r], 4 * kTile);
}
template <int C, int A, int B>
inline void tile_multiply() {
  for (int r = 0; r < kTile; ++r) {
    float sum[kTile];
    std::memcpy(sum, tile(C)[r], sizeof sum);
    for (int k = 0; k < kTile; ++k)
      for (int c = 0; c < kTile; ++c)
        for (int half = 0; half < 2; ++half)
          sum[c] += widen_bfloat(static_cast<uint16_t>(tile(A)[r][k] >> (16 * half))) *
                    widen_bfloat(static_cast<uint16_t>(tile(B)[k][c] >> (16 * half)));
    std::memcpy(tile(C)[r], sum, sizeof sum);
  }
}

#endif

// C[16 R][16 V] (+)= A[16 R][depth] B[depth][16 V], R and V 1 or 2: up to four sums; a tile of A
// is used in V products, a tile of B in R.
template <int R, int V>
inline void multiply_tile_block(const Pair* a, int64_t lda, const Pair* b, int64_t ldb, float* c, int64_t ldc,
                                int64_t depth, bool accumulate) {
  float* const below = c + kTile * ldc;
  const auto start = [&](auto load, auto zero, const float* at) { accumulate ? load(at, ldc) : zero(); };
  start(tile_load<0>, tile_zero<0>, c);
  if constexpr (V == 2) start(tile_load<1>, tile_zero<1>, c + kTile);
  if constexpr (R == 2) start(tile_load<2>, tile_zero<2>, below);
  if constexpr (R == 2 && V == 2) start(tile_load<3>, tile_zero<3>, below + kTile);
  for (int64_t k = 0; k < depth; k += kTile) {
    tile_load<4>(a + k, lda);
    tile_load<6>(b + k * ldb, ldb);
    tile_multiply<0, 4, 6>();
    if constexpr (R == 2) tile_load<5>(a + kTile * lda + k, lda);
    if constexpr (R == 2) tile_multiply<2, 5, 6>();
    if constexpr (V == 2) tile_load<7>(b + k * ldb + kTile, ldb);
    if constexpr (V == 2) tile_multiply<1, 4, 7>();
    if constexpr (R == 2 && V == 2) tile_multiply<3, 5, 7>();
  }
  tile_store<0>(c, ldc);
  if constexpr (V == 2) tile_store<1>(c + kTile, ldc);
  if constexpr (R == 2) tile_store<2>(below, ldc);
  if constexpr (R == 2 && V == 2) tile_store<3>(below + kTile, ldc);
}

// C[rows][columns] (+)= A[rows][depth] B[depth][columns]; all three in whole tiles.
inline void multiply_tiles(int64_t rows, int64_t columns, int64_t depth, const Pair* a, int64_t lda, const Pair* b,
                           int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  for (int64_t column = 0; column < columns;) {
    const bool wide = columns - column > kTile;
    for (int64_t r = 0; r < rows;) {
      const bool high = rows - r > kTile;
      const auto block = high   ? wide ? multiply_tile_block<2, 2> : multiply_tile_block<2, 1>
                         : wide ? multiply_tile_block<1, 2>
                                : multiply_tile_block<1, 1>;
      block(a + r * lda, lda, b + column, ldb, c + r * ldc + column, ldc, depth, accumulate);
      r += high ? 2 * kTile : kTile;
    }
    column += wide ? 2 * kTile : kTile;
  }
}

#endif

}  // namespace hk::HK_LEVEL
