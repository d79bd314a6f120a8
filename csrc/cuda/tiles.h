// The sizes of a block of threads, by kernel, size of an element and width of a head.
//
// Each is the largest whose sums stay in registers (255 per thread; tests bound what is spilled to a few words) and
// whose tiles fit into 99 KiB of shared memory, the least that a GPU from sm_80 on gives to a block (sm_86, sm_89,
// sm_120). The machine code is the same for several GPUs, so the host chooses between sizes by the shared memory of the
// device. Heuristic: nothing here was measured on a GPU.
//
// kGroups is the number of 16-row groups that a warp owns: with two, every load of the other operand is used twice.
#pragma once

#include <string>
#include <type_traits>

#include "cuda/hardware.h"
#include "cuda/kernels.h"

namespace hk::cuda {

// Bytes of shared memory that every GPU gives to a block.
constexpr int kLeastShared = 99 << 10;
// The same for all blocks of a multiprocessor: sm_86, sm_89, sm_120.
constexpr int kLeastOfMultiprocessor = 100 << 10;

// Kernels with terms (scores.h) have one more tile of numbers in shared memory and more arithmetic, so they have fewer
// widths, and a warp owns one group. kSmall is for GPUs where a multiprocessor holds only one block of the other sizes:
// with half the rows, two blocks fit into 100 KiB, and one multiplies while the other waits. FlashAttention-2 has 64 x
// 64 there for causal masks; rows padded by 16 bytes leave 48 keys of width 128.
template <typename T, int kWidth, bool kTerms, bool kSmall>
struct ForwardSizes {
  static constexpr bool kWide = sizeof(T) * kWidth > 256;  // bytes of a row
  static constexpr int kWarps = sizeof(T) * kWidth > 512 && kTerms ? 2 : 4;
  static constexpr int kGroups = sizeof(T) == 4 || kWide || kTerms || kSmall ? 1 : 2;
  static constexpr int kBlockN = sizeof(T) * kWidth > 512 ? 16 : kWide || kTerms ? 32 : kSmall && kWidth > 96 ? 48 : 64;
};

// Whether a kernel exists in small sizes too.
template <typename T, int kWidth, bool kTerms>
constexpr bool kHasSmall = sizeof(T) == 2 && !kTerms && (kWidth == 96 || kWidth == 128);

// For a few query rows, as in decoding: every warp has all kBlockM rows, and kOwn keys of a tile. kBlockM is the least
// number of rows that tensor cores multiply.
template <typename T, int kWidth>
struct DecodeSizes {
  static constexpr int kWarps = sizeof(T) * kWidth > 512 ? 2 : 4;
  static constexpr int kBlockM = 16, kOwn = 16;
};

// For both passes of the backward: a warp owns rows (keys or query rows) and visits tiles of kOther of the other side,
// two of which are in shared memory. Each side has two operands.
template <typename T, int kWidth, bool kTerms>
struct BackwardSizes {
  static constexpr int kRowBytes = sizeof(T) * kWidth;
  static constexpr int kWarps = kRowBytes > 512 ? 1 : kRowBytes > 256 ? 2 : 4;
  static constexpr int kGroups = kRowBytes > 128 || kTerms ? 1 : 2;
  static constexpr int kOther = kRowBytes > 256 ? 16 : 32;
  static constexpr int kAcross = 1;
};

// For the pass by keys if a block may have 163 KiB (sm_80, sm_90 and newer): kAcross warps have the same keys, and each
// has a part of the query rows and of the features. Their probabilities and dscores go through shared memory, so that
// two groups of a warp use every load in every product.
struct WideKeysSizes {
  static constexpr int kWarps = 8, kGroups = 2, kOther = 64, kAcross = 2;
  static constexpr int kOwn = kWarps / kAcross * kGroups * 16;
};

// Whether there is a pass by keys with the wide sizes.
template <typename T, int kWidth, bool kTerms>
constexpr bool kHasWideKeys = sizeof(T) == 2 && !kTerms && kWidth == 128;

// Rows and keys of a block of the gradient of a bias (attention_bias.cu).
constexpr int kBiasTile = 64;

// Calls f with the first of these widths that `width` fits into, else with the last.
template <int kWidth, int... kWider, typename F>
void with_narrowest(int64_t width, F&& f) {
  if constexpr (sizeof...(kWider) > 0) {
    if (width > kWidth) return with_narrowest<kWider...>(width, f);
  }
  f(std::integral_constant<int, kWidth>{});
}

// Calls f with a constant: whether a call has terms.
template <typename F>
void with_terms(bool terms, F&& f) {
  terms ? f(std::true_type{}) : f(std::false_type{});
}

// Calls f(width, terms) with constants: one of the widths of D and Dv, and whether a call has terms. Narrow float heads
// use a wider one: fewer kernels for the dtype that is used least.
template <typename T, typename F>
void with_width(int64_t D, int64_t Dv, bool terms, F&& f) {
  with_terms(terms, [&](auto there) {
    const auto run = [&](auto width) { f(width, there); };
    if constexpr (there && sizeof(T) == 4)
      with_narrowest<64, 256>(D > Dv ? D : Dv, run);
    else if constexpr (sizeof(T) == 2 && !there)
      with_narrowest<32, 64, 96, 128, 256>(D > Dv ? D : Dv, run);
    else
      with_narrowest<64, 128, 256>(D > Dv ? D : Dv, run);
  });
}

// The widths of D and Dv for a few query rows.
template <typename F>
void with_decode_width(int64_t D, int64_t Dv, F&& f) {
  with_narrowest<64, 128, 256>(D > Dv ? D : Dv, f);
}

// The tiles of "decode", "keys" or "queries"; `wide_keys` is runs_wide_keys of the device.
template <typename T>
Tiles gated_tiles(const std::string& pass, int64_t D, int64_t Dv, bool terms, bool wide_keys) {
  Tiles tiles{};
  if (pass == "decode") {
    with_decode_width(D, Dv, [&](auto width) {
      using Sizes = DecodeSizes<T, width>;
      tiles = {Sizes::kBlockM, Sizes::kWarps * Sizes::kOwn, 0};
    });
    return tiles;
  }
  with_width<T>(D, Dv, terms, [&](auto width, auto there) {
    using Sizes = BackwardSizes<T, width, there>;
    constexpr int kOwn = Sizes::kWarps * Sizes::kGroups * 16;
    if (pass == "keys") tiles = {Sizes::kOther, kOwn, 0};
    if (pass == "keys" && kHasWideKeys<T, width, there> && wide_keys)
      tiles = {WideKeysSizes::kOther, WideKeysSizes::kOwn, 0};
    if (pass == "queries") tiles = {kOwn, Sizes::kOther, 0};
  });
  return tiles;
}

}  // namespace hk::cuda
