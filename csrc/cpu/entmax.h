// alpha-entmax of transposed tiles of scores: [keys][query rows], one query row per lane.
//
//   p = [1 + order (s - threshold)]_+ ^ (1 / order),   order = alpha - 1
//
// The threshold of a row makes its probabilities add up to 1 (Correia, Niculae, Martins 2019, where it is called tau =
// order threshold - 1). As order tends to 0 it tends to the logarithm of the sum of exp(s) and entmax to softmax.
// Scores and the threshold of a row are kept relative to its largest score, by which they are as exact for large scores
// as for small ones.
#pragma once

#include "cpu/softmax.h"

namespace hk::HK_LEVEL {

// ln(1 + y) for y >= -1, finite for -1; by the method of fdlibm.
template <typename Real>
inline Vec<Real> log1p(Vec<Real> y) {
  constexpr bool kSingle = sizeof(Real) == 4;
  constexpr int kMantissaBits = kSingle ? 23 : 52;
  constexpr Int<Real> kOne = static_cast<Int<Real>>(kSingle ? 0x3f800000 : 0x3ff0000000000000);
  constexpr Int<Real> kRootHalf = static_cast<Int<Real>>(kSingle ? 0x3f3504f3 : 0x3fe6a09e667f3bcd);
  constexpr Int<Real> kMantissa = (Int<Real>{1} << kMantissaBits) - 1;

  const Vec<Real> u = Real(1) + y, least = splat<Real>(std::numeric_limits<Real>::min());
  const Vec<Real> lost = (y - (u - Real(1))) / at_least<Real>(least, u);
  // u = 2^n (1 + f), with 1 + f between sqrt(1/2) and sqrt(2).
  const IntVec<Real> shifted = (IntVec<Real>)u + (kOne - kRootHalf);
  const Vec<Real> n = __builtin_convertvector((shifted >> kMantissaBits) - (kOne >> kMantissaBits), Vec<Real>);
  const Vec<Real> f = (Vec<Real>)((shifted & kMantissa) + kRootHalf) - Real(1);
  const Vec<Real> s = f / (f + Real(2)), z = s * s, half = Real(0.5) * f * f;
  Vec<Real> r;
  if constexpr (kSingle) {
    r = splat<Real>(0.24279078841f);
    r = r * z + 0.28498786688f;
    r = r * z + 0.40000972152f;
    r = r * z + 0.66666662693f;
  } else {
    r = splat<Real>(1.479819860511658591e-1);
    r = r * z + 1.531383769920937332e-1;
    r = r * z + 1.818357216161805012e-1;
    r = r * z + 2.222219843214978396e-1;
    r = r * z + 2.857142874366239149e-1;
    r = r * z + 3.999999999940941908e-1;
    r = r * z + 6.666666666666735130e-1;
  }
  return n * static_cast<Real>(0.69314718055994530942) + (f - (half - s * (half + z * r)) + lost);
}

// Probabilities, and their derivatives p ^ (2 - alpha) by the score with the threshold held: 0 where p is 0.
template <typename Real>
struct Powers {
  Vec<Real> p, slope;
};

// Calls body(power) with the power of this order: power(y) is that of u = 1 + y, y >= -1.
template <typename Real, typename Body>
inline void with_power(Real order, Body body) {
  if (order == Real(1))
    return body([](Vec<Real> y) {
      const Vec<Real> u = Real(1) + y;
      return Powers<Real>{u, u == Real(0) ? Vec<Real>{} : splat<Real>(1)};
    });
  if (order == Real(0.5))
    return body([](Vec<Real> y) {
      const Vec<Real> u = Real(1) + y;
      return Powers<Real>{u * u, u};
    });
  body([exponent = Real(1) / order](Vec<Real> y) {
    const Vec<Real> p = exp<Real>(log1p<Real>(y) * exponent);
    return Powers<Real>{p, p == Real(0) ? Vec<Real>{} : p / (Real(1) + y)};
  });
}

// max(order * (score - threshold), -1).
template <typename Real>
inline Vec<Real> above_threshold(Real order, Vec<Real> score, Vec<Real> threshold) {
  return at_least<Real>(splat<Real>(-1), (score - threshold) * order);
}

// Scores of a tile to probabilities, in place, and their slopes.
template <typename Real>
inline void entmax(Real order, const Real* threshold, int keys, int columns, Real* scores, Real* slopes) {
  with_power(order, [&](auto power) {
    for (int n = 0; n < keys; ++n) {
      for (int m = 0; m < columns; m += kLanes<Real>) {
        const int at = n * BLOCK_M + m;
        const Vec<Real> y = above_threshold(order, load(scores + at), load(threshold + m));
        const Powers<Real> result = power(y);
        store<Real>(scores + at, result.p);
        store<Real>(slopes + at, result.slope);
      }
    }
  });
}

// The threshold of the rows of one vector for scores [count][BLOCK_M], from a lower bound on it: Newton's method for
// sum(p) ^ order = 1. The left side is a norm of the excess over the threshold, so it is convex and decreasing, and
// thresholds only increase. From the largest score the first step is exact for equal scores, and in the limit of
// softmax.
template <typename Real>
inline Vec<Real> find_threshold(Real order, Vec<Real> threshold, const Real* scores, int64_t count) {
  constexpr int kMostSteps = 32;  // about 4 are taken
  constexpr Real kLeast = 2 * std::numeric_limits<Real>::epsilon();
  for (int i = 0; i < kMostSteps; ++i) {
    Vec<Real> sum{}, slopes{};
    with_power(order, [&](auto power) {
      // A sum of blocks, which rounds less than one long sum.
      for (int64_t first = 0; first < count; first += BLOCK_N) {
        Vec<Real> block_sum{}, block_slopes{};
        for (int64_t n = first; n < std::min(first + BLOCK_N, count); ++n) {
          const Powers<Real> result = power(above_threshold(order, load(scores + n * BLOCK_M), threshold));
          block_sum += result.p;
          block_slopes += result.slope;
        }
        sum += block_sum;
        slopes += block_slopes;
      }
    });
    const Vec<Real> z = order * log1p<Real>(sum - Real(1));
    Vec<Real> series = splat<Real>(1);  // (1 - exp(-z)) / z
    for (int k = 6; k > 1; --k) series = Real(1) - z * series / static_cast<Real>(k);
    const Vec<Real> excess = z < Real(0.25) ? z * series : Real(1) - exp<Real>(-z);
    const Vec<Real> by = slopes == Real(0)  // the row sees no key
                             ? Vec<Real>{}
                             : sum * excess / slopes / order;
    const Vec<Real> size = threshold < Real(0) ? -threshold : threshold;
    threshold += by;
    if (!any_lane<Real>(by > kLeast * at_least<Real>(splat<Real>(1), size))) break;
  }
  return threshold;
}

}  // namespace hk::HK_LEVEL
