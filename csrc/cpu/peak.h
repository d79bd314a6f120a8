// Peak throughput of the cores at this level: products and powers without memory access. benchmarks/floor.py compares
// the kernels with it.
#pragma once

#include "cpu/gemm.h"

namespace hk::HK_LEVEL {

// Independent sums: two units with a latency of 4 need at least 8. 14 sums and both operands fill 16 registers.
constexpr int kChains = 14;
constexpr int kPowerChains = 8;  // of about 12 dependent instructions each

// `steps` products into each of the chains; returns the number of multiply-adds.
template <typename Operand>
inline int64_t chain_products(int64_t steps) {
  using Real = RealOf<Operand>;
  Vec<Real> sum[kChains];
  for (int c = 0; c < kChains; ++c) sum[c] = splat<Real>(static_cast<Real>(c));
  Vec<Operand> a{}, b{};
  if constexpr (kNumbers<Operand> == 1) a = splat<Real>(Real(0.5)), b = splat<Real>(Real(1));
  for (int64_t step = 0; step < steps; ++step) {
    asm volatile("" : HK_IN_REGISTER(a), HK_IN_REGISTER(b));  // else products leave the loop
#pragma GCC unroll 14
    for (int c = 0; c < kChains; ++c) {
      if constexpr (kNumbers<Operand> == 1) {
        sum[c] = add_product<Operand>(sum[c], a, b);
      } else {
        sum[c] = add_product<Operand>(a, b, sum[c]);
      }
    }
  }
  for (int c = 0; c < kChains; ++c) asm volatile("" : HK_IN_REGISTER(sum[c]));
  return steps * kChains * kLanes<Real> * kNumbers<Operand>;
}

// `steps` powers of e in each of the chains; returns the number of powers.
template <typename Operand>
inline int64_t chain_powers(int64_t steps) {
  using Real = RealOf<Operand>;
  Vec<Real> x[kPowerChains];
  for (int c = 0; c < kPowerChains; ++c) x[c] = splat<Real>(static_cast<Real>(c));
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 8
    for (int c = 0; c < kPowerChains; ++c) x[c] = exp_of_score<Operand>(-x[c]);
  }
  for (int c = 0; c < kPowerChains; ++c) asm volatile("" : HK_IN_REGISTER(x[c]));
  return steps * kPowerChains * kLanes<Real>;
}

#if HK_TILES
template <>
inline int64_t chain_products<Pair>(int64_t steps) {
  alignas(64) Pair zeros[kTile * kTile] = {};
  const TileUnit<Pair> unit;
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  tile_load<4>(zeros, kTile), tile_load<5>(zeros, kTile);
  tile_load<6>(zeros, kTile), tile_load<7>(zeros, kTile);
  for (int64_t step = 0; step < steps; ++step) {
    tile_multiply<0, 4, 6>();
    tile_multiply<1, 4, 7>();
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
  }
  return steps * 4 * kTile * kTile * kTile * kNumbers<Pair>;
}
#endif

// Runs `chain` on all threads at once; returns the sum.
template <typename Chain>
inline int64_t on_threads(int threads, Chain chain) {
  int64_t total = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(+ : total)
  total += chain();
  return total;
}

}  // namespace hk::HK_LEVEL
