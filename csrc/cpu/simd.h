// Portable SIMD: the compiler's vector extensions, one width per instruction-set level. No intrinsics.
#pragma once

#include <cstdint>
#include <cstring>

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

namespace hk::HK_LEVEL {

template <typename T>
struct Simd;

template <>
struct Simd<float> {
  typedef float Vec __attribute__((vector_size(HK_VECTOR_BYTES)));
  using Int = int32_t;
  typedef Int IntVec __attribute__((vector_size(HK_VECTOR_BYTES)));
};

template <>
struct Simd<double> {
  typedef double Vec __attribute__((vector_size(HK_VECTOR_BYTES)));
  using Int = int64_t;
  typedef Int IntVec __attribute__((vector_size(HK_VECTOR_BYTES)));
};

template <typename T>
using Vec = typename Simd<T>::Vec;
template <typename T>
using Int = typename Simd<T>::Int;  // the integer as wide as a lane
template <typename T>
using IntVec = typename Simd<T>::IntVec;

template <typename T>
constexpr int kLanes = HK_VECTOR_BYTES / static_cast<int>(sizeof(T));

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <typename T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename T>
inline IntVec<T> load_int(const Int<T>* p) {
  IntVec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename T>
inline void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof v);
}

template <typename T>
inline Vec<T> splat(T x) {
  return x - Vec<T>{};  // x - 0 is x to the bit, so this is one broadcast
}

template <typename T>
inline T sum_lanes(Vec<T> v) {
  T total = 0;
  for (int i = 0; i < kLanes<T>; ++i) total += v[i];
  return total;
}

// 2^x. Chebyshev interpolants of 2^r on [-1/2, 1/2] (relative error 2.5e-9 for float, 4.2e-18 for double), scaled by
// 2^n through the exponent bits. Exactly 0 below the normal range, -inf included; NaN stays NaN. For x up to 64.
template <typename T>
inline Vec<T> exp2(Vec<T> x) {
  constexpr bool kSingle = sizeof(T) == 4;
  constexpr T kLowest = kSingle ? T(-126) : T(-1022);
  constexpr T kMagic = kSingle ? T(12582912.0) : T(6755399441055744.0);  // 1.5 * 2^(mantissa bits): rounds to integer
  constexpr int kMantissaBits = kSingle ? 23 : 52;
  constexpr Int<T> kBias = kSingle ? 127 : 1023;

  const IntVec<T> vanishes = x < kLowest;
  const Vec<T> clamped = vanishes ? splat<T>(kLowest) : x;
  const Vec<T> rounded = clamped + kMagic;
  const Vec<T> r = clamped - (rounded - kMagic);
  Vec<T> p;
  if constexpr (kSingle) {
    p = splat<T>(0.00015461444698569129083f);
    p = p * r + 0.001340042817761583794f;
    p = p * r + 0.0096180566785246380754f;
    p = p * r + 0.055503272266703020589f;
    p = p * r + 0.24022650922288758071f;
    p = p * r + 0.69314720670283259577f;
    p = p * r + 1.0f;
  } else {
    p = splat<T>(4.455817908336064493e-10);
    p = p * r + 7.0741942972885210056e-9;
    p = p * r + 1.0178057087733941105e-7;
    p = p * r + 1.3215432535912376166e-6;
    p = p * r + 0.000015252733841556772589;
    p = p * r + 0.00015403530463724354209;
    p = p * r + 0.0013333558146406470697;
    p = p * r + 0.0096181291075872566681;
    p = p * r + 0.055504108664821627039;
    p = p * r + 0.24022650695910159567;
    p = p * r + 0.69314718055994530925;
    p = p * r + 1.0;
  }
  // A cast between vectors keeps the bits.
  const IntVec<T> bits = (IntVec<T>)rounded;
  const IntVec<T> power = (bits + kBias) << kMantissaBits;
  const Vec<T> result = p * (Vec<T>)power;
  return vanishes ? Vec<T>{} : result;
}

// Whether a row of `count` values holds a NaN or an infinity.
template <typename T>
inline bool has_nonfinite(const T* row, int64_t count) {
  Vec<T> probe{};
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) probe += load(row + i) * T(0);
  T rest = sum_lanes<T>(probe);
  for (; i < count; ++i) rest += row[i] * T(0);
  return rest != rest;
}

}  // namespace hk::HK_LEVEL
