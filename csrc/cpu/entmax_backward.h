// Sums over the keys of each row, which the backward pass of entmax needs before its loop over
// pairs of tiles.
//
//   dS = slope (dP - center),   center = sum(slope dP) / sum(slope)
//
// With softmax, slope is P, and center is rowsum(dout * out), which is already known.
#pragma once

#include <memory>

#include "cpu/attend_backward.h"
#include "cpu/parallel.h"
#include "cpu/work_items.h"

namespace hk::HK_LEVEL {

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
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const Real order = head.order;
  const int columns = visible.columns;
  const KeySpan all{0, std::numeric_limits<int64_t>::max()};
  for_visible_pairs(&tile, 1, all, [&](auto&, const KeySpan& window, KeySpan keys) {
    const auto [any, hiding, factor] = score_tile(
        head, tile.query, visible, keys, scratch.key.rows(head.key, window, keys), scratch);
    if (!any) return;
    if (hiding || !keys.full) hide(scratch.scores, keys, visible, columns);
    subtract_top(tile.lse, keys.count(), columns, scratch.scores);
    if (!in_support(order, tile.threshold, keys.count(), columns, scratch.scores)) return;
    multiply(keys.count(), columns, ceil_div(head.Dv, kNumbers<Operand>),
             scratch.value.rows(head.value, window, keys), tile.dout, BLOCK_M, scratch.dprobs,
             BLOCK_M, false);
    if (dropout.active)
      drop(dropout, head.b, head.h, keys, visible.first, columns,
           static_cast<Real>(dropout.keep_scale), scratch.dprobs);
    with_power(order, [&](auto power) {
      for (int n = 0; n < keys.count(); ++n) {
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

}  // namespace hk::HK_LEVEL
