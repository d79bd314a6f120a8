// One tile of query rows against all the keys it sees, backward: shared by both operators.
//
// Per pair of tiles, transposed as in the forward pass: S = K Q^T again, P = exp2(S - lse), dP = V
// dO^T, dS = P (dP - delta), then dV += P^T dO, dK += dS^T Q and dQ^T += K^T dS. One thread adds up
// dK and dV of its keys in ascending order of the query tiles, and dQ of a query tile in ascending
// order of the key tiles, so the bits do not depend on how the work was split.
#pragma once

#include <vector>

#include "cpu/attend.h"

namespace hk::HK_LEVEL {

// Rows of a query tile that hold a NaN or an infinity: kept aside so that they reach only the keys
// they see.
template <typename Real>
struct SetAside {
  std::vector<int> index;
  std::vector<Real> rows;  // [index][width]

  // Moves such rows of tile[count][stride] in here and leaves zeros.
  void gather(Real* tile, int count, int64_t width, int64_t stride) {
    index.clear();
    rows.clear();
    for (int m = 0; m < count; ++m) {
      Real* row = tile + m * stride;
      if (!has_nonfinite(row, width)) continue;
      index.push_back(m);
      rows.insert(rows.end(), row, row + width);
      std::fill(row, row + width, Real(0));
    }
  }
};

// Accumulators of the keys [begin, ...) that this thread owns; null where a gradient is not asked
// for.
template <typename Real>
struct KeyGradients {
  int64_t begin = 0;
  Real* dkey = nullptr;           // [S][row_stride(D)]
  Real* dvalue = nullptr;         // [S][row_stride(Dv)]
  Real* dcontent_bias = nullptr;  // [S]
};

template <typename Real>
struct BackwardScratch : TileScratch<Real> {
  Real* query_rows;  // [64][D] unscaled, mixed
  Real* dout_rows;   // [64][Dv] gated
  Real* dout;        // [Dv][64] the same transposed
  Real* dprobs;      // [64][64] dP, then dS
  Real* dropped;     // [64][64] probabilities after dropout
  Real* dquery;      // [D][64]
  SetAside<Real> bad_queries, bad_douts;
  alignas(64)
      Real lse[BLOCK_M];  // base 2; +inf where a row sees nothing, so that its probabilities are 0
  alignas(64) Real delta[BLOCK_M];  // rowsum(dout * out)

  static int64_t bytes(int64_t D, int64_t Dv) {
    return TileScratch<Real>::bytes(D, Dv) + piece<Real>(row_stride<Real>(D) * BLOCK_M) +
           piece<Real>(row_stride<Real>(Dv) * BLOCK_M) +
           piece<Real>(round_up(Dv, kLanes<Real>) * BLOCK_M) + 2 * piece<Real>(BLOCK_N * BLOCK_M) +
           piece<Real>(round_up(D, kLanes<Real>) * BLOCK_M);
  }
  BackwardScratch(Workspace& w, int64_t D, int64_t Dv)
      : TileScratch<Real>(w, D, Dv),
        query_rows(w.take<Real>(row_stride<Real>(D) * BLOCK_M)),
        dout_rows(w.take<Real>(row_stride<Real>(Dv) * BLOCK_M)),
        dout(w.take<Real>(round_up(Dv, kLanes<Real>) * BLOCK_M)),
        dprobs(w.take<Real>(BLOCK_N * BLOCK_M)),
        dropped(w.take<Real>(BLOCK_N * BLOCK_M)),
        dquery(w.take<Real>(round_up(D, kLanes<Real>) * BLOCK_M)) {}
};

// What the backward pass of one head reads and writes besides its `Head`.
struct HeadGradients {
  Rows dout;        // [T][Dv]
  Rows attended;    // [T][Dv]
  const void* lse;  // [T] in the compute type
  void* dgate;      // [T] or [T][Dv] in the compute type; null where it is not asked for
};

// A zeroed piece of the workspace.
template <typename Real>
inline Real* zeros(Workspace& workspace, int64_t count) {
  Real* piece = workspace.take<Real>(count);
  std::memset(piece, 0, count * sizeof(Real));
  return piece;
}

// Rows [begin, end) of a gradient from its accumulator [end - begin][row_stride(width)]; no
// accumulator: not asked for.
template <typename Real>
inline void store_accumulator(const Rows& rows, int64_t begin, int64_t end, int64_t width,
                              const Real* accumulator) {
  if (!accumulator) return;
  const int64_t stride = row_stride<Real>(width);
  for (int64_t r = begin; r < end; ++r)
    store_row(rows.at(r), accumulator + (r - begin) * stride, rows.dtype, width, rows.step);
}

template <typename Real>
inline Real dot(const Real* a, const Real* b, int64_t padded) {
  Vec<Real> sum{};
  for (int64_t i = 0; i < padded; i += kLanes<Real>) sum += load(a + i) * load(b + i);
  return sum_lanes<Real>(sum);
}

// Gradient rows of the gate: dout * attended, summed over the width unless the gate is elementwise.
template <typename Real>
inline void store_gate_row(void* dgate, bool elementwise, int64_t i, int64_t Dv, const Real* dout,
                           const Real* attended) {
  const int64_t padded = round_up(Dv, kLanes<Real>);
  if (!elementwise) {
    static_cast<Real*>(dgate)[i] = attended ? dot(dout, attended, padded) : Real(0);
    return;
  }
  Real* row = static_cast<Real*>(dgate) + i * Dv;
  for (int64_t w = 0; w < Dv; ++w) row[w] = attended ? dout[w] * attended[w] : Real(0);
}

// Reads dout and attended of the tile once: delta, the gate's gradient rows, and the gated dout
// both ways round.
template <typename Real>
inline void load_output_gradients(const Head<Real>& head, const Gate<Real>& gate,
                                  const HeadGradients& gradients, const VisibleRows<Real>& visible,
                                  BackwardScratch<Real>& scratch) {
  const int64_t padded = round_up(head.Dv, kLanes<Real>), stride = row_stride<Real>(head.Dv);
  gather_rows(gradients.dout, visible, head.Dv, scratch.dout_rows);
  gather_rows(gradients.attended, visible, head.Dv, scratch.rows);
  alignas(64) Real tokens[BLOCK_M];
  if (gate && !gate.elementwise) gate.tokens(head.b, head.h, visible.first, visible.count, tokens);
  for (int m = 0; m < BLOCK_M; ++m) {
    const int64_t i = visible.first + m;
    const Real lse = visible.sees(m) ? static_cast<const Real*>(gradients.lse)[i] : kHidden<Real>;
    const bool sees = lse != kHidden<Real>;  // a row may see nothing but holes
    scratch.lse[m] = lse == kHidden<Real> ? -kHidden<Real> : lse * static_cast<Real>(kLog2e);
    scratch.delta[m] = 0;
    Real* dout = scratch.dout_rows + m * stride;
    const Real* attended = sees ? scratch.rows + m * stride : nullptr;
    if (gradients.dgate && m < visible.count)
      store_gate_row(gradients.dgate, gate.elementwise, i, head.Dv, dout, attended);
    if (!sees) continue;
    if (gate.elementwise) {
      Real* values = scratch.widened;
      gate.elements(head.b, head.h, i, head.Dv, values);
      for (int64_t w = 0; w < padded; w += kLanes<Real>)
        store<Real>(dout + w, load(dout + w) * load(values + w));
    } else if (gate) {
      for (int64_t w = 0; w < padded; w += kLanes<Real>)
        store<Real>(dout + w, load(dout + w) * tokens[m]);
    }
    scratch.delta[m] = dot(dout, attended, padded);
  }
  transpose(scratch.dout_rows, stride, scratch.dout, BLOCK_M, visible.columns, padded);
  scratch.bad_douts.gather(scratch.dout_rows, visible.columns, padded, stride);
}

// sum[n][w] += weights[n][m] * rows[m][w] over the query rows m, for the columns: dS times queries,
// or P times dout. Both matrices have rows of row_stride(width).
template <typename Real>
inline void add_weighted_queries(const Real* weights, const Real* rows, const SetAside<Real>& aside,
                                 int64_t width, Range columns, const KeyTile& keys,
                                 const VisibleRows<Real>& visible, Real* sum) {
  const int64_t stride = row_stride<Real>(width), padded = round_up(width, kLanes<Real>);
  const int64_t end = round_up(columns.end, kLanes<Real>);
  multiply<Real>(keys.count(), end - columns.begin, visible.columns, {weights, BLOCK_M, 1},
                 rows + columns.begin, stride, sum + columns.begin, stride, true);
  for (size_t bad = 0; bad < aside.index.size(); ++bad) {
    const int m = aside.index[bad];
    for (int n = 0; n < keys.count(); ++n)
      if (visible.row_sees_key(m, keys.begin + n))
        for (int64_t w = columns.begin; w < end; ++w)
          sum[n * stride + w] += weights[n * BLOCK_M + m] * aside.rows[bad * padded + w];
  }
}

// The tile's rows of dQ, from scratch.dquery; rows that see nothing are 0.
template <typename Real>
inline void store_dquery(const Rows& dquery, const VisibleRows<Real>& visible, int64_t D,
                         BackwardScratch<Real>& scratch) {
  const int64_t padded = round_up(D, kLanes<Real>), stride = row_stride<Real>(D);
  transpose(scratch.dquery, BLOCK_M, scratch.rows, stride, padded, visible.columns);
  for (int m = 0; m < visible.count; ++m) {
    if (visible.sees(m)) {
      store_row(dquery.at(visible.first + m), scratch.rows + m * stride, dquery.dtype, D,
                dquery.step);
    } else {
      store_zeros<Real>(dquery, visible.first + m, 1, D);
    }
  }
}

// Probabilities from scores, and (`with_dscores`) dS from dP, of one pair of tiles. Hidden pairs
// and lanes without a row are 0 whatever stood there: the sums over query rows run across all
// lanes.
template <typename Real>
inline void softmax_backward(const DropoutParams& dropout, const Head<Real>& head, Real scale,
                             bool with_dscores, const KeyTile& keys,
                             const VisibleRows<Real>& visible, BackwardScratch<Real>& scratch) {
  const int columns = visible.columns;
  const bool all_visible = keys.full && visible.all_rows;
  for (int n = 0; n < keys.count(); ++n) {
    for (int m = 0; m < columns; m += kLanes<Real>) {
      Real* at = scratch.scores + n * BLOCK_M + m;
      const Vec<Real> p = exp2<Real>(load(at) - load(scratch.lse + m));
      store<Real>(at, all_visible                                 ? p
                      : visible.lanes_that_see(m, keys.begin + n) ? p
                                                                  : Vec<Real>{});
    }
  }
  if (dropout.active) {
    std::memcpy(scratch.dropped, scratch.scores, sizeof(Real) * BLOCK_M * keys.count());
    drop(dropout, head.b, head.h, keys, visible.first, columns, scratch.dropped, scratch.dprobs);
  }
  if (!with_dscores) return;
  for (int n = 0; n < keys.count(); ++n) {
    for (int m = 0; m < columns; m += kLanes<Real>) {
      Real* at = scratch.dprobs + n * BLOCK_M + m;
      const Vec<Real> p = load(scratch.scores + n * BLOCK_M + m);
      const Vec<Real> ds = p * (load(at) - load(scratch.delta + m)) * scale;
      store<Real>(at, all_visible                                 ? ds
                      : visible.lanes_that_see(m, keys.begin + n) ? ds
                                                                  : Vec<Real>{});
    }
  }
}

// The tile of queries in `scratch` (query, query_rows, dout, lse, delta) against keys [begin, end):
// adds to the gradients of the keys, and to scratch.dquery over `dquery_features` (none: not asked
// for).
template <typename Real>
inline void attend_backward(const Head<Real>& head, const DropoutParams& dropout, Real scale,
                            const VisibleRows<Real>& visible, int64_t begin, int64_t end,
                            const std::vector<Range>& dquery_features,
                            const KeyGradients<Real>& gradients, BackwardScratch<Real>& scratch) {
  const bool with_dscores = gradients.dkey || gradients.dcontent_bias || !dquery_features.empty();
  for_visible_tiles(visible, begin, end, [&](const KeyTile& keys) {
    const int64_t offset = keys.begin - gradients.begin;
    score_tile(head, scratch.query, keys, visible.columns, scratch.widened, scratch.scores);
    if (with_dscores) {
      const Tile<Real> values =
          tile_of(head.value, keys.begin, keys.count(), head.Dv, scratch.widened);
      multiply<Real>(keys.count(), visible.columns, head.Dv, {values.data, values.stride, 1},
                     scratch.dout, BLOCK_M, scratch.dprobs, BLOCK_M, false);
    }
    softmax_backward(dropout, head, scale, with_dscores, keys, visible, scratch);
    if (gradients.dvalue)
      add_weighted_queries(dropout.active ? scratch.dropped : scratch.scores, scratch.dout_rows,
                           scratch.bad_douts, head.Dv, Range{0, head.Dv}, keys, visible,
                           gradients.dvalue + offset * row_stride<Real>(head.Dv));
    if (gradients.dkey)
      for (const Range& range : head.features)
        add_weighted_queries(scratch.dprobs, scratch.query_rows, scratch.bad_queries, head.D, range,
                             keys, visible, gradients.dkey + offset * row_stride<Real>(head.D));
    if (gradients.dcontent_bias)
      for (int n = 0; n < keys.count(); ++n) {
        Vec<Real> sum{};
        for (int m = 0; m < visible.columns; m += kLanes<Real>)
          sum += load(scratch.dprobs + n * BLOCK_M + m);
        gradients.dcontent_bias[offset + n] += sum_lanes<Real>(sum);
      }
    for (const Range& range : dquery_features)
      add_weighted_keys(head.key.columns(range.begin), range.end - range.begin, keys, visible,
                        scratch.dprobs, scratch.widened, scratch.dquery + range.begin * BLOCK_M);
  });
}

// The gate's gradient rows of a head that was closed, and so not computed, in the forward pass.
template <typename Real>
inline void closed_gate_rows(const Head<Real>& head, const DropoutParams& dropout,
                             const HeadGradients& gradients, const VisibleRows<Real>& visible,
                             BackwardScratch<Real>& scratch) {
  const int64_t padded = round_up(head.Dv, kLanes<Real>), stride = row_stride<Real>(head.Dv);
  OnlineSoftmax<Real> softmax;
  attend(head, dropout, visible, scratch, softmax);
  transpose(scratch.out, BLOCK_M, scratch.rows, stride, padded, visible.columns);
  gather_rows(gradients.dout, visible, head.Dv, scratch.dout_rows);
  for (int m = 0; m < visible.count; ++m) {
    const bool sees = visible.sees(m) && softmax.sum[m] != Real(0);
    Real* row = scratch.rows + m * stride;
    if (sees) {
      for (int64_t w = 0; w < padded; w += kLanes<Real>)
        store<Real>(row + w, load(row + w) / softmax.sum[m]);
      for (int64_t w = head.Dv; w < padded; ++w) row[w] = 0;
    }
    store_gate_row<Real>(gradients.dgate, false, visible.first + m, head.Dv,
                         scratch.dout_rows + m * stride, sees ? row : nullptr);
  }
}

// Readies `scratch` for a query tile of a head and stores the tile's rows of the gate's gradient;
// false where no pair of it needs computing: the head is closed, or no row sees a key.
template <typename Real, typename Operator>
inline bool prepare_tile(const Operator& op, const Head<Real>& head, bool closed_grad,
                         const HeadGradients& gradients, const VisibleRows<Real>& visible,
                         BackwardScratch<Real>& scratch) {
  const bool closed = op.gate.closed(head.b, head.h);
  if (closed && !gradients.dgate) return false;
  if (closed && !(closed_grad && visible.any)) {
    std::fill_n(static_cast<Real*>(gradients.dgate) + visible.first, visible.count, Real(0));
    return false;
  }
  if (visible.any) op.pack(head.b, head.h, visible, scratch);
  if (closed) {
    closed_gate_rows(head, op.params.dropout, gradients, visible, scratch);
    return false;
  }
  load_output_gradients(head, op.gate, gradients, visible, scratch);
  return visible.any;
}

}  // namespace hk::HK_LEVEL
