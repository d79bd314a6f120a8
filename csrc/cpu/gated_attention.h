// Gated attention on the CPU: which thread computes which tiles of which head. The tiles themselves
// are in attend.h.
#pragma once

#include "cpu/attend_backward.h"
#include "cpu/forward.h"

namespace hk::HK_LEVEL {

template <typename Real>
struct GatedAttention {
  const AttentionParams& params;
  Gate<Real> gate;
  int64_t B, H, Hk, T, S, D, Dv, query_tiles;
  std::vector<Real> to_log2;  // factor of each of the D features of a query

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
        query_tiles((T + BLOCK_M - 1) / BLOCK_M),
        to_log2(D, static_cast<Real>(p.scale * kLog2e)) {}

  Head<Real> head(int64_t b, int64_t h) const {
    const int64_t hk = h / (H / Hk);
    return {b,
            h,
            rows_at(params.key, b, hk),
            rows_at(params.value, b, hk),
            Rows{},
            Real(0),
            D,
            Dv,
            {Range{0, D}}};
  }

  void pack(int64_t b, int64_t h, const VisibleRows<Real>& visible,
            const TileScratch<Real>& scratch) const {
    pack_query(rows_at(params.query, b, h), visible, {Range{0, D}}, to_log2.data(), scratch.rows,
               scratch.query);
  }

  int64_t multiply_adds() const { return B * H * T * S * (D + Dv); }
};

template <typename Real>
void gated_attention_forward(const ForwardParams& params) {
  attention_forward<Real>(params, GatedAttention<Real>(params));
}

template <typename Real>
struct GatedAttentionBackward : GatedAttention<Real> {
  const BackwardParams& backward;

  explicit GatedAttentionBackward(const BackwardParams& p) : GatedAttention<Real>(p), backward(p) {}

  // Accumulators of dK and dV of `keys` keys.
  int64_t accumulator_bytes(int64_t keys) const {
    return piece<Real>(keys * row_stride<Real>(this->D)) +
           piece<Real>(keys * row_stride<Real>(this->Dv));
  }

  // Query tiles [first_tile, last_tile) of head (b, h) against keys [begin, end). `with_rows`: this
  // is where dQ and the gate's rows of those tiles are computed, over all keys.
  void head_tiles(int64_t b, int64_t h, int64_t first_tile, int64_t last_tile, int64_t begin,
                  int64_t end, bool with_rows, const KeyGradients<Real>& keys,
                  BackwardScratch<Real>& scratch) const {
    const BackwardParams& p = backward;
    const Head<Real> head = this->head(b, h);
    const Rows query = rows_at(p.query, b, h), dquery = rows_at(p.dquery, b, h);
    const int64_t row = (b * this->H + h) * this->T;
    Real* dgate = with_rows && p.dgate ? static_cast<Real*>(p.dgate.data) +
                                             row * (this->gate.elementwise ? this->Dv : 1)
                                       : nullptr;
    const HeadGradients gradients{rows_at(p.dout, b, h), rows_at(p.attended, b, h),
                                  static_cast<Real*>(p.lse.data) + row, dgate};
    const std::vector<Range> dquery_features =
        with_rows && dquery ? head.features : std::vector<Range>{};
    const bool pairs = keys.dkey || keys.dvalue || !dquery_features.empty();
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      const int64_t first = tile * BLOCK_M;
      const VisibleRows<Real> visible(p.mask, b, first, this->T, this->S);
      const bool sees_part = std::max(begin, visible.hull_lo) < std::min(end, visible.hull_hi);
      if (!with_rows && !sees_part) continue;
      if (with_rows && dquery && (!visible.any || this->gate.closed(b, h)))
        store_zeros<Real>(dquery, first, visible.count, this->D);
      if (!prepare_tile(*this, head, p.closed_grad, gradients, visible, scratch) || !pairs)
        continue;
      const int64_t Dp = round_up(this->D, kLanes<Real>);
      gather_rows(query, visible, this->D, scratch.query_rows);
      scratch.bad_queries.gather(scratch.query_rows, visible.columns, Dp,
                                 row_stride<Real>(this->D));
      std::memset(scratch.dquery, 0, sizeof(Real) * BLOCK_M * Dp);
      attend_backward(head, p.dropout, static_cast<Real>(p.scale), visible, begin, end,
                      dquery_features, keys, scratch);
      if (!dquery_features.empty()) store_dquery(dquery, visible, this->D, scratch);
    }
  }

  // dK and dV of keys [begin, end) of key head (b, hk), summed over its query heads in order.
  void key_head(int64_t b, int64_t hk, int64_t begin, int64_t end, bool with_rows,
                Workspace& workspace) const {
    BackwardScratch<Real> scratch(workspace, this->D, this->Dv);
    const int64_t count = end - begin;
    KeyGradients<Real> keys{begin, nullptr, nullptr, nullptr};
    if (backward.dkey) keys.dkey = zeros<Real>(workspace, count * row_stride<Real>(this->D));
    if (backward.dvalue) keys.dvalue = zeros<Real>(workspace, count * row_stride<Real>(this->Dv));
    const int64_t group = this->H / this->Hk;
    for (int64_t h = hk * group; h < (hk + 1) * group; ++h)
      head_tiles(b, h, 0, this->query_tiles, begin, end, with_rows, keys, scratch);
    store_accumulator(rows_at(backward.dkey, b, hk), begin, end, this->D, keys.dkey);
    store_accumulator(rows_at(backward.dvalue, b, hk), begin, end, this->Dv, keys.dvalue);
  }
};

// Where key heads divide well among the threads, one thread does all of a key head: five products a
// pair of tiles. Else the keys of a head are split for dK and dV, and dQ is a pass of its own over
// query tiles: seven products, the same bits.
template <typename Real>
void gated_attention_backward(const BackwardParams& params) {
  const GatedAttentionBackward<Real> op(params);
  const int64_t heads = op.B * op.Hk;
  const int64_t work = 5 * op.multiply_adds() / 2,
                scratch = BackwardScratch<Real>::bytes(op.D, op.Dv);
  if (op.S == 0 || 5 * round_up(heads, params.threads) <= 7 * heads) {
    parallel_for(heads, params.threads, work, scratch + op.accumulator_bytes(op.S),
                 [&](int64_t item, Workspace& w) {
                   op.key_head(item / op.Hk, item % op.Hk, 0, op.S, true, w);
                 });
    return;
  }
  if (params.dkey || params.dvalue) {
    const int64_t tiles = (op.S + BLOCK_N - 1) / BLOCK_N;
    const int64_t parts = std::min<int64_t>(tiles, (2 * params.threads + heads - 1) / heads);
    const int64_t keys = (tiles + parts - 1) / parts * BLOCK_N;
    parallel_for(heads * parts, params.threads, work, scratch + op.accumulator_bytes(keys),
                 [&](int64_t item, Workspace& w) {
                   const int64_t head = item / parts, begin = std::min(op.S, item % parts * keys);
                   op.key_head(head / op.Hk, head % op.Hk, begin, std::min(op.S, begin + keys),
                               false, w);
                 });
  }
  if (params.dquery || params.dgate) {
    parallel_for(op.query_tiles * op.B * op.H, params.threads, work, scratch,
                 [&](int64_t item, Workspace& w) {
                   const WorkItem at(op, item);
                   BackwardScratch<Real> tile_scratch(w, op.D, op.Dv);
                   op.head_tiles(at.b, at.h, at.first_row / BLOCK_M, at.first_row / BLOCK_M + 1, 0,
                                 op.S, true, KeyGradients<Real>{}, tile_scratch);
                 });
  }
}

}  // namespace hk::HK_LEVEL
