// Dropout of probabilities: Philox of the seed and the element (b, h, row, key) decides.
#pragma once

#include "common/params.h"
#include "common/philox.h"
#include "cuda/shared_tile.h"

namespace hk::cuda {

class Dropout {
 public:
  HK_DEVICE explicit Dropout(const DropoutParams& p)
      : seed_(static_cast<uint64_t>(p.seed[0])), threshold_(p.threshold) {
    HK_UNROLL
    for (int i = 0; i < 4; ++i) first_[i] = static_cast<uint32_t>(p.seed[1 + i]);
  }

  // Which of the four keys from `first_key` on, a multiple of 4, are dropped: a bit each.
  HK_DEVICE uint32_t drops(int b, int h, int row, int first_key) const {
    const Philox4 drawn =
        philox(first_[3] / 4 + first_key / 4, first_[2] + row, first_[1] + h, first_[0] + b, seed_);
    uint32_t bits = 0;
    HK_UNROLL
    for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(drawn.word[i] < threshold_) << i;
    return bits;
  }

 private:
  uint64_t seed_;
  uint32_t first_[4];  // (b, h, row, key) of the call's first element in the whole
  uint32_t threshold_;
};

}  // namespace hk::cuda
