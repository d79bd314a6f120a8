// The forward loop of a tile of query rows with entmax in the place of softmax. Its threshold is known only after all
// scores, which are kept.
#pragma once

#include "cpu/attend.h"

namespace hk::HK_LEVEL {

// Keys of one vector of query rows whose scores exceed a lower bound on the threshold of a row.
template <typename Real>
struct NearKeys {
  int32_t* places = nullptr;  // BLOCK_N times the kept tile, plus the key in the tile; ascending
  Real* p = nullptr;          // [count][BLOCK_M], of which the lanes of the vector
  int64_t count = 0, read = 0;
};

// The near keys of the rows of a vector, which starts at column m, and their probabilities; stores the thresholds.
// Scores become relative to `reference`. There are `count` kept tiles and `maxima` vectors of largest scores.
//
// The threshold of a subset of the scores is a lower bound on that of all of them. So the largest of every
// kKeysPerMaximum scores give a bound, and of the rest only the scores above it are read: few, if probabilities are
// sparse. They move to the front of their column of kept_scores.
template <typename Real, typename Operand>
inline NearKeys<Real> find_near_keys(Vec<Real> reference, int m, int64_t count, int64_t maxima,
                                     TileScratch<Real, Operand>& scratch, QueryTile<Real, Operand>& tile) {
  constexpr int L = kLanes<Real>;
  const Real order = tile.head.order;
  const KeySpan* const kept = scratch.kept;
  Real* const largest = scratch.kept_maxima + m;
  for (int64_t i = 0; i < maxima; ++i) store<Real>(largest + i * BLOCK_M, load(largest + i * BLOCK_M) - reference);
  const Vec<Real> bound = find_threshold<Real>(order, Vec<Real>{}, largest, maxima);

  Real* const scores = scratch.kept_scores + m;
  int32_t* const places = scratch.near + m / L * count * BLOCK_N;
  IntVec<Real> real{};  // rows that see a key: others have scores too where a tile is full
  for (int lane = 0; lane < L; ++lane) real[lane] = -static_cast<Int<Real>>(tile.visible.sees(m + lane));
  int64_t n = 0;
  for (int64_t at = 0; at < count; ++at) {
    for (int64_t place = at * BLOCK_N; place < at * BLOCK_N + kept[at].count(); ++place) {
      const Vec<Real> score = load(scores + place * BLOCK_M) - reference;
      store<Real>(scores + n * BLOCK_M, score);
      places[n] = static_cast<int32_t>(place);
      n += any_lane<Real>(real & !(above_threshold(order, score, bound) <= Real(-1)));
    }
  }
  const Vec<Real> threshold = find_threshold<Real>(order, bound, scores, n);
  store<Real>(tile.threshold + m, threshold);
  with_power(order, [&](auto power) {
    for (int64_t i = 0; i < n; ++i) {
      Real* const score = scores + i * BLOCK_M;
      store<Real>(score, power(above_threshold(order, load(score), threshold)).p);
    }
  });
  return {places, scores, n};
}

// Adds the values of near keys of a tile, times their probabilities, to the output rows of a vector, which starts at
// column m.
template <typename Real, typename Operand>
inline void add_near_keys(NearKeys<Real>& near, int64_t place, const KeySpan& keys, int m, const DropoutParams& dropout,
                          TileScratch<Real, Operand>& scratch, QueryTile<Real, Operand>& tile) {
  constexpr int L = kLanes<Real>;
  const Head<Real>& head = tile.head;
  const int64_t width = head.Dv, stride = row_stride<Real>(width), first = near.read;
  const auto key_of = [&](int64_t i) { return keys.begin + near.places[i] - place; };
  const auto row_of = [&](int64_t i) { return scratch.rows + (i - first) * stride; };
  for (; near.read < near.count && near.places[near.read] < place + keys.count(); ++near.read)
    read_row(head.value, key_of(near.read), width, row_of(near.read));
  const int64_t count = near.read - first;
  if (count == 0) return;
  Real* const p = near.p + first * BLOCK_M;
  if (dropout.active)
    drop(dropout, head, tile.visible.first + m, L, count, [&](int64_t i) { return key_of(first + i); }, Real(1), p);
  // A value that is not finite reaches only the rows that give it a probability.
  const bool aside = has_nonfinite(scratch.rows, count, width, stride);
  for (int64_t i = first; aside && i < near.read; ++i)
    if (has_nonfinite(row_of(i), 1, width, 0)) std::memset(row_of(i), 0, width * sizeof(Real));
  Real* const out = tile.out + m;
  multiply(width, L, count, columns_of(scratch.rows, stride), p, BLOCK_M, out, BLOCK_M, first > 0);
  for (int64_t i = first; aside && i < near.read; ++i) {
    read_row(head.value, key_of(i), width, scratch.row);
    if (!has_nonfinite(scratch.row, 1, width, 0)) continue;
    const Real* const weights = near.p + i * BLOCK_M;
    for (int lane = 0; lane < L; ++lane)
      if (head.adds(tile.visible, m + lane, key_of(i), weights + lane))
        for (int64_t w = 0; w < width; ++w) out[w * BLOCK_M + lane] += scratch.row[w] * weights[lane];
  }
}

// Runs the forward loop of a query tile, whose `query` is packed, over its keys. Afterwards `softmax` holds the largest
// score of each row as reference, and 1 as sum, 0 for rows that see no key; `threshold` is relative to that score.
template <typename Real, typename Operand>
inline void attend_entmax(QueryTile<Real, Operand>& tile, const DropoutParams& dropout,
                          TileScratch<Real, Operand>& scratch) {
  constexpr int L = kLanes<Real>;
  const TileUnit<Operand> unit;
  const VisibleRows<Real>& visible = tile.visible;
  const int columns = visible.columns;
  KeySpan* const kept = scratch.kept;
  Real* const tile_scores = scratch.scores;
  int64_t count = 0, maxima = 0;
  alignas(64) Real top[BLOCK_M];
  std::fill_n(top, BLOCK_M, kHidden<Real>);
  for_visible_pairs(&tile, 1, KeySpan{0, std::numeric_limits<int64_t>::max()}, BLOCK_N,
                    [&](auto&, const KeySpan& window, KeySpan keys) {
                      Real* const scores = scratch.scores = scratch.kept_scores + count * BLOCK_N * BLOCK_M;
                      const Scored<Real> scored = score_tile(tile, window, keys, scratch);
                      if (!scored.any) return;
                      if (scored.hiding || !keys.full) hide(scores, keys, visible, columns);
                      for (int first = 0; first < keys.count(); first += kKeysPerMaximum) {
                        Real* const at = scratch.kept_maxima + maxima++ * BLOCK_M;
                        const int end = std::min<int>(first + kKeysPerMaximum, keys.count());
                        for (int m = 0; m < columns; m += L) {
                          Vec<Real> most = splat<Real>(kHidden<Real>);
                          for (int n = first; n < end; ++n) most = at_least<Real>(most, load(scores + n * BLOCK_M + m));
                          store<Real>(at + m, most);
                          store<Real>(top + m, at_least<Real>(load(top + m), most));
                        }
                      }
                      kept[count++] = keys;
                    });
  scratch.scores = tile_scores;

  NearKeys<Real> near[BLOCK_M / L];
  for (int m = 0; m < columns; m += L) {
    const Vec<Real> most = load(top + m);
    const Vec<Real> reference = most == kHidden<Real> ? Vec<Real>{} : most;
    store<Real>(tile.softmax.reference + m, most);
    store<Real>(tile.softmax.sum + m, most == kHidden<Real> ? Vec<Real>{} : splat<Real>(1));
    near[m / L] = find_near_keys(reference, m, count, maxima, scratch, tile);
  }

  for (int64_t at = 0; at < count; ++at)
    for (int m = 0; m < columns; m += L) add_near_keys(near[m / L], at * BLOCK_N, kept[at], m, dropout, scratch, tile);
  tile.started = true;
}

// The same for `count` query tiles, with softmax where the order of their heads is 0.
template <typename Real, typename Operand>
inline void attend_all(QueryTile<Real, Operand>* tiles, int64_t count, const DropoutParams& dropout,
                       TileScratch<Real, Operand>& scratch) {
  if (count == 0 || tiles->head.order == Real(0)) return attend(tiles, count, dropout, scratch);
  for (int64_t i = 0; i < count; ++i) attend_entmax(tiles[i], dropout, scratch);
}

}  // namespace hk::HK_LEVEL
