// The backward pass of a tile of query rows with entmax in the place of softmax.
//
//   dS = slope (dP - center),   center = sum(slope dP) / sum(slope)
//
// With softmax, slope is P, and center is rowsum(dout * out), which is already known. Here a tile goes through its keys
// twice, for the centers and then for the gradients.
//
// All scores are computed once. Of each tile of keys, those near enough to have a probability in some row are kept:
// with alpha 1.5 and 2,048 keys a twentieth to half of them. The rows of these keys, of their values and of their
// gradients are gathered side by side, so that products read nothing else.
#pragma once

#include "cpu/attend_backward.h"

namespace hk::HK_LEVEL {

// Finds the near keys of near.keys, of which there are none yet.
template <typename Real, typename Operand>
inline void find_near_tile(const BackwardTile<Real, Operand>& tile, const KeySpan& window,
                           BackwardScratch<Real, Operand>& scratch, NearTile<Real>& near) {
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const KeySpan& keys = near.keys;
  const int columns = visible.columns;
  const bool capped = head.terms.cap != Real(0);
  const Scored<Real> scored = score_tile(tile, window, keys, scratch, capped);
  if (!scored.any) return;
  if (!keys.full || !visible.all_rows) hide(scratch.scores, keys, visible, columns);
  for (int n = 0; n < keys.count(); ++n) {
    IntVec<Real> above{};
    for (int m = 0; m < columns; m += kLanes<Real>) {
      const Vec<Real> score = load(scratch.scores + n * BLOCK_M + m) - load(tile.lse + m);
      store<Real>(near.scores + near.count * BLOCK_M + m, score);
      above |= !(above_threshold(head.order, score, load(tile.threshold + m)) <= Real(-1));
    }
    if (!any_lane<Real>(above)) continue;
    if (capped) std::memcpy(near.slopes + near.count * BLOCK_M, scratch.slope + n * BLOCK_M, sizeof(Real) * columns);
    near.places[near.count++] = static_cast<uint8_t>(n);
  }
}

// Rows of near keys side by side in `buffer`, as the window near.span().
template <typename Real>
inline Rows gather_near(const Rows& source, const NearTile<Real>& near, int64_t width, void* buffer) {
  const Rows rows{static_cast<char*>(buffer), width, 1, source.dtype};
  for (int i = 0; i < near.count; ++i)
    std::memcpy(rows.at(i), source.at(near.key(i)), width * element_size(source.dtype));
  return rows;
}

// scratch.dprobs = dP of near keys, before dropout.
template <typename Real, typename Operand>
inline void multiply_near_values(const BackwardTile<Real, Operand>& tile, const NearTile<Real>& near,
                                 BackwardScratch<Real, Operand>& scratch) {
  const Head<Real>& head = tile.head;
  const Rows values = gather_near(head.value, near, head.Dv, scratch.rows);
  scratch.value.forget();
  multiply(near.count, tile.visible.columns, ceil_div(head.Dv, kNumbers<Operand>),
           scratch.value.rows(values, near.span(), near.span()), tile.dout, BLOCK_M, scratch.dprobs, BLOCK_M, false);
}

// Dropout of near.scores, into scratch.dropped, and of scratch.dprobs, in place. While near.scores are not
// probabilities yet, scratch.dropped is not read.
template <typename Real, typename Operand>
inline void drop_near(const BackwardTile<Real, Operand>& tile, const DropoutParams& dropout, const NearTile<Real>& near,
                      BackwardScratch<Real, Operand>& scratch) {
  const auto key_of = [&](int64_t i) { return near.key(i); };
  std::memcpy(scratch.dropped, near.scores, sizeof(Real) * BLOCK_M * near.count);
  drop(dropout, tile.head, tile.visible.first, tile.visible.columns, near.count, key_of,
       static_cast<Real>(dropout.keep_scale), scratch.dropped, scratch.dprobs);
}

// Sums over the keys of each row. `difference` is dP - delta, with delta = rowsum(dout * out).
//
// The derivative of p by alpha is (Correia, Niculae, Martins 2019, proposition 1)
//
//   (p - share) / order^2 - (p ln p + share entropy) / order,   share = slope / sum(slope)
//
// a difference of large terms if alpha is near 1. With x = -ln(u) = -order ln p, first = (e^x - 1) / order and second =
// (e^x - 1 - x) / order^2 their first-order parts cancel:
//
//   p (sum(p second) - second - ln p sum(p first) - first entropy) / (1 + order sum(p first))
template <typename Real>
struct EntmaxSums {
  alignas(64) Real slope[BLOCK_M] = {};
  alignas(64) Real slope_difference[BLOCK_M] = {};
  alignas(64) Real log[BLOCK_M] = {};  // of p ln p, p first, p second
  alignas(64) Real first[BLOCK_M] = {};
  alignas(64) Real second[BLOCK_M] = {};
  alignas(64) Real p_difference[BLOCK_M] = {};  // of the same times the difference
  alignas(64) Real log_difference[BLOCK_M] = {};
  alignas(64) Real first_difference[BLOCK_M] = {};
  alignas(64) Real second_difference[BLOCK_M] = {};

  // Adds a key for the lanes from m on.
  void add(int m, const Powers<Real>& power, Vec<Real> difference) {
    add_to(slope + m, power.slope);
    add_to(slope_difference + m, power.slope * difference);
  }

  // The same for the gradient of alpha; y = u - 1.
  void add_alpha(int m, Real order, Vec<Real> y, const Powers<Real>& power, Vec<Real> difference) {
    const Real inverse = Real(1) / order;
    const Vec<Real> x = -log1p<Real>(y), p = power.p;
    const Vec<Real> p_first = power.slope * -y * inverse;
    constexpr int kTerms = sizeof(Real) == 4 ? 7 : 14;
    Vec<Real> series = splat<Real>(1);  // (e^x - 1 - x) 2 / x^2
    for (int i = kTerms; i > 2; --i) series = Real(1) + x * series / static_cast<Real>(i);
    const Vec<Real> p_second =
        x < Real(0.5) ? p * (x * inverse) * (x * inverse) * series * Real(0.5) : (p_first - p * x * inverse) * inverse;
    const Vec<Real> p_log = p * -x * inverse;
    add_to(log + m, p_log);
    add_to(first + m, p_first);
    add_to(second + m, p_second);
    add_to(p_difference + m, p * difference);
    add_to(log_difference + m, p_log * difference);
    add_to(first_difference + m, p_first * difference);
    add_to(second_difference + m, p_second * difference);
  }

  Real of_alpha(int m, Real order) const {
    const Real sum = second[m] * p_difference[m] - second_difference[m] - first[m] * log_difference[m] +
                     log[m] * first_difference[m];
    return sum / (Real(1) + order * first[m]);
  }

 private:
  static void add_to(Real* sum, Vec<Real> x) { store<Real>(sum, load(sum) + x); }
};

// Adds the near keys of a pair of tiles; `with_alpha`: also for the gradient of alpha.
template <typename Real, typename Operand>
inline void add_near_tile(const BackwardTile<Real, Operand>& tile, const NearTile<Real>& near,
                          const DropoutParams& dropout, bool with_alpha, BackwardScratch<Real, Operand>& scratch,
                          EntmaxSums<Real>& sums) {
  const Real order = tile.head.order;
  multiply_near_values(tile, near, scratch);
  if (dropout.active) drop_near(tile, dropout, near, scratch);
  with_power(order, [&](auto power) {
    for (int i = 0; i < near.count; ++i) {
      for (int m = 0; m < tile.visible.columns; m += kLanes<Real>) {
        const int at = i * BLOCK_M + m;
        const Vec<Real> y = above_threshold(order, load(near.scores + at), load(tile.threshold + m));
        const Powers<Real> result = power(y);
        const Vec<Real> difference =
            result.slope == Real(0) ? Vec<Real>{} : load(scratch.dprobs + at) - load(tile.delta + m);
        sums.add(m, result, difference);
        if (with_alpha) sums.add_alpha(m, order, y, result, difference);
      }
    }
  });
}

// What a pass stores of the rows of a tile, [T], besides their gradients; null if not requested.
template <typename Real>
struct EntmaxRows {
  Real *center, *dalpha;
};

// dS of near keys times `scale` from dP, in place. A value that is not finite reaches only the rows that give it a
// probability.
template <typename Real, typename Operand>
inline void near_score_gradients(const BackwardTile<Real, Operand>& tile, Real scale, int count,
                                 BackwardScratch<Real, Operand>& scratch) {
  for (int i = 0; i < count; ++i) {
    for (int m = 0; m < tile.visible.columns; m += kLanes<Real>) {
      const int at = i * BLOCK_M + m;
      const Vec<Real> slope = load(scratch.slopes + at);
      const Vec<Real> ds = slope * (load(scratch.dprobs + at) - load(tile.delta + m)) * scale;
      store<Real>(scratch.dprobs + at, slope == Real(0) ? Vec<Real>{} : ds);
    }
  }
}

// `attend_backward` of one tile with entmax. `centered`: its delta are the centers already; else `range` is all keys.
template <typename Real, typename Operand>
inline void attend_entmax_backward(BackwardTile<Real, Operand>& tile, const DropoutParams& dropout, Real scale,
                                   const KeySpan& range, Ranges dquery_features, const KeyGradients<Real>& gradients,
                                   bool centered, const EntmaxRows<Real>& rows,
                                   BackwardScratch<Real, Operand>& scratch) {
  const TileUnit<Operand> unit;
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const int columns = visible.columns;
  const bool with_raw = gradients.dkey || !dquery_features.empty();
  const bool with_dscores = with_raw || gradients.bias;

  NearTile<Real>* const tiles = scratch.near_tiles;
  int64_t count = 0, kept = 0;
  for_visible_pairs(&tile, 1, range, BLOCK_N, [&](auto&, const KeySpan& window, const KeySpan& keys) {
    NearTile<Real>& near = *new (tiles + count) NearTile<Real>{
        keys, scratch.kept_scores + kept * BLOCK_M, scratch.kept_slopes + kept * BLOCK_M, 0, {}};
    find_near_tile(tile, window, scratch, near);
    kept += near.count;
    count += near.count > 0;
  });

  if (!centered && (with_dscores || rows.center || rows.dalpha)) {
    EntmaxSums<Real> sums;
    for (int64_t t = 0; t < count; ++t) add_near_tile(tile, tiles[t], dropout, rows.dalpha != nullptr, scratch, sums);
    for (int m = 0; m < visible.count; ++m) {
      if (sums.slope[m] == Real(0)) continue;  // it sees nothing
      tile.delta[m] += sums.slope_difference[m] / sums.slope[m];
      if (rows.center) rows.center[visible.first + m] = tile.delta[m];
      if (rows.dalpha) rows.dalpha[visible.first + m] = sums.of_alpha(m, head.order);
    }
  }
  if (!with_dscores && !gradients.dvalue) return;

  for (int64_t t = 0; t < count; ++t) {
    const NearTile<Real>& near = tiles[t];
    entmax(head.order, tile.threshold, near.count, columns, near.scores, scratch.slopes);
    if (with_dscores) multiply_near_values(tile, near, scratch);
    if (dropout.active) drop_near(tile, dropout, near, scratch);
    if (with_dscores) near_score_gradients(tile, gradients.bias ? Real(1) : scale, near.count, scratch);
    if (gradients.bias) {  // of all keys of the tile, in the place of the slopes
      std::memset(scratch.slopes, 0, sizeof(Real) * BLOCK_M * near.keys.count());
      for (int i = 0; i < near.count; ++i)
        std::memcpy(scratch.slopes + near.places[i] * BLOCK_M, scratch.dprobs + i * BLOCK_M, sizeof(Real) * columns);
      gradients.bias.add(scratch.slopes, visible, near.keys, scratch.bias_rows);
    }
    const bool capped = head.terms.cap != Real(0);
    if (with_raw && (capped || gradients.bias))
      raw_gradients(near.count, columns, gradients.bias ? scale : Real(1), capped ? near.slopes : nullptr,
                    scratch.dprobs);
    // Adds to the sums of near keys, which move to scratch.rows and back.
    const auto add_to_keys = [&](Real* sums, int64_t width, const Real* weights, Operand* buffer,
                                 const Operand* queries, const SetAside<Real>& aside) {
      const int64_t stride = row_stride<Real>(width);
      const auto sum_of = [&](int i) { return sums + (near.key(i) - gradients.begin) * stride; };
      for (int i = 0; i < near.count; ++i) std::memcpy(scratch.rows + i * stride, sum_of(i), sizeof(Real) * stride);
      add_weighted_queries(weights, left_operand(weights, near.count, columns, buffer), queries, aside, width,
                           Range{0, width}, near.span(), head, visible, scratch.rows);
      for (int i = 0; i < near.count; ++i) std::memcpy(sum_of(i), scratch.rows + i * stride, sizeof(Real) * stride);
    };
    if (gradients.dvalue)
      add_to_keys(gradients.dvalue, head.Dv, dropout.active ? scratch.dropped : near.scores, scratch.probs_packed,
                  tile.dout_rows, tile.bad_douts);
    if (gradients.dkey)
      add_to_keys(gradients.dkey, head.D, scratch.dprobs, scratch.dscores_packed, tile.query_rows, tile.bad_queries);
    if (dquery_features.empty()) continue;
    const Rows near_keys = gather_near(head.key, near, head.D, scratch.more_rows);
    scratch.near_keys.forget();
    add_weighted_keys(scratch.near_keys, near_keys, near.span(), near.span(), Range{0, head.D}, head, visible,
                      scratch.dprobs, false, scratch, tile.dquery, true);
  }
}

// `attend_backward` of tiles of either kind. `p` are the parameters of the pass, which stores `centers` and dalpha, [B,
// H, T], unless they are null.
template <typename Real, typename Operand>
inline void attend_all_backward(BackwardTile<Real, Operand>* tiles, int64_t count, const BackwardParams& p, Real scale,
                                const KeySpan& range, Ranges dquery_features, const KeyGradients<Real>& gradients,
                                Real* centers, Real* dalpha, BackwardScratch<Real, Operand>& scratch) {
  if (!p.alpha) return attend_backward(tiles, count, p.dropout, scale, range, dquery_features, gradients, scratch);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = (tiles[i].head.b * p.query.size[1] + tiles[i].head.h) * p.query.size[2];
    attend_entmax_backward(tiles[i], p.dropout, scale, range, dquery_features, gradients, p.delta != nullptr,
                           {centers ? centers + row : nullptr, dalpha ? dalpha + row : nullptr}, scratch);
  }
}

}  // namespace hk::HK_LEVEL
