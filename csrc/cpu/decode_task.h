// One task of decoding: the rows of heads that share a key head against a part of their keys, for one key head or for
// several that are next to each other in memory.
#pragma once

#include "cpu/part_rows.h"

namespace hk::HK_LEVEL {

// The sums of a task over a part, by slot of its rows.
template <typename Real>
struct PartSums {
  Real* outputs;     // [rows][out_stride] unnormalised
  Real* weights;     // [rows] sums, 0 where the row sees no key of the part
  Real* references;  // [rows] of the softmax; undefined where the row sees no key
};

// Bytes of a block of keys or values of a head, twice as many if several rows or heads read them. All rows of a head
// read a block before the next one, so that it stays in the first-level cache, and prefetch the next block meanwhile.
// Measured on Zen 4 against half and twice the size.
constexpr int64_t kBlock = 4096;

template <typename Operand, typename Number>
class DecodeTask {
  using Real = RealOf<Operand>;
  using Row = PartRow<Real>;

 public:
  explicit DecodeTask(const Attention<Real, Operand>& op)
      : op_(op),
        rows_(op.heads_per_key * op.T),
        query_stride_(round_up(op.D, kLoad<Operand, Number>)),
        out_stride_(round_up(op.Dv, kLoad<Operand, Number>)) {}

  int64_t rows() const { return rows_; }
  int64_t out_stride() const { return out_stride_; }

  // For a task with `heads` key heads.
  int64_t workspace_bytes(int64_t heads) const {
    const int64_t each = buffer_bytes<Head<Real>>(op_.heads_per_key) + buffer_bytes<Row>(rows_) +
                         buffer_bytes<Real>(rows_ * kPart) + buffer_bytes<Real>(rows_ * query_stride_) +
                         buffer_bytes<Real>(rows_ * out_stride_);
    return heads * each + buffer_bytes<KeyHead>(heads) + buffer_bytes<Values>(heads * rows_) +
           buffer_bytes<Number>(kWord * op_.Dv);
  }

  // Computes the sums of part `part` of the keys of key heads [first, first + heads); those of a head are stored in
  // sums_of(hk).
  template <typename SumsOf>
  void run(int64_t b, int64_t first, int64_t heads, int64_t part, SumsOf sums_of, Workspace& workspace) const {
    const int64_t begin = part * kPart, size = std::min(op_.S - begin, kPart);
    const size_t mark = workspace.mark();
    KeyHead* open = workspace.take<KeyHead>(heads);
    int64_t count = 0;
    for (int64_t hk = first; hk < first + heads; ++hk) {
      const PartSums<Real> sums = sums_of(hk);
      std::fill(sums.weights, sums.weights + rows_, Real(0));
      Row* rows = workspace.take<Row>(rows_);
      Head<Real>* of_rows = workspace.take<Head<Real>>(op_.heads_per_key);
      const int64_t found = find_rows(op_, b, hk, begin, begin + size, of_rows, rows);
      if (!found) continue;
      Real* queries = workspace.take<Real>(found * query_stride_);
      load_queries(rows, found, queries);
      KeyHead& head = open[count++];
      head = {rows, found, reinterpret_cast<const Operand*>(queries), workspace.take<Real>(found * kPart), sums, {}};
      for (int64_t r = 0; r < found; ++r)
        for (int64_t w = 0; w < kWords; ++w) head.seen[w] |= rows[r].seen[w];
    }
    multiply_queries(open, count, begin, size);
    for (int64_t i = 0; i < count; ++i) weigh(open[i], begin, size);
    add_values(open, count, begin, size, workspace);
    workspace.rewind(mark);
  }

 private:
  // Rows of the heads that share a key head.
  struct KeyHead {
    Row* rows;
    int64_t count;
    const Operand* queries;  // [count][query_stride_]
    Real* weights;           // [count][kPart], at first the scores
    PartSums<Real> sums;
    uint64_t seen[kWords];  // which keys some row sees, one bit each
  };

  // Rows that share their values.
  struct Values {
    const Row* rows;
    int64_t count;
    const Operand* weights;  // [count][kPart]
    Real* sums;              // [count][out_stride_]
    Real* out;               // the same by slot

    const Rows& values() const { return rows->head->value; }
  };

  const Attention<Real, Operand>& op_;
  const int64_t rows_;                       // of the heads that share a key head
  const int64_t query_stride_, out_stride_;  // whole loads

  // The scaled queries of rows, as operands. Skipped features are 0, since a load may reach past the end of a chunk.
  void load_queries(const Row* rows, int64_t count, Real* queries) const {
    for (int64_t r = 0; r < count; ++r) {
      const Head<Real>& head = *rows[r].head;
      const Rows source = op_.query_rows(head.b, head.h);
      const Real* factors = op_.factors_of(head.h);
      Real* row = queries + r * query_stride_;
      std::fill(row, row + query_stride_, Real(0));
      for (const Range& range : head.features) {
        const int64_t width = range.end - range.begin;
        load_row(row + range.begin, source.columns(range.begin).at(rows[r].i), source.dtype, width, source.step);
        for (int64_t d = range.begin; d < range.end; ++d) row[d] *= factors[d];
      }
      prepare_query<Operand, Number>(row, query_stride_);
    }
  }

  // products[r][n] = scaled query of row r times key begin + n, for blocks of keys that some row sees. Prefetches the
  // next block, and after the last one the first block of values.
  void multiply_queries(const KeyHead* heads, int64_t count, int64_t begin, int64_t size) const {
    const int64_t block = std::max<int64_t>(kSums, block_of(op_.D, count));
    for (int64_t n = 0; n < size; n += block) {
      for (int64_t i = 0; i < count; ++i) {
        const KeyHead& head = heads[i];
        if (!(head.seen[n / kWord] >> n % kWord & ~uint64_t{0} >> (kWord - block))) continue;
        const Rows& keys = head.rows->head->key;
        const Number* first = row_of(keys, begin + n);
        const Number* next = n + block < size ? row_of(keys, begin + n + block) : row_of(head.rows->head->value, begin);
        multiply_keys_of(head, n, {first, keys.stride, std::min(block, size - n), next - first});
      }
    }
  }

  // The number of keys or values of `width` in a block if `heads` are read in turn: a power of two up to kWord, and at
  // least 8 (heuristic: the loop over a block costs less than its products).
  int64_t block_of(int64_t width, int64_t heads) const {
    const int64_t bytes = width * int64_t{sizeof(Number)};
    const int64_t most = rows_ > 1 || heads > 1 ? 2 * kBlock : kBlock;
    int64_t block = kWord;
    while (block > 8 && block * bytes > most) block /= 2;
    return block;
  }

  // Keys of a head that are multiplied at once, and the distance in numbers of what is prefetched.
  struct Keys {
    const Number* first;
    int64_t stride, count, ahead;
  };

  // All rows of a head times keys, from the n-th of the part on.
  void multiply_keys_of(const KeyHead& head, int64_t n, const Keys& keys) const {
    for (int64_t r = 0; r < head.count; ++r) {
      int64_t rows = 1;
      while (r + rows < head.count && head.rows[r + rows].same_features) ++rows;
      for_rows(rows, [&](auto R, int64_t first, int64_t blocks) {
        multiply_rows<R>(head, r + first, blocks, n, keys, first == 0 ? keys.ahead : 0);
      });
      r += rows - 1;
    }
  }

  // Blocks of R rows from r on, each times the keys.
  template <int R>
  void multiply_rows(const KeyHead& head, int64_t r, int64_t blocks, int64_t n, const Keys& keys, int64_t ahead) const {
    constexpr int K = kSums / R;
    const Ranges& features = head.rows[r].head->features;
    for (int64_t k = 0; k < keys.count; k += K) {
      const int64_t left = keys.count - k;
      const auto multiply =
          left < K ? multiply_keys<Operand, Number, R, K, true> : multiply_keys<Operand, Number, R, K, false>;
      for (int64_t i = r; i < r + blocks * R; i += R)
        multiply(keys.first + k * keys.stride, keys.stride, left, i == r ? ahead : 0, head.queries + i * query_stride_,
                 query_stride_, features, head.weights + i * kPart + n + k);
    }
  }

  // Scores become weights, as operands.
  void weigh(const KeyHead& head, int64_t begin, int64_t size) const {
    const int64_t words = ceil_div(size, kWord);
    for (int64_t r = 0; r < head.count; ++r) {
      Row& row = head.rows[r];
      Real* scores = head.weights + r * kPart;
      for (int64_t w = 0; w < words; ++w)
        finish_word(*row.head, kScaledQuery<Operand> ? Real(1) : row.head->scale, row.i, begin + w * kWord,
                    std::min(kWord, size - w * kWord), row.seen[w], scores + w * kWord);
      const PartSoftmax<Real> softmax(scores, words);
      head.sums.weights[row.slot] = softmax.sum;
      head.sums.references[row.slot] = softmax.reference;
      if (op_.params.dropout.active) drop_row(op_.params.dropout, *row.head, row.i, begin, size, scores);
      as_operands<Operand>(scores, words * kWord);
    }
  }

  // The sums of values, stored by slot.
  void add_values(const KeyHead* heads, int64_t heads_count, int64_t begin, int64_t size, Workspace& workspace) const {
    Values* sources = workspace.take<Values>(heads_count * rows_);
    int64_t count = 0;
    for (int64_t i = 0; i < heads_count; ++i) {
      const KeyHead& head = heads[i];
      Real* sums = workspace.take<Real>(head.count * out_stride_);
      std::fill(sums, sums + head.count * out_stride_, Real(0));
      for (int64_t r = 0; r < head.count; ++r) {
        const Real* weights = head.weights + r * kPart;
        if (r > 0 && head.rows[r].head->value.data == head.rows[r - 1].head->value.data) {
          ++sources[count - 1].count;
        } else {
          sources[count++] = {head.rows + r, 1, reinterpret_cast<const Operand*>(weights), sums + r * out_stride_,
                              head.sums.outputs};
        }
      }
    }
    Number* finite = workspace.take<Number>(kWord * op_.Dv);
    // In the order of memory: blocks of all heads in turn if the heads of a token are next to each other, else all
    // blocks of one head after the other.
    const bool tokens_first = op_.params.value.stride[1] < op_.params.value.stride[2];
    const int64_t together = tokens_first ? count : 1;
    // A sum rounds once per block, so its size must not depend on what else is in the task.
    const int64_t block = rows_ == 1 && !tokens_first ? kWord : block_of(op_.Dv, tokens_first ? 2 : 1);
    // The hardware prefetches values that one row reads in the order of memory.
    const bool in_order = !tokens_first && count > 0 && sources[0].count == 1;
    for (int64_t first = 0; first < count; first += together) {
      for (int64_t n = 0; n < size; n += block) {
        for (int64_t i = first; i < first + together; ++i) {
          const Rows& values = sources[i].values();
          const Number* next = n + block < size       ? row_of(values, begin + n + block)
                               : i + together < count ? row_of(sources[i + together].values(), begin)
                                                      : row_of(sources[i].rows->head->key, begin + size);
          add_block_of_values(sources[i], begin, n, std::min(block, size - n),
                              in_order ? 0 : next - row_of(values, begin + n), finite);
        }
      }
    }
    for (int64_t i = 0; i < count; ++i)
      for (int64_t r = 0; r < sources[i].count; ++r)
        std::memcpy(sources[i].out + sources[i].rows[r].slot * out_stride_, sources[i].sums + r * out_stride_,
                    sizeof(Real) * out_stride_);
  }

  // `count` values from begin + n on. A key that a row may not see adds nothing to it, NaN and infinity included.
  // `finite` is scratch [kWord][Dv].
  void add_block_of_values(const Values& source, int64_t begin, int64_t n, int64_t count, int64_t ahead,
                           Number* finite) const {
    uint64_t some = 0, every = ~uint64_t{0};  // which keys some row sees, and every row, one bit each
    for (int64_t r = 0; r < source.count; ++r) {
      const uint64_t bits = source.rows[r].seen[n / kWord] >> n % kWord;
      some |= bits, every &= bits;
    }
    some &= ~uint64_t{0} >> (kWord - count);
    if (!some) return;
    const Rows& values = source.values();
    begin += n;
    constexpr int kStep = kNumbers<Operand>;  // keys
    const int first = __builtin_ctzll(some) / kStep * kStep;
    const int last = static_cast<int>(std::min(count, round_up(kWord - __builtin_clzll(some), kStep)));
    uint64_t aside = 0;  // keys with NaN or infinity that some row does not see
    for (int k = first; k < last; ++k)
      if (!(every >> k & 1) && !is_finite(row_of(values, begin + k))) aside |= uint64_t{1} << k;
    const auto add = [&](const Number* data, int64_t stride) {
      for_rows(source.count, [&](auto R, int64_t row, int64_t blocks) {
        for (int64_t r = row; r < row + blocks * R; r += R) {
          const Prefetch next{count * r / source.count, count * (r + R) / source.count, ahead};
          add_columns<Operand, Number, R>(source.weights + r * kPart + (n + first) / kStep, last - first, data, stride,
                                          next, op_.Dv, source.sums + r * out_stride_, out_stride_);
        }
      });
    };
    if (!aside) return add(row_of(values, begin + first), values.stride);
    for (int k = first; k < last; ++k) {
      if (aside >> k & 1) {
        std::memset(finite + k * op_.Dv, 0, sizeof(Number) * op_.Dv);
      } else {
        std::memcpy(finite + k * op_.Dv, values.at(begin + k), sizeof(Number) * op_.Dv);
      }
    }
    add(finite + first * op_.Dv, op_.Dv);
    for (; aside; aside &= aside - 1) {
      const int k = __builtin_ctzll(aside);
      for (int64_t r = 0; r < source.count; ++r) {
        if (!(source.rows[r].seen[n / kWord] >> (n % kWord + k) & 1)) continue;
        Real weight = 0;
        load_row(&weight, reinterpret_cast<const char*>(source.weights + r * kPart) + (n + k) * sizeof(Operand) / kStep,
                 kStep == 1 ? kDTypeOf<Real> : DType::kBFloat16, 1);
        for (int64_t d = 0; d < op_.Dv; ++d) {
          Real value = 0;
          load_row(&value, values.columns(d).at(begin + k), values.dtype, 1);
          source.sums[r * out_stride_ + d] += weight * value;
        }
      }
    }
  }

  static const Number* row_of(const Rows& rows, int64_t row) { return reinterpret_cast<const Number*>(rows.at(row)); }

  bool is_finite(const Number* row) const {
    Vec<Real> probe{};  // 0 times a finite number is 0, anything else becomes NaN
    const auto add = [&](auto numbers) {
      for (int i = 0; i < kVectors<Real, Number>; ++i) probe += widened(numbers, i, Real{}, Number{}) * Real(0);
    };
    constexpr int W = kLoad<Real, Number>;
    int64_t d = 0;
    for (; d + W <= op_.Dv; d += W) add(load_numbers<Real>(row + d));
    if (d < op_.Dv) add(load_numbers<Real>(row + d, op_.Dv - d));
    return sum_lanes<Real>(probe) == Real(0);
  }
};

}  // namespace hk::HK_LEVEL
