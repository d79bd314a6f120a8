// Numbers as tensors store them, loaded into vectors of operands: widened in registers, or as pairs
// of bfloat16, which are operands as they are.
#pragma once

#include "cpu/pair.h"

namespace hk::HK_LEVEL {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// How many numbers a vector of operands holds.
template <typename Operand>
constexpr int kWidth = kLanes<Operand> * kNumbers<Operand>;

template <typename Number>
struct WordOf {
  using Type = uint16_t;
};
template <>
struct WordOf<float> {
  using Type = float;
};
template <>
struct WordOf<double> {
  using Type = double;
};

// kWidth<Operand> numbers.
template <typename Operand, typename Number>
struct Stored {
  typedef typename WordOf<Number>::Type Vec
      __attribute__((vector_size(kWidth<Operand> * sizeof(Number))));
};

template <typename Operand, typename Number>
inline typename Stored<Operand, Number>::Vec load_numbers(const Number* p) {
  typename Stored<Operand, Number>::Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The first `count` numbers, fewer than kWidth, then zeros.
template <typename Operand, typename Number>
inline typename Stored<Operand, Number>::Vec load_numbers(const Number* p, int64_t count) {
  using Vec = typename Stored<Operand, Number>::Vec;
#if HK_VECTOR_BYTES == 64
  const uint32_t first = (uint32_t{1} << count) - 1;
  if constexpr (sizeof(Number) == 8) return (Vec)_mm512_maskz_loadu_pd(first, p);
  if constexpr (sizeof(Number) == 4) return (Vec)_mm512_maskz_loadu_ps(first, p);
  if constexpr (sizeof(Vec) == 64) return (Vec)_mm512_maskz_loadu_epi16(first, p);
  if constexpr (sizeof(Vec) == 32) return (Vec)_mm256_maskz_loadu_epi16(first, p);
#else
  Vec v{};
  std::memcpy(&v, p, count * sizeof(Number));
  return v;
#endif
}

// Vectors of stored numbers as operands.
inline Vec<float> widened(Stored<float, float>::Vec v, float) { return v; }
inline Vec<double> widened(Stored<double, double>::Vec v, double) { return v; }
inline Vec<Pair> widened(Stored<Pair, BFloat16>::Vec v, BFloat16) { return (Vec<Pair>)v; }
inline Vec<float> widened(Stored<float, BFloat16>::Vec v, BFloat16) {
  return (Vec<float>)(__builtin_convertvector(v, IntVec<float>) << 16);
}
inline Vec<float> widened(Stored<float, Float16>::Vec v, Float16) {
#if HK_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)v);  // masked: see at_least
#else  // widen_half of rows.h in every lane
  const IntVec<float> h = __builtin_convertvector(v, IntVec<float>);
  const Vec<float> magnitude = (Vec<float>)((h & 0x7fff) << 13) * 5.192296858534828e33f;
  const IntVec<float> special = ((h & 0x7c00) == 0x7c00) & 0x7f800000;
  return (Vec<float>)((IntVec<float>)magnitude | special | (h & 0x8000) << 16);
#endif
}

// A vector of operands from the numbers at p.
template <typename Operand, typename Number>
inline Vec<Operand> load_as(const Number* p) {
  return widened(load_numbers<Operand>(p), Number{});
}
// From the first `count` only, fewer than kWidth; zeros follow.
template <typename Operand, typename Number>
inline Vec<Operand> load_as(const Number* p, int64_t count) {
  return widened(load_numbers<Operand>(p, count), Number{});
}

}  // namespace hk::HK_LEVEL
