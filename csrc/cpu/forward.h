// The forward pass of an operator: divides its query tiles among the threads.
#pragma once

#include "cpu/attend.h"
#include "cpu/parallel.h"
#include "cpu/work_items.h"

namespace hk::HK_LEVEL {

// `Operator` describes a head (`head`), packs a query tile of it (`pack`) and knows sizes and gate.
template <typename Real, typename Operand, typename Operator>
void attention_forward(const ForwardParams& params, const Operator& op) {
  const int64_t tile_bytes =
      buffer_bytes<char>(sizeof(QueryTile<Real, Operand>)) + QueryTile<Real, Operand>::bytes(op);
  const WorkItems items(op, tiles_in_cache(tile_bytes), kItemsPerThread * params.threads);
  const int64_t bytes = items.size * tile_bytes + TileScratch<Real, Operand>::bytes(op.D, op.Dv);
  parallel_for(
      items.count(), params.threads, op.multiply_adds(), bytes,
      [&](int64_t item, Workspace& workspace) {
        TileScratch<Real, Operand> scratch(workspace, op.D, op.Dv, items.size);
        const auto outputs = [&](int64_t b, int64_t h) {
          return Outputs{
              rows_at(params.out, b, h), rows_at(params.attended, b, h),
              params.lse ? static_cast<Real*>(params.lse.data) + (b * op.H + h) * op.T : nullptr};
        };
        QueryTile<Real, Operand>* tiles =
            workspace.take_objects<QueryTile<Real, Operand>>(items.size);
        int64_t count = 0;
        for (const TilePlace& at : items.tiles(item)) {
          const VisibleRows<Real> visible(params.mask, at.b, at.h, at.first_row, op.T, op.S);
          if (op.gate.closed(at.b, at.h) || !visible.any) {
            const HeadTerms<Real> terms(params.terms, at.b, at.h, op.T);
            store_empty_rows(outputs(at.b, at.h), terms, at.first_row, visible.count, op.Dv);
            continue;
          }
          QueryTile<Real, Operand>* tile =
              new (tiles + count++) QueryTile<Real, Operand>(workspace, op, at.b, at.h, visible);
          op.pack(at.b, at.h, visible, scratch.rows, tile->query);
        }
        attend(tiles, count, params.dropout, scratch);
        for (int64_t i = 0; i < count; ++i)
          finish_tile(tiles[i], op.gate, scratch, outputs(tiles[i].head.b, tiles[i].head.h));
      });
}

}  // namespace hk::HK_LEVEL
