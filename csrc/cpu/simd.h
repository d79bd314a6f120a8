// Portable SIMD: the compiler's vector extensions, one width per ISA level. Intrinsics are used only where the compiler
// does not find the instruction.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define HK_VECTOR_BYTES 64
#elif defined(__AVX__)
#define HK_VECTOR_BYTES 32
#else
#define HK_VECTOR_BYTES 16  // SSE2, NEON
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
#define HK_VECTOR_REGISTERS 32
#else
#define HK_VECTOR_REGISTERS 16
#endif

// An operand of asm that is read and written, in a vector register.
#if defined(__x86_64__)
#define HK_IN_REGISTER "+v"
#else
#define HK_IN_REGISTER "+w"
#endif

namespace hk::HK_LEVEL {

template <typename Real>
struct Simd;

template <>
struct Simd<float> {
  typedef float Vec __attribute__((vector_size(HK_VECTOR_BYTES)));
  using Real = float;
  using Int = int32_t;
  typedef Int IntVec __attribute__((vector_size(HK_VECTOR_BYTES)));
};

template <>
struct Simd<double> {
  typedef double Vec __attribute__((vector_size(HK_VECTOR_BYTES)));
  using Real = double;
  using Int = int64_t;
  typedef Int IntVec __attribute__((vector_size(HK_VECTOR_BYTES)));
};

template <typename Real>
using Vec = typename Simd<Real>::Vec;
template <typename Real>
using Int = typename Simd<Real>::Int;  // the integer as wide as a lane
template <typename Real>
using IntVec = typename Simd<Real>::IntVec;

// Operands of products are float and double, or words of several numbers (pair.h).
template <typename Operand>
using RealOf = typename Simd<Operand>::Real;  // the type of sums of products
template <typename Operand>
constexpr int kNumbers = 1;  // numbers per operand

template <typename Real>
constexpr int kLanes = HK_VECTOR_BYTES / static_cast<int>(sizeof(Real));

constexpr int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

constexpr int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

// Elements between the rows of a scratch tile: an odd number of cache lines, so that the elements of a column spread
// over all sets of the L1 cache.
template <typename Real>
constexpr int64_t row_stride(int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(Real);
  return ((width + kLine - 1) / kLine | 1) * kLine;
}

template <typename Real>
inline Vec<Real> load(const Real* p) {
  Vec<Real> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename Real>
inline IntVec<Real> load_int(const Int<Real>* p) {
  IntVec<Real> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename Real>
inline void store(Real* p, Vec<Real> v) {
  std::memcpy(p, &v, sizeof v);
}

template <typename Real>
inline Vec<Real> splat(Real x) {
  return x - Vec<Real>{};  // x - 0 is x to the bit, so this is one broadcast
}

// x, rounded before it is used: a product is not contracted with the sum that follows. The difference of two large and
// equal products is then 0.
template <typename Real>
inline Vec<Real> rounded_product(Vec<Real> x) {
  asm("" : HK_IN_REGISTER(x));
  return x;
}

// sum + a * b, lane by lane.
template <typename Operand>
inline Vec<RealOf<Operand>> add_product(Vec<Operand> a, Vec<Operand> b, Vec<RealOf<Operand>> sum) {
  return sum + a * b;
}

template <typename Real>
inline Real sum_lanes(Vec<Real> v) {
  Real total = 0;
  for (int i = 0; i < kLanes<Real>; ++i) total += v[i];
  return total;
}

template <typename Real>
inline bool any_lane(IntVec<Real> mask) {
#if HK_VECTOR_BYTES == 64
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif HK_VECTOR_BYTES == 32
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  Int<Real> any = 0;
  for (int i = 0; i < kLanes<Real>; ++i) any |= mask[i];
  return any != 0;
#endif
}

// The larger of bound and x in each lane, and x if x is NaN.
template <typename Real>
inline Vec<Real> at_least(Vec<Real> bound, Vec<Real> x) {
  if constexpr (sizeof(Real) == 4) {
#if HK_VECTOR_BYTES == 64
    // Masked: g++ 12 warns of an undefined value in the unmasked form.
    return (Vec<Real>)_mm512_mask_max_ps((__m512)bound, 0xffff, (__m512)bound, (__m512)x);
#elif HK_VECTOR_BYTES == 32
    return (Vec<Real>)_mm256_max_ps((__m256)bound, (__m256)x);
#endif
  }
  return bound > x ? bound : x;
}

// e^x, as 2^n e^r: 2^n through the exponent bits, and of e^r a Chebyshev interpolant on [-ln(2) / 2, ln(2) / 2]
// (relative error 2.5e-9 for float, 4.2e-18 for double). Exactly 0 below the normal range, -inf included; NaN stays
// NaN. For x up to 44.
template <typename Real>
__attribute__((always_inline)) inline Vec<Real> exp(Vec<Real> x) {
  constexpr bool kSingle = sizeof(Real) == 4;
  constexpr int kMantissaBits = kSingle ? 23 : 52;
  constexpr Real kBias = kSingle ? Real(127) : Real(1023);
  // Adding 1.5 * 2^kMantissaBits + kBias leaves the rounded, biased integer in the low bits.
  constexpr Real kMagic = (kSingle ? Real(12582912.0) : Real(6755399441055744.0)) + kBias;
  constexpr Real kLog2e = Real(1.4426950408889634074), kLn2 = Real(0.69314718055994530942);
  // n times kHigh is exact, and kHigh + kLow = ln(2).
  constexpr Real kHigh = kSingle ? Real(0.693359375) : Real(0.6931471803691238);
  constexpr Real kLow = kSingle ? Real(-2.1219444005469058e-4) : Real(1.9082149292705878e-10);
#ifdef __FP_FAST_FMAF  // x - n ln(2) is rounded once: where p is not tiny, x has a larger error
  constexpr bool kOneStep = kSingle;
#else
  constexpr bool kOneStep = false;
#endif

  const Vec<Real> lowest = splat<Real>(-kBias * kLn2);  // its exponent bits are 0: so is its power
  x = at_least<Real>(lowest, x);
  const Vec<Real> rounded = x * kLog2e + kMagic, n = rounded - kMagic;
  const Vec<Real> r = kOneStep ? x - n * kLn2 : x - n * kHigh - n * kLow;
  Vec<Real> p;
  if constexpr (kSingle) {
    p = splat<Real>(0.0013941108433972674609f);
    p = p * r + 0.0083751263981533356821f;
    p = p * r + 0.041666352896775156787f;
    p = p * r + 0.16666415514653275427f;
    p = p * r + 0.50000000471177576745f;
    p = p * r + 1.0000000377162138425f;
    p = p * r + 1.0f;
  } else {
    p = splat<Real>(2.5110037605963777712e-8);
    p = p * r + 2.7632639639041029749e-7;
    p = p * r + 0.0000027557240918578969824;
    p = p * r + 0.000024801485482328492418;
    p = p * r + 0.00019841269890047113706;
    p = p * r + 0.0013888888952314774653;
    p = p * r + 0.0083333333333196006109;
    p = p * r + 0.041666666666488095496;
    p = p * r + 0.16666666666666680806;
    p = p * r + 0.50000000000000183855;
    p = p * r + 1.0;
    p = p * r + 1.0;
  }
  // A cast between vectors keeps the bits.
  return p * (Vec<Real>)((IntVec<Real>)rounded << kMantissaBits);
}

// tanh(x): near 0 by the approximations of the Cephes library, elsewhere by 1 - 2 / (e^2x + 1).
template <typename Real>
inline Vec<Real> tanh(Vec<Real> x) {
  const IntVec<Real> negative = x < Real(0);
  const Vec<Real> size = negative ? -x : x, z = x * x;
  Vec<Real> near;
  if constexpr (sizeof(Real) == 4) {
    near = splat<Real>(-5.70498872745e-3f);
    near = near * z + 2.06390887954e-2f;
    near = near * z - 5.37397155531e-2f;
    near = near * z + 1.33314422036e-1f;
    near = near * z - 3.33332819422e-1f;
  } else {
    Vec<Real> p = splat<Real>(-9.64399179425052238628e-1);
    p = p * z - 9.92877231001918586564e1;
    p = p * z - 1.61468768441708447952e3;
    Vec<Real> q = z + 1.12811678491632931402e2;
    q = q * z + 2.23548839060100448583e3;
    q = q * z + 4.84406305325125486048e3;
    near = p / q;
  }
  // Beyond 20 it is 1 in either type; NaN stays NaN.
  const Vec<Real> power = exp<Real>((size > Real(20) ? splat<Real>(20) : size) * Real(2));
  const Vec<Real> far = Real(1) - Real(2) / (power + Real(1));
  return size < Real(0.625) ? x + x * (z * near) : negative ? -far : far;
}

// Whether data[rows][width], rows `stride` apart, holds a NaN or an infinity.
template <typename Real>
inline bool has_nonfinite(const Real* data, int64_t rows, int64_t width, int64_t stride) {
  Vec<Real> probe{};  // 0 times a finite number is 0, anything else becomes NaN
  Real rest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const Real* row = data + r * stride;
    int64_t i = 0;
    for (; i + kLanes<Real> <= width; i += kLanes<Real>) probe += load(row + i) * Real(0);
    for (; i < width; ++i) rest += row[i] * Real(0);
  }
  rest += sum_lanes<Real>(probe);
  return rest != rest;
}

}  // namespace hk::HK_LEVEL
