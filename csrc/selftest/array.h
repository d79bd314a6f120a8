// Tensors of the self test, read without the functions of the kernels: each in a heap block of exactly its extent, so
// that AddressSanitizer detects any access outside of it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "common/numbers.h"
#include "common/params.h"

namespace hk::selftest {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The most by which rounding is off, relatively: half of the last bit of the significand.
inline double roundoff(DType dtype) {
  constexpr int kBits[] = {24, 53, 8, 11};  // of the significand, in the order of DType
  return std::ldexp(1, -kBits[static_cast<int>(dtype)]);
}

inline int64_t bytes_of(DType dtype) {
  constexpr int64_t kBytes[] = {4, 8, 2, 2};
  return kBytes[static_cast<int>(dtype)];
}

// A number of 16 bits by the definition of IEEE 754 and its like for bfloat16, with `fraction` bits of fraction.
inline double number_of(uint16_t bits, int fraction) {
  const int exponent = (bits & 0x7fff) >> fraction, largest = 0x7fff >> fraction, hidden = 1 << fraction;
  const int significand = bits % hidden;
  const double special = significand ? kNaN : kInfinity;
  const int scale = std::max(exponent, 1) - largest / 2 - fraction;
  const double size = exponent == largest ? special : std::ldexp(significand + (exponent ? hidden : 0), scale);
  return bits >> 15 ? -size : size;
}

using Index = std::array<int64_t, 4>;  // dimensions that a tensor lacks are 0

// A tensor and its memory; gaps and unwritten elements are NaN: all bits set. Layouts: "" is contiguous; "heads" has
// dimension 2 outside of dimension 1; "padded" has gaps between rows; "spread" has them between elements too.
class Array {
 public:
  Tensor tensor;

  Array() = default;
  Array(DType dtype, const std::vector<int64_t>& size, const std::string& layout = "") {
    tensor.dtype = dtype;
    tensor.rank = static_cast<int>(size.size());
    const bool heads = layout == "heads" && tensor.rank == 4;
    const bool gaps = layout == "padded" || layout == "spread";
    int64_t step = layout == "spread" ? 2 : 1, extent = 1, count = 1;
    for (int i = tensor.rank - 1; i >= 0; --i) {
      const int d = heads && (i == 1 || i == 2) ? 3 - i : i;
      tensor.size[d] = size[d];
      tensor.stride[d] = step;
      step = step * size[d] + (gaps && d == tensor.rank - 1 ? 3 : 0);
      extent += (size[d] - 1) * tensor.stride[d];
      count *= size[d];
    }
    if (count == 0) return;  // a tensor without elements has no memory
    memory_.assign((extent + gaps) * bytes_of(dtype), 0xff);
    tensor.data = memory_.data() + (gaps ? bytes_of(dtype) : 0);  // and is not aligned
  }
  Array(Array&&) = default;
  Array& operator=(Array&&) = default;

  double get(const Index& at) const {
    const void* p = address(at);
    if (tensor.dtype == DType::kFloat32) return *static_cast<const float*>(p);
    if (tensor.dtype == DType::kFloat64) return *static_cast<const double*>(p);
    const uint16_t bits = *static_cast<const uint16_t*>(p);
    return number_of(bits, tensor.dtype == DType::kBFloat16 ? 7 : 10);
  }

  void set(const Index& at, double x) {
    void* p = address(at);
    if (tensor.dtype == DType::kFloat32) {
      *static_cast<float*>(p) = static_cast<float>(x);
    } else if (tensor.dtype == DType::kFloat64) {
      *static_cast<double*>(p) = x;
    } else {
      const float single = static_cast<float>(x);
      *static_cast<uint16_t*>(p) = tensor.dtype == DType::kBFloat16 ? narrow_bfloat(single) : narrow_half(single);
    }
  }

  // Calls body(index) for every element, the last dimension fastest.
  template <typename Body>
  void each(Body body) const {
    if (memory_.empty()) return;
    Index n{1, 1, 1, 1}, at;
    std::copy_n(tensor.size, tensor.rank, n.begin());
    for (at[0] = 0; at[0] < n[0]; ++at[0])
      for (at[1] = 0; at[1] < n[1]; ++at[1])
        for (at[2] = 0; at[2] < n[2]; ++at[2])
          for (at[3] = 0; at[3] < n[3]; ++at[3]) body(at);
  }

  // All elements, in that order.
  std::vector<double> values() const {
    std::vector<double> list;
    each([&](const Index& at) { list.push_back(get(at)); });
    return list;
  }

  bool same_bits(const Array& other) const { return memory_ == other.memory_; }

  bool gaps_untouched() {
    const std::vector<uint8_t> before = memory_;
    each([&](const Index& at) { std::memset(address(at), 0xff, bytes_of(tensor.dtype)); });
    const bool untouched = memory_ == std::vector<uint8_t>(memory_.size(), 0xff);
    std::copy(before.begin(), before.end(), memory_.begin());
    return untouched;
  }

 private:
  std::vector<uint8_t> memory_;

  void* address(const Index& at) const {
    int64_t offset = 0;
    for (int d = 0; d < tensor.rank; ++d) offset += tensor.size[d] == 1 ? 0 : at[d] * tensor.stride[d];
    return static_cast<char*>(tensor.data) + offset * bytes_of(tensor.dtype);
  }
};

}  // namespace hk::selftest
