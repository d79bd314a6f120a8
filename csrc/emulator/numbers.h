// Floating-point formats that C++ lacks, as bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace hk::emulator {

inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The power of two at or below a normal number above 0.
inline double power_of_two_below(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= 0x7ff0000000000000u;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Without the bits that a float lacks, other than a subnormal one.
inline double toward_zero(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= ~((uint64_t{1} << 29) - 1);
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float widen_bf16(uint32_t bits) { return bits_float(bits << 16); }

inline uint16_t narrow_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Exponent and fraction in their places of a float, 112 too low, which also makes subnormal numbers
// normal.
inline float widen_fp16(uint32_t bits) {
  const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  const uint32_t magnitude = float_bits(bits_float((bits & 0x7fffu) << 13) * 0x1p112f);
  return bits_float(magnitude | special | (bits & 0x8000u) << 16);
}

inline uint16_t narrow_fp16(float x) {
  const uint32_t sign = float_bits(x) >> 16 & 0x8000u, bits = float_bits(x) & 0x7fffffffu;
  uint32_t half;
  if (x != x) return 0x7fff;
  if (bits >= 0x477ff000u) {  // 65520: rounds to 65536 or more
    half = 0x7c00u;
  } else if (bits < 0x38800000u) {  // 2^-14, the smallest normal number: the addition aligns and rounds
    half = float_bits(bits_float(bits) + 0.5f) - float_bits(0.5f);
  } else {
    half = (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

constexpr uint32_t kBelowTf32 = 0x1fffu;  // the bits of a float that tf32 lacks

}  // namespace hk::emulator
