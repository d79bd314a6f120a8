// Pairs of bfloat16 as operands of products: two neighbours along the depth in one word. Processors
// with bfloat16 instructions multiply both at once, exactly, and add them to a float.
//
// A matrix that is broadcast, [rows][depth], has its rows' neighbours in a word; one that is read
// by vectors, [depth][columns], has two neighbouring rows in the words of one row.
//
// The instructions flush subnormal numbers to 0: a factor or a sum below 2^-126 may count as 0
// (tests/ops/test_cpu_levels.py). Checking for such numbers would slow down every call.
#pragma once

#include "cpu/rows.h"

namespace hk::HK_LEVEL {

struct Pair {
  uint32_t bits;  // the first number in the low half
};

template <>
struct Simd<Pair> {
  typedef uint32_t Vec __attribute__((vector_size(HK_VECTOR_BYTES)));
  typedef uint16_t Halves __attribute__((vector_size(HK_VECTOR_BYTES)));
  using Real = float;
};

template <>
constexpr int kNumbers<Pair> = 2;

template <>
inline Vec<Pair> splat<Pair>(Pair x) {
  return x.bits | Vec<Pair>{};
}

// Both products of a lane are exact.
template <>
inline Vec<float> add_product<Pair>(Vec<Pair> a, Vec<Pair> b, Vec<float> sum) {
#if defined(__AVX512BF16__)
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  constexpr uint32_t kHigh = 0xffff0000u;
  sum += (Vec<float>)(a << 16) * (Vec<float>)(b << 16);
  return sum + (Vec<float>)(a & kHigh) * (Vec<float>)(b & kHigh);
#endif
}

// Rounded to bfloat16 (to nearest, ties to even), in the low halves.
inline Vec<Pair> narrow_lanes(Vec<float> x) {
  const Vec<Pair> bits = (Vec<Pair>)x;
  const Vec<Pair> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x != x ? 0x7fc0u | Vec<Pair>{} : rounded;
}

// Rounded to bfloat16, as floats.
inline Vec<float> rounded(Vec<float> x) { return (Vec<float>)(narrow_lanes(x) << 16); }

// The first (half = 0) or second (half = 1) halves of the words of a, then of b.
template <int half, size_t... I>
inline Vec<Pair> halves_of(Vec<Pair> a, Vec<Pair> b, std::index_sequence<I...>) {
  using Halves = Simd<Pair>::Halves;
  return (Vec<Pair>)__builtin_shufflevector((Halves)a, (Halves)b, (2 * static_cast<int>(I) + half)...);
}

template <int half>
inline Vec<Pair> halves_of(Vec<Pair> a, Vec<Pair> b) {
  return halves_of<half>(a, b, std::make_index_sequence<2 * kLanes<Pair>>{});
}

// The lanes of a, then those of b, as neighbours.
inline Vec<Pair> narrow_neighbours(Vec<float> a, Vec<float> b) {
#if defined(__AVX512BF16__)
  return (Vec<Pair>)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
  return halves_of<0>(narrow_lanes(a), narrow_lanes(b));
#endif
}

// The first (half = 0) or last (half = 1) numbers of a, each with that of b.
template <int half>
inline Vec<Pair> couple(Vec<Pair> a, Vec<Pair> b) {
  using Halves = Simd<Pair>::Halves;
  return (Vec<Pair>)interleave<half>((Halves)a, (Halves)b);
}

// Pairs each lane of a with that of b.
inline Vec<Pair> narrow_couples(Vec<float> a, Vec<float> b) {
#if defined(__AVX512BF16__)
  const auto both = (Simd<Pair>::Halves)narrow_neighbours(a, b);
  return (Vec<Pair>)__builtin_shufflevector(both, both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24,
                                            9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  return narrow_lanes(a) | narrow_lanes(b) << 16;
#endif
}

// e^x of probabilities that are factors of products of Operand; x up to 44.
template <typename Operand>
__attribute__((always_inline)) inline Vec<RealOf<Operand>> exp_of_score(Vec<RealOf<Operand>> x) {
  return exp<RealOf<Operand>>(x);
}

#if HK_VECTOR_BYTES == 64
// Accurate to 1.5e-7 and exactly 1 at 0, in two thirds of the time of `exp`: 2^t, with a minimax
// polynomial for the fraction of t. The rounding of t adds 6e-8 |x|, which matters for small
// probabilities only, since x is a score minus one near the largest. -inf gives 0, NaN stays NaN.
template <>
__attribute__((always_inline)) inline Vec<float> exp_of_score<Pair>(Vec<float> x) {
  constexpr int kFloor = 1;
  const Vec<float> t = x * 1.44269504f;
  const Vec<float> r = (Vec<float>)_mm512_maskz_reduce_ps(0xffff, (__m512)t, kFloor);
  Vec<float> p = splat<float>(0.0018671301924f);
  p = p * r + 0.0090170300631f;
  p = p * r + 0.055799913289f;
  p = p * r + 0.24016445010f;
  p = p * r + 0.69315131181f;
  p = p * r + 1.0f;
  return (Vec<float>)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)t);
}
#endif

// Rows of numbers as a factor that is broadcast: words [rows][columns / 2] from data
// [rows][columns]; in place is allowed. `columns` in whole vectors.
inline void pair_columns(const float* data, int64_t lds, int64_t rows, int64_t columns, Pair* words, int64_t ldw) {
  constexpr int L = kLanes<float>;
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = data + r * lds;
    for (int64_t c = 0; c < columns; c += 2 * L)
      store(words + r * ldw + c / 2,
            narrow_neighbours(load(row + c), c + L < columns ? load(row + c + L) : Vec<float>{}));
  }
}

// Rows of numbers as a factor that is read by vectors: words [(first + rows) / 2][columns] of
// rows `first` (0 or 1) and later; a half that has no row is 0. `columns` in whole vectors.
inline void pair_rows(const float* data, int64_t lds, int64_t first, int64_t rows, int64_t columns, Pair* words,
                      int64_t ldw) {
  const Vec<float> none{};
  for (int64_t r = -first; r < rows; r += 2) {
    const float* upper = data + r * lds;
    Pair* row = words + (r + first) / 2 * ldw;
    const bool before = r < 0, behind = r + 1 == rows;
    for (int64_t c = 0; c < columns; c += kLanes<float>)
      store(row + c, narrow_couples(before ? none : load(upper + c), behind ? none : load(upper + lds + c)));
  }
}

// words [columns][rows / 2] from source [rows][columns / 2]: the numbers transposed. Both sizes in
// pairs of whole vectors; `turned` is scratch [columns / 2][rows].
inline void transpose_pairs(const Pair* source, int64_t lds, Pair* words, int64_t ldw, int64_t rows, int64_t columns,
                            Pair* turned) {
  constexpr int L = kLanes<Pair>;
  transpose(source, lds, turned, rows, rows, columns / 2);
  for (int64_t c = 0; c < columns / 2; ++c) {
    for (int64_t r = 0; r < rows; r += 2 * L) {
      const Vec<Pair> a = load(turned + c * rows + r), b = load(turned + c * rows + r + L);
      store(words + 2 * c * ldw + r / 2, halves_of<0>(a, b));
      store(words + (2 * c + 1) * ldw + r / 2, halves_of<1>(a, b));
    }
  }
}

// Whether all numbers are finite; `count` in whole vectors.
inline bool all_finite(const Pair* words, int64_t count) {
  using Halves = Simd<Pair>::Halves;
  constexpr uint16_t kExponent = 0x7f80;
  Halves special{};
  for (int64_t i = 0; i < count; i += kLanes<Pair>)
    special |= (Halves)(((Halves)load(words + i) & kExponent) == kExponent);
  return !any_lane<float>((IntVec<float>)special);
}

}  // namespace hk::HK_LEVEL
