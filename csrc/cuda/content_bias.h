// The content bias of collaborative attention: a number a key, added to its scores inside the
// scale.
#pragma once

#include "cuda/gate.h"

namespace hk::cuda {

// Of one head.
class ContentBias {
  // A larger one counts as this, so that its product with the scale is finite. A power of 2: the
  // product is exact, so that equal ones are equal to their maximum in the softmax.
  static constexpr float kMost = 1.329227995784916e36f;

 public:
  HK_DEVICE ContentBias(const Tensor& t, int64_t b, int64_t h)
      : t_(t), offset_(b * t.stride[0] + h * t.stride[1]) {}

  // 0 where there is none.
  HK_DEVICE float at(int key) const {
    if (t_.rank == 0 || key >= t_.size[2]) return 0.0f;
    const float value = load_number(t_.data, t_.dtype, offset_ + key * t_.stride[2]);
    return is_finite(value) ? fminf(fmaxf(value, -kMost), kMost) : value;
  }

 private:
  const Tensor& t_;
  int64_t offset_;
};

}  // namespace hk::cuda
