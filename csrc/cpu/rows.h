// Loads and stores of tensor rows: conversion between the storage dtype and Real (float or double), and transposition.
// The switch on the storage dtype is here, once per row.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/numbers.h"
#include "common/params.h"
#include "cpu/simd.h"

namespace hk::HK_LEVEL {

inline int64_t element_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

template <typename Real>
constexpr DType kDTypeOf = sizeof(Real) == 4 ? DType::kFloat32 : DType::kFloat64;

// A two-dimensional part of a tensor: rows of contiguous elements, unless `step` says otherwise.
struct Rows {
  char* data = nullptr;
  int64_t stride = 0;  // elements between rows
  int64_t step = 1;    // elements between columns
  DType dtype = DType::kFloat32;
  int64_t next = 0;  // distance in bytes to the same rows of the head processed next; 0: unknown

  char* at(int64_t row) const { return data + row * stride * element_size(dtype); }
  Rows columns(int64_t first) const { return {data + first * step * element_size(dtype), stride, step, dtype, next}; }
  explicit operator bool() const { return data != nullptr; }
};

// [rows, width] of a four-dimensional tensor at (b, h).
inline Rows rows_at(const Tensor& t, int64_t b, int64_t h) {
  char* base = static_cast<char*>(t.data);
  if (!base) return {};
  return {base + (b * t.stride[0] + h * t.stride[1]) * element_size(t.dtype), t.stride[2], t.stride[3], t.dtype,
          t.stride[1] * element_size(t.dtype)};
}

// [rows, width] of a three-dimensional tensor at b.
inline Rows rows_at(const Tensor& t, int64_t b) {
  char* base = static_cast<char*>(t.data);
  if (!base) return {};
  return {base + b * t.stride[0] * element_size(t.dtype), t.stride[1], t.stride[2], t.dtype};
}

// dst[i] = src[i * step] widened to Real, for `count` elements.
template <typename Real>
inline void load_row(Real* dst, const char* src, DType dtype, int64_t count, int64_t step = 1) {
  const auto copy = [&](const auto* p, auto widen) {
    if (step == 1) {
      for (int64_t i = 0; i < count; ++i) dst[i] = static_cast<Real>(widen(p[i]));
    } else {
      for (int64_t i = 0; i < count; ++i) dst[i] = static_cast<Real>(widen(p[i * step]));
    }
  };
  const auto same = [](auto x) { return x; };
  switch (dtype) {
    case DType::kFloat32:
      return copy(reinterpret_cast<const float*>(src), same);
    case DType::kFloat64:
      return copy(reinterpret_cast<const double*>(src), same);
    case DType::kBFloat16:
      return copy(reinterpret_cast<const uint16_t*>(src), [](uint16_t h) { return widen_bfloat(h); });
    case DType::kFloat16:
      return copy(reinterpret_cast<const uint16_t*>(src), [](uint16_t h) { return widen_half(h); });
  }
}

// dst[i * step] = src[i] narrowed to the storage dtype, for `count` elements.
template <typename Real>
inline void store_row(char* dst, const Real* src, DType dtype, int64_t count, int64_t step = 1) {
  const auto copy = [&](auto* p, auto narrow) {
    if (step == 1) {
      for (int64_t i = 0; i < count; ++i) p[i] = narrow(src[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) p[i * step] = narrow(src[i]);
    }
  };
  switch (dtype) {
    case DType::kFloat32:
      return copy(reinterpret_cast<float*>(dst), [](Real x) { return static_cast<float>(x); });
    case DType::kFloat64:
      return copy(reinterpret_cast<double*>(dst), [](Real x) { return static_cast<double>(x); });
    case DType::kBFloat16:
      return copy(reinterpret_cast<uint16_t*>(dst), [](Real x) { return narrow_bfloat(static_cast<float>(x)); });
    case DType::kFloat16:
      return copy(reinterpret_cast<uint16_t*>(dst), [](Real x) { return narrow_half(static_cast<float>(x)); });
  }
}

// Prefetches the same row of the head that is processed next, if heads of `width` elements are side by side, as in the
// layout [B, T, H, D] of the projections: hardware prefetchers do not cross the pages between rows. (g++ drops calls of
// a function that only prefetches.)
template <bool kWrite>
__attribute__((always_inline)) inline void prefetch_next_head(const Rows& rows, int64_t row, int64_t width) {
  constexpr int64_t kLine = 64;
  const int64_t bytes = width * element_size(rows.dtype);
  if (rows.stride == width || rows.step != 1 || rows.next == 0) return;
  const char* next = rows.at(row) + rows.next;
  for (int64_t at = 0; at < bytes; at += kLine)
    __builtin_prefetch(next + at, kWrite, 2);  // 2: into the second-level cache
}

// dst[0 .. width) = a row in Real.
template <typename Real>
inline void read_row(const Rows& rows, int64_t row, int64_t width, Real* dst) {
  prefetch_next_head<false>(rows, row, width);
  load_row(dst, rows.at(row), rows.dtype, width, rows.step);
}

// A row = src[0 .. width) in its dtype.
template <typename Real>
inline void write_row(const Rows& rows, int64_t row, int64_t width, const Real* src) {
  prefetch_next_head<true>(rows, row, width);
  store_row(rows.at(row), src, rows.dtype, width, rows.step);
}

template <typename Real>
inline void store_zeros(const Rows& rows, int64_t first, int64_t count, int64_t width) {
  const int64_t bytes = element_size(rows.dtype);
  if (width == 0) return;
  if (rows.step == 1 && rows.stride == width) {
    std::memset(rows.at(first), 0, count * width * bytes);
    return;
  }
  const Real zero = 0;
  for (int64_t r = first; r < first + count; ++r) {
    if (rows.step == 1) {
      std::memset(rows.at(r), 0, width * bytes);
    } else {
      for (int64_t i = 0; i < width; ++i) store_row(rows.at(r) + i * rows.step * bytes, &zero, rows.dtype, 1);
    }
  }
}

// Interleaves the lower (half = 0) or upper (half = 1) halves of a and b.
template <int half, typename Lanes, size_t... I>
inline Lanes interleave(Lanes a, Lanes b, std::index_sequence<I...>) {
  constexpr int L = sizeof...(I);
  return __builtin_shufflevector(a, b, (half * L / 2 + static_cast<int>(I) / 2 + (I % 2) * L)...);
}

template <int half, typename Lanes>
inline Lanes interleave(Lanes a, Lanes b) {
  return interleave<half>(a, b, std::make_index_sequence<sizeof a / sizeof a[0]>{});
}

// Lane i of the result is the sum of the lanes of v[i], each in the same order.
template <typename Real>
__attribute__((always_inline)) inline Vec<Real> sums_of(const Vec<Real>* v) {
  constexpr int L = kLanes<Real>;
  Vec<Real> a[L];
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) a[i] = v[i];
#pragma GCC unroll 4
  for (int half = L / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) a[i] = interleave<0>(a[i], a[i + half]) + interleave<1>(a[i], a[i + half]);
  return a[0];
}

// dst[columns][rows] = src[rows][columns] transposed, one square of lanes x lanes: log2(lanes) perfect shuffles.
template <typename Real>
inline void transpose_square(const Real* src, int64_t lds, Real* dst, int64_t ldd) {
  constexpr int L = kLanes<Real>;
  Vec<Real> a[L], b[L];
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) a[i] = load(src + i * lds);
#pragma GCC unroll 4
  for (int stage = 1; stage < L; stage *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < L / 2; ++i) {
      b[2 * i] = interleave<0>(a[i], a[i + L / 2]);
      b[2 * i + 1] = interleave<1>(a[i], a[i + L / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) store(dst + i * ldd, a[i]);
}

// As above for whole tiles; both sizes in whole lanes.
template <typename Real>
inline void transpose(const Real* src, int64_t lds, Real* dst, int64_t ldd, int64_t rows, int64_t columns) {
  constexpr int L = kLanes<Real>;
  for (int64_t r = 0; r < rows; r += L)
    for (int64_t c = 0; c < columns; c += L) transpose_square(src + r * lds + c, lds, dst + c * ldd + r, ldd);
}

}  // namespace hk::HK_LEVEL
