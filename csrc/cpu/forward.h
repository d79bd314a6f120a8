// The forward pass: divides its query tiles among the threads.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/decode.h"
#include "cpu/entmax_attend.h"
#include "cpu/parallel.h"
#include "cpu/work_items.h"

namespace hk::HK_LEVEL {

// Stores the zeros of closed heads in `out`, in the order of memory: with the heads side by side in rows, [B, T, H,
// Dv], storing head by head would visit every page once per head.
template <typename Real, typename Operand>
void store_closed_heads(const ForwardParams& params, const Attention<Real, Operand>& op) {
  const Tensor& out = params.out;
  if (!op.gate || !out) return;
  std::vector<std::vector<Range>> closed(op.B);  // runs of neighbours, for each batch element
  int64_t count = 0;
  for (int64_t b = 0; b < op.B; ++b) {
    for (int64_t h = 0; h < op.H; ++h) {
      if (!op.gate.closed(b, h)) continue;
      if (closed[b].empty() || closed[b].back().end != h) closed[b].push_back({h, h});
      closed[b].back().end = h + 1;
      ++count;
    }
  }
  if (count == 0) return;
  const int64_t work = count * op.T * op.Dv, bytes = element_size(out.dtype);
  if (out.stride[3] != 1 || out.stride[1] != op.Dv || out.stride[2] < op.H * op.Dv) {
    parallel_for(op.B * op.H, params.threads, work, 0, [&](int64_t item, Workspace&) {
      const int64_t b = item / op.H, h = item % op.H;
      if (op.gate.closed(b, h)) store_zeros<Real>(rows_at(out, b, h), 0, op.T, op.Dv);
    });
    return;
  }
  const int64_t blocks = ceil_div(op.T, BLOCK_M);
  parallel_for(op.B * blocks, params.threads, work, 0, [&](int64_t item, Workspace&) {
    const int64_t b = item / blocks, first = item % blocks * BLOCK_M;
    char* rows = static_cast<char*>(out.data) + b * out.stride[0] * bytes;
    for (int64_t i = first; i < std::min<int64_t>(op.T, first + BLOCK_M); ++i)
      for (const Range& heads : closed[b])
        std::memset(rows + (i * out.stride[2] + heads.begin * op.Dv) * bytes, 0,
                    (heads.end - heads.begin) * op.Dv * bytes);
  });
}

// The keys of a window. With twice as many, sums of wide rows by tiles (AMX) are read and stored half as often.
template <typename Real, typename Operand>
int64_t window_of(const Attention<Real, Operand>& op) {
  const AttentionParams& p = op.params;
  const bool narrow = p.mask.dense || p.terms.bias || p.terms.offset_bias || p.content_bias;  // made for BLOCK_N keys
  return kTiled<Operand> && op.Dv > 64 && !narrow ? 2 * BLOCK_N : BLOCK_N;
}

template <typename Real, typename Operand>
void attention_forward(const ForwardParams& params) {
  const Attention<Real, Operand> op(params);
  if (params.rows() <= kFewRows && !params.alpha) return decode(params, op);
  const int64_t tile_bytes = buffer_bytes<QueryTile<Real, Operand>>(1) + QueryTile<Real, Operand>::bytes(op);
  const WorkItems items(op, tiles_in_cache(tile_bytes), kItemsPerThread * params.threads);
  store_closed_heads(params, op);
  const int64_t window = window_of(op);
  const int64_t bytes = items.size * tile_bytes + TileScratch<Real, Operand>::bytes(op, window);
  parallel_for(items.count(), params.threads, op.multiply_adds(), bytes, [&](int64_t item, Workspace& workspace) {
    TileScratch<Real, Operand> scratch(workspace, op, items.size, window);
    QueryTile<Real, Operand>* tiles = workspace.take<QueryTile<Real, Operand>>(items.size);
    int64_t count = 0;
    const Range places = items.tiles(item);
    for (int64_t i = places.begin; i < places.end; ++i) {
      const TilePlace at = items.place(i);
      Outputs<Real> empty = outputs_of(op, params, at.b, at.h);
      if (op.gate.closed(at.b, at.h)) {
        empty.out = {};  // stored above
        store_empty_rows(empty, HeadTerms<Real>(params.terms, at.b, at.h, op.T), at.first_row,
                         std::min<int64_t>(BLOCK_M, op.T - at.first_row), op.Dv);
        continue;
      }
      const VisibleRows<Real> visible(params.mask, at.b, at.h, at.first_row, op.T, op.S);
      // The gradient of their gate needs `attended`.
      const bool skips_rows = !(params.attended && params.closed_grad);
      if (!visible.any || (skips_rows && op.gate.closed_rows(at.b, at.h, at.first_row, visible.count))) {
        store_empty_rows(empty, HeadTerms<Real>(params.terms, at.b, at.h, op.T), at.first_row, visible.count, op.Dv);
        continue;
      }
      QueryTile<Real, Operand>* tile =
          new (tiles + count++) QueryTile<Real, Operand>(workspace, op, at.b, at.h, visible);
      op.pack(at.b, at.h, visible, scratch.rows, tile->query);
    }
    attend_all(tiles, count, params.dropout, scratch);
    for (int64_t i = 0; i < count; ++i)
      finish_tile(tiles[i], op.gate, scratch, outputs_of(op, params, tiles[i].head.b, tiles[i].head.h));
  });
}

}  // namespace hk::HK_LEVEL
