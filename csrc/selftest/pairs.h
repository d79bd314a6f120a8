// Tests the rounding of numbers to pairs, at the HK_LEVEL of the including file.
#pragma once

#include <random>
#include <string>

#include "cpu/pair.h"

namespace hk::HK_LEVEL {

// Random floats, NaN and infinity among them, rounded by vectors and by `narrow_bfloat`.
inline std::string test_rounding(std::mt19937& random) {
  constexpr int L = kLanes<Pair>;
  float x[2 * L];
  Pair neighbours[L], couples[L];
  for (float& one : x) {
    const uint32_t bits = random() | (random() % 4 ? 0 : 0x7f800000);
    std::memcpy(&one, &bits, 4);
  }
  store(neighbours, narrow_neighbours(load(x), load(x + L)));
  store(couples, narrow_couples(load(x), load(x + L)));
  for (int i = 0; i < 2 * L; ++i) {
    const uint32_t beside = neighbours[i / 2].bits >> (i % 2 * 16);
    const uint32_t behind = couples[i % L].bits >> (i / L * 16);
    const uint16_t expected = narrow_bfloat(x[i]);
    if (static_cast<uint16_t>(beside) != expected || static_cast<uint16_t>(behind) != expected)
      return "lane " + std::to_string(i) + " of " + std::to_string(x[i]);
  }
  return "";
}

}  // namespace hk::HK_LEVEL
