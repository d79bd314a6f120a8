// The backward pass of a tile of query rows with entmax in the place of softmax: sums over the keys
// of each row, then the loop over pairs of tiles.
//
//   dS = slope (dP - center),   center = sum(slope dP) / sum(slope)
//
// With softmax, slope is P, and center is rowsum(dout * out), which is already known.
//
// Both compute all scores of a pair of tiles, and from there on only the keys near enough to have a
// probability in some row: with alpha 1.5 and 2,048 keys a twentieth to half of them. These keys,
// their values and the sums of their gradients are gathered side by side.
#pragma once

#include <memory>

#include "cpu/attend_backward.h"
#include "cpu/parallel.h"
#include "cpu/work_items.h"

namespace hk::HK_LEVEL {

// Keys of a tile that have a probability in some row of a query tile.
struct NearTile {
  int count = 0;
  int places[BLOCK_N];  // in the tile; ascending
  KeySpan span() const { return {0, count, true}; }
};

// Finds them. Their scores, relative to the largest of the row, are the first rows of
// scratch.scores, and with `with_slope` the derivatives of their cap those of scratch.slope.
template <typename Real, typename Operand>
inline NearTile find_near_tile(const BackwardTile<Real, Operand>& tile, const KeySpan& window,
                               const KeySpan& keys, BackwardScratch<Real, Operand>& scratch,
                               bool with_slope = false) {
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const int columns = visible.columns;
  Real* const scores = scratch.scores;
  NearTile near;
  const Scored<Real> scored =
      score_tile(head, tile.query, visible, keys, scratch.key.rows(head.key, window, keys), scratch,
                 with_slope);
  if (!scored.any) return near;
  if (!keys.full || !visible.all_rows) hide(scores, keys, visible, columns);
  for (int n = 0; n < keys.count(); ++n) {
    IntVec<Real> above{};
    for (int m = 0; m < columns; m += kLanes<Real>) {
      const Vec<Real> score = load(scores + n * BLOCK_M + m) - load(tile.lse + m);
      store<Real>(scores + near.count * BLOCK_M + m, score);
      above |= !(above_threshold(head.order, score, load(tile.threshold + m)) <= Real(-1));
    }
    near.places[near.count] = n;
    if (!any_lane<Real>(above)) continue;
    if (with_slope)
      std::memmove(scratch.slope + near.count * BLOCK_M, scratch.slope + n * BLOCK_M,
                   columns * sizeof(Real));
    ++near.count;
  }
  return near;
}

// The rows of near keys of a tile, side by side in `buffer`, as the window near.span().
inline Rows gather_near(const Rows& source, const KeySpan& keys, const NearTile& near,
                        int64_t width, void* buffer) {
  const Rows rows{static_cast<char*>(buffer), width, 1, source.dtype};
  for (int i = 0; i < near.count; ++i)
    std::memcpy(rows.at(i), source.at(keys.begin + near.places[i]),
                width * element_size(source.dtype));
  return rows;
}

// scratch.dprobs = dP of near keys, before dropout.
template <typename Real, typename Operand>
inline void multiply_near_values(const BackwardTile<Real, Operand>& tile, const KeySpan& keys,
                                 const NearTile& near, BackwardScratch<Real, Operand>& scratch) {
  const Head<Real>& head = tile.head;
  const Rows values = gather_near(head.value, keys, near, head.Dv, scratch.rows);
  scratch.value.forget();
  multiply(near.count, tile.visible.columns, ceil_div(head.Dv, kNumbers<Operand>),
           scratch.value.rows(values, near.span(), near.span()), tile.dout, BLOCK_M, scratch.dprobs,
           BLOCK_M, false);
}

// Dropout of scratch.dprobs, in place, and of the scores, into scratch.dropped.
template <typename Real, typename Operand>
inline void drop_near(const BackwardTile<Real, Operand>& tile, const DropoutParams& dropout,
                      const KeySpan& keys, const NearTile& near,
                      BackwardScratch<Real, Operand>& scratch) {
  const int columns = tile.visible.columns;
  std::fill_n(scratch.dropped, keys.count() * BLOCK_M, Real(1));
  drop(dropout, tile.head.b, tile.head.h, keys, tile.visible.first, columns,
       static_cast<Real>(dropout.keep_scale), scratch.dropped);
  for (int i = 0; i < near.count; ++i) {
    for (int m = 0; m < columns; m += kLanes<Real>) {
      const int at = i * BLOCK_M + m;
      const Vec<Real> factor = load(scratch.dropped + near.places[i] * BLOCK_M + m), none{};
      const Vec<Real> dp = load(scratch.dprobs + at), p = load(scratch.scores + at);
      store<Real>(scratch.dprobs + at, factor == Real(0) ? none : dp * factor);
      store<Real>(scratch.dropped + at, factor == Real(0) ? none : p * factor);
    }
  }
}

// Sums over the keys of each row. `difference` is dP - delta, with delta = rowsum(dout * out).
//
// The derivative of p by alpha is (Correia, Niculae, Martins 2019, proposition 1)
//
//   (p - share) / order^2 - (p ln p + share entropy) / order,   share = slope / sum(slope)
//
// a difference of large terms if alpha is near 1. With x = -ln(u) = -order ln p, first = (e^x -
// 1) / order and second = (e^x - 1 - x) / order^2 their first-order parts cancel:
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
    const Vec<Real> p_second = x < Real(0.5)
                                   ? p * (x * inverse) * (x * inverse) * series * Real(0.5)
                                   : (p_first - p * x * inverse) * inverse;
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
    const Real sum = second[m] * p_difference[m] - second_difference[m] -
                     first[m] * log_difference[m] + log[m] * first_difference[m];
    return sum / (Real(1) + order * first[m]);
  }

 private:
  static void add_to(Real* sum, Vec<Real> x) { store<Real>(sum, load(sum) + x); }
};

// Adds the pairs of a tile that is prepared for the backward pass (prepare_tile).
template <typename Real, typename Operand>
inline void add_pairs(BackwardTile<Real, Operand>& tile, const DropoutParams& dropout,
                      bool with_alpha, BackwardScratch<Real, Operand>& scratch,
                      EntmaxSums<Real>& sums) {
  const TileUnit<Operand> unit;
  const Real order = tile.head.order;
  const int columns = tile.visible.columns;
  const KeySpan all{0, std::numeric_limits<int64_t>::max()};
  for_visible_pairs(&tile, 1, all, [&](auto&, const KeySpan& window, KeySpan keys) {
    const NearTile near = find_near_tile(tile, window, keys, scratch);
    if (near.count == 0) return;
    multiply_near_values(tile, keys, near, scratch);
    if (dropout.active) drop_near(tile, dropout, keys, near, scratch);
    with_power(order, [&](auto power) {
      for (int n = 0; n < near.count; ++n) {
        for (int m = 0; m < columns; m += kLanes<Real>) {
          const int at = n * BLOCK_M + m;
          const Vec<Real> y =
              above_threshold(order, load(scratch.scores + at), load(tile.threshold + m));
          const Powers<Real> result = power(y);
          const Vec<Real> difference = result.slope == Real(0)
                                           ? Vec<Real>{}
                                           : load(scratch.dprobs + at) - load(tile.delta + m);
          sums.add(m, result, difference);
          if (with_alpha) sums.add_alpha(m, order, y, result, difference);
        }
      }
    });
  });
}

// Calls body(params) with `delta` set to the centers of all rows; stores dalpha.
template <typename Real, typename Operand, typename Operator, typename Body>
inline void with_centers(const Operator& op, const BackwardParams& p, Body body) {
  const std::unique_ptr<Real[]> centers(new Real[op.B * op.H * op.T]());
  const int64_t tile_bytes = BackwardTile<Real, Operand>::bytes(op);
  const WorkItems items(op, tiles_in_cache(BackwardTile<Real, Operand>::cached_bytes(op)),
                        kItemsPerThread * p.threads);
  const int64_t bytes = BackwardScratch<Real, Operand>::bytes(op, op.Dv) + tile_bytes;
  if (p.dalpha) std::fill_n(static_cast<Real*>(p.dalpha.data), op.B * op.H * op.T, Real(0));
  parallel_for(items.count(), p.threads, 2 * op.multiply_adds(), bytes,
               [&](int64_t item, Workspace& workspace) {
                 BackwardScratch<Real, Operand> scratch(workspace, op, op.Dv, items.size);
                 for (const TilePlace& at : items.tiles(item)) {
                   const size_t mark = workspace.mark();
                   BackwardTile<Real, Operand> tile(
                       workspace, op, at.b, at.h,
                       VisibleRows<Real>(p.mask, at.b, at.h, at.first_row, op.T, op.S));
                   const HeadGradients read = head_gradients<Real>(op, p, at.b, at.h, false);
                   if (prepare_tile(op, p.closed_grad, read, tile, scratch)) {
                     EntmaxSums<Real> sums;
                     add_pairs(tile, p.dropout, static_cast<bool>(p.dalpha), scratch, sums);
                     const int64_t row = (at.b * op.H + at.h) * op.T + at.first_row;
                     for (int m = 0; m < tile.visible.count; ++m) {
                       if (sums.slope[m] == Real(0)) continue;  // it sees nothing
                       centers[row + m] = tile.delta[m] + sums.slope_difference[m] / sums.slope[m];
                       if (p.dalpha)
                         static_cast<Real*>(p.dalpha.data)[row + m] =
                             sums.of_alpha(m, tile.head.order);
                     }
                   }
                   workspace.rewind(mark);
                 }
               });
  BackwardParams with(p);
  with.delta = centers.get();
  body(with);
}

// dS of near keys times `scale` from dP, in place. A value that is not finite reaches only the rows
// that give it a probability.
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

// `attend_backward` of tiles whose heads have an order.
template <typename Real, typename Operand>
inline void attend_entmax_backward(BackwardTile<Real, Operand>* tiles, int64_t count,
                                   const DropoutParams& dropout, Real scale, const KeySpan& range,
                                   Ranges dquery_features, const KeyGradients<Real>& gradients,
                                   BackwardScratch<Real, Operand>& scratch) {
  const TileUnit<Operand> unit;
  const bool with_raw = gradients.dkey || !dquery_features.empty();
  for_visible_pairs(
      tiles, count, range,
      [&](BackwardTile<Real, Operand>& tile, const KeySpan& window, const KeySpan& keys) {
        const Head<Real>& head = tile.head;
        const VisibleRows<Real>& visible = tile.visible;
        const int columns = visible.columns;
        const bool sloped = with_raw && head.terms.cap != Real(0);
        const NearTile near = find_near_tile(tile, window, keys, scratch, sloped);
        if (near.count == 0) return;
        entmax(head.order, tile.threshold, near.count, columns, scratch.scores, scratch.slopes);
        if (with_raw || gradients.bias) multiply_near_values(tile, keys, near, scratch);
        if (dropout.active) drop_near(tile, dropout, keys, near, scratch);
        if (with_raw || gradients.bias)
          near_score_gradients(tile, gradients.bias ? Real(1) : scale, near.count, scratch);
        if (gradients.bias) {  // of all keys of the tile, in the place of the slopes
          std::memset(scratch.slopes, 0, sizeof(Real) * BLOCK_M * keys.count());
          for (int i = 0; i < near.count; ++i)
            std::memcpy(scratch.slopes + near.places[i] * BLOCK_M, scratch.dprobs + i * BLOCK_M,
                        sizeof(Real) * columns);
          gradients.bias.add(scratch.slopes, visible, keys, scratch.bias_rows);
        }
        if (sloped || (gradients.bias && with_raw))
          raw_gradients(near.count, columns, gradients.bias ? scale : Real(1), sloped, scratch);
        // Adds to the sums of near keys, which move to scratch.rows and back.
        const auto add_to_keys = [&](Real* sums, int64_t width, const Real* weights,
                                     Operand* buffer, const Operand* rows,
                                     const SetAside<Real>& aside) {
          const int64_t stride = row_stride<Real>(width);
          const auto sum_of = [&](int i) {
            return sums + (keys.begin - gradients.begin + near.places[i]) * stride;
          };
          for (int i = 0; i < near.count; ++i)
            std::memcpy(scratch.rows + i * stride, sum_of(i), sizeof(Real) * stride);
          add_weighted_queries(weights, left_operand(weights, near.count, columns, buffer), rows,
                               aside, width, Range{0, width}, near.span(), head, visible,
                               scratch.rows);
          for (int i = 0; i < near.count; ++i)
            std::memcpy(sum_of(i), scratch.rows + i * stride, sizeof(Real) * stride);
        };
        if (gradients.dvalue)
          add_to_keys(gradients.dvalue, head.Dv, dropout.active ? scratch.dropped : scratch.scores,
                      scratch.probs_packed, tile.dout_rows, tile.bad_douts);
        if (gradients.dkey)
          add_to_keys(gradients.dkey, head.D, scratch.dprobs, scratch.dscores_packed,
                      tile.query_rows, tile.bad_queries);
        if (dquery_features.empty()) return;
        const Rows near_keys = gather_near(head.key, keys, near, head.D, scratch.more_rows);
        scratch.near.forget();
        add_weighted_keys(scratch.near, near_keys, near.span(), near.span(), Range{0, head.D}, head,
                          visible, scratch.dprobs, false, scratch, tile.dquery, true);
      });
}

// The same for tiles of either kind.
template <typename Real, typename Operand>
inline void attend_all_backward(BackwardTile<Real, Operand>* tiles, int64_t count,
                                const DropoutParams& dropout, Real scale, const KeySpan& range,
                                Ranges dquery_features, const KeyGradients<Real>& gradients,
                                BackwardScratch<Real, Operand>& scratch) {
  if (count == 0 || tiles->head.order == Real(0))
    return attend_backward(tiles, count, dropout, scale, range, dquery_features, gradients,
                           scratch);
  attend_entmax_backward(tiles, count, dropout, scale, range, dquery_features, gradients, scratch);
}

}  // namespace hk::HK_LEVEL
