// Groups query tiles that share their keys into work items.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/visible.h"

namespace hk::HK_LEVEL {

// How many query tiles of `bytes` stay in the L2 cache while the keys are processed (heuristic: half of 1 MiB, a common
// size per core).
inline int64_t tiles_in_cache(int64_t bytes) { return std::max<int64_t>(1, (int64_t{512} << 10) / bytes); }

// Work items per thread, to balance the load (heuristic).
constexpr int64_t kItemsPerThread = 8;

struct TilePlace {
  int64_t b, h, first_row;
};

// All query tiles of an operator, divided into work items. Tiles that read the same keys are consecutive: those of one
// head, then those of the next head that shares its keys. Later rows come first, since a causal mask leaves them the
// most keys.
struct WorkItems {
  int64_t H, query_tiles;
  int64_t key_heads;   // of the whole batch
  int64_t tiles_each;  // query tiles that share the keys of one key head
  int64_t parts;       // work items of one key head
  int64_t size;        // query tiles per work item; the last item of a key head may have fewer

  // `op` has B, H, `query_tiles` and `heads_per_key`. An item holds at most `most` tiles, fewer if there would
  // otherwise be less than `wanted` items.
  template <typename Operator>
  WorkItems(const Operator& op, int64_t most, int64_t wanted)
      : H(op.H),
        query_tiles(op.query_tiles),
        key_heads(op.B * op.H / op.heads_per_key),
        tiles_each(op.H ? op.query_tiles * op.heads_per_key : 0) {
    parts = ceil_div(tiles_each, std::clamp<int64_t>(key_heads * tiles_each / wanted, 1, most));
    size = ceil_div(tiles_each, std::max<int64_t>(1, parts));
  }

  int64_t count() const { return key_heads * parts; }

  // The query tiles of an item, by their numbers.
  Range tiles(int64_t item) const {
    const int64_t start = item / parts * tiles_each, part = item % parts;
    return {start + part * size, start + std::min(tiles_each, (part + 1) * size)};
  }

  TilePlace place(int64_t tile) const {
    return {tile / (query_tiles * H), tile / query_tiles % H, (query_tiles - 1 - tile % query_tiles) * BLOCK_M};
  }
};

}  // namespace hk::HK_LEVEL
