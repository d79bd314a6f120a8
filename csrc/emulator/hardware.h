// The software implementation of cuda/hardware.h, which documents these functions.
//
// Both were written from the PTX ISA. tests/ops/test_cuda_wrappers.py checks each function against it, here and on a
// GPU, where it has to pass before results of the emulator can be trusted. Products truncate as tensor cores of sm_80
// do, so that tests see the drift of long sums.
#pragma once

#include <cmath>
#include <limits>

#include "common/numbers.h"
#include "emulator/block.h"

namespace hk::cuda {

static_assert(kWarp == emulator::kLanes);

inline int thread_index() { return emulator::thread_index(); }
inline int64_t block_index() { return emulator::block_index(); }
inline char* shared_memory() { return emulator::shared_memory(); }

inline void sync_block() {
  static constexpr emulator::Operation kOperation{"sync_block", true, nullptr};
  emulator::take_part(kOperation, nullptr);
}
inline void sync_warp() {
  static constexpr emulator::Operation kOperation{"sync_warp", false, nullptr};
  emulator::take_part(kOperation, nullptr);
}

namespace software {

// Replaces the votes with the result.
inline void any(void* const* votes, int count) {
  bool answer = false;
  for (int i = 0; i < count; ++i) answer |= *static_cast<bool*>(votes[i]);
  for (int i = 0; i < count; ++i) *static_cast<bool*>(votes[i]) = answer;
}

template <typename V>
struct Shuffled {
  V value;
  int mask;
};

template <typename V>
void shuffle_xor(void* const* arguments, int) {
  V values[kWarp];
  for (int i = 0; i < kWarp; ++i) values[i] = static_cast<Shuffled<V>*>(arguments[i])->value;
  for (int i = 0; i < kWarp; ++i) {
    auto& lane = *static_cast<Shuffled<V>*>(arguments[i]);
    lane.value = values[(i ^ lane.mask) & (kWarp - 1)];
  }
}

struct Matrices {
  uint32_t* result;
  const char* row;
};

template <bool kTransposed>
void load_matrices(void* const* arguments, int) {
  uint16_t elements[4][8][8];
  for (int i = 0; i < kWarp; ++i) std::memcpy(elements[i / 8][i % 8], static_cast<Matrices*>(arguments[i])->row, 16);
  for (int i = 0; i < kWarp; ++i) {
    const int row = i / 4, column = 2 * (i % 4);
    for (int m = 0; m < 4; ++m) {
      const auto& e = elements[m];
      const uint32_t low = kTransposed ? e[column][row] : e[row][column];
      const uint32_t high = kTransposed ? e[column + 1][row] : e[row][column + 1];
      static_cast<Matrices*>(arguments[i])->result[m] = low | high << 16;
    }
  }
}

struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

template <typename T>
double operand(uint32_t bits) {
  if constexpr (std::is_same_v<T, tf32>) {
    constexpr uint32_t kBelowTf32 = 0x1fff;  // the bits of a float that tf32 lacks
    return float_of(bits & ~kBelowTf32);
  } else {
    return to_float(T{static_cast<uint16_t>(bits)});
  }
}

// The sums of a row and 8 columns.
using Row = double[8];

// x with only those of its bits that are in `mask`.
inline double masked(double x, uint64_t mask) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= mask;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Adds products to sums as the tensor cores of sm_80 do (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores";
// Khattak and Mikaitis 2025, "Accurate models of NVIDIA tensor cores"): exact products, all terms aligned to the
// largest and cut off below its 24th binary place, and their sum rounded toward zero.
template <int kCount>
void add_products(Row& sums, const double* a, const Row* b) {
  Row terms[kCount + 1], exact = {}, largest = {};
  for (int column = 0; column < 8; ++column) terms[kCount][column] = sums[column];
  for (int k = 0; k < kCount; ++k)
    for (int column = 0; column < 8; ++column) terms[k][column] = a[k] * b[k][column];
  for (const Row& term : terms) {
    for (int column = 0; column < 8; ++column) {
      const double size = std::abs(term[column]);
      largest[column] = largest[column] < size ? size : largest[column];
      exact[column] += term[column];
    }
  }
  constexpr uint64_t kExponent = 0x7ff0000000000000, kFloat = ~uint64_t{0} << 29;  // the bits that a float has too
  Row scale;
  int32_t aligned[8] = {};
  for (int column = 0; column < 8; ++column) scale[column] = 0x1p24 / masked(largest[column], kExponent);
  for (const Row& term : terms)
    for (int column = 0; column < 8; ++column) aligned[column] += static_cast<int32_t>(term[column] * scale[column]);
  for (int column = 0; column < 8; ++column) {
    const bool is_plain = largest[column] != 0 && std::isfinite(exact[column]);
    sums[column] = is_plain ? masked(aligned[column] / scale[column], kFloat) : exact[column];
  }
}

template <typename T>
void multiply_add(void* const* arguments, int) {
  constexpr int kNumbers = std::is_same_v<T, tf32> ? 1 : 2;  // numbers per word
  constexpr int kHalf = 4 * kNumbers, kDepth = 2 * kHalf;    // half a depth is added up at a time
  double a[16][kDepth];
  Row b[kDepth], sums[16];
  for (int i = 0; i < kWarp; ++i) {
    const Product& lane = *static_cast<Product*>(arguments[i]);
    const int row = i / 4;
    for (int half = 0; half < 2; ++half) {
      for (int e = 0; e < kNumbers; ++e) {
        const int k = half * kHalf + kNumbers * (i % 4) + e;
        const auto number = [e](uint32_t word) { return operand<T>(kNumbers == 1 ? word : word >> 16 * e & 0xffffu); };
        a[row][k] = number(lane.a[2 * half]);
        a[row + 8][k] = number(lane.a[2 * half + 1]);
        b[k][row] = number(lane.b[half]);
      }
    }
    for (int e = 0; e < 4; ++e) sums[row + 8 * (e / 2)][2 * (i % 4) + e % 2] = lane.c[e];
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < kDepth; k += kHalf) add_products<kHalf>(sums[row], a[row] + k, b + k);
  for (int i = 0; i < kWarp; ++i) {
    float* const c = static_cast<Product*>(arguments[i])->c;
    for (int e = 0; e < 4; ++e) c[e] = static_cast<float>(sums[i / 4 + 8 * (e / 2)][2 * (i % 4) + e % 2]);
  }
}

// Flushes subnormal numbers to zero and keeps the sign.
inline float flush(float x) { return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

}  // namespace software

inline bool any_in_block(bool vote) {
  static constexpr emulator::Operation kOperation{"any_in_block", true, software::any};
  emulator::take_part(kOperation, &vote);
  return vote;
}
inline bool any_in_warp(bool vote) {
  static constexpr emulator::Operation kOperation{"any_in_warp", false, software::any};
  emulator::take_part(kOperation, &vote);
  return vote;
}

template <typename V>
inline V shuffle_xor(V value, int mask) {
  static_assert(sizeof(V) == sizeof(uint32_t));
  static constexpr emulator::Operation kOperation{"shuffle_xor", false, software::shuffle_xor<V>};
  software::Shuffled<V> lane{value, mask};
  emulator::take_part(kOperation, &lane);
  return lane.value;
}

template <bool kTransposed>
inline void load_matrices(uint32_t (&matrices)[4], const void* row) {
  static constexpr emulator::Operation kOperation{kTransposed ? "load_matrices_transposed" : "load_matrices", false,
                                                  software::load_matrices<kTransposed>};
  emulator::check_shared(row, "loads a row of a matrix from");
  software::Matrices lane{matrices, static_cast<const char*>(row)};
  emulator::take_part(kOperation, &lane);
}

template <typename T>
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static constexpr emulator::Operation kOperation{"multiply_add", false, software::multiply_add<T>};
  software::Product lane{c, a, {b0, b1}};
  emulator::take_part(kOperation, &lane);
}

inline void copy_async(void* shared, const void* global, int bytes) { emulator::copy_async(shared, global, bytes); }
inline void commit_copies() { emulator::commit_copies(); }
template <int kPending>
inline void wait_copies() {
  emulator::wait_copies(kPending);
}

inline void store_words(void* global, const uint32_t (&words)[4]) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0)
    throw emulator::Fault("stores 16 bytes to an address that is not a multiple of 16");
  std::memcpy(global, words, sizeof words);
}

inline float exp2_approx(float x) { return software::flush(std::exp2(software::flush(x))); }

inline uint32_t float_bits(float x) { return bits_of(x); }
inline float bits_float(uint32_t bits) { return float_of(bits); }

template <typename T>
inline float to_float(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return std::is_same_v<T, bf16> ? widen_bfloat(x.bits) : widen_half(x.bits);
  }
}
template <typename T>
inline T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return {std::is_same_v<T, bf16> ? narrow_bfloat(x) : narrow_half(x)};
  }
}
template <typename T>
inline uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template <typename T>
inline LowHigh unpack(uint32_t word) {
  return {to_float(T{static_cast<uint16_t>(word)}), to_float(T{static_cast<uint16_t>(word >> 16)})};
}

}  // namespace hk::cuda
