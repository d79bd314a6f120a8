// Numbers as tensors store them, loaded into vectors of operands: widened in registers, or as pairs of bfloat16, which
// are operands as they are.
#pragma once

#include "cpu/pair.h"

namespace hk::HK_LEVEL {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// The number of numbers in a vector of operands.
template <typename Operand>
constexpr int kWidth = kLanes<Operand> * kNumbers<Operand>;

// The number of vectors of operands that one load becomes. With bfloat16, the even numbers are shifted and the odd ones
// masked, in half of the instructions that widening neighbours takes. Wider vectors would not end where chunks of a
// mixing vector do.
template <typename Operand, typename Number>
constexpr int kVectors = 1;
#if HK_VECTOR_BYTES <= 32
template <>
constexpr int kVectors<float, BFloat16> = 2;
#endif

// Numbers of a load.
template <typename Operand, typename Number>
constexpr int kLoad = kVectors<Operand, Number> * kWidth<Operand>;

// kLoad numbers, those of 16 bits as integers.
template <typename Operand, typename Number>
struct Stored {
  using Lane = std::conditional_t<sizeof(Number) == 2, uint16_t, Number>;
  typedef Lane Vec __attribute__((vector_size(kLoad<Operand, Number> * sizeof(Number))));
};

template <typename Operand, typename Number>
inline typename Stored<Operand, Number>::Vec load_numbers(const Number* p) {
  typename Stored<Operand, Number>::Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The first `count` numbers, fewer than kLoad, then zeros.
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

// The words of `width` numbers, in whole vectors; numbers past the width are 0.
inline void copy_words(const BFloat16* numbers, int64_t width, Pair* words) {
  constexpr int W = kWidth<Pair>;
  int64_t d = 0;
  for (; d + W <= width; d += W) store(words + d / 2, (Vec<Pair>)load_numbers<Pair>(numbers + d));
  if (d < width) store(words + d / 2, (Vec<Pair>)load_numbers<Pair>(numbers + d, width - d));
}

// Vector i of the operands that a load becomes; operand and number name the types.
inline Vec<float> widened(Stored<float, float>::Vec v, int, float, float) { return v; }
inline Vec<double> widened(Stored<double, double>::Vec v, int, double, double) { return v; }
inline Vec<Pair> widened(Stored<Pair, BFloat16>::Vec v, int, Pair, BFloat16) { return (Vec<Pair>)v; }
inline Vec<float> widened(Stored<float, BFloat16>::Vec v, [[maybe_unused]] int i, float, BFloat16) {
#if HK_VECTOR_BYTES <= 32
  return (Vec<float>)(i == 0 ? (IntVec<float>)v << 16 : (IntVec<float>)v & ~0xffff);
#else
  return (Vec<float>)(__builtin_convertvector(v, IntVec<float>) << 16);
#endif
}
inline Vec<float> widened(Stored<float, Float16>::Vec v, int, float, Float16) {
#if HK_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)v);  // masked: see at_least
#else                                                            // widen_half in every lane
  const IntVec<float> h = __builtin_convertvector(v, IntVec<float>);
  const Vec<float> magnitude = (Vec<float>)((h & 0x7fff) << 13) * 0x1p112f;
  const IntVec<float> special = ((h & 0x7c00) == 0x7c00) & 0x7f800000;
  return (Vec<float>)((IntVec<float>)magnitude | special | (h & 0x8000) << 16);
#endif
}

// Puts numbers [kLoad] into the order of the lanes that a load has.
template <typename Operand, typename Number>
inline void as_loaded(RealOf<Operand>* numbers) {
  using Real = RealOf<Operand>;
  constexpr int L = kLanes<Real>;
  if constexpr (kVectors<Operand, Number> == 2) {
    Real lanes[2 * L];
    for (int i = 0; i < 2 * L; ++i) lanes[i % 2 * L + i / 2] = numbers[i];
    std::memcpy(numbers, lanes, sizeof lanes);
  }
}

// The inverse, for the vectors of a load.
template <typename Operand, typename Number>
inline void in_order(Vec<RealOf<Operand>>* v) {
  using Real = RealOf<Operand>;
  if constexpr (kVectors<Operand, Number> == 2) {
    const Vec<Real> first = v[0];
    v[0] = interleave<0>(first, v[1]);
    v[1] = interleave<1>(first, v[1]);
  }
}

}  // namespace hk::HK_LEVEL
