// Decoding (T = 1): the query heads that share a key head become the rows of one tile.
#pragma once

#include <vector>

#include "cpu/gate.h"

namespace hk::HK_LEVEL {

// Rewrites a call of gated attention with T = 1 as one with H = Hk and T = H / Hk: the same tensors
// with other strides, and the interval of the single row repeated for each new row.
class FoldedHeads {
 public:
  // Whether the rewrite applies: dropout depends on head and row, and only whole heads are skipped.
  template <typename Real>
  static bool serves(const ForwardParams& p, const Gate<Real>& gate) {
    const int64_t B = p.query.size[0], H = p.query.size[1], Hk = p.key.size[1];
    if (p.query.size[2] != 1 || H <= Hk || p.dropout.active) return false;
    for (int64_t b = 0; b < B; ++b)
      for (int64_t h = 0; h < H; ++h)
        if (gate.closed(b, h)) return false;
    return true;
  }

  explicit FoldedHeads(const ForwardParams& p)
      : params(p), Hk_(p.key.size[1]), rows_(p.query.size[1] / p.key.size[1]) {
    const int64_t B = p.query.size[0], S = p.key.size[2];
    for (Tensor* t : {&params.query, &params.out, &params.attended})  // lse is dense already
      if (*t) *t = folded(*t, t->size[0], t->size[3], t->stride[1]);
    if (const Tensor& gate = p.gate) {
      const int head = gate.rank == 1 ? 0 : 1;  // [H], else [B, H, ...]
      params.gate = folded(gate, head ? gate.size[0] : 1, gate.rank == 4 ? gate.size[3] : 1,
                           gate.size[head] == 1 ? 0 : gate.stride[head]);
    }
    fold_terms(p.terms);
    const MaskParams& mask = p.mask;
    for (int64_t b = 0; b < B; ++b) {
      int64_t lo = std::max<int64_t>(0, mask.band_lo), hi = std::min(S, mask.band_hi);
      if (mask.k_lo) {
        lo = std::max<int64_t>(lo, mask.k_lo[b * mask.interval_stride]);
        hi = std::min<int64_t>(hi, mask.k_hi[b * mask.interval_stride]);
      }
      k_lo_.insert(k_lo_.end(), rows_, static_cast<int32_t>(lo));
      k_hi_.insert(k_hi_.end(), rows_, static_cast<int32_t>(hi));
    }
    params.mask.band_lo = -rows_;
    params.mask.band_hi = S;
    params.mask.k_lo = k_lo_.data();
    params.mask.k_hi = k_hi_.data();
    params.mask.interval_stride = rows_;
    params.mask.dense_stride[1] = mask.dense_stride[1] * rows_;
    params.mask.dense_stride[2] = mask.dense_stride[1];
  }

  ForwardParams params;

 private:
  // The table of offsets of one row is a bias.
  void fold_terms(const ScoreTerms& terms) {
    ScoreTerms& folded = params.terms;
    Tensor& bias = folded.bias;
    if (const Tensor& t = terms.offset_bias) {
      bias = {t.data, t.dtype, 5, {}, {0, 0, t.stride[0], 0, t.stride[1]}};
      folded.offset_bias = {};
    }
    if (bias) {
      bias.stride[3] = bias.stride[2];
      bias.stride[2] *= rows_;
    }
    if (Tensor& sinks = folded.sinks) {
      sinks.stride[1] = sinks.stride[0];
      sinks.stride[0] *= rows_;
    }
  }

  // A tensor [B, H, 1, width] as [B, Hk, rows, width]; `head`: elements between its heads.
  Tensor folded(const Tensor& t, int64_t B, int64_t width, int64_t head) const {
    return {
        t.data, t.dtype, 4, {B, Hk_, rows_, width}, {t.stride[0], head * rows_, head, t.stride[3]}};
  }

  int64_t Hk_, rows_;
  std::vector<int32_t> k_lo_, k_hi_;  // [B][rows]
};

}  // namespace hk::HK_LEVEL
