// Floating-point formats that C++ lacks, as bits. Rounding is to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace hk {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float widen_bfloat(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

inline uint16_t narrow_bfloat(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

// Exponent and fraction in their places of a float, 112 too low; the product also makes subnormal numbers normal.
inline float widen_half(uint16_t h) {
  const uint32_t magnitude = bits_of(float_of(static_cast<uint32_t>(h & 0x7fffu) << 13) * 0x1p112f);
  const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return float_of(magnitude | special | static_cast<uint32_t>(h & 0x8000u) << 16);
}

inline uint16_t narrow_half(float x) {
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000u, bits = bits_of(x) & 0x7fffffffu;
  uint32_t half;
  if (bits > 0x7f800000u) {  // NaN
    half = 0x7e00u;
  } else if (bits >= 0x477ff000u) {  // 65520: rounds to 65536 or more
    half = 0x7c00u;
  } else if (bits < 0x38800000u) {  // 2^-14, the smallest normal number: the addition aligns and rounds
    half = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
  } else {
    half = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

}  // namespace hk
