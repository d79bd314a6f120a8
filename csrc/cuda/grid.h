// What a block of threads works on, by its number.
#pragma once

#include "cuda/hardware.h"

namespace hk::cuda {

// Tiles of query rows: heads in order, of each the last rows (the longest of a causal mask) first.
struct HeadTile {
  int b, h, H, tile;

  HK_DEVICE HeadTile(int64_t heads, int tiles) : H(static_cast<int>(heads)) {
    const int64_t pair = block_index() / tiles;
    b = static_cast<int>(pair / H);
    h = static_cast<int>(pair % H);
    tile = tiles - 1 - static_cast<int>(block_index() % tiles);
  }
};

// Tiles of keys: those of a key head in order, key heads in order, then batches, then splits.
struct KeyHeadTile {
  int split, b, head, tile;

  HK_DEVICE KeyHeadTile(int64_t B, int heads, int tiles) {
    const int64_t pair = block_index() / tiles;
    tile = static_cast<int>(block_index() % tiles);
    head = static_cast<int>(pair % heads);
    b = static_cast<int>(pair / heads % B);
    split = static_cast<int>(pair / heads / B);
  }
};

}  // namespace hk::cuda
