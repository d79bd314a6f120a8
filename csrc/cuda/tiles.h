// The sizes of a block of threads, by kernel, size of an element and width of a head.
//
// Each is the largest whose sums stay in registers (255 a thread; tests hold what is spilled to
// words) and whose tiles fit into 99 KiB of shared memory, the least that a part of sm_80 and up
// gives to a block (sm_86, sm_89, sm_120). Nothing here was measured on a GPU: heuristic.
//
// kGroups is the number of 16-row groups a warp owns: with two, what is loaded of the other operand
// serves twice. kMinBlocks asks the compiler for so many blocks of registers a multiprocessor.
#pragma once

#include <string>
#include <type_traits>

#include "cuda/hardware.h"
#include "cuda/kernels.h"

namespace hk::cuda {

// Bytes of shared memory that every part gives to a block.
constexpr int kLeastShared = 99 << 10;

template <typename T, int kWidth>
struct ForwardSizes {
  static constexpr bool kWide = sizeof(T) * kWidth > 256;  // bytes of a row
  static constexpr int kWarps = 4;
  static constexpr int kGroups = sizeof(T) == 4 || kWide ? 1 : 2;
  static constexpr int kBlockN = sizeof(T) * kWidth > 512 ? 16 : kWide ? 32 : 64;
  static constexpr int kMinBlocks = 1;
};

// Of both passes of the backward: a warp owns rows (keys or query rows) and goes through tiles of
// kOther of the other side, two of which lie in shared memory. Two operands of each side.
template <typename T, int kWidth>
struct BackwardSizes {
  static constexpr int kRowBytes = sizeof(T) * kWidth;
  static constexpr int kWarps = kRowBytes > 512 ? 1 : kRowBytes > 256 ? 2 : 4;
  static constexpr int kGroups = kRowBytes > 128 ? 1 : 2;
  static constexpr int kOther = kRowBytes > 256 ? 16 : 32;
  static constexpr int kMinBlocks = 1;
};

// f of the narrowest width that a kernel is compiled for and that D and Dv fit into. Narrow heads
// of float take the next wider one: fewer kernels for the dtype that is used least.
template <typename T, typename F>
void with_width(int64_t D, int64_t Dv, F&& f) {
  const int64_t width = D > Dv ? D : Dv;
  if constexpr (sizeof(T) == 2) {
    if (width <= 32) return f(std::integral_constant<int, 32>{});
  }
  if (width <= 64) return f(std::integral_constant<int, 64>{});
  if constexpr (sizeof(T) == 2) {
    if (width <= 96) return f(std::integral_constant<int, 96>{});
  }
  if (width <= 128) return f(std::integral_constant<int, 128>{});
  return f(std::integral_constant<int, 256>{});
}

// Of "keys" or "queries".
template <typename T>
Tiles gated_tiles(const std::string& pass, int64_t D, int64_t Dv) {
  Tiles tiles{};
  with_width<T>(D, Dv, [&](auto width) {
    using Sizes = BackwardSizes<T, width>;
    constexpr int kOwn = Sizes::kWarps * Sizes::kGroups * 16;
    if (pass == "keys") tiles = {Sizes::kOther, kOwn, 0};
    if (pass == "queries") tiles = {kOwn, Sizes::kOther, 0};
  });
  return tiles;
}

}  // namespace hk::cuda
