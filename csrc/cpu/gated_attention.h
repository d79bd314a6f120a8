// Gated attention on the CPU: the assignment of tiles to threads. The tiles are those of attend.h.
#pragma once

#include <memory>

#include "cpu/bias_backward.h"
#include "cpu/decode.h"
#include "cpu/forward.h"

namespace hk::HK_LEVEL {

template <typename Real, typename Operand>
struct GatedAttention {
  const AttentionParams& params;
  Gate<Real> gate;
  bool skips_closed = true;  // whether closed heads are not computed
  bool skips_rows = false;   // whether the backward pass skips tiles whose rows are all closed
  int64_t B, H, Hk, T, S, D, Dv, query_tiles;
  int64_t heads_per_key;      // query heads that share a key head
  int64_t kept_tiles;         // tiles of scores that entmax keeps of a query tile
  Range features;             // all
  std::vector<Real> factors;  // of the D features of a query
  Real scale;                 // of raw products
  BiasImage<Real> image;

  explicit GatedAttention(const AttentionParams& p)
      : params(p),
        gate(p.gate, p.activation),
        B(p.query.size[0]),
        H(p.query.size[1]),
        Hk(p.key.size[1]),
        T(p.query.size[2]),
        S(p.key.size[2]),
        D(p.query.size[3]),
        Dv(p.value ? p.value.size[3] : 1),
        query_tiles(ceil_div(T, BLOCK_M)),
        heads_per_key(Hk ? std::max<int64_t>(1, H / Hk) : 1),
        kept_tiles(p.alpha ? ceil_div(S, BLOCK_N) : 0),
        features{0, D},
        factors(D, kScaledQuery<Operand> ? static_cast<Real>(p.scale) : Real(1)),
        scale(static_cast<Real>(p.scale)),
        image(p, B, H, T, S) {}

  Head<Real> head(int64_t b, int64_t h) const {
    return {b,
            h,
            head_rows(*this, params.key, b, h, heads_per_key),
            head_rows(*this, params.value, b, h, heads_per_key),
            Rows{},
            scale,
            D,
            Dv,
            Ranges{&features, 1},
            image.terms(params.terms, b, h, T),
            order(h)};
  }

  Real order(int64_t h) const {
    return params.alpha ? static_cast<const Real*>(params.alpha.data)[h] - Real(1) : Real(0);
  }

  Rows query_rows(int64_t b, int64_t h) const { return head_rows(*this, params.query, b, h); }
  const Real* factors_of(int64_t) const { return factors.data(); }

  // The query tile of head h; `rows` is scratch.
  void pack(int64_t b, int64_t h, const VisibleRows<Real>& visible, Real* rows, Operand* query) const {
    pack_query(query_rows(b, h), visible, {&features, 1}, kScaledQuery<Operand> ? factors_of(h) : nullptr, rows, query);
  }

  int64_t multiply_adds() const { return B * H * T * S * (D + Dv); }
};

template <typename Real, typename Operand>
void gated_attention_forward(const ForwardParams& params) {
  const GatedAttention<Real, Operand> op(params);
  if (few_rows(params) && !params.alpha) return decode<Operand>(params, op);
  attention_forward<Real, Operand>(params, op);
}

template <typename Real, typename Operand>
struct GatedAttentionBackward : GatedAttention<Real, Operand> {
  const BackwardParams& backward;

  explicit GatedAttentionBackward(const BackwardParams& p) : GatedAttention<Real, Operand>(p), backward(p) {
    this->skips_closed = !p.closed_grad;
    this->skips_rows = !(p.closed_grad && p.dgate) && !p.dlse;
  }

  // Whether a tile has a dQ other than 0.
  bool computes(const TilePlace& at, const VisibleRows<Real>& visible) const {
    return visible.any && !this->gate.closed(at.b, at.h) &&
           !(this->skips_rows && this->gate.closed_rows(at.b, at.h, at.first_row, visible.count));
  }

  // Accumulators of dK and dV of `keys` keys.
  int64_t accumulator_bytes(int64_t keys) const {
    return buffer_bytes<Real>(keys * row_stride<Real>(this->D)) + buffer_bytes<Real>(keys * row_stride<Real>(this->Dv));
  }

  // Query tiles of an item against keys `range`. `with_rows`: also computes dQ, dgate, dsinks and dalpha of the tiles,
  // and `centers` of entmax unless they are null; `range` is then all keys.
  void tiles_backward(const WorkItems& items, int64_t item, const KeySpan& range, bool with_rows,
                      const KeyGradients<Real>& keys, Real* centers, BackwardScratch<Real, Operand>& scratch,
                      Workspace& workspace) const {
    const BackwardParams& p = backward;
    const bool with_dquery = with_rows && p.dquery;
    Real* const dalpha = with_rows ? static_cast<Real*>(p.dalpha.data) : nullptr;
    const bool pairs = keys.dkey || keys.dvalue || keys.bias || with_dquery || centers || dalpha;
    const size_t mark = workspace.mark();
    auto* tiles = workspace.take_objects<BackwardTile<Real, Operand>>(items.size);
    int64_t count = 0;
    const Range places = items.tiles(item);
    for (int64_t i = places.begin; i < places.end; ++i) {
      const TilePlace at = items.place(i);
      const VisibleRows<Real> visible(p.mask, at.b, at.h, at.first_row, this->T, this->S);
      if (!with_rows && !visible.meets(range)) continue;
      if (with_dquery && !computes(at, visible))
        store_zeros<Real>(rows_at(p.dquery, at.b, at.h), at.first_row, visible.count, this->D);
      const HeadGradients gradients = head_gradients<Real>(*this, p, at.b, at.h, with_rows);
      BackwardTile<Real, Operand>& tile =
          *new (tiles + count) BackwardTile<Real, Operand>(workspace, *this, at.b, at.h, visible);
      if (!prepare_tile(*this, p.closed_grad, gradients, tile, scratch) || !pairs) continue;
      load_queries<Real>(tile, this->query_rows(at.b, at.h), nullptr, scratch);
      ++count;
    }
    attend_all_backward(tiles, count, p, static_cast<Real>(p.scale), range, Ranges{&this->features, with_dquery}, keys,
                        centers, dalpha, scratch);
    if (with_dquery)
      for (int64_t i = 0; i < count; ++i)
        store_dquery(head_rows(*this, p.dquery, tiles[i].head.b, tiles[i].head.h), tiles[i], scratch.rows);
    workspace.rewind(mark);
  }

  // dK and dV of keys `range` of a key head, summed over its query heads in order; adds the gradient of their bias to
  // `bias`.
  void key_head(const WorkItems& items, int64_t index, const KeySpan& range, bool with_rows,
                const BiasGradient<Real>& bias, Workspace& workspace) const {
    BackwardScratch<Real, Operand> scratch(workspace, *this, this->Dv, items.size);
    KeyGradients<Real> keys{range.begin, nullptr, nullptr, nullptr, bias};
    if (backward.dkey) keys.dkey = zeros<Real>(workspace, range.count() * row_stride<Real>(this->D));
    if (backward.dvalue) keys.dvalue = zeros<Real>(workspace, range.count() * row_stride<Real>(this->Dv));
    for (int64_t part = 0; part < items.parts; ++part)
      tiles_backward(items, index * items.parts + part, range, with_rows, keys, nullptr, scratch, workspace);
    const int64_t b = index / this->Hk, hk = index % this->Hk;
    store_accumulator(rows_at(backward.dkey, b, hk), range.begin, range.end, this->D, keys.dkey);
    store_accumulator(rows_at(backward.dvalue, b, hk), range.begin, range.end, this->Dv, keys.dvalue);
  }
};

// Whether `items` divide well among the threads: the idle time costs no more than the seven products per pair of tiles
// that split items need instead of five.
inline bool divide_well(int64_t items, int threads) { return 5 * round_up(items, threads) <= 7 * items; }

// If key heads divide well among the threads, one thread processes a whole key head: five products per pair of tiles.
// Otherwise the keys of a head are split for dK and dV, and a separate pass over query tiles computes dQ: seven
// products, bitwise the same result. The gradient of a dense bias is summed in the same loop if one thread can process
// all heads that share an entry, otherwise in a separate pass.
template <typename Real, typename Operand>
void gated_attention_backward(const BackwardParams& given) {
  BackwardParams params(given);
  const GatedAttentionBackward<Real, Operand> op(params);
  const int64_t rows = op.B * op.H * op.T;
  if (params.dalpha) std::fill_n(static_cast<Real*>(params.dalpha.data), rows, Real(0));
  const int64_t heads = op.B * op.Hk, work = 5 * op.multiply_adds() / 2;
  const int64_t tile_bytes = BackwardTile<Real, Operand>::bytes(op);
  const WorkItems whole(op, tiles_in_cache(BackwardTile<Real, Operand>::cached_bytes(op)), 1);
  const int64_t bytes = BackwardScratch<Real, Operand>::bytes(op, op.Dv) + whole.size * tile_bytes;
  const BiasEntries bias(params);
  // Not if it broadcasts over rows: the order of its sums would depend on the tiles of a work item.
  const bool on_the_way = params.dbias && params.dbias.size[3] != 1 && op.heads_per_key == 1 && op.S > 0;
  if (on_the_way && divide_well(bias.count(), params.threads)) {
    parallel_for(bias.count(), params.threads, work, bytes + op.accumulator_bytes(op.S),
                 [&](int64_t entry, Workspace& w) {
                   const BiasGradient<Real> sums = bias.cleared<Real>(entry, 0, op.T);
                   bias.for_readers(entry, op.B, op.H, [&](int64_t b, int64_t h) {
                     const size_t mark = w.mark();
                     op.key_head(whole, b * op.H + h, {0, op.S}, true, sums, w);
                     w.rewind(mark);
                   });
                 });
    return;
  }
  bias_backward<Real, Operand>(op, params);
  const bool of_keys = params.dkey || params.dvalue;
  const bool of_rows = params.dquery || params.dgate || params.dsinks || params.dalpha;
  if (!of_keys && !of_rows) return;
  if (op.S == 0 || divide_well(heads, params.threads)) {
    parallel_for(heads, params.threads, work, bytes + op.accumulator_bytes(op.S),
                 [&](int64_t item, Workspace& w) { op.key_head(whole, item, {0, op.S}, true, {}, w); });
    return;
  }
  // A part of the keys does not suffice for the centers of entmax.
  const std::unique_ptr<Real[]> centers(params.alpha && params.dkey ? new Real[rows]() : nullptr);
  if (of_rows || centers) {
    const WorkItems items(op, tiles_in_cache(BackwardTile<Real, Operand>::cached_bytes(op)),
                          kItemsPerThread * params.threads);
    parallel_for(items.count(), params.threads, work, bytes, [&](int64_t item, Workspace& w) {
      BackwardScratch<Real, Operand> scratch(w, op, op.Dv, items.size);
      op.tiles_backward(items, item, {0, op.S}, true, KeyGradients<Real>{}, centers.get(), scratch, w);
    });
  }
  if (!of_keys) return;
  params.delta = centers.get();
  const int64_t windows = ceil_div(op.S, BLOCK_N);
  const int64_t parts = std::min(windows, ceil_div(2 * params.threads, heads));
  const int64_t keys = ceil_div(windows, parts) * BLOCK_N;
  parallel_for(heads * parts, params.threads, work, bytes + op.accumulator_bytes(keys),
               [&](int64_t item, Workspace& w) {
                 const int64_t begin = std::min(op.S, item % parts * keys);
                 op.key_head(whole, item / parts, {begin, std::min(op.S, begin + keys)}, false, {}, w);
               });
}

}  // namespace hk::HK_LEVEL
