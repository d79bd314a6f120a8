// Dropout of probabilities: Philox of the seed and the element (b, h, row, key) decides.
#pragma once

#include "common/params.h"
#include "common/philox.h"
#include "cuda/hardware.h"

namespace hk::cuda {

class Dropout {
 public:
  HK_DEVICE explicit Dropout(const DropoutParams& p)
      : seed_(static_cast<uint64_t>(*p.seed)), threshold_(p.threshold) {}

  HK_DEVICE bool keeps(int b, int h, int row, int key) const {
    const Philox4 drawn = philox(key / 4, row, h, b, seed_);
    const int word = key % 4;
    const uint32_t low = word & 1 ? drawn.word[1] : drawn.word[0];
    const uint32_t high = word & 1 ? drawn.word[3] : drawn.word[2];
    return (word & 2 ? high : low) >= threshold_;
  }

 private:
  uint64_t seed_;
  uint32_t threshold_;
};

}  // namespace hk::cuda
