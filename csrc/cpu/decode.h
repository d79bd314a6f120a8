// Few query rows against many keys (decoding): the forward pass of both operators.
//
// A task computes the rows of all heads that share a key head against a part of their keys (decode_task.h), for several
// key heads if these are next to each other in memory. The last task of a key head combines its parts in order. Where a
// part ends depends only on the indices of keys, so the result depends bitwise neither on the threads nor on what else
// is in the call.
#pragma once

#include <atomic>
#include <memory>

#include "cpu/decode_task.h"
#include "cpu/parallel.h"
#include "cpu/work_items.h"

namespace hk::HK_LEVEL {

// If the heads of a token are next to each other, a task reads up to this many bytes of keys of a token (heuristic:
// with more heads, the next keys do not stay in the first-level cache).
constexpr int64_t kRun = 4096;

template <typename Operand, typename Number>
class Decoder {
  using Real = RealOf<Operand>;

 public:
  Decoder(const ForwardParams& params, const Attention<Real, Operand>& op)
      : p_(params),
        op_(op),
        task_(op),
        heads_(op.heads_per_key),
        key_heads_(op.H / heads_),
        parts_(std::max<int64_t>(1, ceil_div(op.S, kPart))),
        part_size_(task_.rows() * (task_.out_stride() + 2)),
        sums_(new Real[op.B * key_heads_ * parts_ * part_size_]),
        parts_left_(new std::atomic<int64_t>[op.B * key_heads_]) {
    for (int64_t i = 0; i < op.B * key_heads_; ++i) parts_left_[i] = parts_;
  }

  void run() const {
    const int64_t heads = heads_of_task(), groups = ceil_div(key_heads_, heads);
    const int64_t each = groups * parts_;
    const int64_t bytes = std::max(task_.workspace_bytes(heads), 2 * buffer_bytes<Real>(task_.out_stride()));
    // Consecutive items are neighbours in memory: the parts of a key head, or the heads of a part.
    parallel_for(op_.B * each, p_.threads, op_.multiply_adds(), bytes, [&](int64_t item, Workspace& workspace) {
      const int64_t b = item / each, n = item % each;
      const int64_t part = tokens_first() ? n / groups : n % parts_;
      const int64_t group = tokens_first() ? n % groups : n / parts_;
      const int64_t first = group * heads, last = std::min(key_heads_, first + heads);
      const auto sums = [&](int64_t hk) { return sums_of(b, hk, part); };
      task_.run(b, first, last - first, part, sums, workspace);
      for (int64_t hk = first; hk < last; ++hk) {
        if (--parts_left_[b * key_heads_ + hk] > 0) continue;
        for (int64_t h = hk * heads_; h < (hk + 1) * heads_; ++h)
          for (int64_t i = 0; i < op_.T; ++i) combine(b, h, i, workspace);
      }
    });
  }

 private:
  // Whether the key heads of a token are next to each other.
  bool tokens_first() const { return p_.key.stride[1] < p_.key.stride[2]; }

  // Key heads of a task: one or, where the heads of a token are next to each other, as many as leave the threads enough
  // tasks, in groups of equal size.
  int64_t heads_of_task() const {
    if (!tokens_first()) return 1;
    const int64_t groups = ceil_div(key_heads_ * op_.D * int64_t{sizeof(Number)}, kRun);
    const int64_t tasks = op_.B * key_heads_ * parts_;
    const int64_t most = ceil_div(key_heads_, std::max<int64_t>(1, groups));
    return std::max<int64_t>(1, std::min(tasks / (kItemsPerThread * p_.threads), most));
  }

  const ForwardParams& p_;
  const Attention<Real, Operand>& op_;
  const DecodeTask<Operand, Number> task_;
  const int64_t heads_;      // that share a key head
  const int64_t key_heads_;  // of a batch element
  const int64_t parts_;
  const int64_t part_size_;
  const std::unique_ptr<Real[]> sums_;                        // [B][key_heads_][parts_][part_size_]
  const std::unique_ptr<std::atomic<int64_t>[]> parts_left_;  // [B][key_heads_]

  PartSums<Real> sums_of(int64_t b, int64_t hk, int64_t part) const {
    Real* outputs = sums_.get() + ((b * key_heads_ + hk) * parts_ + part) * part_size_;
    Real* weights = outputs + task_.rows() * task_.out_stride();
    return {outputs, weights, weights + task_.rows()};
  }

  // Adds the parts of row i of a head and stores its results.
  void combine(int64_t b, int64_t h, int64_t i, Workspace& workspace) const {
    constexpr int L = kLanes<Real>;
    const int64_t hk = h / heads_, slot = h % heads_ * op_.T + i, width = task_.out_stride();
    Real reference = kHidden<Real>, sum = 0;
    for (int64_t part = 0; part < parts_; ++part) {
      const PartSums<Real> sums = sums_of(b, hk, part);
      if (sums.weights[slot] != Real(0)) reference = std::max(reference, sums.references[slot]);
    }
    const size_t mark = workspace.mark();
    Real* out = workspace.take<Real>(width);
    std::fill(out, out + width, Real(0));
    for (int64_t part = 0; part < parts_; ++part) {
      const PartSums<Real> sums = sums_of(b, hk, part);
      if (sums.weights[slot] == Real(0)) continue;
      const Real share = exp<Real>(splat<Real>(sums.references[slot] - reference))[0];
      sum += share * sums.weights[slot];
      const Real* row = sums.outputs + slot * width;
      for (int64_t d = 0; d < width; d += L) store<Real>(out + d, load(out + d) + load(row + d) * share);
    }
    const Head<Real> head = op_.head(b, h);
    alignas(64) Real token[L] = {};
    if (op_.gate && !op_.gate.elementwise) op_.gate.tokens(b, h, i, 1, token);
    finish_row(head, op_.gate, token[0], outputs_of(op_, p_, b, h), i, reference, sum, out,
               workspace.take<Real>(width));
    workspace.rewind(mark);
  }
};

// Up to this many query rows are decoding. Measured on Zen 4 with AVX-512 against tiles of rows (S 512, widths 64 and
// 128, heads grouped or not, both operators): 1.3 to 2 times as fast at 8 rows, 0.9 to 1.5 times at 12, since a tile
// computes 16 rows at the price of one.
constexpr int64_t kFewRows = 10;

template <typename Real, typename Operand>
void decode(const ForwardParams& params, const Attention<Real, Operand>& op) {
  if constexpr (kNumbers<Operand> == 2) {
    return Decoder<Operand, BFloat16>(params, op).run();
  } else if constexpr (sizeof(Operand) == 4) {
    if (params.query.dtype == DType::kBFloat16) return Decoder<Operand, BFloat16>(params, op).run();
    if (params.query.dtype == DType::kFloat16) return Decoder<Operand, Float16>(params, op).run();
  }
  if constexpr (kNumbers<Operand> == 1) Decoder<Operand, Operand>(params, op).run();
}

}  // namespace hk::HK_LEVEL
