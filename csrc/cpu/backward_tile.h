// A tile of query rows in the backward pass: its memory, how it is loaded, and the gradients of its own rows.
// `attend_backward.h` has the loop over the keys.
#pragma once

#include "cpu/entmax.h"
#include "cpu/entmax_attend.h"

namespace hk::HK_LEVEL {

// Rows of a query tile that contain NaN or infinity, stored separately so that they reach only the keys they see.
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

// The backward state of a tile of query rows; `out` is used for closed heads only.
template <typename Real, typename Operand>
struct BackwardTile : QueryTile<Real, Operand> {
  Operand* query_rows;  // [64][D] unscaled, mixed
  Operand* dout_rows;   // [64][Dv] gated
  Operand* dout;        // [Dv][64] the same transposed, in the memory of `out`
  Real* dquery;         // [D][64]
  SetAside<Real> bad_queries, bad_douts;
  alignas(64) Real lse[BLOCK_M];    // +inf where a row sees nothing, so that its probabilities are 0
  alignas(64) Real delta[BLOCK_M];  // rowsum(dout * out)

  static constexpr int64_t kRows = BLOCK_M / kNumbers<Operand>;
  // What the loop over the keys reads and writes of a tile whose rows are finite.
  static int64_t cached_bytes(const Attention<Real, Operand>& op) {
    return buffer_bytes<BackwardTile>(1) + QueryTile<Real, Operand>::bytes(op) +
           buffer_bytes<Operand>(row_stride<Operand>(op.D) * kRows) +
           buffer_bytes<Operand>(row_stride<Operand>(op.Dv) * kRows) +
           buffer_bytes<Real>(round_up(op.D, kLanes<Real>) * BLOCK_M);
  }
  static int64_t bytes(const Attention<Real, Operand>& op) {
    return cached_bytes(op) + buffer_bytes<Real>(row_stride<Real>(op.D) * BLOCK_M) +
           buffer_bytes<Real>(row_stride<Real>(op.Dv) * BLOCK_M);
  }
  BackwardTile(Workspace& w, const Attention<Real, Operand>& op, int64_t b, int64_t h, const VisibleRows<Real>& visible)
      : QueryTile<Real, Operand>(w, op, b, h, visible),
        query_rows(w.take<Operand>(row_stride<Operand>(op.D) * kRows)),
        dout_rows(w.take<Operand>(row_stride<Operand>(op.Dv) * kRows)),
        dout(reinterpret_cast<Operand*>(this->out)),
        dquery(w.take<Real>(round_up(op.D, kLanes<Real>) * BLOCK_M)) {
    bad_queries.rows = w.take<Real>(row_stride<Real>(op.D) * BLOCK_M);
    bad_douts.rows = w.take<Real>(row_stride<Real>(op.Dv) * BLOCK_M);
  }
};

// The keys of a pair of tiles that have a probability with entmax, with their scores, relative to the largest of the
// row, and with a cap its derivatives, both [count][64]. Scores become probabilities in place.
template <typename Real>
struct NearTile {
  KeySpan keys;  // of the tile
  Real *scores, *slopes;
  int count;
  uint8_t places[BLOCK_N];  // in the tile; ascending

  KeySpan span() const { return {0, count, true}; }
  int64_t key(int64_t i) const { return keys.begin + places[i]; }
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
  // For entmax alone: the near keys of a query tile, the slopes of their cap, and their rows.
  NearTile<Real>* near_tiles;  // [tiles of keys]
  Real* kept_slopes;           // [tiles of keys][64][64]; empty without a cap
  Panel<Operand> near_keys;

  static int64_t bytes(const Attention<Real, Operand>& op) { return bytes_of<BackwardScratch>(op, int64_t{1}); }
  BackwardScratch(Workspace& w, const Attention<Real, Operand>& op, int64_t tiles)
      : TileScratch<Real, Operand>(w, op, tiles),
        more_rows(w.take<Real>(BLOCK_M * this->width(op))),
        dprobs(w.take<Real>(BLOCK_N * BLOCK_M)),
        dropped(w.take<Real>(BLOCK_N * BLOCK_M)),
        slopes(w.take<Real>(BLOCK_N * BLOCK_M)),
        probs_packed(w.take<Operand>(this->kWeights)),
        dscores_packed(w.take<Operand>(this->kWeights)),
        near_tiles(w.take<NearTile<Real>>(op.kept_tiles)),
        kept_slopes(w.take<Real>((op.params.terms.softcap != 0.0 ? op.kept_tiles : 0) * BLOCK_N * BLOCK_M)),
        near_keys(w, op.kept_tiles > 0 ? op.D : 0, false) {}
};

// Inputs and gradients of one head in the backward pass, besides its `Head`.
template <typename Real>
struct HeadGradients {
  Rows dout;              // [T][Dv]
  Rows attended;          // [T][Dv]
  const Real* lse;        // [T]; entmax: the largest score
  const Real* threshold;  // [T] of entmax, above the largest score; null for softmax
  const Real* dlse;       // [T]; null: 0
  const Real* delta;      // [T]; null: rowsum(dout * attended) - dlse
  Real* dgate;            // [T] or [T][Dv]; null if not requested
  Real* dsinks;           // [T]; null if not requested
};

// The `HeadGradients` of head (b, h); dgate and dsinks are null unless `with_rows`.
template <typename Real, typename Operand>
inline HeadGradients<Real> head_gradients(const Attention<Real, Operand>& op, const BackwardParams& p, int64_t b,
                                          int64_t h, bool with_rows) {
  const int64_t row = (b * op.H + h) * op.T, width = op.gate.elementwise ? op.Dv : 1;
  return {op.head_rows(p.dout, b, h),
          op.head_rows(p.attended, b, h),
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

// Stores rows [begin, end) of a gradient from its accumulator [end - begin][row_stride(width)]; does nothing without an
// accumulator.
template <typename Real>
inline void store_accumulator(const Rows& rows, int64_t begin, int64_t end, int64_t width, const Real* accumulator) {
  if (!accumulator) return;
  const int64_t stride = row_stride<Real>(width);
  for (int64_t r = begin; r < end; ++r) write_row(rows, r, width, accumulator + (r - begin) * stride);
}

template <typename Real>
inline Real dot(const Real* a, const Real* b, int64_t padded) {
  Vec<Real> sum{};
  for (int64_t i = 0; i < padded; i += kLanes<Real>) sum += load(a + i) * load(b + i);
  return sum_lanes<Real>(sum);
}

// Gradient rows of the gate: dout * attended, summed over the width unless the gate is elementwise.
template <typename Real>
inline void store_gate_row(Real* dgate, bool elementwise, int64_t i, int64_t Dv, const Real* dout,
                           const Real* attended) {
  if (!elementwise) {
    dgate[i] = attended ? dot(dout, attended, round_up(Dv, kLanes<Real>)) : Real(0);
    return;
  }
  for (int64_t w = 0; w < Dv; ++w) dgate[i * Dv + w] = attended ? dout[w] * attended[w] : Real(0);
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

// From one read of dout and attended: delta, the gate's gradient rows, and the gated dout, as it is and transposed.
// dlse adds dlse * P to dS = P (dP - delta). delta uses the rounded dout, as the products do, so that dP - delta of a
// row with one key is 0 and not a rounding error.
template <typename Real, typename Operand>
inline void load_output_gradients(BackwardTile<Real, Operand>& tile, const Gate<Real>& gate,
                                  const HeadGradients<Real>& gradients, BackwardScratch<Real, Operand>& scratch) {
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const int64_t padded = round_up(head.Dv, kLanes<Real>), stride = row_stride<Real>(head.Dv);
  Real* dout_rows = staging(tile.dout_rows, scratch.more_rows);
  gather_rows(gradients.dout, visible, head.Dv, dout_rows);
  gather_rows(gradients.attended, visible, head.Dv, scratch.rows);
  alignas(64) Real tokens[BLOCK_M] = {};
  if (gate && !gate.elementwise) gate.tokens(head.b, head.h, visible.first, visible.count, tokens);
  for (int m = 0; m < BLOCK_M; ++m) {
    const int64_t i = visible.first + m;
    const Real lse = visible.sees(m) ? gradients.lse[i] : kHidden<Real>;
    const bool sees = lse != kHidden<Real> &&  // masks or bias may hide all its keys
                      (lse != static_cast<Real>(head.terms.sink(i)) || sees_a_key(head.terms, visible, m));
    tile.lse[m] = sees ? lse : -kHidden<Real>;
    tile.threshold[m] = gradients.threshold && sees ? gradients.threshold[i] : Real(0);
    const bool there = m < visible.count;
    const Real dlse = gradients.dlse && there ? gradients.dlse[i] : Real(0);
    tile.delta[m] = 0;
    Real* dout = dout_rows + m * stride;
    const Real* attended = sees ? scratch.rows + m * stride : nullptr;
    if (gradients.dsinks && there)  // the lse of a row that sees nothing is the sink
      gradients.dsinks[i] = head.terms.sink(i) == kHidden<Real> ? Real(0) : dlse;
    if (gradients.dgate && there) store_gate_row(gradients.dgate, gate.elementwise, i, head.Dv, dout, attended);
    if (!sees) continue;
    if (gate) gate.apply(head.b, head.h, i, head.Dv, tokens[m], dout, scratch.row);
    // The sink's probability times (0 - delta), before rounding.
    if (gradients.dsinks)
      gradients.dsinks[i] =
          -static_cast<Real>(std::exp(head.terms.sink(i) - tile.lse[m])) * (dot(dout, attended, padded) - dlse);
    if (gate) round_row<Operand>(dout, padded);
    tile.delta[m] = gradients.delta ? gradients.delta[i] : dot(dout, attended, padded) - dlse;
  }
  pack_transposed(dout_rows, stride, visible.columns, padded, scratch.rows, tile.dout);
  tile.bad_douts.gather(dout_rows, visible.columns, padded, stride);
  pack_rows(dout_rows, stride, visible.columns, padded, tile.dout_rows);
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

// The gate's gradient rows of a closed head, whose output the forward pass did not compute.
template <typename Real, typename Operand>
inline void closed_gate_rows(QueryTile<Real, Operand>& tile, const DropoutParams& dropout,
                             const HeadGradients<Real>& gradients, BackwardScratch<Real, Operand>& scratch) {
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
      const Normalisation<Real> norm(tile.softmax.reference[m], tile.softmax.sum[m], dropout.keep_scale,
                                     tile.head.terms, visible.first + m);
      for (int64_t w = 0; w < padded; w += kLanes<Real>) store<Real>(row + w, load(row + w) * norm.factor);
      for (int64_t w = Dv; w < padded; ++w) row[w] = 0;
    }
    store_gate_row(gradients.dgate, false, visible.first + m, Dv, dout_rows + m * stride, sees ? row : nullptr);
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

// Prepares everything in a query tile except `query_rows`, and stores its rows of the gate's gradient; `pack` fills
// `tile.query`. Returns false if the head or all rows are closed, or no row sees a key.
template <typename Real, typename Operand, typename Pack>
inline bool prepare_tile(const Attention<Real, Operand>& op, const HeadGradients<Real>& gradients,
                         BackwardTile<Real, Operand>& tile, BackwardScratch<Real, Operand>& scratch, Pack pack) {
  const Head<Real>& head = tile.head;
  const VisibleRows<Real>& visible = tile.visible;
  const bool closed = op.gate.closed(head.b, head.h);
  const bool skipped = closed || (op.skips_rows && op.gate.closed_rows(head.b, head.h, visible.first, visible.count));
  if (skipped && gradients.dsinks) std::fill_n(gradients.dsinks + visible.first, visible.count, Real(0));
  if (skipped && !gradients.dgate) return false;
  if (skipped && (op.skips_closed || !visible.any)) {
    std::fill_n(gradients.dgate + visible.first, visible.count, Real(0));
    return false;
  }
  if (visible.any) pack();
  if (closed) {
    closed_gate_rows(tile, op.params.dropout, gradients, scratch);
    return false;
  }
  load_output_gradients(tile, op.gate, gradients, scratch);
  std::memset(tile.dquery, 0, sizeof(Real) * BLOCK_M * round_up(head.D, kLanes<Real>));
  return visible.any;
}

template <typename Real, typename Operand>
inline bool prepare_tile(const Attention<Real, Operand>& op, const HeadGradients<Real>& gradients,
                         BackwardTile<Real, Operand>& tile, BackwardScratch<Real, Operand>& scratch) {
  return prepare_tile(op, gradients, tile, scratch,
                      [&] { op.pack(tile.head.b, tile.head.h, tile.visible, scratch.rows, tile.query); });
}

}  // namespace hk::HK_LEVEL
