// The attention of a call, gated or collaborative: its sizes, and what the passes read of each head.
#pragma once

#include <vector>

#include "cpu/gate.h"
#include "cpu/operand.h"
#include "cpu/rows.h"
#include "cpu/scores.h"
#include "cpu/visible.h"

namespace hk::HK_LEVEL {

// A view of ranges in ascending order; it does not own them.
struct Ranges {
  const Range* first = nullptr;
  int64_t count = 0;
  const Range* begin() const { return first; }
  const Range* end() const { return first + count; }
  bool empty() const { return count == 0; }
};

// The inputs of one head of one batch element.
template <typename Real>
struct Head {
  int64_t b, h;
  Rows key;           // [S][D]
  Rows value;         // [S][Dv]
  Rows content_bias;  // [1][S]; absent for gated attention
  Real scale;         // of raw products
  int64_t D, Dv;
  Ranges features;  // features with a nonzero factor
  HeadTerms<Real> terms;
  Real order = 0;  // alpha - 1 of entmax; 0: softmax

  // Whether a key adds to a row, NaN included. With entmax only keys that are visible have a weight.
  bool adds(const VisibleRows<Real>& visible, int m, int64_t key, const Real* weight) const {
    if (order != Real(0)) return *weight != Real(0);
    return visible.row_sees_key(m, key) && !terms.hides(visible.first + m, key);
  }
};

// Whether the scale is folded into the query. Pairs round the query, so there it multiplies the scores instead.
template <typename Operand>
constexpr bool kScaledQuery = kNumbers<Operand> == 1;

// rows[m][0 .. round_up(width)) = the tile's rows in Real, zero where a row sees nothing and past the width.
template <typename Real>
inline void gather_rows(const Rows& source, const VisibleRows<Real>& visible, int64_t width, Real* rows) {
  const int64_t padded = round_up(width, kLanes<Real>), stride = row_stride<Real>(width);
  for (int m = 0; m < visible.columns; ++m) {
    Real* row = rows + m * stride;
    const bool read = m < visible.count && visible.sees(m);
    if (read) read_row(source, visible.first + m, width, row);
    for (int64_t d = read ? width : 0; d < padded; ++d) row[d] = 0;
  }
}

// query[d][m] = factor[d] * source[m][d] over the features, zero where a row sees nothing.
template <typename Real>
inline void pack_query(const Rows& source, const VisibleRows<Real>& visible, Ranges features, const Real* factor,
                       Real* rows, Real* query) {
  for (const Range& range : features) {
    const Rows columns = source.columns(range.begin);
    const int64_t width = range.end - range.begin, padded = round_up(width, kLanes<Real>);
    Real* packed = query + range.begin * BLOCK_M;
    if (source.dtype == kDTypeOf<Real> && width == padded && visible.all_rows) {
      for (int m = 0; m < visible.columns; ++m) prefetch_next_head<false>(columns, visible.first + m, width);
      transpose(reinterpret_cast<const Real*>(columns.at(visible.first)), source.stride, packed, BLOCK_M,
                visible.columns, width);
    } else {
      gather_rows(columns, visible, width, rows);
      transpose(rows, row_stride<Real>(width), packed, BLOCK_M, visible.columns, padded);
    }
    for (int64_t d = range.begin; d < range.end; ++d)
      for (int m = 0; m < visible.columns; m += kLanes<Real>)
        store<Real>(query + d * BLOCK_M + m, load(query + d * BLOCK_M + m) * factor[d]);
  }
}

// words[m][0 .. packed(width)) = the tile's rows as pairs, from bfloat16; zero where a row sees nothing and past the
// width.
inline void gather_words(const Rows& source, const VisibleRows<float>& visible, int64_t width, Pair* words) {
  const int64_t stride = row_stride<float>(width);
  for (int m = 0; m < visible.columns; ++m) {
    if (m < visible.count && visible.sees(m)) {
      prefetch_next_head<false>(source, visible.first + m, width);
      copy_words(reinterpret_cast<const BFloat16*>(source.at(visible.first + m)), width, words + m * stride);
    } else {
      std::memset(words + m * stride, 0, 4 * packed<Pair>(width));
    }
  }
}

// The same as pairs, rounded; includes the features between the ranges. `factor` null: all are 1.
inline void pack_query(const Rows& source, const VisibleRows<float>& visible, Ranges features, const float* factor,
                       float* rows, Pair* query) {
  if (features.empty()) return;
  const int64_t width = features.end()[-1].end, stride = row_stride<float>(width);
  if (!factor) {
    Pair* words = reinterpret_cast<Pair*>(rows);
    gather_words(source, visible, width, words);
    return transpose(words, stride, query, BLOCK_M, visible.columns, packed<Pair>(width));
  }
  gather_rows(source, visible, width, rows);
  for (int m = 0; m < visible.columns; ++m)
    for (int64_t d = 0; d < width; ++d) rows[m * stride + d] *= factor[d];
  pack_transposed(rows, stride, visible.columns, round_up(width, kLanes<float>), rows, query);
}

constexpr int64_t kMixingChunk = 16;  // MIXING_CHUNK of call.py
static_assert(kVectors<float, BFloat16> == 1 || kMixingChunk % kLoad<float, BFloat16> == 0,
              "a query row is in the order of loads, which begin where chunks do");

// In collaborative attention all heads share one query and one key. The mixing vector of a head scales the features of
// the query; chunks of it that are all zero are skipped.
template <typename Real, typename Operand>
struct Attention {
  const AttentionParams& params;
  const bool collaborative;
  Gate<Real> gate;
  bool skips_closed = true;  // whether closed heads are not computed
  bool skips_rows = false;   // whether the backward pass skips tiles whose rows are all closed
  int64_t B, H, T, S, D, Dv, query_tiles;
  int64_t heads_per_key, heads_per_value;    // query heads that share a key head, and a value head
  int64_t kept_tiles;                        // tiles of scores that entmax keeps of a query tile
  std::vector<Real> mixing;                  // [H][D]; collaborative attention only
  std::vector<Real> factors;                 // [H][D] of the features of a query; gated attention: [D]
  std::vector<std::vector<Range>> features;  // [H] runs of chunks that are not all zero; collaborative attention only
  Range all_features;
  BiasImage<Real> image;

  explicit Attention(const AttentionParams& p)
      : params(p),
        collaborative(p.mixing),
        gate(p.gate, p.activation),
        B(p.query.size[0]),
        H(p.heads()),
        T(p.rows()),
        S(p.keys()),
        D(p.query.size[p.query.rank - 1]),
        Dv(p.value ? p.value.size[3] : 1),
        query_tiles(ceil_div(T, BLOCK_M)),
        heads_per_key(group_of(collaborative ? 1 : p.key.size[1])),
        heads_per_value(collaborative ? group_of(p.value ? p.value.size[1] : H) : heads_per_key),
        kept_tiles(p.alpha ? ceil_div(S, BLOCK_N) : 0),
        all_features{0, D},
        image(p, B, H, T, S) {
    if (collaborative) {
      read_mixing();
    } else {
      factors.assign(D, query_scale());
    }
  }

  // Of the backward pass.
  explicit Attention(const BackwardParams& p) : Attention(static_cast<const AttentionParams&>(p)) {
    skips_closed = !p.closed_grad;
    skips_rows = !(p.closed_grad && p.dgate) && !p.dlse;
  }

  Head<Real> head(int64_t b, int64_t h) const {
    Rows content_bias;
    if (const Tensor& t = params.content_bias) {
      content_bias = rows_at(t, b);
      content_bias = {content_bias.at(h), 0, content_bias.step, content_bias.dtype};
    }
    return {b,
            h,
            collaborative ? rows_at(params.key, b) : head_rows(params.key, b, h, heads_per_key),
            head_rows(params.value, b, h, heads_per_value),
            content_bias,
            static_cast<Real>(params.scale),
            D,
            Dv,
            features_of(h),
            image.terms(params.terms, b, h, T),
            params.alpha ? static_cast<const Real*>(params.alpha.data)[h] - Real(1) : Real(0)};
  }

  Ranges features_of(int64_t h) const {
    if (!collaborative) return {&all_features, 1};
    return {features[h].data(), static_cast<int64_t>(features[h].size())};
  }
  const Real* factors_of(int64_t h) const { return factors.data() + (collaborative ? h * D : 0); }

  Rows query_rows(int64_t b, int64_t h) const {
    return collaborative ? rows_at(params.query, b) : head_rows(params.query, b, h);
  }

  // [rows, width] of a tensor at (b, h / group), and the distance to those of the next head that is computed, of the
  // same batch element or a later one: `group` query heads share a head of the tensor.
  Rows head_rows(const Tensor& t, int64_t b, int64_t h, int64_t group = 1) const {
    Rows rows = rows_at(t, b, h / group);
    if (!rows) return rows;
    const int64_t last = B * H;
    int64_t next = b * H + (h / group + 1) * group;
    while (next < last && skips_closed && gate.closed(next / H, next % H)) ++next;
    rows.next = next == last ? 0
                             : ((next / H - b) * t.stride[0] + (next % H / group - h / group) * t.stride[1]) *
                                   element_size(t.dtype);
    return rows;
  }

  // The query tile of head h, mixed, skipped features left undefined; `rows` is scratch.
  void pack(int64_t b, int64_t h, const VisibleRows<Real>& visible, Real* rows, Operand* query) const {
    const bool scales = collaborative || kScaledQuery<Operand>;
    pack_query(query_rows(b, h), visible, features_of(h), scales ? factors_of(h) : nullptr, rows, query);
  }

  int64_t multiply_adds() const { return B * H * T * S * (D + Dv); }

 private:
  // The number of query heads that share one of `heads`; at least 1.
  int64_t group_of(int64_t heads) const { return heads ? std::max<int64_t>(1, H / heads) : 1; }

  Real query_scale() const { return kScaledQuery<Operand> ? static_cast<Real>(params.scale) : Real(1); }

  void read_mixing() {
    const Tensor& t = params.mixing;
    mixing.resize(H * D);
    factors.resize(H * D);
    features.resize(H);
    std::vector<double> own(D);  // the mixing of a head, compared with 0 before rounding to Real
    for (int64_t h = 0; h < H; ++h) {
      load_row(own.data(), static_cast<char*>(t.data) + h * t.stride[0] * element_size(t.dtype), t.dtype, D,
               t.stride[1]);
      for (int64_t d = 0; d < D; ++d) {
        mixing[h * D + d] = static_cast<Real>(own[d]);
        factors[h * D + d] = mixing[h * D + d] * query_scale();
      }
      for (int64_t begin = 0; begin < D; begin += kMixingChunk) {
        const int64_t end = std::min(D, begin + kMixingChunk);
        const auto first = own.begin() + begin, last = own.begin() + end;
        if (std::all_of(first, last, [](double x) { return x == 0; })) continue;
        std::vector<Range>& ranges = features[h];
        if (!ranges.empty() && ranges.back().end == begin) {
          ranges.back().end = end;
        } else {
          ranges.push_back({begin, end});
        }
      }
    }
  }
};

}  // namespace hk::HK_LEVEL
