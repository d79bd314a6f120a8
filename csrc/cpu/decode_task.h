// One task of decoding: the rows of all heads that share a key head against a part of their keys.
#pragma once

#include "cpu/part_rows.h"

namespace hk::HK_LEVEL {

// What a task leaves of a part, by slot of its rows.
template <typename Real>
struct PartSums {
  Real* outputs;     // [rows][out_stride] unnormalised
  Real* weights;     // [rows] sums, 0 where the row sees no key of the part
  Real* references;  // [rows] of the softmax; undefined where the row sees no key
};

template <typename Operand, typename Number, typename Operator>
class DecodeTask {
  using Real = RealOf<Operand>;
  using Row = PartRow<Real>;

 public:
  DecodeTask(const ForwardParams& params, const Operator& op)
      : p_(params),
        op_(op),
        rows_(op.heads_per_key * op.T),
        query_stride_(round_up(op.D, kLoad<Operand, Number>)),
        out_stride_(round_up(op.Dv, kLoad<Operand, Number>)) {}

  int64_t rows() const { return rows_; }
  int64_t out_stride() const { return out_stride_; }

  int64_t workspace_bytes() const {
    return buffer_bytes<Head<Real>>(op_.heads_per_key) + buffer_bytes<Row>(rows_) +
           buffer_bytes<Real>(rows_ * kPart) + buffer_bytes<Real>(rows_ * query_stride_) +
           buffer_bytes<Real>(rows_ * out_stride_) + buffer_bytes<Number>(kWord * op_.Dv);
  }

  // The sums of part `part` of the keys of key head hk.
  void run(int64_t b, int64_t hk, int64_t part, const PartSums<Real>& sums,
           Workspace& workspace) const {
    const int64_t begin = part * kPart, end = std::min(op_.S, begin + kPart);
    std::fill(sums.weights, sums.weights + rows_, Real(0));
    const size_t mark = workspace.mark();
    Row* rows = workspace.take_objects<Row>(rows_);
    const int64_t count = find_rows(op_, p_.mask, b, hk, begin, end,
                                    workspace.take_objects<Head<Real>>(op_.heads_per_key), rows);
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
        sums.weights[row.slot] = softmax.sum;
        sums.references[row.slot] = softmax.reference;
        if (p_.dropout.active) drop_row(p_.dropout, *row.head, row.i, begin, end - begin, scores);
        as_operands<Operand>(scores, words * kWord);
      }
      add_values(rows, count, begin, end, reinterpret_cast<const Operand*>(weights), sums.outputs,
                 workspace);
    }
    workspace.rewind(mark);
  }

 private:
  const ForwardParams& p_;
  const Operator& op_;
  const int64_t rows_;                       // of the heads that share a key head
  const int64_t query_stride_, out_stride_;  // whole loads

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
      prepare_query<Operand, Number>(row, query_stride_);
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
        for (int64_t row = next_keys; row < std::min(end, next_keys + kSums); ++row)
          prefetch(keys.at(row), op_.D * sizeof(Number));
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
    const auto add = [&](auto numbers) {
      for (int i = 0; i < kVectors<Real, Number>; ++i)
        probe += widened(numbers, i, Real{}, Number{}) * Real(0);
    };
    constexpr int W = kLoad<Real, Number>;
    int64_t d = 0;
    for (; d + W <= op_.Dv; d += W) add(load_numbers<Real>(row + d));
    if (d < op_.Dv) add(load_numbers<Real>(row + d, op_.Dv - d));
    return sum_lanes<Real>(probe) == Real(0);
  }
};

}  // namespace hk::HK_LEVEL
