// CuTe's description of the instructions that the CUDA kernels use, per dtype.
#pragma once

#include <cute/tensor.hpp>
#include <string>

#include "cuda/tensor_core.h"

namespace hk::selftest {

using cuda::bf16, cuda::fp16, cuda::kWarp, cuda::tf32, cuda::TensorCore;

template <typename T>
struct Instruction;
template <>
struct Instruction<bf16> {
  static constexpr const char* kName = "bf16";
  using Operand = bf16;
  using Element = cute::bfloat16_t;
  using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};
template <>
struct Instruction<fp16> {
  static constexpr const char* kName = "fp16";
  using Operand = fp16;
  using Element = cute::half_t;
  using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct Instruction<float> {
  static constexpr const char* kName = "float";
  using Operand = tf32;
  using Element = cute::tfloat32_t;
  using Mma = cute::SM80_16x8x8_F32TF32TF32F32_TN;
};

template <typename T>
std::string named(const std::string& what) {
  return what + ", " + Instruction<T>::kName;
}

// Which element of C [16][8] += A [16][kDepth] B [kDepth][8] a lane's value is. CuTe numbers the
// elements of a matrix, the first dimension fastest; B's first dimension is n.
struct Place {
  int first, second;
};
template <typename T>
struct Fragments {
  using Traits = cute::MMA_Traits<typename Instruction<T>::Mma>;
  static constexpr int kDepth = TensorCore<T>::kDepth;
  static constexpr int kLeft = 16 * kDepth / kWarp, kRight = 8 * kDepth / kWarp, kSums = 4;

  static Place left(int lane, int value) {  // (m, k)
    const int number = typename Traits::ALayout{}(lane, value);
    return {number % 16, number / 16};
  }
  static Place right(int lane, int value) {  // (n, k)
    const int number = typename Traits::BLayout{}(lane, value);
    return {number % 8, number / 8};
  }
  // Of the operand of two instructions, 16 columns.
  static Place right_pair(int lane, int value) {
    const auto [n, k] = right(lane, value % kRight);
    return {n + value / kRight * 8, k};
  }
  static Place sum(int lane, int value) {  // (m, n)
    const int number = typename Traits::CLayout{}(lane, value);
    return {number % 16, number / 16};
  }

  static_assert(cute::size<1>(typename Traits::ALayout{}) == kLeft);
  static_assert(cute::size<1>(typename Traits::BLayout{}) == kRight);
  static_assert(cute::size<1>(typename Traits::CLayout{}) == kSums);
};

using LoadRows = cute::SM75_U32x4_LDSM_N;
using LoadTransposed = cute::SM75_U16x8_LDSM_T;

// A warp's product of 16 rows and 16 columns: two instructions.
template <typename T>
auto tiled_mma() {
  using cute::_1, cute::_16;
  return cute::make_tiled_mma(cute::MMA_Atom<typename Instruction<T>::Mma>{}, cute::Layout<cute::Shape<_1, _1, _1>>{},
                              cute::Tile<_16, _16, cute::Int<TensorCore<T>::kDepth>>{});
}

}  // namespace hk::selftest
