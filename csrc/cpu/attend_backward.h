// Tiles of query rows against all the keys they see: the backward pass that both operators share.
//
// Per pair of tiles, transposed as in the forward pass: S = K Q^T again, P = exp(S - lse), dP = V
// dO^T, dS = P (dP - delta), then dV += P^T dO, dK += dS^T Q and dQ^T += K^T dS. One thread sums dK
// and dV of its keys in the order of the query tiles, and dQ of a query tile in the order of the
// keys, so the result does not depend bitwise on how the work is split.
#pragma once

#include "cpu/entmax.h"
#include "cpu/entmax_attend.h"

namespace hk::HK_LEVEL {

// Rows of a query tile that contain NaN or infinity, stored separately so that they reach only the
// keys they see.
template <typename Real>
struct SetAside {
  int count = 0;
  int index[BLOCK_M];
  Real* rows;  // [count][stride]

  // Moves such rows out of tile[tile_rows][stride], leaving zeros.
  void gather(Real* tile, int tile_rows, int64_t width, int64_t stride) {
    count = 0;
    if (!has_nonfinite(tile, tile_rows, width, stride)) return;
    for (int m = 0; m < tile_rows; ++m) {
      Real* row = tile + m * stride;
      if (!has_nonfinite(row, 1, width, 0)) continue;
      std::memcpy(rows + count * stride, row, width * sizeof(Real));
      std::memset(row, 0, width * sizeof(Real));
      index[count++] = m;
    }
  }
};

// Accumulators of the keys [begin, ...) that this thread owns; null if a gradient is not requested.
template <typename Real>
struct KeyGradients {
  int64_t begin = 0;
  Real* dkey = nullptr;           // [keys][row_stride(D)]
  Real* dvalue = nullptr;         // [keys][row_stride(Dv)]
  Real* dcontent_bias = nullptr;  // [keys]
  BiasGradient<Real> bias;
};

// The backward state of a tile of query rows; `out` is used for closed heads only.
template <typename Real, typename Operand>
struct BackwardTile : QueryTile<Real, Operand> {
  Operand* query_rows;  // [64][D] unscaled, mixed
  Operand* dout_rows;   // [64][Dv] gated
  Operand* dout;        // [Dv][64] the same transposed, in the memory of `out`
  Real* dquery;         // [D][64]
  SetAside<Real> bad_queries, bad_douts;
  alignas(64) Real lse[BLOCK_M];  // +inf where a row sees nothing, so that its probabilities are 0
  alignas(64) Real delta[BLOCK_M];  // rowsum(dout * out)

  static constexpr int64_t kRows = BLOCK_M / kNumbers<Operand>;
  // What the loop over the keys reads and writes of a tile whose rows are finite.
  template <typename Operator>
  static int64_t cached_bytes(const Operator& op) {
    return buffer_bytes<char>(sizeof(BackwardTile)) + QueryTile<Real, Operand>::bytes(op) +
           buffer_bytes<Operand>(row_stride<Operand>(op.D) * kRows) +
           buffer_bytes<Operand>(row_stride<Operand>(op.Dv) * kRows) +
           buffer_bytes<Real>(round_up(op.D, kLanes<Real>) * BLOCK_M);
  }
  template <typename Operator>
  static int64_t bytes(const Operator& op) {
    return cached_bytes(op) + buffer_bytes<Real>(row_stride<Real>(op.D) * BLOCK_M) +
           buffer_bytes<Real>(row_stride<Real>(op.Dv) * BLOCK_M);
  }
  template <typename Operator>
  BackwardTile(Workspace& w, const Operator& op, int64_t b, int64_t h,
               const VisibleRows<Real>& visible)
      : QueryTile<Real, Operand>(w, op, b, h, visible),
        query_rows(w.take<Operand>(row_stride<Operand>(op.D) * kRows)),
        dout_rows(w.take<Operand>(row_stride<Operand>(op.Dv) * kRows)),
        dout(reinterpret_cast<Operand*>(this->out)),
        dquery(w.take<Real>(round_up(op.D, kLanes<Real>) * BLOCK_M)) {
    bad_queries.rows = w.take<Real>(row_stride<Real>(op.D) * BLOCK_M);
    bad_douts.rows = w.take<Real>(row_stride<Real>(op.Dv) * BLOCK_M);
  }
};

// Scratch that the tiles of a work item share.
template <typename Real, typename Operand>
struct BackwardScratch : TileScratch<Real, Operand> {
  Real* more_rows;          // [64][max(D, Dv)]
  Real* dprobs;             // [64][64] dP, then dS
  Real* dropped;            // [64][64] probabilities after dropout
  Real* slopes;             // [64][64] of entmax
  Operand* probs_packed;    // [64][64] P as the factor that is broadcast; empty if Operand is Real
  Operand* dscores_packed;  // [64][64] dS, likewise

  template <typename Operator>
  static int64_t bytes(const Operator& op, int64_t Dv) {
    return TileScratch<Real, Operand>::bytes(op, Dv) +
           buffer_bytes<Real>(BLOCK_M * TileScratch<Real, Operand>::width(op.D, Dv)) +
           3 * buffer_bytes<Real>(BLOCK_N * BLOCK_M) +
           2 * buffer_bytes<Operand>(TileScratch<Real, Operand>::kWeights);
  }
  template <typename Operator>
  BackwardScratch(Workspace& w, const Operator& op, int64_t Dv, int64_t tiles)
      : TileScratch<Real, Operand>(w, op, Dv, tiles),
        more_rows(w.take<Real>(BLOCK_M * this->width(op.D, Dv))),
        dprobs(w.take<Real>(BLOCK_N * BLOCK_M)),
        dropped(w.take<Real>(BLOCK_N * BLOCK_M)),
        slopes(w.take<Real>(BLOCK_N * BLOCK_M)),
        probs_packed(w.take<Operand>(this->kWeights)),
        dscores_packed(w.take<Operand>(this->kWeights)) {}
};

// Inputs and gradients of one head in the backward pass, besides its `Head`.
struct HeadGradients {
  Rows dout;              // [T][Dv]
  Rows attended;          // [T][Dv]
  const void* lse;        // [T] in the compute type; entmax: the largest score
  const void* threshold;  // [T] of entmax, above the largest score; null for softmax
  const void* dlse;       // [T] in the compute type; null: 0
  const void* delta;      // [T] in the compute type; null: rowsum(dout * attended) - dlse
  void* dgate;            // [T] or [T][Dv] in the compute type; null if not requested
  void* dsinks;           // [T] in the compute type; null if not requested
};

// The `HeadGradients` of head (b, h); dgate and dsinks are null unless `with_rows`.
template <typename Real, typename Operator>
inline HeadGradients head_gradients(const Operator& op, const BackwardParams& p, int64_t b,
                                    int64_t h, bool with_rows) {
  const int64_t row = (b * op.H + h) * op.T, width = op.gate.elementwise ? op.Dv : 1;
  return {head_rows(op, p.dout, b, h),
          head_rows(op, p.attended, b, h),
          static_cast<Real*>(p.lse.data) + row,
          p.alpha ? static_cast<Real*>(p.lse.data) + op.B * op.H * op.T + row : nullptr,
          p.dlse ? static_cast<Real*>(p.dlse.data) + row : nullptr,
          p.delta ? static_cast<const Real*>(p.delta) + row : nullptr,
          with_rows && p.dgate ? static_cast<Real*>(p.dgate.data) + row * width : nullptr,
          with_rows && p.dsinks ? static_cast<Real*>(p.dsinks.data) + row : nullptr};
}

// A zeroed buffer of the workspace.
template <typename Real>
inline Real* zeros(Workspace& workspace, int64_t count) {
  Real* buffer = workspace.take<Real>(count);
  std::memset(buffer, 0, count * sizeof(Real));
  return buffer;
}

// Stores rows [begin, end) of a gradient from its accumulator [end - begin][row_stride(width)];
// does nothing without an accumulator.
template <typename Real>
inline void store_accumulator(const Rows& rows, int64_t begin, int64_t end, int64_t width,
                              const Real* accumulator) {
  if (!accumulator) return;
  const int64_t stride = row_stride<Real>(width);
  for (int64_t r = begin; r < end; ++r)
    write_row(rows, r, width, accumulator + (r - begin) * stride);
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

// Whether a row sees a key. Its lse does not say so if it is the sink of the row.
template <typename Real>
inline bool sees_a_key(const HeadTerms<Real>& terms, const VisibleRows<Real>& visible, int m) {
  alignas(64) Real bias[BLOCK_N] = {};
  const int64_t end = visible.hi[m];
  for (int64_t begin = visible.begin(); begin < end; begin += BLOCK_N) {
    const int64_t count = std::min<int64_t>(BLOCK_N, end - begin);
    if (terms.has_bias()) terms.load_bias_row(visible.first + m, begin, count, bias);
    for (int64_t n = 0; n < count; ++n)
      if (visible.row_sees_key(m, begin + n) && bias[n] != kHidden<Real>) return true;
  }
  return false;
}

// From one read of dout and attended: delta, the gate's gradient rows, and the gated dout, as it is
// and transposed. dlse adds dlse * P to dS = P (dP - delta). delta uses the rounded dout, as the
// products do, so that dP - delta of a row with one key is 0 and not a rounding error.
template <typename Real, typename Operand>
inline void load_output_gradients(BackwardTile<Real, Operand>& tile, const Gate<Real>& gate,
                                  const HeadGradients& gradients,
                                  BackwardScratch<Real, Operand>& scratch) {
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const int64_t padded = round_up(head.Dv, kLanes<Real>), stride = row_stride<Real>(head.Dv);
  Real* dout_rows = staging(tile.dout_rows, scratch.more_rows);
  gather_rows(gradients.dout, visible, head.Dv, dout_rows);
  gather_rows(gradients.attended, visible, head.Dv, scratch.rows);
  alignas(64) Real tokens[BLOCK_M];
  if (gate && !gate.elementwise) gate.tokens(head.b, head.h, visible.first, visible.count, tokens);
  for (int m = 0; m < BLOCK_M; ++m) {
    const int64_t i = visible.first + m;
    const Real lse = visible.sees(m) ? static_cast<const Real*>(gradients.lse)[i] : kHidden<Real>;
    const bool sees =
        lse != kHidden<Real> &&  // masks or bias may hide all its keys
        (lse != static_cast<Real>(head.terms.sink(i)) || sees_a_key(head.terms, visible, m));
    tile.lse[m] = lse == kHidden<Real> ? -kHidden<Real> : lse;
    tile.threshold[m] =
        gradients.threshold && sees ? static_cast<const Real*>(gradients.threshold)[i] : Real(0);
    const bool there = m < visible.count;
    const Real dlse =
        gradients.dlse && there ? static_cast<const Real*>(gradients.dlse)[i] : Real(0);
    tile.delta[m] = 0;
    Real* dout = dout_rows + m * stride;
    const Real* attended = sees ? scratch.rows + m * stride : nullptr;
    if (gradients.dsinks && there)  // the lse of a row that sees nothing is the sink
      static_cast<Real*>(gradients.dsinks)[i] =
          head.terms.sink(i) == kHidden<Real> ? Real(0) : dlse;
    if (gradients.dgate && there)
      store_gate_row(gradients.dgate, gate.elementwise, i, head.Dv, dout, attended);
    if (!sees) continue;
    if (gate.elementwise) {
      Real* values = scratch.row;
      gate.elements(head.b, head.h, i, head.Dv, values);
      for (int64_t w = 0; w < padded; w += kLanes<Real>)
        store<Real>(dout + w, load(dout + w) * load(values + w));
    } else if (gate) {
      for (int64_t w = 0; w < padded; w += kLanes<Real>)
        store<Real>(dout + w, load(dout + w) * tokens[m]);
    }
    // The sink's probability times (0 - delta), before rounding.
    if (gradients.dsinks)
      static_cast<Real*>(gradients.dsinks)[i] =
          -static_cast<Real>(std::exp(head.terms.sink(i) - tile.lse[m])) *
          (dot(dout, attended, padded) - dlse);
    if (gate) round_row<Operand>(dout, padded);
    tile.delta[m] = gradients.delta ? static_cast<const Real*>(gradients.delta)[i]
                                    : dot(dout, attended, padded) - dlse;
  }
  pack_transposed(dout_rows, stride, visible.columns, padded, scratch.rows, tile.dout);
  tile.bad_douts.gather(dout_rows, visible.columns, padded, stride);
  pack_rows(dout_rows, stride, visible.columns, padded, tile.dout_rows);
}

// sum[n][w] += weights[n][m] * rows[m][w] over the query rows m, for the columns: dS times queries,
// or P times dout; `left` is the packed weights. Matrix rows are row_stride(width) apart.
template <typename Real, typename Operand>
inline void add_weighted_queries(const Real* weights, const Left<Operand, false>& left,
                                 const Operand* rows, const SetAside<Real>& aside, int64_t width,
                                 Range columns, const KeySpan& keys, const Head<Real>& head,
                                 const VisibleRows<Real>& visible, Real* sum) {
  const int64_t stride = row_stride<Real>(width);
  const int64_t end = round_up(columns.end, kLanes<Real>);
  multiply(keys.count(), end - columns.begin, visible.columns / kNumbers<Operand>, left,
           rows + columns.begin, stride, sum + columns.begin, stride, true);
  for (int bad = 0; bad < aside.count; ++bad) {
    const int m = aside.index[bad];
    for (int n = 0; n < keys.count(); ++n)
      if (head.adds(visible, m, keys.begin + n, weights + n * BLOCK_M + m))
        for (int64_t w = columns.begin; w < end; ++w)
          sum[n * stride + w] += weights[n * BLOCK_M + m] * aside.rows[bad * stride + w];
  }
}

// The tile's rows of dQ; rows that see nothing are 0.
template <typename Real, typename Operand>
inline void store_dquery(const Rows& dquery, const BackwardTile<Real, Operand>& tile, Real* rows) {
  const int64_t D = tile.head.D, padded = round_up(D, kLanes<Real>), stride = row_stride<Real>(D);
  transpose(tile.dquery, BLOCK_M, rows, stride, padded, tile.visible.columns);
  for (int m = 0; m < tile.visible.count; ++m) {
    const int64_t i = tile.visible.first + m;
    if (tile.visible.sees(m)) {
      write_row(dquery, i, D, rows + m * stride);
    } else {
      store_zeros<Real>(dquery, i, 1, D);
    }
  }
}

// Scores of a pair of tiles to probabilities, in place; slopes of entmax in scratch.slopes. Hidden
// pairs and lanes without a row become 0, because the sums over query rows include all lanes.
// `hiding` is the bias of the tile if it hides a pair, else null. False if all are 0.
template <typename Real, typename Operand>
inline bool probabilities(const BackwardTile<Real, Operand>& tile, const KeySpan& keys,
                          const Real* hiding, Real factor,
                          BackwardScratch<Real, Operand>& scratch) {
  const VisibleRows<Real>& visible = tile.visible;
  const int columns = visible.columns;
  const bool all_visible = keys.full && visible.all_rows;
  if (tile.head.order != Real(0)) {  // where the bias hides a pair, its score is -inf
    if (!all_visible) hide(scratch.scores, keys, visible, columns);
    subtract_top(tile.lse, keys.count(), columns, scratch.scores);
    return entmax(tile.head.order, tile.threshold, keys.count(), columns, scratch.scores,
                  scratch.slopes)
        .any;
  }
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
  return true;
}

// dS times `scale` from dP, in place, after `probabilities`.
template <typename Real, typename Operand>
inline void score_gradients(const BackwardTile<Real, Operand>& tile, Real scale,
                            const KeySpan& keys, const Real* hiding,
                            BackwardScratch<Real, Operand>& scratch) {
  const VisibleRows<Real>& visible = tile.visible;
  const bool sparse = tile.head.order != Real(0);
  const bool all_visible = keys.full && visible.all_rows;
  const Real* const slopes = sparse ? scratch.slopes : scratch.scores;
  for (int n = 0; n < keys.count(); ++n) {
    for (int m = 0; m < visible.columns; m += kLanes<Real>) {
      const int at = n * BLOCK_M + m;
      const Vec<Real> slope = load(slopes + at);
      Vec<Real> ds = slope * (load(scratch.dprobs + at) - load(tile.delta + m)) * scale;
      if (sparse) {  // NaN of a value outside of the support
        ds = slope == Real(0) ? Vec<Real>{} : ds;
      } else {
        if (!all_visible) ds = visible.lanes_that_see(m, keys.begin + n) ? ds : Vec<Real>{};
        if (hiding) ds = load(hiding + at) != kHidden<Real> ? ds : Vec<Real>{};
      }
      store<Real>(scratch.dprobs + at, ds);
    }
  }
}

// P and dS times `scale` of a pair of tiles in one pass, packed for the three products that they
// are factors of; `keep`: also as numbers, in place of scores and dP. In scratch.weights, dS comes
// after `first` keys of weight 0. kWhole: none of these, an even number of keys, no pair is hidden,
// and the columns are whole vectors of pairs.
template <bool kWhole>
inline void pack_weights(const BackwardTile<float, Pair>& tile, float factor, float scale,
                         const KeySpan& keys, int64_t first, const float* hiding, bool keep,
                         const BackwardScratch<float, Pair>& scratch) {
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
          p[v] = exp_of_score<Pair>(rounded_product<float>(load(scratch.scores + at) * factor) -
                                    load(tile.lse + lane));
          ds[v] = p[v] * (load(scratch.dprobs + at) - load(tile.delta + lane)) * scale;
          if (kWhole) continue;
          if (!all_visible) {
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

inline void pack_weights(const BackwardTile<float, Pair>& tile, float factor, float scale,
                         const KeySpan& keys, int64_t first, const float* hiding, bool keep,
                         const BackwardScratch<float, Pair>& scratch) {
  const VisibleRows<float>& visible = tile.visible;
  const bool whole = first == 0 && !hiding && !keep && keys.full && visible.all_rows &&
                     keys.count() % 2 == 0 && visible.columns % (2 * kLanes<float>) == 0;
  whole ? pack_weights<true>(tile, factor, scale, keys, 0, nullptr, false, scratch)
        : pack_weights<false>(tile, factor, scale, keys, first, hiding, keep, scratch);
}

// Runs the backward loop of `count` tiles over the keys [range.begin, range.end): adds to the
// gradients of the keys, and to `dquery` of the tiles for `dquery_features` (empty: no dquery).
template <typename Real, typename Operand>
inline void attend_backward(BackwardTile<Real, Operand>* tiles, int64_t count,
                            const DropoutParams& dropout, Real scale, const KeySpan& range,
                            Ranges dquery_features, const KeyGradients<Real>& gradients,
                            BackwardScratch<Real, Operand>& scratch) {
  const TileUnit<Operand> unit;
  const bool with_raw = gradients.dkey || gradients.dcontent_bias || !dquery_features.empty();
  const bool with_dscores = with_raw || gradients.bias;
  for_visible_pairs(
      tiles, count, range,
      [&](BackwardTile<Real, Operand>& tile, const KeySpan& window, KeySpan keys) {
        const Head<Real>& head = tile.head;
        const int columns = tile.visible.columns;
        const int64_t offset = keys.begin - gradients.begin;
        const bool sloped = with_raw && head.terms.cap != Real(0);
        const auto [any, hiding, factor] =
            score_tile(head, tile.query, tile.visible, keys,
                       scratch.key.rows(head.key, window, keys), scratch, sloped);
        if (!any) return;
        if (hiding || head.order != Real(0)) keys.full = false;
        Left<Operand, false> probs = rows_of(scratch.probs_packed, BLOCK_M / 2);
        Left<Operand, false> dscores = rows_of(scratch.dscores_packed, BLOCK_M / 2);
        const auto multiply_values = [&] {
          multiply(keys.count(), columns, ceil_div(head.Dv, kNumbers<Operand>),
                   scratch.value.rows(head.value, window, keys), tile.dout, BLOCK_M, scratch.dprobs,
                   BLOCK_M, false);
        };
        const bool at_once = kNumbers<Operand> == 2 && with_raw && !dropout.active && !sloped &&
                             !gradients.bias && head.order == Real(0);
        if constexpr (kNumbers<Operand> == 2) {
          if (at_once) {
            multiply_values();
            bool keep = tile.bad_queries.count || tile.bad_douts.count || gradients.dcontent_bias;
            int64_t first = 0;
            if (!dquery_features.empty()) {
              const auto summands =
                  scratch.key.summands(head.key, window, keys, *dquery_features.begin());
              first = summands.first;
              keep = keep || !summands.aside->empty();
            }
            pack_weights(tile, factor, scale, keys, first, hiding, keep, scratch);
          }
        }
        if (!at_once) {
          if (!probabilities(tile, keys, hiding, factor, scratch)) return;
          if (with_dscores) multiply_values();
          if (dropout.active) {
            std::memcpy(scratch.dropped, scratch.scores, sizeof(Real) * BLOCK_M * keys.count());
            drop(dropout, head.b, head.h, keys, tile.visible.first, columns,
                 static_cast<Real>(dropout.keep_scale), scratch.dropped, scratch.dprobs);
          }
          if (with_dscores)
            score_gradients(tile, gradients.bias ? Real(1) : scale, keys, hiding, scratch);
          if (gradients.bias)
            gradients.bias.add(scratch.dprobs, tile.visible, keys, scratch.bias_rows);
          if (sloped || (gradients.bias && with_raw))
            for (int n = 0; n < keys.count(); ++n)
              for (int m = n * BLOCK_M; m < n * BLOCK_M + columns; m += kLanes<Real>) {
                Vec<Real> draw = load(scratch.dprobs + m);
                if (gradients.bias) draw *= scale;
                if (sloped)  // the slope of a hidden pair may be NaN
                  draw = draw == Real(0) ? draw : draw * load(scratch.slope + m);
                store<Real>(scratch.dprobs + m, draw);
              }
          probs = left_operand(dropout.active ? scratch.dropped : scratch.scores, keys.count(),
                               columns, scratch.probs_packed);
          dscores = left_operand(scratch.dprobs, keys.count(), columns, scratch.dscores_packed);
        }
        if (gradients.dvalue)
          add_weighted_queries(dropout.active ? scratch.dropped : scratch.scores, probs,
                               tile.dout_rows, tile.bad_douts, head.Dv, Range{0, head.Dv}, keys,
                               head, tile.visible,
                               gradients.dvalue + offset * row_stride<Real>(head.Dv));
        if (gradients.dkey)
          for (const Range& features : head.features)
            add_weighted_queries(scratch.dprobs, dscores, tile.query_rows, tile.bad_queries, head.D,
                                 features, keys, head, tile.visible,
                                 gradients.dkey + offset * row_stride<Real>(head.D));
        if (gradients.dcontent_bias)
          for (int n = 0; n < keys.count(); ++n) {
            Vec<Real> sum{};
            for (int m = 0; m < columns; m += kLanes<Real>)
              sum += load(scratch.dprobs + n * BLOCK_M + m);
            gradients.dcontent_bias[offset + n] += sum_lanes<Real>(sum);
          }
        for (const Range& features : dquery_features)
          add_weighted_keys(scratch.key, head.key, window, keys, features, head, tile.visible,
                            scratch.dprobs, at_once, scratch, tile.dquery, true);
      });
}

// The gate's gradient rows of a closed head, whose output the forward pass did not compute.
template <typename Real, typename Operand>
inline void closed_gate_rows(QueryTile<Real, Operand>& tile, const DropoutParams& dropout,
                             const HeadGradients& gradients,
                             BackwardScratch<Real, Operand>& scratch) {
  const VisibleRows<Real>& visible = tile.visible;
  const int64_t Dv = tile.head.Dv, padded = round_up(Dv, kLanes<Real>);
  const int64_t stride = row_stride<Real>(Dv);
  Real* dout_rows = scratch.more_rows;
  attend_all(&tile, 1, dropout, scratch);
  transpose(tile.out, BLOCK_M, scratch.rows, stride, padded, visible.columns);
  gather_rows(gradients.dout, visible, Dv, dout_rows);
  for (int m = 0; m < visible.count; ++m) {
    const bool sees = visible.sees(m) && tile.softmax.sum[m] != Real(0);
    Real* row = scratch.rows + m * stride;
    if (sees) {
      const Normalisation<Real> norm(tile.softmax.reference[m], tile.softmax.sum[m],
                                     dropout.keep_scale, tile.head.terms, visible.first + m);
      for (int64_t w = 0; w < padded; w += kLanes<Real>)
        store<Real>(row + w, load(row + w) * norm.factor);
      for (int64_t w = Dv; w < padded; ++w) row[w] = 0;
    }
    store_gate_row<Real>(gradients.dgate, false, visible.first + m, Dv, dout_rows + m * stride,
                         sees ? row : nullptr);
  }
}

// Loads the tile's query rows, times `mixing` [D] unless it is null.
template <typename Real, typename Operand>
inline void load_queries(BackwardTile<Real, Operand>& tile, const Rows& query, const Real* mixing,
                         BackwardScratch<Real, Operand>& scratch) {
  const int64_t D = tile.head.D, padded = round_up(D, kLanes<Real>), stride = row_stride<Real>(D);
  const int columns = tile.visible.columns;
  if constexpr (kNumbers<Operand> == 2) {
    Pair* words = reinterpret_cast<Pair*>(scratch.rows);
    if (!mixing) gather_words(query, tile.visible, D, words);
    if (!mixing && couple_rows(words, stride, columns, padded, tile.query_rows)) {
      tile.bad_queries.count = 0;
      return;
    }
  }
  Real* rows = staging(tile.query_rows, scratch.rows);
  gather_rows(query, tile.visible, D, rows);
  if (mixing)
    for (int m = 0; m < columns; ++m)
      for (int64_t d = 0; d < D; ++d) rows[m * stride + d] *= mixing[d];
  tile.bad_queries.gather(rows, columns, padded, stride);
  pack_rows(rows, stride, columns, padded, tile.query_rows);
}

// Prepares everything in a query tile except `query_rows`, and stores its rows of the gate's
// gradient. Returns false if the head or all rows are closed, or no row sees a key.
template <typename Real, typename Operand, typename Operator>
inline bool prepare_tile(const Operator& op, bool closed_grad, const HeadGradients& gradients,
                         BackwardTile<Real, Operand>& tile,
                         BackwardScratch<Real, Operand>& scratch) {
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const bool closed = op.gate.closed(head.b, head.h);
  const bool skipped =
      closed ||
      (op.skips_rows && op.gate.closed_rows(head.b, head.h, visible.first, visible.count));
  if (skipped && gradients.dsinks)
    std::fill_n(static_cast<Real*>(gradients.dsinks) + visible.first, visible.count, Real(0));
  if (skipped && !gradients.dgate) return false;
  if (skipped && !(closed_grad && visible.any)) {
    std::fill_n(static_cast<Real*>(gradients.dgate) + visible.first, visible.count, Real(0));
    return false;
  }
  if (visible.any) op.pack(head.b, head.h, visible, scratch.rows, tile.query);
  if (closed) {
    closed_gate_rows(tile, op.params.dropout, gradients, scratch);
    return false;
  }
  load_output_gradients(tile, op.gate, gradients, scratch);
  std::memset(tile.dquery, 0, sizeof(Real) * BLOCK_M * round_up(head.D, kLanes<Real>));
  return visible.any;
}

}  // namespace hk::HK_LEVEL
