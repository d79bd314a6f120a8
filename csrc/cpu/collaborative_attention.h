// Collaborative attention on the CPU: one query and one key for all heads. A head is its mixing
// vector: the features that its chunks which are not all zero cover, and a factor for each feature
// of the query. The tiles are those of attend.h.
#pragma once

#include "cpu/attend_backward.h"
#include "cpu/forward.h"

namespace hk::HK_LEVEL {

constexpr int64_t kMixingChunk = 16;  // MIXING_CHUNK of problem.py

template <typename Real>
struct CollaborativeAttention {
  const AttentionParams& params;
  Gate<Real> gate;
  int64_t B, H, T, S, D, Dv, query_tiles;
  std::vector<Real> mixing;                  // [H][D]
  std::vector<Real> to_log2;                 // [H][D] mixing times scale, for base-2 logarithms
  std::vector<std::vector<Range>> features;  // of each head: runs of chunks that are not all zero

  explicit CollaborativeAttention(const AttentionParams& p)
      : params(p),
        gate(p.gate, p.activation),
        B(p.query.size[0]),
        H(p.mixing.size[0]),
        T(p.query.size[1]),
        S(p.key.size[1]),
        D(p.query.size[2]),
        Dv(p.value ? p.value.size[3] : 1),
        query_tiles((T + BLOCK_M - 1) / BLOCK_M),
        mixing(H * D),
        to_log2(H * D),
        features(H) {
    for (int64_t h = 0; h < H; ++h) {
      Real* mix = mixing.data() + h * D;
      load_row(
          mix,
          static_cast<char*>(p.mixing.data) + h * p.mixing.stride[0] * element_size(p.mixing.dtype),
          p.mixing.dtype, D, p.mixing.stride[1]);
      for (int64_t d = 0; d < D; ++d)
        to_log2[h * D + d] = mix[d] * static_cast<Real>(p.scale * kLog2e);
      for (int64_t begin = 0; begin < D; begin += kMixingChunk) {
        const int64_t end = std::min(D, begin + kMixingChunk);
        if (std::all_of(mix + begin, mix + end, [](Real x) { return x == Real(0); })) continue;
        std::vector<Range>& ranges = features[h];
        if (!ranges.empty() && ranges.back().end == begin) {
          ranges.back().end = end;
        } else {
          ranges.push_back({begin, end});
        }
      }
    }
  }

  Head<Real> head(int64_t b, int64_t h) const {
    Rows bias;
    if (params.content_bias) {
      const Tensor& t = params.content_bias;
      bias = {
          static_cast<char*>(t.data) + (b * t.stride[0] + h * t.stride[1]) * element_size(t.dtype),
          0, t.stride[2], t.dtype};
    }
    return {b,
            h,
            rows_at(params.key, b),
            rows_at(params.value, b, h),
            bias,
            static_cast<Real>(params.scale * kLog2e),
            D,
            Dv,
            features[h]};
  }

  // The mixed query tile of head h, features that do not count left undefined.
  void pack(int64_t b, int64_t h, const VisibleRows<Real>& visible,
            const TileScratch<Real>& scratch) const {
    pack_query(rows_at(params.query, b), visible, features[h], to_log2.data() + h * D, scratch.rows,
               scratch.query);
  }

  int64_t multiply_adds() const { return B * H * T * S * (D + Dv); }
};

template <typename Real>
void collaborative_attention_forward(const ForwardParams& params) {
  attention_forward<Real>(params, CollaborativeAttention<Real>(params));
}

// One batch and a group of its heads is one thread's: dQ and dK of the group add up over its heads,
// head by head. Where batches are too few for the threads the heads are split into groups, whose
// sums are added in order afterwards.
template <typename Real>
struct CollaborativeAttentionBackward : CollaborativeAttention<Real> {
  const BackwardParams& backward;
  int64_t Ds_stride, Dv_stride;  // between rows of scratch

  explicit CollaborativeAttentionBackward(const BackwardParams& p)
      : CollaborativeAttention<Real>(p),
        backward(p),
        Ds_stride(row_stride<Real>(this->D)),
        Dv_stride(row_stride<Real>(this->Dv)) {}

  // Sums over the heads of a group: dQ [T][Ds_stride] then dK [S][Ds_stride].
  int64_t shared_count() const { return (this->T + this->S) * Ds_stride; }

  // What one head adds up on its own, and the tile of queries before mixing.
  struct HeadSums {
    Real* dvalue;        // [S][Dv]
    Real* dmixing;       // [Ds]
    Real* tile_dmixing;  // [Ds]
    Real* shared_rows;   // [64][Ds]
  };
  int64_t head_bytes() const {
    return piece<Real>(this->S * Dv_stride) + 2 * piece<Real>(Ds_stride) +
           piece<Real>(BLOCK_M * Ds_stride);
  }

  // All query tiles of head (b, h): adds to dquery [T][Ds_stride] and dkey [S][Ds_stride]; stores
  // what is the head's own.
  void head_backward(int64_t b, int64_t h, Real* dquery, Real* dkey, const HeadSums& own,
                     BackwardScratch<Real>& scratch) const {
    const BackwardParams& p = backward;
    const Head<Real> head = this->head(b, h);
    const int64_t bh = b * this->H + h, D = this->D, padded = round_up(D, kLanes<Real>);
    Real* dgate = p.dgate ? static_cast<Real*>(p.dgate.data) +
                                bh * this->T * (this->gate.elementwise ? this->Dv : 1)
                          : nullptr;
    Real* dcontent_bias =
        p.dcontent_bias ? static_cast<Real*>(p.dcontent_bias.data) + bh * this->S : nullptr;
    if (dcontent_bias) std::memset(dcontent_bias, 0, sizeof(Real) * this->S);
    Real* dvalue = p.dvalue ? own.dvalue : nullptr;
    if (dvalue) std::memset(dvalue, 0, sizeof(Real) * this->S * Dv_stride);
    std::memset(own.dmixing, 0, sizeof(Real) * Ds_stride);
    const HeadGradients gradients{rows_at(p.dout, b, h), rows_at(p.attended, b, h),
                                  static_cast<Real*>(p.lse.data) + bh * this->T, dgate};
    const KeyGradients<Real> keys{0, dkey, dvalue, dcontent_bias};
    // dS K: the head's own features are enough for dQ; the gradient of its zero chunks needs all of
    // them.
    std::vector<Range> dquery_features;
    if (p.dmixing && p.closed_grad) {
      dquery_features = {Range{0, D}};
    } else if (p.dmixing || dquery) {
      dquery_features = head.features;
    }
    const bool pairs = keys.dkey || keys.dvalue || keys.dcontent_bias || !dquery_features.empty();
    for (int64_t first = 0; first < this->T; first += BLOCK_M) {
      const VisibleRows<Real> visible(p.mask, b, first, this->T, this->S);
      if (!prepare_tile(*this, head, p.closed_grad, gradients, visible, scratch) || !pairs)
        continue;
      gather_rows(rows_at(p.query, b), visible, D, scratch.query_rows);
      // `shared_rows` are the queries as they are; query_rows those that the head mixed, for dK.
      std::memcpy(own.shared_rows, scratch.query_rows, sizeof(Real) * visible.columns * Ds_stride);
      for (int m = 0; m < visible.columns; ++m)
        for (int64_t d = 0; d < D; ++d)
          scratch.query_rows[m * Ds_stride + d] *= this->mixing[h * D + d];
      scratch.bad_queries.gather(scratch.query_rows, visible.columns, padded, Ds_stride);
      std::memset(scratch.dquery, 0, sizeof(Real) * BLOCK_M * padded);
      attend_backward(head, p.dropout, static_cast<Real>(p.scale), visible, 0, this->S,
                      dquery_features, keys, scratch);
      if (dquery_features.empty()) continue;
      transpose(scratch.dquery, BLOCK_M, scratch.rows, Ds_stride, padded, visible.columns);
      // dmixing of the tile is summed from zero and then added: a long sum rounds once a tile.
      std::memset(own.tile_dmixing, 0, sizeof(Real) * D);
      for (int m = 0; m < visible.columns; ++m) {
        if (!visible.sees(m) || static_cast<const Real*>(gradients.lse)[first + m] == kHidden<Real>)
          continue;
        const Real* mixed = scratch.rows + m * Ds_stride;  // dS K of the row
        const Real* query = own.shared_rows + m * Ds_stride;
        for (const Range& range : dquery_features) {
          for (int64_t d = range.begin; d < range.end; ++d) {
            own.tile_dmixing[d] += query[d] * mixed[d];
            if (dquery) dquery[(first + m) * Ds_stride + d] += this->mixing[h * D + d] * mixed[d];
          }
        }
      }
      for (int64_t d = 0; d < D; ++d) own.dmixing[d] += own.tile_dmixing[d];
    }
    store_accumulator(rows_at(p.dvalue, b, h), 0, this->S, this->Dv, dvalue);
    if (p.dmixing)
      std::memcpy(static_cast<Real*>(p.dmixing.data) + bh * D, own.dmixing, sizeof(Real) * D);
  }

  // Heads [begin, end) of batch b; `shared` [T + S][Ds_stride] receives the sums of dQ and dK.
  void group(int64_t b, int64_t begin, int64_t end, Real* shared, Workspace& workspace) const {
    BackwardScratch<Real> scratch(workspace, this->D, this->Dv);
    const HeadSums own{workspace.take<Real>(this->S * Dv_stride), workspace.take<Real>(Ds_stride),
                       workspace.take<Real>(Ds_stride), workspace.take<Real>(BLOCK_M * Ds_stride)};
    std::memset(shared, 0, sizeof(Real) * shared_count());
    for (int64_t h = begin; h < end; ++h)
      head_backward(b, h, backward.dquery ? shared : nullptr,
                    backward.dkey ? shared + this->T * Ds_stride : nullptr, own, scratch);
  }

  void store_shared(int64_t b, const Real* shared) const {
    if (backward.dquery)
      store_accumulator(rows_at(backward.dquery, b), 0, this->T, this->D, shared);
    if (backward.dkey)
      store_accumulator(rows_at(backward.dkey, b), 0, this->S, this->D,
                        shared + this->T * Ds_stride);
  }
};

template <typename Real>
void collaborative_attention_backward(const BackwardParams& params) {
  const CollaborativeAttentionBackward<Real> op(params);
  const int64_t work = 5 * op.multiply_adds() / 2;
  const int64_t bytes = BackwardScratch<Real>::bytes(op.D, op.Dv) + op.head_bytes();
  if (op.B >= params.threads || op.B == 0 || op.H == 0) {
    parallel_for(op.B, params.threads, work, bytes + piece<Real>(op.shared_count()),
                 [&](int64_t b, Workspace& workspace) {
                   Real* shared = workspace.take<Real>(op.shared_count());
                   op.group(b, 0, op.H, shared, workspace);
                   op.store_shared(b, shared);
                 });
    return;
  }
  const int64_t groups = std::min<int64_t>(op.H, (params.threads + op.B - 1) / op.B);
  std::vector<Real> sums(op.B * groups * op.shared_count());
  parallel_for(op.B * groups, params.threads, work, bytes, [&](int64_t item, Workspace& workspace) {
    const int64_t b = item / groups, g = item % groups;
    op.group(b, g * op.H / groups, (g + 1) * op.H / groups, sums.data() + item * op.shared_count(),
             workspace);
  });
  parallel_for(op.B, params.threads, op.B * groups * op.shared_count(), 64,
               [&](int64_t b, Workspace&) {
                 Real* total = sums.data() + b * groups * op.shared_count();
                 for (int64_t g = 1; g < groups; ++g) {
                   const Real* part = total + g * op.shared_count();
                   for (int64_t i = 0; i < op.shared_count(); ++i) total[i] += part[i];
                 }
                 op.store_shared(b, total);
               });
}

}  // namespace hk::HK_LEVEL
