// Products of few rows: with keys, and of their weights with values.
//
// Keys and values are read once, in place, and widened in registers; the lanes are features. A score is a sum over
// lanes; as many scores as there are lanes are reduced together. The scores and the weights of a row are contiguous.
#pragma once

#include "cpu/attend.h"
#include "cpu/stored.h"

namespace hk::HK_LEVEL {

constexpr int64_t kPart = 256;  // keys of a task, and the stride of rows of products and weights

// Sums that are accumulated in registers at once: half of these.
constexpr int kSums = HK_VECTOR_REGISTERS / 2;

__attribute__((always_inline)) inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Whether load c of some that are next to each other begins a line, if the first does.
template <typename Operand, typename Number>
constexpr bool begins_line(int c) {
  return c * kLoad<Operand, Number> * static_cast<int>(sizeof(Number)) % 64 == 0;
}

// Rows of Real become rows of operands in place; `width` in whole vectors of them.
template <typename Operand>
inline void as_operands(RealOf<Operand>* row, [[maybe_unused]] int64_t width) {
  if constexpr (kNumbers<Operand> == 2) pair_columns(row, 0, 1, width, reinterpret_cast<Pair*>(row), 0);
}

// A query row becomes operands in place, in the order of loads of keys, then zeros, which loads may read; `width` in
// whole loads.
template <typename Operand, typename Number>
inline void prepare_query(RealOf<Operand>* row, int64_t width) {
  for (int64_t d = 0; d < width; d += kLoad<Operand, Number>) as_loaded<Operand, Number>(row + d);
  as_operands<Operand>(row, width);
  std::fill(row + width / kNumbers<Operand>, row + width, RealOf<Operand>(0));
}

// products[r][k] of R rows and K keys, [R][kPart]. `query` holds the rows in whole loads, 0 past the width. Prefetches
// the numbers `ahead` of the keys. kLast: there are only `count` keys, at least 1; the other products are undefined.
template <typename Operand, typename Number, int R, int K, bool kLast>
inline void multiply_keys(const Number* keys, int64_t key_stride, int64_t count, int64_t ahead, const Operand* query,
                          int64_t query_stride, const Ranges& features, RealOf<Operand>* products) {
  using Real = RealOf<Operand>;
  constexpr int L = kLanes<Real>;
  static_assert(R * K == kSums && kSums % L == 0);
  Vec<Real> sum[R * K];
#pragma GCC unroll 16
  for (int i = 0; i < R * K; ++i) sum[i] = Vec<Real>{};
  constexpr int W = kLoad<Operand, Number>;
  // Vectors of a load at once: as many as leave registers for the query.
  constexpr int V = R == 1 ? kVectors<Operand, Number> : 1;
  // Features [d, d + C * W) of one key after the other: rows are read in the order of memory.
  const auto add = [&](int64_t d, auto chunk, auto load_key) __attribute__((always_inline)) {
    constexpr int C = chunk;
    static_assert(C == 1 || V == kVectors<Operand, Number>);
#pragma GCC unroll 2
    for (int first = 0; first < kVectors<Operand, Number>; first += V) {
      Vec<Operand> q[R][C * V];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < C * V; ++v)
          q[r][v] = load(query + r * query_stride + d / kNumbers<Operand> + (first + v) * kLanes<Operand>);
      const Number* row = keys + d;
#pragma GCC unroll 16
      for (int k = 0; k < K; ++k) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          if (first == 0 && begins_line<Operand, Number>(c)) prefetch(row + c * W + ahead);
          const auto numbers = load_key(row + c * W);
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) {
            const Vec<Operand> x = widened(numbers, first + v, Operand{}, Number{});
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sum[r * K + k] = add_product<Operand>(x, q[r][c * V + v], sum[r * K + k]);
          }
        }
        row += !kLast || k + 1 < count ? key_stride : 0;
        asm("" : "+r"(row));  // g++ computes K addresses in advance and spills them
      }
    }
  };
  const auto whole = [](const Number* p) { return load_numbers<Operand>(p); };
  // Long chunks: the hardware prefetches whole rows better than parts of them.
  constexpr int kChunk = kLast || V < kVectors<Operand, Number> ? 1 : std::max(1, kSums / (2 * R * V));
  for (const Range& range : features) {
    int64_t d = range.begin;
    const auto add_chunks = [&](auto chunk) __attribute__((always_inline)) {
      if constexpr (chunk <= kChunk)
        for (; d + chunk * W <= range.end; d += chunk * W) add(d, chunk, whole);
    };
    add_chunks(std::integral_constant<int, 8>{});
    add_chunks(std::integral_constant<int, 4>{});
    add_chunks(std::integral_constant<int, 2>{});
    add_chunks(std::integral_constant<int, 1>{});
    if (const int64_t rest = range.end - d)
      add(d, std::integral_constant<int, 1>{}, [rest](const Number* p) { return load_numbers<Operand>(p, rest); });
  }
  alignas(64) Real sums[R * K];
#pragma GCC unroll 4
  for (int i = 0; i < R * K; i += L) store<Real>(sums + i, sums_of<Real>(sum + i));
  for (int r = 0; r < R; ++r) std::memcpy(products + r * kPart, sums + r * K, sizeof(Real) * K);
}

// Rows [begin, end) of a block, and the distance in numbers of those that are prefetched with them.
struct Prefetch {
  int64_t begin = 0, end = 0, ahead = 0;
};

// out[r][w] += weights[r][n] * values[n][w] over `count` keys, for R rows and V vectors of columns; kLast: only the
// first `width` columns. The keys are summed from zero: a long sum rounds once per call.
template <typename Operand, typename Number, int R, int V, bool kLast>
inline void add_block(const Operand* weights, int64_t count, const Number* values, int64_t stride, const Prefetch& next,
                      int64_t width, RealOf<Operand>* out, int64_t out_stride) {
  using Real = RealOf<Operand>;
  constexpr int L = kLanes<Real>;
  Vec<Real> sum[R][V] = {};
  const auto add = [&](int64_t n, const auto& x) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec<Operand> weight = splat<Operand>(weights[r * kPart + n]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = add_product<Operand>(weight, x[v], sum[r][v]);
    }
  };
  const auto load_row = [&](const Number* row, int load) __attribute__((always_inline)) {
    return kLast ? load_numbers<Operand>(row, width) : load_numbers<Operand>(row + load * kLoad<Operand, Number>);
  };
  const auto prefetch_row = [&](const Number* row) __attribute__((always_inline)) {
    constexpr int kLoads = V / (kVectors<Operand, Number> * kNumbers<Operand>);
#pragma GCC unroll 8
    for (int i = 0; i < kLoads; ++i)
      if (begins_line<Operand, Number>(i)) prefetch(row + i * kLoad<Operand, Number> + next.ahead);
  };
  if constexpr (kNumbers<Operand> == 1) {
    constexpr int kEach = kVectors<Operand, Number>;
    for (int64_t n = 0; n < count; ++n) {
      if (n >= next.begin && n < next.end) prefetch_row(values + n * stride);
      Vec<Operand> x[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; v += kEach) {
        const auto numbers = load_row(values + n * stride, v / kEach);
#pragma GCC unroll 2
        for (int i = 0; i < kEach; ++i) x[v + i] = widened(numbers, i, Operand{}, Number{});
      }
      add(n, x);
    }
  } else {  // two keys at a time: their numbers alternate
    for (int64_t n = 0; n < count; n += 2) {
      const Number* row = values + n * stride;
      if (n >= next.begin && n < next.end) prefetch_row(row), prefetch_row(row + stride);
      Vec<Operand> x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V / 2; ++v) {
        const Vec<Operand> a = (Vec<Operand>)load_row(row, v);
        const Vec<Operand> b = n + 1 < count ? (Vec<Operand>)load_row(row + stride, v) : Vec<Operand>{};
        x[2 * v] = couple<0>(a, b);
        x[2 * v + 1] = couple<1>(a, b);
      }
      add(n / 2, x);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v += kVectors<Operand, Number>) in_order<Operand, Number>(sum[r] + v);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      Real* at = out + r * out_stride + v * L;
      store<Real>(at, load(at) + sum[r][v]);
    }
  }
}

// The same for R rows and all `width` columns.
template <typename Operand, typename Number, int R>
inline void add_columns(const Operand* weights, int64_t count, const Number* values, int64_t stride,
                        const Prefetch& next, int64_t width, RealOf<Operand>* out, int64_t out_stride) {
  constexpr int L = kLanes<Operand>;
  constexpr int kMost = std::min(8, kSums / R), kLeast = kLoad<Operand, Number> / L;
  int64_t w = 0;
  const auto run = [&](auto block, int64_t columns) {
    block(weights, count, values + w, stride, next, columns, out + w, out_stride);
    w += columns;
  };
  while (width - w >= kMost * L) run(add_block<Operand, Number, R, kMost, false>, kMost * L);
  if constexpr (kMost > 4)
    if (width - w >= 4 * L) run(add_block<Operand, Number, R, 4, false>, 4 * L);
  if constexpr (kMost > 2)
    if (width - w >= 2 * L) run(add_block<Operand, Number, R, 2, false>, 2 * L);
  if constexpr (kLeast == 1)
    if (width - w >= L) run(add_block<Operand, Number, R, 1, false>, L);
  if (width - w > 0) run(add_block<Operand, Number, R, kLeast, true>, width - w);
}

// Calls body(std::integral_constant<int, R>, first row, number of blocks) for blocks of R = 4, 2 and 1 of `count` rows.
template <typename Body>
inline void for_rows(int64_t count, Body body) {
  const int64_t r = count / 4 * 4;
  if (r > 0) body(std::integral_constant<int, 4>{}, 0, r / 4);
  if (count & 2) body(std::integral_constant<int, 2>{}, r, 1);
  if (count & 1) body(std::integral_constant<int, 1>{}, count - 1, 1);
}

}  // namespace hk::HK_LEVEL
