// The gate of a head's output, activated: one value for a head, for a row, or for an element.
#pragma once

#include <cmath>

#include "cuda/shared_tile.h"

namespace hk::cuda {

// A number of a gate, a mixing vector or a bias, which have their own dtype.
HK_DEVICE float load_number(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(static_cast<const bf16*>(data)[index]);
    case DType::kFloat16:
      return to_float(static_cast<const fp16*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

HK_DEVICE float activate(Activation activation, float value) {
  if (activation == Activation::kIdentity) return value;
  const float e = expf(-fabsf(value));
  if (activation == Activation::kSigmoid) return (value >= 0.0f ? 1.0f : e) / (1.0f + e);
  return fmaxf(value, 0.0f) + log1pf(e);
}

class Gate {
 public:
  HK_DEVICE Gate(const Tensor& t, Activation activation)
      : data_(t.data), dtype_(t.dtype), activation_(activation), there_(t.rank > 0) {
    HK_UNROLL
    for (int d = 0; d < 4; ++d) {
      const int own = t.rank == 1 ? d - 1 : d;  // [H], else [B, H, ...]
      stride_[d] = own < 0 || own >= t.rank || t.size[own] == 1 ? 0 : t.stride[own];
    }
    elementwise_ = t.rank == 4 && t.size[3] != 1;
    per_head_ = there_ && !elementwise_ && (t.rank < 3 || t.size[2] == 1);
  }

  HK_DEVICE bool elementwise() const { return elementwise_; }

  // An identity gate of 0 closes the whole head.
  HK_DEVICE bool closes(int b, int h) const {
    return per_head_ && activation_ == Activation::kIdentity &&
           load_number(data_, dtype_, b * stride_[0] + h * stride_[1]) == 0.0f;
  }

  // The gate of a row, or of an element if it is elementwise; 1 without a gate.
  HK_DEVICE float at(int b, int h, int row, int column = 0) const {
    if (!there_) return 1.0f;
    const int64_t index = b * stride_[0] + h * stride_[1] + row * stride_[2] + column * stride_[3];
    return activate(activation_, load_number(data_, dtype_, index));
  }

 private:
  const void* data_;
  DType dtype_;
  Activation activation_;
  bool there_, elementwise_, per_head_;
  int64_t stride_[4];  // 0 where the gate broadcasts
};

}  // namespace hk::cuda
