// From the scores of a tile to the gradient of its scores.
//
//   p = exp(scores - lse)        dp = dattended value^T        dscores = p * (dp - delta)
//
// The gate is still to be applied to dattended, and so to dp and to the weights p of dvalue;
// dropout multiplies both by what it keeps. Where scores are capped, dscores are those of the
// scores before the cap.
#pragma once

#include "cuda/row_terms.h"
#include "cuda/score_layout.h"
#include "cuda/scores.h"

namespace hk::cuda {

// The numbers of query rows that the elements of a tile have: by its rows from `first`, or by its
// columns.
template <ScoreLayout kLayout, int kRows>
struct TileTerms {
  const RowTerms<kRows>& terms;
  int first;

  HK_DEVICE int operator()(int m, int n, int e) const {
    return first + (kLayout == ScoreLayout::kRowsFirst ? row_of(m, e) : column_of(n, e));
  }
};

// Scores become probabilities; those of hidden pairs are what the other factor makes of them, and
// have to be hidden there.
template <bool kTerms, ScoreLayout kLayout, int kRows, int kGroups, int kColumns>
HK_DEVICE void to_probabilities(Accumulator<kGroups, kColumns>& scores,
                                const TileTerms<kLayout, kRows>& row, float scale_log2) {
  scores.each([&](float& value, int m, int n, int e) {
    value = row.terms.template probability<kTerms>(value, scale_log2, row(m, n, e));
  });
}

// What dropout and the gate make of probabilities, or of dp.
template <ScoreLayout kLayout, int kRows, int kGroups, int kColumns>
HK_DEVICE void weigh(Accumulator<kGroups, kColumns>& tile, const TileTerms<kLayout, kRows>& row,
                     const LeftOut<kLayout, kGroups, kColumns>& left_out, float keep_scale) {
  tile.each([&](float& value, int m, int n, int e) {
    value *= row.terms.gate[row(m, n, e)] * keep_scale;
  });
  left_out.drop(tile);
}

// dp becomes what probabilities multiply.
template <ScoreLayout kLayout, int kRows, int kGroups, int kColumns>
HK_DEVICE void centre(Accumulator<kGroups, kColumns>& dp, const TileTerms<kLayout, kRows>& row,
                      const LeftOut<kLayout, kGroups, kColumns>& left_out, float keep_scale) {
  weigh(dp, row, left_out, keep_scale);
  dp.each([&](float& value, int m, int n, int e) { value -= row.terms.delta[row(m, n, e)]; });
}

// Centred dp becomes dscores, 0 where it is hidden.
template <ScoreLayout kLayout, int kGroups, int kColumns>
HK_DEVICE void to_dscores(Accumulator<kGroups, kColumns>& dp,
                          const Accumulator<kGroups, kColumns>& probabilities,
                          const LeftOut<kLayout, kGroups, kColumns>& left_out) {
  dp.each([&](float& value, int m, int n, int e) { value *= probabilities.c[m][n][e]; });
  left_out.hide(dp);
}

}  // namespace hk::cuda
