// One tile of query rows against all the keys it sees, backward: shared by both operators.
//
// Per pair of tiles, transposed as in the forward pass: S = K Q^T again, P = exp2(S - lse), dP = V dO^T,
// dS = P (dP - delta), then dV += P^T dO, dK += dS^T Q and dQ^T += K^T dS. One thread adds up dK and dV of its keys
// in ascending order of the query tiles, and dQ of a query tile in ascending order of the key tiles, so the bits do not
// depend on how the work was split.
#pragma once

#include <vector>

#include "cpu/attend.h"

namespace hk::HK_LEVEL {

// Rows of a query tile that hold a NaN or an infinity: kept aside so that they reach only the keys they see.
template <typename T>
struct SetAside {
  std::vector<int> index;
  std::vector<T> rows;  // [index][width]

  // Moves such rows of tile[count][width] in here and leaves zeros.
  void gather(T* tile, int count, int64_t width) {
    index.clear();
    rows.clear();
    for (int m = 0; m < count; ++m) {
      T* row = tile + m * width;
      if (!has_nonfinite(row, width)) continue;
      index.push_back(m);
      rows.insert(rows.end(), row, row + width);
      std::fill(row, row + width, T(0));
    }
  }
};

// Accumulators of the keys [begin, ...) that this thread owns; null where a gradient is not asked for.
template <typename T>
struct KeyGradients {
  int64_t begin = 0;
  T* dkey = nullptr;    // [S][round_up(D)]
  T* dvalue = nullptr;  // [S][round_up(Dv)]
  T* dbias = nullptr;   // [S]
};

template <typename T>
struct BackwardScratch : TileScratch<T> {
  T* query_rows;  // [64][D] unscaled, mixed
  T* dout_rows;   // [64][Dv] gated
  T* dout;        // [Dv][64] the same transposed
  T* dprobs;      // [64][64] dP, then dS
  T* dropped;     // [64][64] probabilities after dropout
  T* dquery;      // [D][64]
  SetAside<T> bad_queries, bad_douts;
  alignas(64) T lse[kBlockM];    // base 2; +inf where a row sees nothing, so that its probabilities are 0
  alignas(64) T delta[kBlockM];  // rowsum(dout * out)

  static int64_t bytes(int64_t D, int64_t Dv) {
    const int64_t Dp = round_up(D, kLanes<T>), Dvp = round_up(Dv, kLanes<T>);
    return TileScratch<T>::bytes(D, Dv) + 2 * piece<T>(Dp * kBlockM) + 2 * piece<T>(Dvp * kBlockM) +
           2 * piece<T>(kBlockN * kBlockM);
  }
  BackwardScratch(Workspace& w, int64_t D, int64_t Dv)
      : TileScratch<T>(w, D, Dv),
        query_rows(w.take<T>(round_up(D, kLanes<T>) * kBlockM)),
        dout_rows(w.take<T>(round_up(Dv, kLanes<T>) * kBlockM)),
        dout(w.take<T>(round_up(Dv, kLanes<T>) * kBlockM)),
        dprobs(w.take<T>(kBlockN * kBlockM)),
        dropped(w.take<T>(kBlockN * kBlockM)),
        dquery(w.take<T>(round_up(D, kLanes<T>) * kBlockM)) {}
};

// What the backward pass of one head reads and writes besides its `Head`.
struct HeadGradients {
  Rows dout;      // [T][Dv]
  Rows attended;  // [T][Dv]
  const void* lse;  // [T] in the compute type
  void* dgate;    // [T] or [T][Dv] in the compute type; null where it is not asked for
};

// A zeroed piece of the workspace.
template <typename T>
inline T* zeros(Workspace& workspace, int64_t count) {
  T* piece = workspace.take<T>(count);
  std::memset(piece, 0, count * sizeof(T));
  return piece;
}

// Rows [begin, end) of a gradient from its accumulator [end - begin][round_up(width)]; no accumulator: not asked for.
template <typename T>
inline void store_accumulator(const Rows& rows, int64_t begin, int64_t end, int64_t width, const T* accumulator) {
  if (!accumulator) return;
  const int64_t padded = round_up(width, kLanes<T>);
  for (int64_t r = begin; r < end; ++r)
    store_row(rows.at(r), accumulator + (r - begin) * padded, rows.dtype, width, rows.step);
}

template <typename T>
inline T dot(const T* a, const T* b, int64_t padded) {
  Vec<T> sum{};
  for (int64_t i = 0; i < padded; i += kLanes<T>) sum += load(a + i) * load(b + i);
  return sum_lanes<T>(sum);
}

// Gradient rows of the gate: dout * attended, summed over the width unless the gate is elementwise.
template <typename T>
inline void store_gate_row(void* dgate, bool elementwise, int64_t i, int64_t Dv, const T* dout, const T* attended) {
  const int64_t padded = round_up(Dv, kLanes<T>);
  if (!elementwise) {
    static_cast<T*>(dgate)[i] = attended ? dot(dout, attended, padded) : T(0);
    return;
  }
  T* row = static_cast<T*>(dgate) + i * Dv;
  for (int64_t w = 0; w < Dv; ++w) row[w] = attended ? dout[w] * attended[w] : T(0);
}

// Reads dout and attended of the tile once: delta, the gate's gradient rows, and the gated dout both ways round.
template <typename T>
inline void load_output_gradients(const Head<T>& head, const Gate<T>& gate, const HeadGradients& gradients,
                                  const VisibleRows<T>& visible, BackwardScratch<T>& scratch) {
  const int64_t padded = round_up(head.Dv, kLanes<T>);
  gather_rows(gradients.dout, visible, head.Dv, scratch.dout_rows);
  gather_rows(gradients.attended, visible, head.Dv, scratch.rows);
  alignas(64) T tokens[kBlockM];
  if (gate && !gate.elementwise) gate.tokens(head.b, head.h, visible.first, visible.count, tokens);
  for (int m = 0; m < kBlockM; ++m) {
    const int64_t i = visible.first + m;
    const T lse = visible.sees(m) ? static_cast<const T*>(gradients.lse)[i] : kHidden<T>;
    const bool sees = lse != kHidden<T>;  // a row may see nothing but holes
    scratch.lse[m] = lse == kHidden<T> ? -kHidden<T> : lse * static_cast<T>(kLog2e);
    scratch.delta[m] = 0;
    T* dout = scratch.dout_rows + m * padded;
    const T* attended = sees ? scratch.rows + m * padded : nullptr;
    if (gradients.dgate && m < visible.count)
      store_gate_row(gradients.dgate, gate.elementwise, i, head.Dv, dout, attended);
    if (!sees) continue;
    if (gate.elementwise) {
      T* values = scratch.widened;
      gate.elements(head.b, head.h, i, head.Dv, values);
      for (int64_t w = 0; w < padded; w += kLanes<T>) store<T>(dout + w, load(dout + w) * load(values + w));
    } else if (gate) {
      for (int64_t w = 0; w < padded; w += kLanes<T>) store<T>(dout + w, load(dout + w) * tokens[m]);
    }
    scratch.delta[m] = dot(dout, attended, padded);
  }
  transpose(scratch.dout_rows, padded, scratch.dout, kBlockM, visible.columns, padded);
  scratch.bad_douts.gather(scratch.dout_rows, visible.columns, padded);
}

// sum[n][w] += weights[n][m] * rows[m][w] over the query rows m: dS times queries, or P times dout.
template <typename T>
inline void add_weighted_queries(const T* weights, const T* rows, const SetAside<T>& aside, int64_t padded, Range columns,
                                 const KeyTile& keys, const VisibleRows<T>& visible, T* sum) {
  multiply<T>(keys.count(), columns.end - columns.begin, visible.columns, {weights, kBlockM, 1}, rows + columns.begin,
              padded, sum + columns.begin, padded, true);
  for (size_t bad = 0; bad < aside.index.size(); ++bad) {
    const int m = aside.index[bad];
    for (int n = 0; n < keys.count(); ++n)
      if (visible.row_sees_key(m, keys.begin + n))
        for (int64_t w = columns.begin; w < columns.end; ++w)
          sum[n * padded + w] += weights[n * kBlockM + m] * aside.rows[bad * padded + w];
  }
}

// The tile's rows of dQ, from scratch.dquery; rows that see nothing are 0.
template <typename T>
inline void store_dquery(const Rows& dquery, const VisibleRows<T>& visible, int64_t D, BackwardScratch<T>& scratch) {
  const int64_t padded = round_up(D, kLanes<T>);
  transpose(scratch.dquery, kBlockM, scratch.rows, padded, padded, visible.columns);
  for (int m = 0; m < visible.count; ++m) {
    if (visible.sees(m)) {
      store_row(dquery.at(visible.first + m), scratch.rows + m * padded, dquery.dtype, D, dquery.step);
    } else {
      store_zeros<T>(dquery, visible.first + m, 1, D);
    }
  }
}

// Probabilities from scores, and dS from dP, of one pair of tiles; hidden pairs are 0 whatever stood there.
template <typename T>
inline void softmax_backward(const DropoutParams& dropout, const Head<T>& head, T scale, const KeyTile& keys,
                             const VisibleRows<T>& visible, BackwardScratch<T>& scratch) {
  const int columns = visible.columns;
  for (int n = 0; n < keys.count(); ++n) {
    for (int m = 0; m < columns; m += kLanes<T>) {
      T* at = scratch.scores + n * kBlockM + m;
      const Vec<T> p = exp2<T>(load(at) - load(scratch.lse + m));
      store<T>(at, keys.full ? p : visible.lanes_that_see(m, keys.begin + n) ? p : Vec<T>{});
    }
  }
  if (dropout.active) {
    std::memcpy(scratch.dropped, scratch.scores, sizeof(T) * kBlockM * keys.count());
    drop(dropout, head.b, head.h, keys, visible.first, columns, scratch.dropped, scratch.dprobs);
  }
  for (int n = 0; n < keys.count(); ++n) {
    for (int m = 0; m < columns; m += kLanes<T>) {
      T* at = scratch.dprobs + n * kBlockM + m;
      const Vec<T> ds = load(scratch.scores + n * kBlockM + m) * (load(at) - load(scratch.delta + m)) * scale;
      store<T>(at, keys.full ? ds : visible.lanes_that_see(m, keys.begin + n) ? ds : Vec<T>{});
    }
  }
}

// The tile of queries in `scratch` (query, query_rows, dout, lse, delta) against keys [begin, end): adds to the
// gradients of the keys, and to scratch.dquery over `dquery_features` (none: not asked for).
template <typename T>
inline void attend_backward(const Head<T>& head, const DropoutParams& dropout, T scale, const VisibleRows<T>& visible,
                            int64_t begin, int64_t end, const std::vector<Range>& dquery_features,
                            const KeyGradients<T>& gradients, BackwardScratch<T>& scratch) {
  const int64_t Dp = round_up(head.D, kLanes<T>), Dvp = round_up(head.Dv, kLanes<T>);
  for_visible_tiles(visible, begin, end, [&](const KeyTile& keys) {
    const int64_t offset = keys.begin - gradients.begin;
    score_tile(head, scratch.query, keys, visible.columns, scratch.widened, scratch.scores);
    const Tile<T> values = tile_of(head.value, keys.begin, keys.count(), head.Dv, scratch.widened);
    multiply<T>(keys.count(), visible.columns, head.Dv, {values.data, values.stride, 1}, scratch.dout, kBlockM,
                scratch.dprobs, kBlockM, false);
    softmax_backward(dropout, head, scale, keys, visible, scratch);
    if (gradients.dvalue)
      add_weighted_queries(dropout.active ? scratch.dropped : scratch.scores, scratch.dout_rows, scratch.bad_douts, Dvp,
                           Range{0, Dvp}, keys, visible, gradients.dvalue + offset * Dvp);
    if (gradients.dkey)
      for (const Range& range : head.features)
        add_weighted_queries(scratch.dprobs, scratch.query_rows, scratch.bad_queries, Dp,
                             Range{range.begin, round_up(range.end, kLanes<T>)}, keys, visible,
                             gradients.dkey + offset * Dp);
    if (gradients.dbias)
      for (int n = 0; n < keys.count(); ++n)
        for (int m = 0; m < visible.columns; ++m) gradients.dbias[offset + n] += scratch.dprobs[n * kBlockM + m];
    for (const Range& range : dquery_features)
      add_weighted_keys(head.key.columns(range.begin), range.end - range.begin, keys, visible, scratch.dprobs,
                        scratch.widened, scratch.dquery + range.begin * kBlockM);
  });
}

// The gate's gradient rows of a head that was closed, and so not computed, in the forward pass.
template <typename T>
inline void closed_gate_rows(const Head<T>& head, const DropoutParams& dropout, const HeadGradients& gradients,
                             const VisibleRows<T>& visible, BackwardScratch<T>& scratch) {
  const int64_t padded = round_up(head.Dv, kLanes<T>);
  OnlineSoftmax<T> softmax;
  attend(head, dropout, visible, scratch, softmax);
  transpose(scratch.out, kBlockM, scratch.rows, padded, padded, visible.columns);
  gather_rows(gradients.dout, visible, head.Dv, scratch.dout_rows);
  for (int m = 0; m < visible.count; ++m) {
    const bool sees = visible.sees(m) && softmax.sum[m] != T(0);
    T* row = scratch.rows + m * padded;
    if (sees) {
      for (int64_t w = 0; w < padded; w += kLanes<T>) store<T>(row + w, load(row + w) / softmax.sum[m]);
      for (int64_t w = head.Dv; w < padded; ++w) row[w] = 0;
    }
    store_gate_row<T>(gradients.dgate, false, visible.first + m, head.Dv, scratch.dout_rows + m * padded, sees ? row : nullptr);
  }
}

// Readies `scratch` for a query tile of a head and stores the tile's rows of the gate's gradient; false where no pair of
// it needs computing: the head is closed, or no row sees a key.
template <typename T, typename Operator>
inline bool prepare_tile(const Operator& op, const Head<T>& head, bool closed_grad, const HeadGradients& gradients,
                         const VisibleRows<T>& visible, BackwardScratch<T>& scratch) {
  const bool closed = op.gate.closed(head.b, head.h);
  if (closed && !gradients.dgate) return false;
  if (closed && !(closed_grad && visible.any)) {
    std::fill_n(static_cast<T*>(gradients.dgate) + visible.first, visible.count, T(0));
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
