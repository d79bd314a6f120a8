// Tiles of query rows against all the keys they see: the backward pass that both operators share.
//
// Per pair of tiles, transposed as in the forward pass: S = K Q^T again, P = exp(S - lse), dP = V dO^T, dS = P (dP -
// delta), then dV += P^T dO, dK += dS^T Q and dQ^T += K^T dS. One thread sums dK and dV of its keys in the order of the
// query tiles, and dQ of a query tile in the order of the keys, so the result does not depend bitwise on how the work
// is split.
#pragma once

#include "cpu/backward_tile.h"

namespace hk::HK_LEVEL {

// Accumulators of the keys [begin, ...) that this thread owns; null if a gradient is not requested.
template <typename Real>
struct KeyGradients {
  int64_t begin = 0;
  Real* dkey = nullptr;           // [keys][row_stride(D)]
  Real* dvalue = nullptr;         // [keys][row_stride(Dv)]
  Real* dcontent_bias = nullptr;  // [keys]
  BiasGradient<Real> bias;
};

// sum[n][w] += weights[n][m] * rows[m][w] over the query rows m, for the columns: dS times queries, or P times dout;
// `left` is the packed weights. Matrix rows are row_stride(width) apart.
template <typename Real, typename Operand>
inline void add_weighted_queries(const Real* weights, const Left<Operand, false>& left, const Operand* rows,
                                 const SetAside<Real>& aside, int64_t width, Range columns, const KeySpan& keys,
                                 const Head<Real>& head, const VisibleRows<Real>& visible, Real* sum) {
  const int64_t stride = row_stride<Real>(width);
  const int64_t end = round_up(columns.end, kLanes<Real>);
  visible.template for_keys<kProductUnit<Operand>>(keys, [&](Range n, Range m) {
    const int64_t first = m.begin / kNumbers<Operand>;
    multiply(in_tiles<Operand>(n.end - n.begin), end - columns.begin,
             in_tiles<Operand>((m.end - m.begin) / kNumbers<Operand>), rows_of(left.row(n.begin) + first, left.stride),
             rows + first * stride + columns.begin, stride, sum + n.begin * stride + columns.begin, stride, true);
  });
  for (int bad = 0; bad < aside.count; ++bad) {
    const int m = aside.index[bad];
    for (int n = 0; n < keys.count(); ++n)
      if (head.adds(visible, m, keys.begin + n, weights + n * BLOCK_M + m))
        for (int64_t w = columns.begin; w < end; ++w)
          sum[n * stride + w] += weights[n * BLOCK_M + m] * aside.rows[bad * stride + w];
  }
}

// Scores of a pair of tiles to probabilities, in place. Hidden pairs and lanes without a row become 0, because the sums
// over query rows include all lanes. `hiding` is the bias of the tile if it hides a pair, else null.
template <typename Real, typename Operand>
inline void probabilities(const BackwardTile<Real, Operand>& tile, const KeySpan& keys, const Real* hiding, Real factor,
                          BackwardScratch<Real, Operand>& scratch) {
  const VisibleRows<Real>& visible = tile.visible;
  const int columns = visible.columns;
  const bool all_visible = keys.full && visible.all_rows;
  for (int n = 0; n < keys.count(); ++n) {
    for (int m = 0; m < columns; m += kLanes<Real>) {
      const int at = n * BLOCK_M + m;
      Vec<Real> s = load(scratch.scores + at);
      if (!kScaledQuery<Operand>) s = rounded_product<Real>(s * factor);
      Vec<Real> p = exp_of_score<Operand>(s - load(tile.lse + m));
      if (!all_visible) p = visible.lanes_that_see(m, keys.begin + n) ? p : Vec<Real>{};
      if (hiding) p = load(hiding + at) != kHidden<Real> ? p : Vec<Real>{};
      store<Real>(scratch.scores + at, p);
    }
  }
}

// dS times `scale` from dP, in place, after `probabilities`.
template <typename Real, typename Operand>
inline void score_gradients(const BackwardTile<Real, Operand>& tile, Real scale, const KeySpan& keys,
                            const Real* hiding, BackwardScratch<Real, Operand>& scratch) {
  const VisibleRows<Real>& visible = tile.visible;
  const bool all_visible = keys.full && visible.all_rows;
  for (int n = 0; n < keys.count(); ++n) {
    for (int m = 0; m < visible.columns; m += kLanes<Real>) {
      const int at = n * BLOCK_M + m;
      Vec<Real> ds = load(scratch.scores + at) * (load(scratch.dprobs + at) - load(tile.delta + m)) * scale;
      if (!all_visible) ds = visible.lanes_that_see(m, keys.begin + n) ? ds : Vec<Real>{};
      if (hiding) ds = load(hiding + at) != kHidden<Real> ? ds : Vec<Real>{};
      store<Real>(scratch.dprobs + at, ds);
    }
  }
}

// The gradients of raw products from those of scores, in place: times `scale`, and times the derivative of the cap if
// there is one.
template <typename Real>
inline void raw_gradients(int keys, int columns, Real scale, const Real* slope, Real* dscores) {
  for (int n = 0; n < keys; ++n) {
    for (int m = n * BLOCK_M; m < n * BLOCK_M + columns; m += kLanes<Real>) {
      Vec<Real> draw = load(dscores + m) * scale;
      if (slope)  // that of a hidden pair may be NaN
        draw = draw == Real(0) ? draw : draw * load(slope + m);
      store<Real>(dscores + m, draw);
    }
  }
}

// P and dS times `scale` of a pair of tiles in one pass, packed for the three products that they are factors of;
// `keep`: also as numbers, in place of scores and dP. In scratch.weights, dS comes after `first` keys of weight 0.
// kWhole: `first` is 0, the number of keys is even, no pair is hidden, and the columns are whole vectors of pairs.
template <bool kWhole>
inline void pack_weights(const BackwardTile<float, Pair>& tile, float factor, float scale, const KeySpan& keys,
                         int64_t first, const float* hiding, bool keep, const BackwardScratch<float, Pair>& scratch) {
  constexpr int L = kLanes<float>;
  const VisibleRows<float>& visible = tile.visible;
  const bool all_visible = keys.full && visible.all_rows && !hiding;
  const int64_t count = keys.count(), columns = visible.columns;
  for (int64_t m = 0; m < columns; m += 2 * L) {
    for (int64_t r = kWhole ? 0 : -first; r < count; r += 2) {
      Vec<Pair> dscores[2] = {};
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const int64_t n = r + i;
        if (!kWhole && (n < 0 || n == count)) continue;
        Vec<float> p[2] = {}, ds[2] = {};
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int64_t lane = m + v * L, at = n * BLOCK_M + lane;
          if (!kWhole && lane == columns) continue;
          p[v] = exp_of_score<Pair>(rounded_product<float>(load(scratch.scores + at) * factor) - load(tile.lse + lane));
          ds[v] = p[v] * (load(scratch.dprobs + at) - load(tile.delta + lane)) * scale;
          if (!kWhole && !all_visible) {
            IntVec<float> sees = visible.lanes_that_see(static_cast<int>(lane), keys.begin + n);
            if (hiding) sees &= load(hiding + at) != kHidden<float>;
            p[v] = sees ? p[v] : Vec<float>{};
            ds[v] = sees ? ds[v] : Vec<float>{};
          }
          if (keep) {
            store<float>(scratch.scores + at, p[v]);
            store<float>(scratch.dprobs + at, ds[v]);
          }
        }
        dscores[i] = narrow_neighbours(ds[0], ds[1]);
        store(scratch.probs_packed + (n * BLOCK_M + m) / 2, narrow_neighbours(p[0], p[1]));
        store(scratch.dscores_packed + (n * BLOCK_M + m) / 2, dscores[i]);
      }
      Pair* both = scratch.weights + (kWhole ? r : r + first) / 2 * BLOCK_M + m;
      store(both, couple<0>(dscores[0], dscores[1]));
      store(both + L, couple<1>(dscores[0], dscores[1]));
    }
  }
}

inline void pack_weights(const BackwardTile<float, Pair>& tile, float factor, float scale, const KeySpan& keys,
                         int64_t first, const float* hiding, bool keep, const BackwardScratch<float, Pair>& scratch) {
  const VisibleRows<float>& visible = tile.visible;
  const bool whole = first == 0 && !hiding && keys.full && visible.all_rows && keys.count() % 2 == 0 &&
                     visible.columns % (2 * kLanes<float>) == 0;
  whole ? pack_weights<true>(tile, factor, scale, keys, 0, nullptr, keep, scratch)
        : pack_weights<false>(tile, factor, scale, keys, first, hiding, keep, scratch);
  clear_weights(scratch.probs_packed, keys.count());
  clear_weights(scratch.dscores_packed, keys.count());
}

// sums[n] += the sum over m of tile[n][m].
template <typename Real>
inline void add_row_sums(const Real* tile, int keys, int columns, Real* sums) {
  constexpr int L = kLanes<Real>;
  for (int first = 0; first < keys; first += L) {
    const int count = std::min(L, keys - first);
    Vec<Real> rows[L] = {};
    for (int n = 0; n < count; ++n) {
      Vec<Real> sum{};
      for (int m = 0; m < columns; m += L) sum += load(tile + (first + n) * BLOCK_M + m);
      rows[n] = sum;
    }
    const Vec<Real> total = sums_of<Real>(rows);
    for (int n = 0; n < count; ++n) sums[first + n] += total[n];
  }
}

// Runs the backward loop of `count` tiles over the keys [range.begin, range.end): adds to the gradients of the keys,
// and to `dquery` of the tiles for `dquery_features` (empty: no dquery).
template <typename Real, typename Operand>
inline void attend_backward(BackwardTile<Real, Operand>* tiles, int64_t count, const DropoutParams& dropout, Real scale,
                            const KeySpan& range, Ranges dquery_features, const KeyGradients<Real>& gradients,
                            BackwardScratch<Real, Operand>& scratch) {
  const TileUnit<Operand> unit;
  const bool with_raw = gradients.dkey || gradients.dcontent_bias || !dquery_features.empty();
  const bool with_dscores = with_raw || gradients.bias;
  for_visible_pairs(tiles, count, range, BLOCK_N, [&](auto& tile, const KeySpan& window, KeySpan keys) {
    const Head<Real>& head = tile.head;
    const int columns = tile.visible.columns;
    const int64_t offset = keys.begin - gradients.begin;
    const bool sloped = with_raw && head.terms.cap != Real(0);
    const auto [any, hiding, factor] = score_tile(tile, window, keys, scratch, sloped);
    if (!any) return;
    if (hiding) keys.full = false;
    Left<Operand, false> probs = rows_of(scratch.probs_packed, BLOCK_M / 2);
    Left<Operand, false> dscores = rows_of(scratch.dscores_packed, BLOCK_M / 2);
    const auto multiply_values = [&] {
      multiply_visible(tile.visible, keys, scratch.value.padded(keys),
                       in_tiles<Operand>(ceil_div(head.Dv, kNumbers<Operand>)),
                       scratch.value.rows(head.value, window, keys), tile.dout, scratch.dprobs, false);
    };
    const bool at_once = kNumbers<Operand> == 2 && with_raw && !dropout.active && !sloped && !gradients.bias;
    if constexpr (kNumbers<Operand> == 2) {
      if (at_once) {
        multiply_values();
        bool keep = tile.bad_queries.count || tile.bad_douts.count || gradients.dcontent_bias;
        int64_t first = 0;
        if (!dquery_features.empty()) {
          const auto summands = scratch.key.summands(head.key, window, keys, *dquery_features.begin());
          first = summands.first;
          keep = keep || !summands.aside->empty();
        }
        pack_weights(tile, factor, scale, keys, first, hiding, keep, scratch);
      }
    }
    if (!at_once) {
      probabilities(tile, keys, hiding, factor, scratch);
      if (with_dscores) multiply_values();
      if (dropout.active) {
        const auto key_of = [&](int64_t n) { return keys.begin + n; };
        std::memcpy(scratch.dropped, scratch.scores, sizeof(Real) * BLOCK_M * keys.count());
        drop(dropout, head, tile.visible.first, columns, keys.count(), key_of, static_cast<Real>(dropout.keep_scale),
             scratch.dropped, scratch.dprobs);
      }
      if (with_dscores) score_gradients(tile, gradients.bias ? Real(1) : scale, keys, hiding, scratch);
      if (gradients.bias) gradients.bias.add(scratch.dprobs, tile.visible, keys, scratch.bias_rows);
      if (sloped || (gradients.bias && with_raw))
        raw_gradients(keys.count(), columns, gradients.bias ? scale : Real(1), sloped ? scratch.slope : nullptr,
                      scratch.dprobs);
      probs =
          left_operand(dropout.active ? scratch.dropped : scratch.scores, keys.count(), columns, scratch.probs_packed);
      dscores = left_operand(scratch.dprobs, keys.count(), columns, scratch.dscores_packed);
    }
    if (gradients.dvalue)
      add_weighted_queries(dropout.active ? scratch.dropped : scratch.scores, probs, tile.dout_rows, tile.bad_douts,
                           head.Dv, Range{0, head.Dv}, keys, head, tile.visible,
                           gradients.dvalue + offset * row_stride<Real>(head.Dv));
    if (gradients.dkey)
      for (const Range& features : head.features)
        add_weighted_queries(scratch.dprobs, dscores, tile.query_rows, tile.bad_queries, head.D, features, keys, head,
                             tile.visible, gradients.dkey + offset * row_stride<Real>(head.D));
    if (gradients.dcontent_bias) add_row_sums(scratch.dprobs, keys.count(), columns, gradients.dcontent_bias + offset);
    for (const Range& features : dquery_features)
      add_weighted_keys(scratch.key, head.key, window, keys, features, head, tile.visible, scratch.dprobs, at_once,
                        scratch, tile.dquery, true);
  });
}

}  // namespace hk::HK_LEVEL
