// The gate of a head's output: its values after the activation, per head, token or element.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/params.h"
#include "cpu/rows.h"
#include "cpu/visible.h"

namespace hk::HK_LEVEL {

template <typename Real>
inline Vec<Real> sigmoid(Vec<Real> x) {
  const IntVec<Real> negative = x < Real(0);
  const Vec<Real> e = exp<Real>(negative ? x : -x);
  return (negative ? e : splat<Real>(1)) / (e + Real(1));
}

// In place, over `count` values whose storage is whole vectors.
template <typename Real>
inline void activate(Activation activation, Real* values, int64_t count) {
  if (activation == Activation::kSigmoid) {
    for (int64_t i = 0; i < count; i += kLanes<Real>) store(values + i, sigmoid<Real>(load(values + i)));
  } else if (activation == Activation::kSoftplus) {
    for (int64_t i = 0; i < count; ++i)
      values[i] = std::max(values[i], Real(0)) + std::log1p(std::exp(-std::abs(values[i])));
  }
}

template <typename Real>
struct Gate {
  char* data;
  DType dtype;
  Activation activation;
  int64_t stride[4] = {0, 0, 0, 0};  // 0 where the gate broadcasts
  bool elementwise = false;
  bool per_head = true;

  Gate(const Tensor& t, Activation act) : data(static_cast<char*>(t.data)), dtype(t.dtype), activation(act) {
    if (!data) return;
    for (int d = 0; d < t.rank; ++d) {
      const int dim = t.rank == 1 ? 1 : d;  // [H], else [B, H, ...]
      stride[dim] = t.size[d] == 1 ? 0 : t.stride[d];
    }
    elementwise = t.rank == 4 && t.size[3] != 1;
    per_head = !elementwise && (t.rank < 3 || t.size[2] == 1);
  }

  explicit operator bool() const { return data != nullptr; }

  char* at(int64_t b, int64_t h, int64_t t) const {
    return data + (b * stride[0] + h * stride[1] + t * stride[2]) * element_size(dtype);
  }

  // An identity gate closes the whole head where it is exactly 0 in its own dtype.
  bool closed(int64_t b, int64_t h) const {
    if (!data || !per_head || activation != Activation::kIdentity) return false;
    double value = 0;
    load_row(&value, at(b, h, 0), dtype, 1);
    return value == 0;
  }

  // Whether an identity gate per token is exactly 0 at all `count` rows from `first`.
  bool closed_rows(int64_t b, int64_t h, int64_t first, int64_t count) const {
    if (!data || per_head || elementwise || activation != Activation::kIdentity) return false;
    double values[BLOCK_M];
    load_row(values, at(b, h, first), dtype, count, stride[2]);
    return std::all_of(values, values + count, [](double value) { return value == 0; });
  }

  // Values of `count` tokens from `first`, whole vectors of storage.
  void tokens(int64_t b, int64_t h, int64_t first, int64_t count, Real* values) const {
    read(at(b, h, first), count, stride[2], values);
  }

  // Multiplies the row of a token, in whole vectors: by the elements of an elementwise gate, which are read into
  // `scratch`, else by `value`, that of `tokens`.
  void apply(int64_t b, int64_t h, int64_t token, int64_t width, Real value, Real* row, Real* scratch) const {
    if (elementwise) {
      read(at(b, h, token), width, stride[3], scratch);
      for (int64_t w = 0; w < width; w += kLanes<Real>) store<Real>(row + w, load(row + w) * load(scratch + w));
    } else {
      for (int64_t w = 0; w < width; w += kLanes<Real>) store<Real>(row + w, load(row + w) * value);
    }
  }

 private:
  void read(const char* from, int64_t count, int64_t step, Real* values) const {
    load_row(values, from, dtype, count, step);
    for (int64_t i = count; i < round_up(count, kLanes<Real>); ++i) values[i] = 0;
    activate(activation, values, count);
  }
};

}  // namespace hk::HK_LEVEL
