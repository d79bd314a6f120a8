// The backward pass of gated attention: the assignment of tiles to threads.
#pragma once

#include <memory>

#include "cpu/bias_backward.h"

namespace hk::HK_LEVEL {

template <typename Real, typename Operand>
struct GatedAttentionBackward : Attention<Real, Operand> {
  const BackwardParams& backward;

  explicit GatedAttentionBackward(const BackwardParams& p) : Attention<Real, Operand>(p), backward(p) {}

  int64_t key_heads() const { return backward.key.size[1]; }

  // Whether a tile has a dQ other than 0.
  bool computes(const TilePlace& at, const VisibleRows<Real>& visible) const {
    return visible.any && !this->gate.closed(at.b, at.h) &&
           !(this->skips_rows && this->gate.closed_rows(at.b, at.h, at.first_row, visible.count));
  }

  // Accumulators of dK and dV of `keys` keys.
  int64_t accumulator_bytes(int64_t keys) const {
    const int64_t rows = sum_rows<Operand>(keys);
    return buffer_bytes<Real>(rows * row_stride<Real>(this->D)) + buffer_bytes<Real>(rows * row_stride<Real>(this->Dv));
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
    auto* tiles = workspace.take<BackwardTile<Real, Operand>>(items.size);
    int64_t count = 0;
    const Range places = items.tiles(item);
    for (int64_t i = places.begin; i < places.end; ++i) {
      const TilePlace at = items.place(i);
      const VisibleRows<Real> visible(p.mask, at.b, at.h, at.first_row, this->T, this->S);
      if (!with_rows && !visible.meets(range)) continue;
      if (with_dquery && !computes(at, visible))
        store_zeros<Real>(rows_at(p.dquery, at.b, at.h), at.first_row, visible.count, this->D);
      const HeadGradients<Real> gradients = head_gradients(*this, p, at.b, at.h, with_rows);
      BackwardTile<Real, Operand>& tile =
          *new (tiles + count) BackwardTile<Real, Operand>(workspace, *this, at.b, at.h, visible);
      if (!prepare_tile(*this, gradients, tile, scratch) || !pairs) continue;
      load_queries<Real>(tile, this->query_rows(at.b, at.h), nullptr, scratch);
      ++count;
    }
    attend_all_backward(tiles, count, p, static_cast<Real>(p.scale), range,
                        with_dquery ? this->features_of(0) : Ranges{}, keys, centers, dalpha, scratch);
    if (with_dquery)
      for (int64_t i = 0; i < count; ++i)
        store_dquery(this->head_rows(p.dquery, tiles[i].head.b, tiles[i].head.h), tiles[i], scratch.rows);
    workspace.rewind(mark);
  }

  // dK and dV of keys `range` of a key head, summed over its query heads in order; adds the gradient of their bias to
  // `bias`.
  void key_head(const WorkItems& items, int64_t index, const KeySpan& range, bool with_rows,
                const BiasGradient<Real>& bias, Workspace& workspace) const {
    BackwardScratch<Real, Operand> scratch(workspace, *this, items.size);
    KeyGradients<Real> keys{range.begin, nullptr, nullptr, nullptr, bias};
    const int64_t rows = sum_rows<Operand>(range.count());
    if (backward.dkey) keys.dkey = zeros<Real>(workspace, rows * row_stride<Real>(this->D));
    if (backward.dvalue) keys.dvalue = zeros<Real>(workspace, rows * row_stride<Real>(this->Dv));
    for (int64_t part = 0; part < items.parts; ++part)
      tiles_backward(items, index * items.parts + part, range, with_rows, keys, nullptr, scratch, workspace);
    const int64_t b = index / key_heads(), hk = index % key_heads();
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
  const int64_t heads = op.B * op.key_heads(), work = 5 * op.multiply_adds() / 2;
  const int64_t tile_bytes = BackwardTile<Real, Operand>::bytes(op);
  const WorkItems whole(op, tiles_in_cache(BackwardTile<Real, Operand>::cached_bytes(op)), 1);
  const int64_t bytes = BackwardScratch<Real, Operand>::bytes(op) + whole.size * tile_bytes;
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
      BackwardScratch<Real, Operand> scratch(w, op, items.size);
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
