// Tiles of query rows against all the keys they see: the forward pass that both operators share.
//
// Tiles are transposed, one query row per lane. Keys and values are the broadcast operand of the inner product, which
// reads rows and columns equally fast; only the query tile and the output tile are transposed, once each. `Operand` is
// the element type of the products: Real, or pairs of bfloat16 (pair.h), into which keys, values and probabilities are
// packed. The tiles of a work item share their keys and process them together, window by window: a window of keys and
// values is packed once and stays in the L1 cache, the tiles ([D][64] queries, [Dv][64] output each) in L2.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/panel.h"
#include "cpu/softmax.h"
#include "cpu/workspace.h"

namespace hk::HK_LEVEL {

// The forward state of a tile of query rows.
template <typename Real, typename Operand>
struct QueryTile {
  Head<Real> head;
  VisibleRows<Real> visible;
  OnlineSoftmax<Real> softmax;
  Operand* query;  // [D][64] transposed, mixed
  Real* out;       // [Dv][64]; undefined until `started`, and in rows that see no key
  bool started = false;
  alignas(64) Real threshold[BLOCK_M] = {};  // of entmax, above the largest score of the row

  static constexpr int64_t query_words(int64_t D) { return packed<Operand>(D) * BLOCK_M; }
  static int64_t bytes(const Attention<Real, Operand>& op) {
    return buffer_bytes<Operand>(query_words(op.D)) + buffer_bytes<Real>(round_up(op.Dv, kLanes<Real>) * BLOCK_M);
  }
  QueryTile(Workspace& w, const Attention<Real, Operand>& op, int64_t b, int64_t h, const VisibleRows<Real>& rows)
      : head(op.head(b, h)),
        visible(rows),
        query(w.take<Operand>(query_words(op.D))),
        out(w.take<Real>(round_up(op.Dv, kLanes<Real>) * BLOCK_M)) {}
};

// Entmax keeps the largest score of every so many keys.
constexpr int kKeysPerMaximum = 16;

// Scratch that the tiles of a work item share.
template <typename Real, typename Operand>
struct TileScratch {
  Real* rows;        // [64][max(D, Dv)] a tile in the layout of tensors
  Real* row;         // [max(D, Dv)]
  Real* scores;      // [window][64] scores, then probabilities
  Real* bias;        // [64][64]
  Real* bias_rows;   // [64][row_stride(64)] a tile of bias in the layout of tensors
  Real* slope;       // [64][64] of the cap
  Operand* weights;  // [window][64] scores packed into pairs; empty if Operand is Real
  // Of a query tile, for entmax alone.
  Real* kept_scores;  // [tiles of keys][64][64]
  Real* kept_maxima;  // [tiles of keys][64 / kKeysPerMaximum][64]
  int32_t* near;      // [64 / kLanes][tiles of keys * 64]
  KeySpan* kept;      // [tiles of keys]
  int64_t window;     // keys of a window
  Panel<Operand> key, value;

  static constexpr int64_t kWeights = kNumbers<Operand> == 1 ? 0 : BLOCK_N * BLOCK_M / kNumbers<Operand>;
  static int64_t width(const Attention<Real, Operand>& op) { return row_stride<Real>(std::max(op.D, op.Dv)); }
  static int64_t bytes(const Attention<Real, Operand>& op, int64_t window = BLOCK_N) {
    return bytes_of<TileScratch>(op, int64_t{1}, window);
  }
  // `op` has D and, with entmax, the number of tiles of keys that a query tile keeps; `tiles`: how many query tiles may
  // read a window; `window`: its keys.
  TileScratch(Workspace& w, const Attention<Real, Operand>& op, int64_t tiles, int64_t window = BLOCK_N)
      : rows(w.take<Real>(BLOCK_M * width(op))),
        row(w.take<Real>(width(op))),
        scores(w.take<Real>(window * BLOCK_M)),
        bias(w.take<Real>(BLOCK_N * BLOCK_M)),
        bias_rows(w.take<Real>(BLOCK_M * row_stride<Real>(BLOCK_N))),
        slope(w.take<Real>(BLOCK_N * BLOCK_M)),
        weights(w.take<Operand>(window / BLOCK_N * kWeights)),
        kept_scores(w.take<Real>(op.kept_tiles * BLOCK_N * BLOCK_M)),
        kept_maxima(w.take<Real>(op.kept_tiles * (BLOCK_N / kKeysPerMaximum) * BLOCK_M)),
        near(w.take<int32_t>(op.kept_tiles * BLOCK_N * (BLOCK_M / kLanes<Real>))),
        kept(w.take<KeySpan>(op.kept_tiles)),
        window(window),
        key(w, op.D, tiles > 1, window),
        value(w, op.Dv, tiles > 1, window) {}
};

// pairs[n][m] (+)= sum over k of keys[n][k] * rows[k][m] of the pairs of a tile that intervals leave visible; others
// are undefined, as are those from the last key to `padded`.
template <typename Real, typename Operand>
inline void multiply_visible(const VisibleRows<Real>& visible, const KeySpan& tile, int64_t padded, int64_t depth,
                             const Left<Operand, false>& keys, const Operand* rows, Real* pairs, bool accumulate) {
  visible.template for_keys<kProductUnit<Operand>>(tile, [&](Range n, Range m) {
    multiply((n.end < tile.count() ? n.end : padded) - n.begin, m.end - m.begin, depth,
             rows_of(keys.row(n.begin), keys.stride), rows + m.begin, BLOCK_M, pairs + n.begin * BLOCK_M + m.begin,
             BLOCK_M, accumulate);
  });
}

// Which pairs of a tile the bias leaves visible: none, or all except where `hiding` ([64][64]; null: hides none) is
// -inf. The scores are yet to be multiplied by `factor`, a positive number.
template <typename Real>
struct Scored {
  bool any;
  const Real* hiding;
  Real factor;
};

// scratch.scores[n][m] * factor = score of key n of `keys`, a part of a window, for row m, before any mask, undefined
// where intervals hide a block; not computed if the bias hides all of them. `with_slope`: also stores the derivative of
// the cap in scratch.slope. Only scores of pairs for a softmax leave a factor, which costs nothing in the exponent.
template <typename Real, typename Operand>
inline Scored<Real> score_tile(const QueryTile<Real, Operand>& tile, const KeySpan& window, const KeySpan& keys,
                               TileScratch<Real, Operand>& scratch, bool with_slope = false) {
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const HeadTerms<Real>& terms = head.terms;
  const int columns = visible.columns;
  const Left<Operand, false> key = scratch.key.rows(head.key, window, keys);
  const Real* bias = nullptr;
  if (terms.image) {
    bias = terms.image_tile(visible.first, keys.begin);
  } else if (terms.has_bias()) {
    load_bias(terms, visible, keys, scratch.bias_rows, scratch.bias);
    bias = scratch.bias;
  }
  if (bias && hides_all(bias, keys.count(), columns)) return {false, bias, Real(1)};
  Real* scores = scratch.scores;
  bool started = false;
  if (const Rows& row = head.content_bias) {
    Real bias[BLOCK_N];
    load_row(bias, row.columns(keys.begin).data, row.dtype, keys.count(), row.step);
    const Real scale = kScaledQuery<Operand> ? head.scale : Real(1);
    for (int n = 0; n < keys.count(); ++n)
      for (int m = 0; m < columns; m += kLanes<Real>)
        store<Real>(scores + n * BLOCK_M + m, splat<Real>(bias[n] * scale));
    started = true;
  }
  for (const Range& range : head.features) {
    const int64_t first = range.begin / kNumbers<Operand>;
    int64_t end = ceil_div(range.end, kNumbers<Operand>);
    if (range.end == head.D) end = in_tiles<Operand>(end);
    multiply_visible(visible, keys, scratch.key.padded(keys), end - first, rows_of(key.data + first, key.stride),
                     tile.query + first * BLOCK_M, scores, started);
    started = true;
  }
  if (!started) std::memset(scores, 0, sizeof(Real) * BLOCK_M * keys.count());
  if (!terms.change_scores() && kScaledQuery<Operand>) return {true, nullptr, Real(1)};
  if (!terms.change_scores() && head.order == Real(0) && head.scale > Real(0)) return {true, nullptr, head.scale};
  const bool hides = finish_scores(terms.cap, kScaledQuery<Operand> ? Real(1) : head.scale, keys.count(), columns, bias,
                                   scores, with_slope ? scratch.slope : nullptr);
  return {true, hides ? bias : nullptr, Real(1)};
}

// sum[w][m] (+)= rows[n][w] * weights[n][m] over the keys n of the tile, for the columns w: probabilities times values,
// or dS times keys. A key that a row may not see adds nothing to it, NaN and infinity included. `packed`:
// scratch.weights holds the weights already, and `weights` is read only for keys with NaN or infinity.
template <typename Real, typename Operand>
inline void add_weighted_keys(Panel<Operand>& panel, const Rows& source, const KeySpan& window, const KeySpan& keys,
                              Range columns, const Head<Real>& head, const VisibleRows<Real>& visible,
                              const Real* weights, bool packed, const TileScratch<Real, Operand>& scratch, Real* sum,
                              bool accumulate) {
  const int64_t width = columns.end - columns.begin;
  KeySpan checked = keys;
  checked.full = keys.full && head.order == Real(0);  // entmax gives visible keys a weight of 0 too
  const Summands<Operand> rows = panel.summands(source, window, checked, columns);
  const Operand* right =
      packed ? scratch.weights : right_operand(weights, rows.first, keys.count(), visible.columns, scratch.weights);
  const int64_t last = ceil_div(rows.first + keys.count(), kNumbers<Operand>);
  if (last < rows.steps)
    std::memset(scratch.weights + last * BLOCK_M, 0, sizeof *right * BLOCK_M * (rows.steps - last));
  sum += columns.begin * BLOCK_M;
  visible.template for_lanes<kProductUnit<Operand>>(keys, [&](Range m, Range n) {
    const int64_t first = (rows.first + n.begin) / kNumbers<Operand>;
    const int64_t end = n.end < keys.count() ? ceil_div(rows.first + n.end, kNumbers<Operand>) : rows.steps;
    Left<Operand, kNumbers<Operand> == 1> matrix = rows.matrix;
    matrix.data = matrix.depth(first);
    multiply(in_tiles<Operand>(width), m.end - m.begin, n.end > n.begin ? end - first : 0, matrix,
             right + first * BLOCK_M + m.begin, BLOCK_M, sum + m.begin, BLOCK_M, accumulate);
  });
  for (int64_t key : *rows.aside) {
    const Rows row = source.columns(columns.begin);
    load_row(scratch.row, row.at(key), row.dtype, width, row.step);
    const Real* const row_weights = weights + (key - keys.begin) * BLOCK_M;
    for (int m = 0; m < visible.columns; ++m)
      if (head.adds(visible, m, key, row_weights + m))
        for (int64_t w = 0; w < width; ++w) sum[w * BLOCK_M + m] += scratch.row[w] * row_weights[m];
  }
}

// Dropout of probabilities [count][64] of rows [first_row, first_row + columns) of a head for keys key_of(n), in
// ascending order: kept ones are multiplied by `scale`, others become 0. Applies the same to `target` unless it is
// null.
template <typename Real, typename KeyOf>
inline void drop(const DropoutParams& dropout, const Head<Real>& head, int64_t first_row, int columns, int64_t count,
                 KeyOf key_of, Real scale, Real* probabilities, Real* target = nullptr) {
  uint32_t words[4][BLOCK_M];
  int64_t group = -1;  // of four keys, whose words these are
  for (int64_t n = 0; n < count; ++n) {
    const int64_t key = key_of(n);
    if (key / 4 != group) {
      group = key / 4;
      for (int m = 0; m < columns; ++m) {
        const Philox4 random = dropout_words(dropout, head.b, head.h, first_row + m, group);
        for (int w = 0; w < 4; ++w) words[w][m] = random.word[w];
      }
    }
    for (int m = 0; m < columns; ++m) {
      const bool keep = words[key % 4][m] >= dropout.threshold;
      const int64_t at = n * BLOCK_M + m;
      probabilities[at] = keep ? probabilities[at] * scale : Real(0);
      if (target) target[at] = keep ? target[at] * scale : Real(0);
    }
  }
}

// Runs the forward loop of `count` query tiles, whose `query` is packed, over their keys. Afterwards `softmax` holds
// the sums and `out` the unnormalised output of the rows whose sum is not 0.
template <typename Real, typename Operand>
inline void attend(QueryTile<Real, Operand>* tiles, int64_t count, const DropoutParams& dropout,
                   TileScratch<Real, Operand>& scratch) {
  const TileUnit<Operand> unit;
  const KeySpan all{0, std::numeric_limits<int64_t>::max()};
  for_visible_pairs(tiles, count, all, scratch.window, [&](auto& tile, const KeySpan& window, KeySpan keys) {
    const Head<Real>& head = tile.head;
    const VisibleRows<Real>& visible = tile.visible;
    Real* scores = scratch.scores;
    const Scored<Real> scored = score_tile(tile, window, keys, scratch);
    if (!scored.any) return;
    if (scored.hiding) keys.full = false;
    if (!keys.full) hide(scores, keys, visible, visible.columns);
    bool moved;
    if constexpr (kNumbers<Operand> == 2) {
      const auto rows = scratch.value.summands(head.value, window, keys, {0, head.Dv});
      moved = tile.softmax.step_packed(scores, static_cast<int>(rows.first), keys.count(), visible.columns,
                                       scored.factor, dropout.active || !rows.aside->empty(), scratch.weights);
    } else {
      moved = tile.softmax.step(scores, keys.count(), visible.columns);
    }
    if (moved) {
      for (int64_t w = 0; w < head.Dv; ++w) {
        for (int m = 0; m < visible.columns; m += kLanes<Real>) {
          Real* at = tile.out + w * BLOCK_M + m;
          store<Real>(at, load(at) * load(tile.softmax.rescale + m));
        }
      }
    }
    // Not scaled: the largest weight of a row is 1, and in bfloat16 1 / (1 - p) is off by
    // up to 0.2 % in every row. `Normalisation` has the factor.
    const auto key_of = [&](int64_t n) { return keys.begin + n; };
    if (dropout.active) drop(dropout, head, visible.first, visible.columns, keys.count(), key_of, Real(1), scores);
    add_weighted_keys(scratch.value, head.value, window, keys, {0, head.Dv}, head, visible, scores,
                      kNumbers<Operand> == 2 && !dropout.active, scratch, tile.out, tile.started);
    tile.started = true;
  });
}

// The outputs of one head.
template <typename Real>
struct Outputs {
  Rows out;           // [T][Dv]
  Rows attended;      // [T][Dv], absent if not requested
  Real* lse;          // [T], null if not requested; entmax: the largest score
  Real* threshold;    // [T] of entmax, above the largest score; null for softmax
  double keep_scale;  // of dropout
};

template <typename Real, typename Operand>
inline Outputs<Real> outputs_of(const Attention<Real, Operand>& op, const ForwardParams& p, int64_t b, int64_t h) {
  const int64_t row = (b * p.out.size[1] + h) * p.out.size[2];
  const int64_t rows = p.out.size[0] * p.out.size[1] * p.out.size[2];
  return {op.head_rows(p.out, b, h), op.head_rows(p.attended, b, h),
          p.lse ? static_cast<Real*>(p.lse.data) + row : nullptr,
          p.lse && p.alpha ? static_cast<Real*>(p.lse.data) + rows + row : nullptr, p.dropout.keep_scale};
}

// Stores the results of query rows [first, first + count) that see no key: 0, and the sink as lse; absent outputs are
// left out.
template <typename Real>
inline void store_empty_rows(const Outputs<Real>& outputs, const HeadTerms<Real>& terms, int64_t first, int64_t count,
                             int64_t Dv) {
  if (outputs.out) store_zeros<Real>(outputs.out, first, count, Dv);
  if (outputs.attended) store_zeros<Real>(outputs.attended, first, count, Dv);
  if (outputs.lse)
    for (int64_t i = first; i < first + count; ++i) outputs.lse[i] = static_cast<Real>(terms.sink(i));
  if (outputs.threshold) std::fill_n(outputs.threshold + first, count, Real(0));
}

// The normalisation of a row whose weights, relative to `reference`, have this sum: the factor of the unnormalised
// output, `keep_scale` of dropout included, and lse. Requires a nonzero sum.
template <typename Real>
struct Normalisation {
  Real factor;
  double top, total;  // lse = top + log(total)

  Normalisation(Real reference, Real sum, double keep_scale, const HeadTerms<Real>& terms, int64_t row)
      : factor(static_cast<Real>(keep_scale) / sum), top(reference), total(sum) {
    const double sink = terms.sink(row);
    if (sink == kHidden<Real>) return;
    top = std::max<double>(reference, sink);
    const double share = std::exp(reference - top);
    total = share * sum + std::exp(sink - top);
    factor = static_cast<Real>(keep_scale * share / total);
  }

  double lse() const { return top + std::log(total); }
};

// Normalises, gates and stores row i of a head: `row` is its unnormalised output, `sum` the sum of its weights relative
// to `reference`. `token` is its gate, unless that is elementwise. `row` and `scratch` are whole vectors.
template <typename Real>
inline void finish_row(const Head<Real>& head, const Gate<Real>& gate, Real token, const Outputs<Real>& outputs,
                       int64_t i, Real reference, Real sum, Real* row, Real* scratch) {
  if (sum == Real(0)) return store_empty_rows(outputs, head.terms, i, 1, head.Dv);
  const Normalisation<Real> norm(reference, sum, outputs.keep_scale, head.terms, i);
  for (int64_t w = 0; w < head.Dv; w += kLanes<Real>) store<Real>(row + w, load(row + w) * norm.factor);
  if (outputs.attended) write_row(outputs.attended, i, head.Dv, row);
  if (gate && !gate.elementwise && token == Real(0)) {
    std::fill_n(row, head.Dv, Real(0));  // as in a tile of such rows, which is not computed
  } else if (gate) {
    gate.apply(head.b, head.h, i, head.Dv, token, row, scratch);
  }
  write_row(outputs.out, i, head.Dv, row);
  if (outputs.lse)  // rounded once: every probability of the backward pass reads it
    outputs.lse[i] = static_cast<Real>(norm.lse());
}

// Finishes the rows of a tile after `attend`.
template <typename Real, typename Operand>
inline void finish_tile(const QueryTile<Real, Operand>& tile, const Gate<Real>& gate,
                        const TileScratch<Real, Operand>& scratch, const Outputs<Real>& outputs) {
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const int64_t padded = round_up(head.Dv, kLanes<Real>), stride = row_stride<Real>(head.Dv);
  transpose(tile.out, BLOCK_M, scratch.rows, stride, padded, visible.columns);
  alignas(64) Real tokens[BLOCK_M] = {};
  if (gate && !gate.elementwise) gate.tokens(head.b, head.h, visible.first, visible.count, tokens);
  for (int m = 0; m < visible.count; ++m) {
    if (outputs.threshold) outputs.threshold[visible.first + m] = tile.threshold[m];
    finish_row(head, gate, tokens[m], outputs, visible.first + m, tile.softmax.reference[m],
               visible.sees(m) ? tile.softmax.sum[m] : Real(0), scratch.rows + m * stride, scratch.row);
  }
}

}  // namespace hk::HK_LEVEL
