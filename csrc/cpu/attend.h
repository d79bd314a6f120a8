// One tile of query rows against all the keys it sees: the forward pass that both operators share.
//
// Everything stands transposed, one query row a lane. Keys and values are the broadcast operand of
// the inner product and so are read in place; only the query tile (once) and the output tile (once)
// are transposed. On chip: the query tile [D][64], a tile of scores [64][64] and the output tile
// [Dv][64].
#pragma once

#include <cmath>
#include <vector>

#include "cpu/gate.h"
#include "cpu/gemm.h"
#include "cpu/rows.h"
#include "cpu/softmax.h"
#include "cpu/visible.h"
#include "cpu/workspace.h"

namespace hk::HK_LEVEL {

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

// Features [begin, end) of a score.
struct Range {
  int64_t begin;
  int64_t end;
};

// What the tiles of one head of one batch read.
template <typename Real>
struct Head {
  int64_t b, h;
  Rows key;         // [S][D]
  Rows value;       // [S][Dv]
  Rows bias;        // [1][S] content bias; absent for gated attention
  Real bias_scale;  // to base-2 logarithms
  int64_t D, Dv;
  std::vector<Range> features;  // those that count in a score
};

// Scratch of one tile.
template <typename Real>
struct TileScratch {
  Real* query;    // [D][64] transposed, scaled to base-2 logarithms
  Real* rows;     // [64][max(D, Dv)] a tile the way tensors lie
  Real* widened;  // [65][max(D, Dv)] keys or values in Real, and one row more
  Real* scores;   // [64][64] scores, then probabilities
  Real* out;      // [Dv][64]

  static int64_t width(int64_t D, int64_t Dv) { return row_stride<Real>(std::max(D, Dv)); }
  static int64_t bytes(int64_t D, int64_t Dv) {
    return piece<Real>(round_up(D, kLanes<Real>) * BLOCK_M) + piece<Real>(BLOCK_M * width(D, Dv)) +
           piece<Real>((BLOCK_N + 1) * width(D, Dv)) + piece<Real>(BLOCK_N * BLOCK_M) +
           piece<Real>(round_up(Dv, kLanes<Real>) * BLOCK_M);
  }
  TileScratch(Workspace& w, int64_t D, int64_t Dv)
      : query(w.take<Real>(round_up(D, kLanes<Real>) * BLOCK_M)),
        rows(w.take<Real>(BLOCK_M * width(D, Dv))),
        widened(w.take<Real>((BLOCK_N + 1) * width(D, Dv))),
        scores(w.take<Real>(BLOCK_N * BLOCK_M)),
        out(w.take<Real>(round_up(Dv, kLanes<Real>) * BLOCK_M)) {}
};

// rows[m][0 .. round_up(width)) = the tile's rows in Real, zero where a row sees nothing and past
// the width.
template <typename Real>
inline void gather_rows(const Rows& source, const VisibleRows<Real>& visible, int64_t width,
                        Real* rows) {
  const int64_t padded = round_up(width, kLanes<Real>), stride = row_stride<Real>(width);
  for (int m = 0; m < visible.columns; ++m) {
    Real* row = rows + m * stride;
    const bool read = m < visible.count && visible.sees(m);
    if (read) load_row(row, source.at(visible.first + m), source.dtype, width, source.step);
    for (int64_t d = read ? width : 0; d < padded; ++d) row[d] = 0;
  }
}

// query[d][m] = factor[d] * source[m][d] over the features, zero where a row sees nothing.
template <typename Real>
inline void pack_query(const Rows& source, const VisibleRows<Real>& visible,
                       const std::vector<Range>& features, const Real* factor, Real* rows,
                       Real* query) {
  for (const Range& range : features) {
    const Rows columns = source.columns(range.begin);
    const int64_t width = range.end - range.begin, padded = round_up(width, kLanes<Real>);
    Real* packed = query + range.begin * BLOCK_M;
    if (source.dtype == kDTypeOf<Real> && width == padded && visible.all_rows) {
      transpose(reinterpret_cast<const Real*>(columns.at(visible.first)), source.stride, packed,
                BLOCK_M, visible.columns, width);
    } else {
      gather_rows(columns, visible, width, rows);
      transpose(rows, row_stride<Real>(width), packed, BLOCK_M, visible.columns, padded);
    }
    for (int64_t d = range.begin; d < range.end; ++d)
      for (int m = 0; m < visible.columns; m += kLanes<Real>)
        store<Real>(query + d * BLOCK_M + m, load(query + d * BLOCK_M + m) * factor[d]);
  }
}

// scores[n][m] = base-2 logarithm of the weight of key n for row m, before any mask.
template <typename Real>
inline void score_tile(const Head<Real>& head, const Real* query, const KeyTile& keys, int columns,
                       Real* widened, Real* scores) {
  bool started = false;
  if (head.bias) {
    Real bias[BLOCK_N];
    load_row(bias, head.bias.data + keys.begin * head.bias.step * element_size(head.bias.dtype),
             head.bias.dtype, keys.count(), head.bias.step);
    for (int n = 0; n < keys.count(); ++n)
      for (int m = 0; m < columns; m += kLanes<Real>)
        store<Real>(scores + n * BLOCK_M + m, splat<Real>(bias[n] * head.bias_scale));
    started = true;
  }
  for (const Range& range : head.features) {
    const Tile<Real> tile = tile_of(head.key.columns(range.begin), keys.begin, keys.count(),
                                    range.end - range.begin, widened);
    multiply<Real>(keys.count(), columns, range.end - range.begin, {tile.data, tile.stride, 1},
                   query + range.begin * BLOCK_M, BLOCK_M, scores, BLOCK_M, started);
    started = true;
  }
  if (!started) std::memset(scores, 0, sizeof(Real) * BLOCK_M * keys.count());
}

// sum[w][m] += rows[n][w] * weights[n][m] over the keys n of the tile: probabilities times values,
// or dS times keys. A key that a row may not see adds nothing to it, NaN and infinity included.
template <typename Real>
inline void add_weighted_keys(const Rows& source, int64_t width, const KeyTile& keys,
                              const VisibleRows<Real>& visible, const Real* weights, Real* widened,
                              Real* sum) {
  Tile<Real> tile = tile_of(source, keys.begin, keys.count(), width, widened);
  std::vector<int> bad;
  if (!keys.full) {
    for (int n = 0; n < keys.count(); ++n)
      if (has_nonfinite(tile.data + n * tile.stride, width)) bad.push_back(n);
  }
  const int64_t stride = row_stride<Real>(width);
  if (!bad.empty()) {  // weights of hidden pairs are 0, but 0 * NaN is not
    if (tile.data != widened)
      for (int n = 0; n < keys.count(); ++n)
        std::memcpy(widened + n * stride, tile.data + n * tile.stride, width * sizeof(Real));
    tile = {widened, stride};
    for (int n : bad) std::memset(widened + n * stride, 0, width * sizeof(Real));
  }
  multiply<Real>(width, visible.columns, keys.count(), {tile.data, 1, tile.stride}, weights,
                 BLOCK_M, sum, BLOCK_M, true);
  Real* row = widened + BLOCK_N * stride;
  for (int n : bad) {
    load_row(row, source.at(keys.begin + n), source.dtype, width);
    for (int m = 0; m < visible.columns; ++m)
      if (visible.row_sees_key(m, keys.begin + n))
        for (int64_t w = 0; w < width; ++w)
          sum[w * BLOCK_M + m] += row[w] * weights[n * BLOCK_M + m];
  }
}

// scratch.query holds the packed tile; afterwards scratch.out holds the unnormalised output and
// `softmax` its sums.
template <typename Real>
inline void attend(const Head<Real>& head, const DropoutParams& dropout,
                   const VisibleRows<Real>& visible, const TileScratch<Real>& scratch,
                   OnlineSoftmax<Real>& softmax) {
  std::memset(scratch.out, 0, sizeof(Real) * BLOCK_M * round_up(head.Dv, kLanes<Real>));
  bool started = false;
  for_visible_tiles(visible, 0, visible.hull_hi, [&](const KeyTile& keys) {
    score_tile(head, scratch.query, keys, visible.columns, scratch.widened, scratch.scores);
    if (!keys.full) hide(scratch.scores, keys, visible, visible.columns, kHidden<Real>);
    const bool moved = softmax.step(scratch.scores, keys.count(), visible.columns);
    if (dropout.active)
      drop(dropout, head.b, head.h, keys, visible.first, visible.columns, scratch.scores);
    if (moved && started) {
      for (int64_t w = 0; w < head.Dv; ++w)
        for (int m = 0; m < visible.columns; m += kLanes<Real>)
          store<Real>(scratch.out + w * BLOCK_M + m,
                      load(scratch.out + w * BLOCK_M + m) * load(softmax.rescale + m));
    }
    started = true;
    add_weighted_keys(head.value, head.Dv, keys, visible, scratch.scores, scratch.widened,
                      scratch.out);
  });
}

// Where a finished tile goes.
struct Outputs {
  Rows out;       // [T][Dv]
  Rows attended;  // [T][Dv], absent where it is not kept
  void* lse;      // [T] in the compute type, absent where it is not kept
};

// What query rows [first, first + count) give that see nothing: 0, and lse -inf.
template <typename Real>
inline void store_blind_rows(const Outputs& outputs, int64_t first, int64_t count, int64_t Dv) {
  store_zeros<Real>(outputs.out, first, count, Dv);
  if (outputs.attended) store_zeros<Real>(outputs.attended, first, count, Dv);
  if (outputs.lse) std::fill_n(static_cast<Real*>(outputs.lse) + first, count, kHidden<Real>);
}

// Normalise, gate and store a tile after `attend`.
template <typename Real>
inline void finish_tile(const Head<Real>& head, const Gate<Real>& gate,
                        const VisibleRows<Real>& visible, const TileScratch<Real>& scratch,
                        const OnlineSoftmax<Real>& softmax, const Outputs& outputs) {
  const int64_t padded = round_up(head.Dv, kLanes<Real>), stride = row_stride<Real>(head.Dv);
  transpose(scratch.out, BLOCK_M, scratch.rows, stride, padded, visible.columns);
  alignas(64) Real tokens[BLOCK_M];
  if (gate && !gate.elementwise) gate.tokens(head.b, head.h, visible.first, visible.count, tokens);
  for (int m = 0; m < visible.count; ++m) {
    const int64_t i = visible.first + m;
    Real* row = scratch.rows + m * stride;
    if (!visible.sees(m) || softmax.sum[m] == Real(0)) {  // no key, or holes only
      store_blind_rows<Real>(outputs, i, 1, head.Dv);
      continue;
    }
    const Real inverse = Real(1) / softmax.sum[m];
    for (int64_t w = 0; w < padded; w += kLanes<Real>)
      store<Real>(row + w, load(row + w) * inverse);
    if (outputs.attended)
      store_row(outputs.attended.at(i), row, outputs.attended.dtype, head.Dv,
                outputs.attended.step);
    if (gate.elementwise) {
      Real* values = scratch.widened;
      gate.elements(head.b, head.h, i, head.Dv, values);
      for (int64_t w = 0; w < padded; w += kLanes<Real>)
        store<Real>(row + w, load(row + w) * load(values + w));
    } else if (gate) {
      for (int64_t w = 0; w < padded; w += kLanes<Real>)
        store<Real>(row + w, load(row + w) * tokens[m]);
    }
    store_row(outputs.out.at(i), row, outputs.out.dtype, head.Dv, outputs.out.step);
    if (outputs.lse)
      static_cast<Real*>(outputs.lse)[i] = static_cast<Real>(kLn2) * softmax.maximum[m] +
                                           static_cast<Real>(std::log(softmax.sum[m]));
  }
}

}  // namespace hk::HK_LEVEL
