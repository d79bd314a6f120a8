// The work of a block of threads, by its number.
#pragma once

#include "cuda/hardware.h"

namespace hk::cuda {

// A launch has less than 2^31 blocks (check_grid), and a 32-bit division takes a fifth of the time of a 64-bit one.
HK_DEVICE unsigned block_number() { return static_cast<unsigned>(block_index()); }

// Tiles of query rows: heads in order, the last rows of each (the longest under a causal mask) first; the splits of a
// tile's keys are consecutive.
struct HeadTile {
  int split, b, h, H, tile;

  HK_DEVICE HeadTile(int64_t heads, unsigned tiles, int splits = 1) : split(0), H(static_cast<int>(heads)) {
    const unsigned count = static_cast<unsigned>(heads);
    unsigned number = block_number();
    if (splits > 1) {
      split = static_cast<int>(number % static_cast<unsigned>(splits));
      number /= static_cast<unsigned>(splits);
    }
    const unsigned pair = number / tiles;
    b = static_cast<int>(pair / count);
    h = static_cast<int>(pair % count);
    tile = static_cast<int>(tiles - 1 - number % tiles);
  }
};

// Tiles of keys: those of a key head in order, key heads in order, then batches, then splits.
struct KeyHeadTile {
  int split, b, head, tile;

  HK_DEVICE KeyHeadTile(int64_t batches, unsigned heads, unsigned tiles) {
    const unsigned pair = block_number() / tiles, B = static_cast<unsigned>(batches);
    tile = static_cast<int>(block_number() % tiles);
    head = static_cast<int>(pair % heads);
    b = static_cast<int>(pair / heads % B);
    split = static_cast<int>(pair / heads / B);
  }
};

}  // namespace hk::cuda
