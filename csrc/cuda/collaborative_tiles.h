// The sizes of a block of threads of the collaborative kernels; tiles.h has those of the gated ones. The shared width
// is a number of the call, read in steps of kStepWidth features.
#pragma once

#include <string>

#include "cuda/chunks.h"
#include "cuda/launch.h"
#include "cuda/scores.h"
#include "cuda/tiles.h"

namespace hk::cuda {

template <typename T, int kWidth, bool kTerms>
struct CollaborativeForwardSizes {
  static constexpr int kRowBytes = sizeof(T) * kWidth;
  static constexpr int kWarps = 4;
  static constexpr int kGroups = sizeof(T) == 4 || kRowBytes > 256 || kTerms ? 1 : 2;
  static constexpr int kBlockN = kRowBytes > 512 ? 16 : sizeof(T) == 4 || kRowBytes > 128 || kTerms ? 32 : 64;
};

// Owns keys; tiles of kOther query rows. The sums of a slice of dkey and of dvalue stay in registers.
template <typename T, int kWidth>
struct CollaborativeKeysSizes {
  static constexpr int kRowBytes = sizeof(T) * kWidth;
  static constexpr int kWarps = kRowBytes > 512 ? 1 : sizeof(T) == 4 && kWidth > 64 ? 2 : 4;
  static constexpr int kGroups = 1;
  static constexpr int kOther = sizeof(T) == 4 || kWidth > 128 ? 16 : 32;
  static constexpr int kSlice = kRowBytes > 512 ? 32 : kWidth > 128 ? 64 : sizeof(T) == 4 || kWidth > 64 ? 128 : 256;
};

// Owns query rows; tiles of kOther keys. The sum of a slice of a head's dmixed stays in registers.
template <typename T, int kWidth, bool kTerms>
struct CollaborativeQueriesSizes {
  static constexpr int kRowBytes = sizeof(T) * kWidth;
  static constexpr int kWarps = kRowBytes > 512 ? 1 : sizeof(T) == 4 && kWidth > 64 ? 2 : 4;
  static constexpr int kGroups = sizeof(T) == 4 || kWidth > 64 || kTerms ? 1 : 2;
  static constexpr int kOther = sizeof(T) == 4 || kWidth > 128 ? 16 : 32;
  static constexpr int kSlice = 128;
};

// Calls f(width, terms) with constants: one of the widths of Dv, and whether a call has terms.
template <typename T, typename F>
void with_value_width(int64_t Dv, bool terms, F&& f) {
  with_terms(terms, [&](auto there) {
    const auto run = [&](auto width) { f(width, there); };
    if constexpr (there)
      with_narrowest<64, 256>(Dv, run);
    else if constexpr (sizeof(T) == 2)
      with_narrowest<32, 64, 128, 256>(Dv, run);
    else
      with_narrowest<64, 128, 256>(Dv, run);
  });
}

// The tiles of "forward", "keys" or "queries".
template <typename T>
Tiles collaborative_tiles(const std::string& pass, int64_t Dv, bool terms) {
  Tiles tiles{};
  with_value_width<T>(Dv, terms, [&](auto width, auto there) {
    using Keys = CollaborativeKeysSizes<T, width>;
    using Queries = CollaborativeQueriesSizes<T, width, there>;
    using Forward = CollaborativeForwardSizes<T, width, there>;
    if (pass == "forward") tiles = {Forward::kWarps * Forward::kGroups * 16, Forward::kBlockN, 0};
    if (pass == "keys") tiles = {Keys::kOther, Keys::kWarps * Keys::kGroups * 16, Keys::kSlice};
    if (pass == "queries") tiles = {Queries::kWarps * Queries::kGroups * 16, Queries::kOther, Queries::kSlice};
  });
  return tiles;
}

// The number of heads that share a value head.
HK_DEVICE int heads_per_value(const AttentionParams& p) {
  const int Hv = static_cast<int>(p.value.size[1]);
  return Hv ? static_cast<int>(p.mixing.size[0]) / Hv : 1;
}

// The sources of copies of a block that owns query rows. They are in shared memory, as its BlockCoord is, where they
// take no registers between uses.
template <typename T>
struct QuerySources {
  Rows<T> query, key, value;
};

HK_DEVICE Head head_of(const AttentionParams& p, int b, int h) {
  return {b, h, static_cast<int>(p.query.size[1]), static_cast<int>(p.key.size[1])};
}
HK_DEVICE Visible visible_of(const AttentionParams& p, int b, int h) {
  const Head head = head_of(p, b, h);
  return {p.mask, b, h, head.T, head.S};
}

// Features that rows may have on every GPU: with rows that are copied for every tile.
constexpr int64_t kWidestShared = 1024;

// The number of tiles for the features of the rows that a block owns: one per step if they stay on chip for all tiles
// of the other side, else one per stage.
constexpr int owned_tiles(int64_t width, bool kept) { return kept ? ceil_div(static_cast<int>(width), kStepWidth) : 2; }

// Whether the features of the rows that a block owns stay on chip for all tiles of the other side, or are copied again
// for every tile. They stay if two blocks still fit into a multiprocessor, or if only one fits either way.
template <typename Kernel>
bool keeps_rows(int64_t width, int device) {
  const int kept = Kernel::shared_bytes(width, true), copied = Kernel::shared_bytes(width, false);
  if (two_blocks_fit(kept, device)) return true;
  return kept <= shared_memory_limits(device).per_block && !two_blocks_fit(copied, device);
}

}  // namespace hk::cuda
