// One tile of query rows against all the keys it sees: the forward pass that both operators share.
//
// Everything stands transposed, one query row a lane. Keys and values are the broadcast operand of the inner product
// and so are read in place; only the query tile (once) and the output tile (once) are transposed. On chip: the query
// tile [D][64], a tile of scores [64][64] and the output tile [Dv][64].
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
template <typename T>
struct Head {
  int64_t b, h;
  Rows key;                      // [S][D]
  Rows value;                    // [S][Dv]
  Rows bias;                     // [1][S] content bias; absent for gated attention
  T bias_scale;                  // to base-2 logarithms
  int64_t D, Dv;
  std::vector<Range> features;   // those that count in a score
};

// Scratch of one tile.
template <typename T>
struct TileScratch {
  T* query;    // [D][64] transposed, scaled to base-2 logarithms
  T* rows;     // [64][max(D, Dv)] a tile the way tensors lie
  T* widened;  // [65][max(D, Dv)] keys or values in T, and one row more
  T* scores;   // [64][64] scores, then probabilities
  T* out;      // [Dv][64]

  static int64_t width(int64_t D, int64_t Dv) { return round_up(std::max(D, Dv), kLanes<T>); }
  static int64_t bytes(int64_t D, int64_t Dv) {
    return piece<T>(round_up(D, kLanes<T>) * kBlockM) + piece<T>(kBlockM * width(D, Dv)) +
           piece<T>((kBlockN + 1) * width(D, Dv)) + piece<T>(kBlockN * kBlockM) +
           piece<T>(round_up(Dv, kLanes<T>) * kBlockM);
  }
  TileScratch(Workspace& w, int64_t D, int64_t Dv)
      : query(w.take<T>(round_up(D, kLanes<T>) * kBlockM)),
        rows(w.take<T>(kBlockM * width(D, Dv))),
        widened(w.take<T>((kBlockN + 1) * width(D, Dv))),
        scores(w.take<T>(kBlockN * kBlockM)),
        out(w.take<T>(round_up(Dv, kLanes<T>) * kBlockM)) {}
};

// rows[m][0 .. round_up(width)) = the tile's rows in T, zero where a row sees nothing and past the width.
template <typename T>
inline void gather_rows(const Rows& source, const VisibleRows<T>& visible, int64_t width, T* rows) {
  const int64_t padded = round_up(width, kLanes<T>);
  for (int m = 0; m < visible.columns; ++m) {
    T* row = rows + m * padded;
    const bool read = m < visible.count && visible.sees(m);
    if (read) load_row(row, source.at(visible.first + m), source.dtype, width, source.step);
    for (int64_t d = read ? width : 0; d < padded; ++d) row[d] = 0;
  }
}

// query[d][m] = factor[d] * source[m][d], zero where a row sees nothing.
template <typename T>
inline void pack_query(const Rows& source, const VisibleRows<T>& visible, int64_t D, const T* factor, T* rows, T* query) {
  const int64_t padded = round_up(D, kLanes<T>);
  if (source.dtype == kDTypeOf<T> && D == padded && visible.all_rows) {
    transpose(reinterpret_cast<const T*>(source.at(visible.first)), source.stride, query, kBlockM, visible.columns, D);
  } else {
    gather_rows(source, visible, D, rows);
    transpose(rows, padded, query, kBlockM, visible.columns, padded);
  }
  for (int64_t d = 0; d < D; ++d)
    for (int m = 0; m < visible.columns; m += kLanes<T>)
      store<T>(query + d * kBlockM + m, load(query + d * kBlockM + m) * factor[d]);
}

// scores[n][m] = base-2 logarithm of the weight of key n for row m, before any mask.
template <typename T>
inline void score_tile(const Head<T>& head, const T* query, const KeyTile& keys, int columns, T* widened, T* scores) {
  bool started = false;
  if (head.bias) {
    T bias[kBlockN];
    load_row(bias, head.bias.data + keys.begin * head.bias.step * element_size(head.bias.dtype), head.bias.dtype,
             keys.count(), head.bias.step);
    for (int n = 0; n < keys.count(); ++n)
      for (int m = 0; m < columns; m += kLanes<T>) store<T>(scores + n * kBlockM + m, splat<T>(bias[n] * head.bias_scale));
    started = true;
  }
  for (const Range& range : head.features) {
    const Tile<T> tile = tile_of(head.key.columns(range.begin), keys.begin, keys.count(), range.end - range.begin, widened);
    multiply<T>(keys.count(), columns, range.end - range.begin, {tile.data, tile.stride, 1}, query + range.begin * kBlockM,
                kBlockM, scores, kBlockM, started);
    started = true;
  }
  if (!started) std::memset(scores, 0, sizeof(T) * kBlockM * keys.count());
}

// sum[w][m] += rows[n][w] * weights[n][m] over the keys n of the tile: probabilities times values, or dS times keys.
// A key that a row may not see adds nothing to it, NaN and infinity included.
template <typename T>
inline void add_weighted_keys(const Rows& source, int64_t width, const KeyTile& keys, const VisibleRows<T>& visible,
                              const T* weights, T* widened, T* sum) {
  Tile<T> tile = tile_of(source, keys.begin, keys.count(), width, widened);
  std::vector<int> bad;
  if (!keys.full) {
    for (int n = 0; n < keys.count(); ++n)
      if (has_nonfinite(tile.data + n * tile.stride, width)) bad.push_back(n);
  }
  if (!bad.empty()) {  // weights of hidden pairs are 0, but 0 * NaN is not
    if (tile.data != widened)
      for (int n = 0; n < keys.count(); ++n) std::memcpy(widened + n * width, tile.data + n * tile.stride, width * sizeof(T));
    tile = {widened, width};
    for (int n : bad) std::memset(widened + n * width, 0, width * sizeof(T));
  }
  multiply<T>(width, visible.columns, keys.count(), {tile.data, 1, tile.stride}, weights, kBlockM, sum, kBlockM, true);
  T* row = widened + kBlockN * width;
  for (int n : bad) {
    load_row(row, source.at(keys.begin + n), source.dtype, width);
    for (int m = 0; m < visible.columns; ++m)
      if (visible.row_sees_key(m, keys.begin + n))
        for (int64_t w = 0; w < width; ++w) sum[w * kBlockM + m] += row[w] * weights[n * kBlockM + m];
  }
}

// scratch.query holds the packed tile; afterwards scratch.out holds the unnormalised output and `softmax` its sums.
template <typename T>
inline void attend(const Head<T>& head, const DropoutParams& dropout, const VisibleRows<T>& visible,
                   const TileScratch<T>& scratch, OnlineSoftmax<T>& softmax) {
  std::memset(scratch.out, 0, sizeof(T) * kBlockM * round_up(head.Dv, kLanes<T>));
  bool started = false;
  for_visible_tiles(visible, 0, visible.hull_hi, [&](const KeyTile& keys) {
    score_tile(head, scratch.query, keys, visible.columns, scratch.widened, scratch.scores);
    if (!keys.full) hide(scratch.scores, keys, visible, visible.columns, kHidden<T>);
    const bool moved = softmax.step(scratch.scores, keys.count(), visible.columns);
    if (dropout.active) drop(dropout, head.b, head.h, keys, visible.first, visible.columns, scratch.scores);
    if (moved && started) {
      for (int64_t w = 0; w < head.Dv; ++w)
        for (int m = 0; m < visible.columns; m += kLanes<T>)
          store<T>(scratch.out + w * kBlockM + m, load(scratch.out + w * kBlockM + m) * load(softmax.rescale + m));
    }
    started = true;
    add_weighted_keys(head.value, head.Dv, keys, visible, scratch.scores, scratch.widened, scratch.out);
  });
}

// Where a finished tile goes.
struct Outputs {
  Rows out;       // [T][Dv]
  Rows attended;  // [T][Dv], absent where it is not kept
  void* lse;      // [T] in the compute type, absent where it is not kept
};

// Normalise, gate and store a tile after `attend`. Rows that see nothing give 0 and lse -inf.
template <typename T>
inline void finish_tile(const Head<T>& head, const Gate<T>& gate, const VisibleRows<T>& visible,
                        const TileScratch<T>& scratch, const OnlineSoftmax<T>& softmax, const Outputs& outputs) {
  const int64_t padded = round_up(head.Dv, kLanes<T>);
  transpose(scratch.out, kBlockM, scratch.rows, padded, padded, visible.columns);
  alignas(64) T tokens[kBlockM];
  if (gate && !gate.elementwise) gate.tokens(head.b, head.h, visible.first, visible.count, tokens);
  for (int m = 0; m < visible.count; ++m) {
    const int64_t i = visible.first + m;
    T* row = scratch.rows + m * padded;
    if (!visible.sees(m) || softmax.sum[m] == T(0)) {  // no key, or holes only
      store_zeros<T>(outputs.out, i, 1, head.Dv);
      if (outputs.attended) store_zeros<T>(outputs.attended, i, 1, head.Dv);
      if (outputs.lse) static_cast<T*>(outputs.lse)[i] = kHidden<T>;
      continue;
    }
    const T inverse = T(1) / softmax.sum[m];
    for (int64_t w = 0; w < padded; w += kLanes<T>) store<T>(row + w, load(row + w) * inverse);
    if (outputs.attended) store_row(outputs.attended.at(i), row, outputs.attended.dtype, head.Dv, outputs.attended.step);
    if (gate.elementwise) {
      T* values = scratch.widened;
      gate.elements(head.b, head.h, i, head.Dv, values);
      for (int64_t w = 0; w < padded; w += kLanes<T>) store<T>(row + w, load(row + w) * load(values + w));
    } else if (gate) {
      for (int64_t w = 0; w < padded; w += kLanes<T>) store<T>(row + w, load(row + w) * tokens[m]);
    }
    store_row(outputs.out.at(i), row, outputs.out.dtype, head.Dv, outputs.out.step);
    if (outputs.lse)
      static_cast<T*>(outputs.lse)[i] =
          static_cast<T>(kLn2) * softmax.maximum[m] + static_cast<T>(std::log(softmax.sum[m]));
  }
}

}  // namespace hk::HK_LEVEL
