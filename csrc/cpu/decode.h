// Few query rows against many keys (decoding): the forward pass of both operators.
//
// A task computes the rows of all heads that share a key head against a part of their keys. Keys
// and values are read once, in place, and widened in registers; the lanes are features. A score is
// a sum over lanes, and as many of them are reduced together as there are lanes. The scores of a
// row are contiguous, so masks, terms and the softmax run along the keys. The last task of a key
// head combines its parts in order. Where a part ends depends on nothing but the keys' numbers, so
// the result depends bitwise neither on the threads nor on what else is in the call.
#pragma once

#include <atomic>
#include <memory>

#include "cpu/attend.h"
#include "cpu/parallel.h"
#include "cpu/stored.h"

namespace hk::HK_LEVEL {

constexpr int64_t kPart = 256;  // keys of a task
constexpr int64_t kWord = 64;   // keys whose visibility is one word
constexpr int64_t kWords = kPart / kWord;

// Sums that are accumulated in registers at once: half of these.
constexpr int kSums = HK_VECTOR_REGISTERS / 2;

// Prefetches rows [first, last); g++ drops calls of a function that only prefetches.
__attribute__((always_inline)) inline void prefetch_rows(const Rows& rows, int64_t first,
                                                         int64_t last, int64_t width) {
  const int64_t bytes = width * element_size(rows.dtype);
  for (int64_t row = first; row < last; ++row)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows.at(row) + at);
}

// Lane i of the result is the sum of the lanes of v[i], each in the same order.
template <typename Real>
__attribute__((always_inline)) inline Vec<Real> sums_of(const Vec<Real>* v) {
  constexpr int L = kLanes<Real>;
  using Lanes = std::make_index_sequence<L>;
  Vec<Real> a[L];
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) a[i] = v[i];
#pragma GCC unroll 4
  for (int half = L / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i)
      a[i] = interleave<Real, 0>(a[i], a[i + half], Lanes{}) +
             interleave<Real, 1>(a[i], a[i + half], Lanes{});
  return a[0];
}

// Rows of Real become rows of operands in place; `width` in whole vectors of them.
template <typename Operand>
inline Operand* as_operands(RealOf<Operand>* row, [[maybe_unused]] int64_t width) {
  Operand* operands = reinterpret_cast<Operand*>(row);
  if constexpr (kNumbers<Operand> == 2) pair_columns(row, 0, 1, width, operands, 0);
  return operands;
}

// products[r][k] of R rows and K keys, [R][kPart]. `query` holds the rows in whole vectors, 0 past
// the width. kLast: there are only `count` keys, at least 1; the other products are undefined.
template <typename Operand, typename Number, int R, int K, bool kLast>
inline void multiply_keys(const Number* keys, int64_t key_stride, int64_t count,
                          const Operand* query, int64_t query_stride, Ranges features,
                          RealOf<Operand>* products) {
  using Real = RealOf<Operand>;
  constexpr int L = kLanes<Real>;
  static_assert(R * K == kSums && kSums % L == 0);
  Vec<Real> sum[R * K];
#pragma GCC unroll 16
  for (int i = 0; i < R * K; ++i) sum[i] = Vec<Real>{};
  // Features [d, d + C * kWidth) of one key after the other: rows are read as they lie in memory.
  const auto add = [&](int64_t d, auto chunk, auto load_key) __attribute__((always_inline)) {
    constexpr int C = chunk;
    Vec<Operand> q[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c)
        q[r][c] = load(query + r * query_stride + d / kNumbers<Operand> + c * kLanes<Operand>);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      const Number* row = keys + (kLast ? std::min<int64_t>(k, count - 1) : k) * key_stride + d;
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const Vec<Operand> x = load_key(row + c * kWidth<Operand>);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          sum[r * K + k] = add_product<Operand>(x, q[r][c], sum[r * K + k]);
      }
    }
  };
  constexpr int kChunk = std::max(1, kSums / (4 * R));
  constexpr std::integral_constant<int, kChunk> chunk{};
  constexpr std::integral_constant<int, 1> one{};
  const auto whole = [](const Number* p) { return load_as<Operand>(p); };
  for (const Range& range : features) {
    int64_t d = range.begin;
    for (; d + kChunk * kWidth<Operand> <= range.end; d += kChunk * kWidth<Operand>)
      add(d, chunk, whole);
    for (; d + kWidth<Operand> <= range.end; d += kWidth<Operand>) add(d, one, whole);
    if (const int64_t rest = range.end - d)
      add(d, one, [rest](const Number* p) { return load_as<Operand>(p, rest); });
  }
  alignas(64) Real sums[R * K];
#pragma GCC unroll 4
  for (int i = 0; i < R * K; i += L) store<Real>(sums + i, sums_of<Real>(sum + i));
  for (int r = 0; r < R; ++r) std::memcpy(products + r * kPart, sums + r * K, sizeof(Real) * K);
}

// out[r][w] += weights[r][n] * values[n][w] over `count` keys, for R rows and V vectors of columns;
// kLast: only the first `width` columns. The keys are summed from zero: a long sum rounds once per
// call.
template <typename Operand, typename Number, int R, int V, bool kLast>
inline void add_block(const Operand* weights, int64_t count, const Number* values, int64_t stride,
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
  const auto load_row = [&](const Number* row, int v) __attribute__((always_inline)) {
    return kLast ? load_as<Operand>(row, width) : load_as<Operand>(row + v * kWidth<Operand>);
  };
  if constexpr (kNumbers<Operand> == 1) {
    for (int64_t n = 0; n < count; ++n) {
      Vec<Operand> x[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) x[v] = load_row(values + n * stride, v);
      add(n, x);
    }
  } else {  // two keys at a time: their numbers alternate
    for (int64_t n = 0; n < count; n += 2) {
      const Number* row = values + n * stride;
      Vec<Operand> x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V / 2; ++v) {
        const Vec<Operand> a = load_row(row, v);
        const Vec<Operand> b = n + 1 < count ? load_row(row + stride, v) : Vec<Operand>{};
        x[2 * v] = couple<0>(a, b);
        x[2 * v + 1] = couple<1>(a, b);
      }
      add(n / 2, x);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      Real* at = out + r * out_stride + v * L;
      store<Real>(at, load(at) + sum[r][v]);
    }
}

// The same for R rows and all `width` columns.
template <typename Operand, typename Number, int R>
inline void add_columns(const Operand* weights, int64_t count, const Number* values, int64_t stride,
                        int64_t width, RealOf<Operand>* out, int64_t out_stride) {
  constexpr int L = kLanes<Operand>;
  constexpr int kMost = std::min(8, kSums / R), kLeast = kNumbers<Operand>;
  int64_t w = 0;
  const auto run = [&](auto block, int64_t columns) {
    block(weights, count, values + w, stride, columns, out + w, out_stride);
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

// Calls body(std::integral_constant<int, R>, first row) for blocks of up to four of `count` rows.
template <typename Body>
inline void for_row_blocks(int64_t count, Body body) {
  int64_t r = 0;
  for (; r + 4 <= count; r += 4) body(std::integral_constant<int, 4>{}, r);
  if (r + 2 <= count) body(std::integral_constant<int, 2>{}, r), r += 2;
  if (r < count) body(std::integral_constant<int, 1>{}, r);
}

// A row of a task that sees some of its keys.
template <typename Real>
struct PartRow {
  const Head<Real>* head;
  int64_t i;              // of the head
  int64_t slot;           // among all rows of the task
  bool same_features;     // as the row before it
  uint64_t seen[kWords];  // one bit per key, the first the lowest
};

// Products of a row with the keys of a word, [begin, begin + count), times `factor` to base-2
// logarithms of weights, in place. Those of hidden keys become -inf; the bits in `seen` of keys
// that the bias hides are cleared.
template <typename Real>
inline void finish_word(const Head<Real>& head, Real factor, int64_t i, int64_t begin,
                        int64_t count, uint64_t& seen, Real* scores) {
  constexpr int L = kLanes<Real>;
  const HeadTerms<Real>& terms = head.terms;
  alignas(64) Real row[kWord] = {};
  const auto each = [&](auto finish) {
    for (int n = 0; n < kWord; n += L) store<Real>(scores + n, finish(load(scores + n), n));
  };
  if (seen == 0) return std::fill(scores, scores + kWord, kHidden<Real>);
  if (factor != Real(1)) each([&](Vec<Real> s, int) { return s * factor; });
  if (const Rows& content = head.content_bias) {
    load_row(row, content.columns(begin).data, content.dtype, count, content.step);
    each([&](Vec<Real> s, int n) { return s + load(row + n) * head.log2_scale; });
  }
  if (const Real cap = terms.cap; cap != Real(0))
    each([&](Vec<Real> s, int) { return tanh<Real>(s * (Real(1) / cap)) * cap; });
  if (terms.has_bias()) {
    terms.load_bias_row(i, begin, count, row);
    for (int n = 0; n < kWord; ++n) seen &= ~(static_cast<uint64_t>(row[n] == kHidden<Real>) << n);
    each([&](Vec<Real> s, int n) { return s + load(row + n) * static_cast<Real>(kLog2e); });
  }
  if (seen == ~uint64_t{0}) return;
  IntVec<Real> lane;
  for (int l = 0; l < L; ++l) lane[l] = Int<Real>{1} << l;
  each([&](Vec<Real> s, int n) {
    const IntVec<Real> bits = static_cast<Int<Real>>(seen >> n) & lane;
    return bits != 0 ? s : splat<Real>(kHidden<Real>);
  });
}

// The softmax of a row's scores of a part, which become unnormalised weights.
template <typename Real>
struct PartSoftmax {
  Real reference, sum;

  PartSoftmax(Real* scores, int64_t words) {
    constexpr int L = kLanes<Real>;
    Vec<Real> top = splat<Real>(kHidden<Real>), total{};
    for (int64_t n = 0; n < words * kWord; n += L) {
      const Vec<Real> s = load(scores + n);
      top = s > top ? s : top;
    }
    reference = kHidden<Real>;
    for (int l = 0; l < L; ++l) reference = std::max<Real>(reference, top[l]);
    const Real shift = reference == kHidden<Real> ? Real(0) : reference;
    for (int64_t n = 0; n < words * kWord; n += L) {
      const Vec<Real> weight = exp2<Real>(load(scores + n) - shift);
      store<Real>(scores + n, weight);
      total += weight;
    }
    sum = sum_lanes<Real>(total);
  }
};

// Dropout of a row's weights of keys [begin, begin + count); `begin` is a multiple of 4.
template <typename Real>
inline void drop_row(const DropoutParams& dropout, const Head<Real>& head, int64_t i, int64_t begin,
                     int64_t count, Real* weights) {
  const Real scale = static_cast<Real>(dropout.keep_scale);
  Philox4 random{};
  for (int64_t n = 0; n < count; ++n) {
    if (n % 4 == 0) random = dropout_words(dropout, head.b, head.h, i, (begin + n) / 4);
    weights[n] = random.word[n % 4] >= dropout.threshold ? weights[n] * scale : Real(0);
  }
}

template <typename Operand, typename Number, typename Operator>
class Decoder {
  using Real = RealOf<Operand>;
  using Row = PartRow<Real>;
  static constexpr int L = kLanes<Real>;

 public:
  Decoder(const ForwardParams& params, const Operator& op)
      : p_(params),
        op_(op),
        heads_(op.heads_per_key),
        key_heads_(op.H / heads_),
        rows_(heads_ * op.T),
        parts_(std::max<int64_t>(1, ceil_div(op.S, kPart))),
        query_stride_(round_up(op.D, kWidth<Operand>)),
        out_stride_(round_up(op.Dv, kWidth<Operand>)),
        part_size_(rows_ * (out_stride_ + 2)),
        sums_(new Real[op.B * key_heads_ * parts_ * part_size_]),
        parts_left_(new std::atomic<int64_t>[op.B * key_heads_]) {
    for (int64_t i = 0; i < op.B * key_heads_; ++i) parts_left_[i] = parts_;
  }

  void run() const {
    const int64_t bytes =
        buffer_bytes<Head<Real>>(heads_) + buffer_bytes<Row>(rows_) +
        buffer_bytes<Real>(rows_ * kPart) + buffer_bytes<Real>(rows_ * query_stride_) +
        buffer_bytes<Real>(rows_ * out_stride_) + buffer_bytes<Number>(kWord * op_.Dv) +
        2 * buffer_bytes<Real>(out_stride_);
    // Neighbours in memory follow each other: the parts of a key head or, where the heads of a key
    // are next to each other, the heads of a part.
    const bool heads_inside = key_heads_ > 1 && p_.key.stride[1] < p_.key.stride[2];
    const int64_t each = key_heads_ * parts_;
    parallel_for(op_.B * each, p_.threads, op_.multiply_adds(), bytes,
                 [&](int64_t item, Workspace& workspace) {
                   const int64_t b = item / each, n = item % each;
                   const int64_t hk = heads_inside ? n % key_heads_ : n / parts_;
                   const int64_t part = heads_inside ? n / key_heads_ : n % parts_;
                   attend_part(b, hk, part, workspace);
                   if (--parts_left_[b * key_heads_ + hk] > 0) return;
                   for (int64_t h = hk * heads_; h < (hk + 1) * heads_; ++h)
                     for (int64_t i = 0; i < op_.T; ++i) combine(b, h, i, workspace);
                 });
  }

 private:
  const ForwardParams& p_;
  const Operator& op_;
  const int64_t heads_;      // that share a key head
  const int64_t key_heads_;  // of a batch element
  const int64_t rows_;       // of the heads that share a key head
  const int64_t parts_;
  const int64_t query_stride_, out_stride_;  // whole vectors
  const int64_t part_size_;
  // [B][key_heads_][parts_]: unnormalised outputs [rows_][out_stride_], then [rows_] sums of
  // weights, 0 where the row sees no key of the part, and [rows_] references of the softmax.
  const std::unique_ptr<Real[]> sums_;
  const std::unique_ptr<std::atomic<int64_t>[]> parts_left_;  // [B][key_heads_]

  Real* part_at(int64_t b, int64_t hk, int64_t part) const {
    return sums_.get() + ((b * key_heads_ + hk) * parts_ + part) * part_size_;
  }

  // One task: the sums of a part.
  void attend_part(int64_t b, int64_t hk, int64_t part, Workspace& workspace) const {
    const int64_t begin = part * kPart, end = std::min(op_.S, begin + kPart);
    Real* out = part_at(b, hk, part);
    Real* sums = out + rows_ * out_stride_;
    std::fill(sums, sums + rows_, Real(0));
    const size_t mark = workspace.mark();
    Row* rows = workspace.take_objects<Row>(rows_);
    const int64_t count =
        find_rows(b, hk, begin, end, workspace.take_objects<Head<Real>>(heads_), rows);
    if (count > 0) {
      Real* weights = workspace.take<Real>(rows_ * kPart);
      multiply_queries(rows, count, begin, end, weights, workspace);
      const int64_t words = ceil_div(end - begin, kWord);
      for (int64_t r = 0; r < count; ++r) {
        Row& row = rows[r];
        Real* scores = weights + r * kPart;
        for (int64_t w = 0; w < words; ++w) {
          const int64_t first = begin + w * kWord;
          finish_word(*row.head, kScaledQuery<Operand> ? Real(1) : row.head->log2_scale, row.i,
                      first, std::min(kWord, end - first), row.seen[w], scores + w * kWord);
        }
        const PartSoftmax<Real> softmax(scores, words);
        sums[row.slot] = softmax.sum;
        sums[rows_ + row.slot] = softmax.reference;
        if (p_.dropout.active) drop_row(p_.dropout, *row.head, row.i, begin, end - begin, scores);
        as_operands<Operand>(scores, words * kWord);
      }
      add_values(rows, count, begin, end, reinterpret_cast<const Operand*>(weights), out,
                 workspace);
    }
    workspace.rewind(mark);
  }

  // The rows of open heads that see keys of [begin, end); constructs these heads.
  int64_t find_rows(int64_t b, int64_t hk, int64_t begin, int64_t end, Head<Real>* heads,
                    Row* rows) const {
    const MaskParams& mask = p_.mask;
    int64_t count = 0;
    for (int64_t g = 0; g < heads_; ++g) {
      const int64_t h = hk * heads_ + g;
      if (op_.gate.closed(b, h)) continue;
      const Head<Real>* head = nullptr;
      for (int64_t i = 0; i < op_.T; ++i) {
        int64_t lo = std::max(begin, i + mask.band_lo), hi = std::min(end, i + mask.band_hi);
        if (mask.k_lo) {
          lo = std::max<int64_t>(lo, mask.k_lo[b * mask.interval_stride + i]);
          hi = std::min<int64_t>(hi, mask.k_hi[b * mask.interval_stride + i]);
        }
        if (lo >= hi) continue;
        Row& row = rows[count];
        uint64_t any = 0;
        for (int64_t w = 0; w < kWords; ++w)
          any |= row.seen[w] = seen_keys(b, h, i, lo, hi, begin + w * kWord);
        if (!any) continue;
        if (!head) head = new (heads + g) Head<Real>(op_.head(b, h));
        row.head = head, row.i = i, row.slot = g * op_.T + i;
        row.same_features = count > 0 && same(head->features, rows[count - 1].head->features);
        ++count;
      }
    }
    return count;
  }

  // Which keys of [first, first + kWord) row i sees, one bit each; its interval is [lo, hi).
  uint64_t seen_keys(int64_t b, int64_t h, int64_t i, int64_t lo, int64_t hi, int64_t first) const {
    const auto below = [&](int64_t key) {  // the bits of keys before `key`
      const int64_t n = key - first;
      return n <= 0 ? 0 : n >= kWord ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
    };
    const MaskParams& mask = p_.mask;
    uint64_t seen = below(hi) & ~below(lo);
    if (!seen) return 0;
    const int count = static_cast<int>(std::min(kWord, hi - first));
    if (mask.key_visible)
      seen &= DenseMask{mask.key_visible + b * mask.visible_stride, 0, 1}.bits(0, first, count);
    if (mask.dense)
      seen &= DenseMask{mask.dense + b * mask.dense_stride[0] + h * mask.dense_stride[1],
                        mask.dense_stride[2], mask.dense_stride[3]}
                  .bits(i, first, count);
    return seen;
  }

  static bool same(Ranges a, Ranges b) {
    return a.count == b.count &&
           (a.first == b.first || std::equal(a.begin(), a.end(), b.begin(), [](Range x, Range y) {
              return x.begin == y.begin && x.end == y.end;
            }));
  }

  // products[r][n] = scaled query of row r times key begin + n, [count][kPart], of words of keys
  // that some row sees.
  void multiply_queries(const Row* rows, int64_t count, int64_t begin, int64_t end, Real* products,
                        Workspace& workspace) const {
    Real* query = workspace.take<Real>(count * query_stride_);
    for (int64_t r = 0; r < count; ++r) {
      const Head<Real>& head = *rows[r].head;
      const Rows source = op_.query_rows(head.b, head.h);
      const Real* factors = op_.factors_of(head.h);
      Real* row = query + r * query_stride_;
      load_row(row, source.at(rows[r].i), source.dtype, op_.D, source.step);
      for (int64_t d = 0; d < op_.D; ++d) row[d] *= factors[d];
      std::fill(row + op_.D, row + query_stride_, Real(0));
      as_operands<Operand>(row, query_stride_);
    }
    const Rows keys = rows->head->key;
    for (int64_t w = 0; begin + w * kWord < end; ++w) {
      uint64_t some = 0;
      for (int64_t r = 0; r < count; ++r) some |= rows[r].seen[w];
      if (!some) continue;
      const int64_t last = w * kWord + kWord - __builtin_clzll(some);
      for (int64_t n = w * kWord + __builtin_ctzll(some) / kSums * kSums; n < last; n += kSums) {
        // The sums over lanes fill the queues of a core before it comes to the next keys: without
        // this it reads 11 GB/s instead of 17 (Zen 4).
        const int64_t next_keys = begin + n + kSums;
        prefetch_rows(keys, next_keys, std::min(end, next_keys + kSums), op_.D);
        for (int64_t r = 0; r < count;) {
          int64_t next = r + 1;
          while (next < count && rows[next].same_features) ++next;
          for_row_blocks(next - r, [&](auto R, int64_t row) {
            multiply_block<R>(keys, begin + n, end,
                              reinterpret_cast<const Operand*>(query + (r + row) * query_stride_),
                              rows[r].head->features, products + (r + row) * kPart + n);
          });
          r = next;
        }
      }
    }
  }

  // R rows times the keys from `first` on, kSums of them or up to `end`.
  template <int R>
  void multiply_block(const Rows& keys, int64_t first, int64_t end, const Operand* query,
                      Ranges features, Real* products) const {
    constexpr int K = kSums / R;
    for (int64_t k = 0; k < kSums; k += K) {
      const int64_t left = end - first - k;
      if (left <= 0) return;
      const auto block = left < K ? multiply_keys<Operand, Number, R, K, true>
                                  : multiply_keys<Operand, Number, R, K, false>;
      block(row_of(keys, first + k), keys.stride, left, query, query_stride_, features,
            products + k);
    }
  }

  // The sums of values by `weights` [count][kPart], stored in `out` by slot.
  void add_values(const Row* rows, int64_t count, int64_t begin, int64_t end,
                  const Operand* weights, Real* out, Workspace& workspace) const {
    Real* sums = workspace.take<Real>(count * out_stride_);
    std::fill(sums, sums + count * out_stride_, Real(0));
    Number* finite = workspace.take<Number>(kWord * op_.Dv);
    for (int64_t r = 0; r < count;) {
      const Rows& values = rows[r].head->value;
      int64_t next = r + 1;
      while (next < count && rows[next].head->value.data == values.data) ++next;
      for (int64_t w = 0; begin + w * kWord < end; ++w)
        add_word(rows + r, next - r, w, begin + w * kWord, end, values, weights + r * kPart,
                 sums + r * out_stride_, finite);
      r = next;
    }
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(out + rows[r].slot * out_stride_, sums + r * out_stride_,
                  sizeof(Real) * out_stride_);
  }

  // The values of word w, keys [begin, end). A key that a row may not see adds nothing to it, NaN
  // and infinity included. `finite` is scratch [kWord][Dv].
  void add_word(const Row* rows, int64_t count, int64_t w, int64_t begin, int64_t end,
                const Rows& values, const Operand* weights, Real* sums, Number* finite) const {
    uint64_t some = 0, every = ~uint64_t{0};
    for (int64_t r = 0; r < count; ++r) some |= rows[r].seen[w], every &= rows[r].seen[w];
    if (!some) return;
    constexpr int kStep = kNumbers<Operand>;  // keys
    const int first = __builtin_ctzll(some) / kStep * kStep;
    const int last =
        static_cast<int>(std::min(end - begin, round_up(kWord - __builtin_clzll(some), kStep)));
    uint64_t aside = 0;  // keys with NaN or infinity that some row does not see
    for (int n = first; n < last; ++n)
      if (!(every >> n & 1) && !is_finite(row_of(values, begin + n))) aside |= uint64_t{1} << n;
    const auto add = [&](const Number* data, int64_t stride) {
      for_row_blocks(count, [&](auto R, int64_t r) {
        add_columns<Operand, Number, R>(weights + r * kPart + (w * kWord + first) / kStep,
                                        last - first, data, stride, op_.Dv, sums + r * out_stride_,
                                        out_stride_);
      });
    };
    if (!aside) return add(row_of(values, begin + first), values.stride);
    for (int n = first; n < last; ++n) {
      if (aside >> n & 1) {
        std::memset(finite + n * op_.Dv, 0, sizeof(Number) * op_.Dv);
      } else {
        std::memcpy(finite + n * op_.Dv, values.at(begin + n), sizeof(Number) * op_.Dv);
      }
    }
    add(finite + first * op_.Dv, op_.Dv);
    for (; aside; aside &= aside - 1) {
      const int n = __builtin_ctzll(aside);
      for (int64_t r = 0; r < count; ++r) {
        if (!(rows[r].seen[w] >> n & 1)) continue;
        Real weight = 0;
        load_row(&weight,
                 reinterpret_cast<const char*>(weights + r * kPart) +
                     (w * kWord + n) * sizeof(Operand) / kStep,
                 kStep == 1 ? kDTypeOf<Real> : DType::kBFloat16, 1);
        for (int64_t d = 0; d < op_.Dv; ++d) {
          Real value = 0;
          load_row(&value, values.columns(d).at(begin + n), values.dtype, 1);
          sums[r * out_stride_ + d] += weight * value;
        }
      }
    }
  }

  static const Number* row_of(const Rows& rows, int64_t row) {
    return reinterpret_cast<const Number*>(rows.at(row));
  }

  bool is_finite(const Number* row) const {
    Vec<Real> probe{};  // 0 times a finite number is 0, anything else becomes NaN
    int64_t d = 0;
    for (; d + L <= op_.Dv; d += L) probe += load_as<Real>(row + d) * Real(0);
    if (d < op_.Dv) probe += load_as<Real>(row + d, op_.Dv - d) * Real(0);
    return sum_lanes<Real>(probe) == Real(0);
  }

  // Adds the parts of row i of a head and stores its results.
  void combine(int64_t b, int64_t h, int64_t i, Workspace& workspace) const {
    const int64_t hk = h / heads_, slot = h % heads_ * op_.T + i;
    const auto sum_of = [&](int64_t part) {
      return part_at(b, hk, part) + rows_ * out_stride_ + slot;
    };
    Real reference = kHidden<Real>, sum = 0;
    for (int64_t part = 0; part < parts_; ++part)
      if (sum_of(part)[0] != Real(0)) reference = std::max(reference, sum_of(part)[rows_]);
    const size_t mark = workspace.mark();
    Real* out = workspace.take<Real>(out_stride_);
    std::fill(out, out + out_stride_, Real(0));
    for (int64_t part = 0; part < parts_; ++part) {
      const Real* at = sum_of(part);
      if (at[0] == Real(0)) continue;
      const Real share = exp2<Real>(splat<Real>(at[rows_] - reference))[0];
      sum += share * at[0];
      const Real* row = part_at(b, hk, part) + slot * out_stride_;
      for (int64_t d = 0; d < out_stride_; d += L)
        store<Real>(out + d, load(out + d) + load(row + d) * share);
    }
    const Head<Real> head = op_.head(b, h);
    alignas(64) Real token[L];
    if (op_.gate && !op_.gate.elementwise) op_.gate.tokens(b, h, i, 1, token);
    finish_row(head, op_.gate, token[0], outputs_of<Real>(p_, b, h), i, reference, sum, out,
               workspace.take<Real>(out_stride_));
    workspace.rewind(mark);
  }
};

// Up to this many query rows are decoding. Measured on Zen 4 with AVX-512 against tiles of rows (S
// 512, widths 64 and 128, heads grouped or not, both operators): 1.3 to 2 times as fast at 8 rows,
// 0.9 to 1.5 times at 12, since a tile computes 16 rows at the price of one.
constexpr int64_t kFewRows = 10;

inline bool few_rows(const AttentionParams& p) {
  return p.query.size[p.mixing ? 1 : 2] <= kFewRows;
}

template <typename Operand, typename Operator>
void decode(const ForwardParams& params, const Operator& op) {
  if constexpr (kNumbers<Operand> == 2) {
    return Decoder<Operand, BFloat16, Operator>(params, op).run();
  } else if constexpr (sizeof(Operand) == 4) {
    if (params.query.dtype == DType::kBFloat16)
      return Decoder<Operand, BFloat16, Operator>(params, op).run();
    if (params.query.dtype == DType::kFloat16)
      return Decoder<Operand, Float16, Operator>(params, op).run();
  }
  if constexpr (kNumbers<Operand> == 1) Decoder<Operand, Operand, Operator>(params, op).run();
}

}  // namespace hk::HK_LEVEL
