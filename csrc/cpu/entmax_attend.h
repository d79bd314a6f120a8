// The forward loop of a tile of query rows with entmax in place of softmax. The threshold of a row
// depends on all of its scores, so they are stored.
#pragma once

#include "cpu/attend.h"

namespace hk::HK_LEVEL {

// Runs the forward loop of a query tile, whose `query` is packed, over its keys. Afterwards
// `softmax` holds the largest score of each row as reference, and 1 as sum, 0 for rows that see no
// key; `threshold` is relative to that score.
template <typename Real, typename Operand>
inline void attend_entmax(QueryTile<Real, Operand>& tile, const DropoutParams& dropout,
                          TileScratch<Real, Operand>& scratch) {
  const TileUnit<Operand> unit;
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const int columns = visible.columns;
  KeptTile* const kept = scratch.kept;
  Real* const tile_scores = scratch.scores;
  const auto scores_of = [&](int64_t i) { return scratch.kept_scores + i * BLOCK_N * BLOCK_M; };
  int64_t count = 0;
  alignas(64) Real top[BLOCK_M];
  std::fill_n(top, BLOCK_M, kHidden<Real>);
  for_visible_pairs(
      &tile, 1, KeySpan{0, std::numeric_limits<int64_t>::max()},
      [&](auto&, const KeySpan& window, KeySpan keys) {
        Real* const scores = scratch.scores = scores_of(count);
        const Scored<Real> scored = score_tile(head, tile.query, visible, keys,
                                               scratch.key.rows(head.key, window, keys), scratch);
        if (!scored.any) return;
        if (scored.hiding) keys.full = false;
        if (!keys.full) hide(scores, keys, visible, columns);
        for (int n = 0; n < keys.count(); ++n)
          for (int m = 0; m < columns; m += kLanes<Real>)
            store<Real>(top + m, at_least<Real>(load(top + m), load(scores + n * BLOCK_M + m)));
        kept[count++] = {window, keys, true};
      });
  scratch.scores = tile_scores;

  for (int m = 0; m < BLOCK_M; ++m) {
    tile.softmax.reference[m] = top[m];
    tile.softmax.sum[m] = top[m] == kHidden<Real> ? Real(0) : Real(1);
    top[m] = top[m] == kHidden<Real> ? Real(0) : top[m];
  }
  for (int64_t at = 0; at < count; ++at)
    subtract_top(top, kept[at].keys.count(), columns, scores_of(at));
  ThresholdSearch<Real> search(head.order);
  constexpr int kMostSteps = 32;  // about 4 are taken
  for (int i = 0; i < kMostSteps; ++i) {
    for (int64_t at = 0; at < count; ++at)
      if (kept[at].in_reach)
        kept[at].in_reach = search.add(scores_of(at), kept[at].keys.count(), columns);
    if (!search.step(columns)) break;
  }
  std::memcpy(tile.threshold, search.threshold, sizeof tile.threshold);
  for (int64_t at = 0; at < count; ++at) {
    KeySpan keys = kept[at].keys;
    Real* const p = scores_of(at);
    if (!kept[at].in_reach) continue;
    const Support support =
        entmax<Real>(head.order, search.threshold, keys.count(), columns, p, nullptr);
    if (!support.any) continue;
    keys.full = keys.full && support.all && !dropout.active;
    if (dropout.active) drop(dropout, head.b, head.h, keys, visible.first, columns, Real(1), p);
    add_weighted_keys(scratch.value, head.value, kept[at].window, keys, {0, head.Dv}, head, visible,
                      p, false, scratch, tile.out, tile.started);
    tile.started = true;
  }
}

// The same for `count` query tiles, with softmax if the order of their head is 0.
template <typename Real, typename Operand>
inline void attend_all(QueryTile<Real, Operand>* tiles, int64_t count, const DropoutParams& dropout,
                       TileScratch<Real, Operand>& scratch) {
  if (count == 0 || tiles->head.order == Real(0)) return attend(tiles, count, dropout, scratch);
  for (int64_t i = 0; i < count; ++i) attend_entmax(tiles[i], dropout, scratch);
}

}  // namespace hk::HK_LEVEL
