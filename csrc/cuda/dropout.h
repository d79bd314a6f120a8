// Dropout of probabilities: Philox of the seed and the element (b, h, row, key) decides.
#pragma once

#include "common/params.h"
#include "common/philox.h"
#include "cuda/shared_tile.h"

namespace hk::cuda {

class Dropout {
 public:
  HK_DEVICE explicit Dropout(const DropoutParams& p)
      : seed_(static_cast<uint64_t>(*p.seed)), threshold_(p.threshold) {}

  // Which of the four keys from `first_key` on, a multiple of 4, are dropped: a bit each.
  HK_DEVICE uint32_t drops(int b, int h, int row, int first_key) const {
    const Philox4 drawn = philox(first_key / 4, row, h, b, seed_);
    uint32_t bits = 0;
    HK_UNROLL
    for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(drawn.word[i] < threshold_) << i;
    return bits;
  }

 private:
  uint64_t seed_;
  uint32_t threshold_;
};

}  // namespace hk::cuda
