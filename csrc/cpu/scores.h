// The terms of a score between the product and the softmax: cap, bias, and the sink of the row.
//
//   score = softcap * tanh(scale * raw / softcap) + bias
//
// No factor is folded into bias or sink, so finite ones do not overflow.
#pragma once

#include <cmath>
#include <limits>
#include <memory>

#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/visible.h"

namespace hk::HK_LEVEL {

// Score of a hidden pair.
template <typename Real>
constexpr Real kHidden = -__builtin_inff();

// The terms of one head of one batch.
template <typename Real>
struct HeadTerms {
  Rows bias;     // [T][S], strides 0 where it broadcasts; absent: none
  Rows offsets;  // [1][T + S - 1], pair (i, j) reads column j - i + last_row; absent: none
  Rows sinks;    // [T][1], stride 0; absent: none
  int64_t last_row = 0;
  Real cap = 0;                 // 0: none
  const Real* image = nullptr;  // the bias tile by tile (BiasImage), or null
  int64_t windows = 0;          // of the image

  HeadTerms(const ScoreTerms& terms, int64_t b, int64_t h, int64_t T)
      : last_row(T - 1), cap(static_cast<Real>(terms.softcap)) {
    if (const Tensor& t = terms.bias) {
      const int64_t entry = b / terms.bias_inner * t.stride[0] + b % terms.bias_inner * t.stride[1] + h * t.stride[2];
      bias = {at(t, entry), t.stride[3], t.stride[4], t.dtype};
    }
    if (const Tensor& t = terms.offset_bias) offsets = {at(t, h * t.stride[0]), 0, t.stride[1], t.dtype};
    if (const Tensor& t = terms.sinks) sinks = {at(t, h * t.stride[0]), t.stride[1], 1, t.dtype};
  }

  // The tile of the image that begins with these keys, [keys][64].
  const Real* image_tile(int64_t first_row, int64_t first_key) const {
    const int64_t tile = first_row / BLOCK_M * windows + first_key / BLOCK_N;
    return image + (tile * BLOCK_N + first_key % BLOCK_N) * BLOCK_M;
  }

  bool has_bias() const { return bias || offsets; }
  bool change_scores() const { return has_bias() || cap != Real(0); }

  // Whether the bias hides the pair.
  bool hides(int64_t row, int64_t key) const {
    if (!has_bias()) return false;
    return (bias ? value(bias, row, key) : value(offsets, 0, key - row + last_row)) ==
           -std::numeric_limits<double>::infinity();
  }

  // values[n] = bias of a row for key begin + n; requires a bias.
  void load_bias_row(int64_t row, int64_t begin, int64_t count, Real* values) const {
    const Rows part =
        bias ? Rows{bias.columns(begin).at(row), 0, bias.step, bias.dtype} : offsets.columns(begin - row + last_row);
    load_row(values, part.data, part.dtype, count, part.step);
  }

  // The sink of a row; -inf without one.
  double sink(int64_t row) const { return sinks ? value(sinks, row, 0) : -std::numeric_limits<double>::infinity(); }

 private:
  static char* at(const Tensor& t, int64_t element) {
    return static_cast<char*>(t.data) + element * element_size(t.dtype);
  }
  static double value(const Rows& rows, int64_t row, int64_t column) {
    double result = 0;
    load_row(&result, rows.columns(column).at(row), rows.dtype, 1);
    return result;
  }
};

// bias[n][m] of the keys of a tile for the query rows, transposed as scores are; lanes past the rows are 0. `rows` is
// scratch of [64][row_stride(64)].
template <typename Real>
inline void load_bias(const HeadTerms<Real>& terms, const VisibleRows<Real>& visible, const KeySpan& keys, Real* rows,
                      Real* bias) {
  const int count = keys.count(), columns = visible.columns;
  if (terms.offsets) {
    // Offsets descend along the lanes: lane m of key n reads reversed[count - 1 - n + m].
    const int64_t last = keys.end - 1 - visible.first + terms.last_row;
    const int64_t first = last - std::min<int64_t>(last, count + columns - 2);
    alignas(64) Real ascending[BLOCK_N + BLOCK_M], reversed[BLOCK_N + BLOCK_M] = {};
    const Rows table = terms.offsets.columns(first);
    load_row(ascending, table.at(0), table.dtype, last - first + 1, table.step);
    for (int64_t i = 0; i <= last - first; ++i) reversed[i] = ascending[last - first - i];
    for (int n = 0; n < count; ++n)
      for (int m = 0; m < columns; m += kLanes<Real>) store(bias + n * BLOCK_M + m, load(reversed + count - 1 - n + m));
    return;
  }
  const Rows part = terms.bias.columns(keys.begin);
  if (part.stride == 0) {  // the same for all rows
    Real row[BLOCK_N];
    load_row(row, part.at(0), part.dtype, count, part.step);
    for (int n = 0; n < count; ++n)
      for (int m = 0; m < columns; m += kLanes<Real>) store<Real>(bias + n * BLOCK_M + m, splat<Real>(row[n]));
    return;
  }
  if (part.step != 1) {
    for (int n = 0; n < count; ++n) {
      Real* column = bias + n * BLOCK_M;
      load_row(column, part.columns(n).at(visible.first), part.dtype, visible.count, part.stride);
      std::fill(column + visible.count, column + std::max(visible.count, columns), Real(0));
    }
    return;
  }
  const int64_t padded = round_up(count, kLanes<Real>);
  if (part.dtype == kDTypeOf<Real> && count == padded && columns <= visible.count) {
    transpose(reinterpret_cast<const Real*>(part.at(visible.first)), part.stride, bias, BLOCK_M, columns, padded);
    return;
  }
  constexpr int64_t stride = row_stride<Real>(BLOCK_N);
  for (int m = 0; m < columns; ++m) {
    Real* row = rows + m * stride;
    const int filled = m < visible.count ? count : 0;
    if (filled) load_row(row, part.at(visible.first + m), part.dtype, count);
    std::fill(row + filled, row + padded, Real(0));
  }
  transpose(rows, stride, bias, BLOCK_M, columns, padded);
}

// A dense bias that several heads or batches share, tile by tile as scores are: [entry][query tile][window][64 keys][64
// rows]. It is transposed once instead of once per head.
template <typename Real>
class BiasImage {
 public:
  BiasImage(const AttentionParams& p, int64_t B, int64_t H, int64_t T, int64_t S) {
    const Tensor& bias = p.terms.bias;
    if (!bias || T < BLOCK_M || bias.size[3] == 1 || bias.size[4] == 1) return;
    const int64_t entries = bias.size[0] * bias.size[1] * bias.size[2];
    tiles_ = ceil_div(T, BLOCK_M);
    windows_ = ceil_div(S, BLOCK_N);
    const int64_t count = entries * tiles_ * windows_ * kTile;
    if (B * H < kReaders * entries || count * static_cast<int64_t>(sizeof(Real)) > kBytes) return;
    data_.reset(new Real[count]);
    constexpr int64_t kRows = BLOCK_M * row_stride<Real>(BLOCK_N);
    MaskParams none;
    none.band_lo = -T;
    none.band_hi = S + 1;
    parallel_for(entries * tiles_, p.threads, count, buffer_bytes<Real>(kRows),
                 [&](int64_t item, Workspace& workspace) {
                   Real* rows = workspace.take<Real>(kRows);
                   const int64_t entry = item / tiles_, h = entry % bias.size[2];
                   const int64_t inner = entry / bias.size[2] % bias.size[1];
                   const int64_t outer = entry / bias.size[2] / bias.size[1];
                   const HeadTerms<Real> terms(p.terms, outer * p.terms.bias_inner + inner, h, T);
                   const VisibleRows<Real> all(none, 0, 0, item % tiles_ * BLOCK_M, T, S);
                   for (int64_t w = 0; w < windows_; ++w)
                     load_bias(terms, all, {w * BLOCK_N, std::min(S, (w + 1) * BLOCK_N), true}, rows,
                               data_.get() + (item * windows_ + w) * kTile);
                 });
  }

  // The terms of head (b, h), with their entry of the image, if any.
  HeadTerms<Real> terms(const ScoreTerms& terms, int64_t b, int64_t h, int64_t T) const {
    HeadTerms<Real> result(terms, b, h, T);
    if (!data_) return result;
    const int64_t* size = terms.bias.size;
    const int64_t outer = size[0] == 1 ? 0 : b / terms.bias_inner;
    const int64_t inner = size[1] == 1 ? 0 : b % terms.bias_inner;
    const int64_t entry = (outer * size[1] + inner) * size[2] + (size[2] == 1 ? 0 : h);
    result.image = data_.get() + entry * tiles_ * windows_ * kTile;
    result.windows = windows_;
    return result;
  }

 private:
  static constexpr int64_t kTile = BLOCK_M * BLOCK_N;
  static constexpr int64_t kReaders = 4;                // heads per entry, at least; heuristic
  static constexpr int64_t kBytes = int64_t{32} << 20;  // heuristic
  std::unique_ptr<Real[]> data_;
  int64_t tiles_ = 0, windows_ = 0;
};

// Whether the bias hides all pairs of a tile; lanes past the rows count as visible.
template <typename Real>
inline bool hides_all(const Real* bias, int count, int columns) {
  for (int n = 0; n < count; ++n)
    for (int m = 0; m < columns; m += kLanes<Real>)
      if (any_lane<Real>(load(bias + n * BLOCK_M + m) != kHidden<Real>)) return false;
  return true;
}

// Finishes scores[n][m] of `count` keys in place: multiplies by `factor`, applies the cap, then adds the bias ([64][64]
// or null). Stores the derivative of the cap in `slope` ([64][64] or null). Returns whether the bias hides a pair.
template <typename Real>
inline bool finish_scores(Real cap, Real factor, int count, int columns, const Real* bias, Real* scores, Real* slope) {
  const Real inverse = cap != Real(0) ? Real(1) / cap : Real(0);
  IntVec<Real> hidden{};
  for (int n = 0; n < count; ++n) {
    for (int m = 0; m < columns; m += kLanes<Real>) {
      const int at = n * BLOCK_M + m;
      Vec<Real> s = load(scores + at) * factor;
      if (cap != Real(0)) {
        const Vec<Real> share = tanh<Real>(s * inverse);
        s = share * cap;
        if (slope) store<Real>(slope + at, Real(1) - share * share);
      }
      if (bias) {
        const Vec<Real> b = load(bias + at);
        const IntVec<Real> hides = b == kHidden<Real>;
        hidden |= hides;
        s = hides ? splat<Real>(kHidden<Real>) : s + b;
      }
      store<Real>(scores + at, s);
    }
  }
  return any_lane<Real>(hidden);
}

// The accumulator of a bias gradient: of an entry [T][S] with strides (0 where it broadcasts), or of the offsets of a
// head; null if not requested.
template <typename Real>
struct BiasGradient {
  Real* data = nullptr;
  int64_t row_stride = 0, key_stride = 0;
  Real* offsets = nullptr;
  int64_t last_row = 0;

  explicit operator bool() const { return data || offsets; }

  // Adds dscores[n][m] of a tile; those of hidden pairs and of lanes without a row are 0. `rows` is scratch
  // [64][row_stride(64)]; dscores is allocated in whole vectors of keys.
  void add(const Real* dscores, const VisibleRows<Real>& visible, const KeySpan& keys, Real* rows) const {
    const int count = keys.count(), columns = visible.columns;
    if (offsets) {
      alignas(64) Real sums[BLOCK_N + BLOCK_M] = {};  // reversed as in load_bias
      for (int n = 0; n < count; ++n)
        for (int m = 0; m < columns; m += kLanes<Real>) {
          Real* at = sums + count - 1 - n + m;
          store<Real>(at, load(at) + load(dscores + n * BLOCK_M + m));
        }
      const int64_t last = keys.end - 1 - visible.first + last_row;
      for (int64_t i = std::min<int64_t>(last, count + visible.count - 2); i >= 0; --i) offsets[last - i] += sums[i];
    } else if (row_stride == 0) {
      for (int n = 0; n < count; ++n) {
        Vec<Real> sum{};
        for (int m = 0; m < columns; m += kLanes<Real>) sum += load(dscores + n * BLOCK_M + m);
        data[(keys.begin + n) * key_stride] += sum_lanes<Real>(sum);
      }
    } else if (key_stride == 0) {
      for (int m = 0; m < columns; m += kLanes<Real>) {
        Vec<Real> sum{};
        for (int n = 0; n < count; ++n) sum += load(dscores + n * BLOCK_M + m);
        for (int lane = 0; lane < kLanes<Real> && m + lane < visible.count; ++lane)
          data[(visible.first + m + lane) * row_stride] += sum[lane];
      }
    } else {
      constexpr int64_t stride = hk::HK_LEVEL::row_stride<Real>(BLOCK_N);
      transpose(dscores, BLOCK_M, rows, stride, round_up(count, kLanes<Real>), columns);
      for (int m = 0; m < std::min(columns, visible.count); ++m) {
        Real* row = data + (visible.first + m) * row_stride + keys.begin;
        for (int n = 0; n < count; ++n) row[n] += rows[m * stride + n];
      }
    }
  }
};

}  // namespace hk::HK_LEVEL
