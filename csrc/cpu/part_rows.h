// The rows of a task of decoding: which keys of its part they see, their scores and their softmax. The scores of a row
// are contiguous, so masks, terms and the softmax run along the keys.
#pragma once

#include "cpu/row_products.h"

namespace hk::HK_LEVEL {

constexpr int64_t kWord = 64;  // keys whose visibility is one word
constexpr int64_t kWords = kPart / kWord;

// A row of a task that sees some of its keys.
template <typename Real>
struct PartRow {
  const Head<Real>* head;
  int64_t i;              // of the head
  int64_t slot;           // among all rows of the task
  bool same_features;     // as the row before it
  uint64_t seen[kWords];  // one bit per key, the first the lowest
};

// Which keys of [first, first + kWord) row i sees, one bit each: those of its interval [lo, hi), and those before
// `front`, which is at most hi.
inline uint64_t seen_keys(const MaskParams& mask, int64_t b, int64_t h, int64_t i, int64_t lo, int64_t hi,
                          int64_t front, int64_t first) {
  uint64_t seen = interval_bits(lo, hi, front, first);
  if (!seen) return 0;
  const int count = static_cast<int>(std::min(kWord, hi - first));
  if (mask.key_visible) seen &= DenseMask{mask.key_visible + b * mask.visible_stride, 0, 1}.bits(0, first, count);
  if (mask.dense)
    seen &= DenseMask{mask.dense + b * mask.dense_stride[0] + h * mask.dense_stride[1], mask.dense_stride[2],
                      mask.dense_stride[3]}
                .bits(i, first, count);
  return seen;
}

inline bool same(Ranges a, Ranges b) {
  return a.count == b.count && (a.first == b.first || std::equal(a.begin(), a.end(), b.begin()));
}

// The rows of open heads that see keys of [begin, end); constructs these heads.
template <typename Real, typename Operand>
inline int64_t find_rows(const Attention<Real, Operand>& op, int64_t b, int64_t hk, int64_t begin, int64_t end,
                         Head<Real>* heads, PartRow<Real>* rows) {
  const MaskParams& mask = op.params.mask;
  int64_t count = 0;
  for (int64_t g = 0; g < op.heads_per_key; ++g) {
    const int64_t h = hk * op.heads_per_key + g;
    if (op.gate.closed(b, h)) continue;
    const Head<Real>* head = nullptr;
    for (int64_t i = 0; i < op.T; ++i) {
      int64_t lo = std::max(begin, i + mask.band_lo), hi = std::min(end, i + mask.band_hi);
      if (mask.k_lo) {
        const int64_t at = b * mask.interval_stride + h * mask.interval_head_stride + i;
        lo = std::max<int64_t>(lo, mask.k_lo[at]);
        hi = std::min<int64_t>(hi, mask.k_hi[at]);
      }
      int64_t front = 0;
      if (mask.first_keys) front = std::min<int64_t>(hi, mask.first_keys[h * mask.first_stride]);
      if (lo >= hi && front <= begin) continue;
      PartRow<Real>& row = rows[count];
      uint64_t any = 0;
      for (int64_t w = 0; w < kWords; ++w)
        any |= row.seen[w] = seen_keys(mask, b, h, i, lo, hi, front, begin + w * kWord);
      if (!any) continue;
      if (!head) head = new (heads + g) Head<Real>(op.head(b, h));
      row.head = head, row.i = i, row.slot = g * op.T + i;
      row.same_features = count > 0 && same(head->features, rows[count - 1].head->features);
      ++count;
    }
  }
  return count;
}

// Products of a row with the keys of a word, [begin, begin + count), times `factor` to scores, in place. Those of
// hidden keys become -inf; the bits in `seen` of keys that the bias hides are cleared.
template <typename Real>
inline void finish_word(const Head<Real>& head, Real factor, int64_t i, int64_t begin, int64_t count, uint64_t& seen,
                        Real* scores) {
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
    each([&](Vec<Real> s, int n) { return s + load(row + n) * head.scale; });
  }
  if (const Real cap = terms.cap; cap != Real(0))
    each([&](Vec<Real> s, int) { return tanh<Real>(s * (Real(1) / cap)) * cap; });
  if (terms.has_bias()) {
    terms.load_bias_row(i, begin, count, row);
    for (int n = 0; n < kWord; ++n) seen &= ~(static_cast<uint64_t>(row[n] == kHidden<Real>) << n);
    each([&](Vec<Real> s, int n) { return s + load(row + n); });
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
      const Vec<Real> weight = exp<Real>(load(scores + n) - shift);
      store<Real>(scores + n, weight);
      total += weight;
    }
    sum = sum_lanes<Real>(total);
  }
};

// Dropout of a row's weights of keys [begin, begin + count), not scaled; `begin` is a multiple of 4.
template <typename Real>
inline void drop_row(const DropoutParams& dropout, const Head<Real>& head, int64_t i, int64_t begin, int64_t count,
                     Real* weights) {
  Philox4 random{};
  for (int64_t n = 0; n < count; ++n) {
    if (n % 4 == 0) random = dropout_words(dropout, head.b, head.h, i, (begin + n) / 4);
    weights[n] = random.word[n % 4] >= dropout.threshold ? weights[n] : Real(0);
  }
}

}  // namespace hk::HK_LEVEL
