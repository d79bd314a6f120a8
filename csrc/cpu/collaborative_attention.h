// The backward pass of collaborative attention: the assignment of heads to threads.
#pragma once

#include <memory>

#include "cpu/bias_backward.h"

namespace hk::HK_LEVEL {

// The number of groups of heads with separate sums of dQ [T] and dK [S], which are added in order.
// It depends only on H, Hv, T and S, so the result does not depend bitwise on the number of threads
// or the batch size. The heads that share a value head are in one group, which sums dV in their
// order. A group has at least 128 pairs for each row of its sums: clearing and adding them takes up
// to 5 % of the time (measured at T = S = 128). A power of two divides well among the threads.
inline int64_t groups_of_heads(int64_t H, int64_t Hv, int64_t T, int64_t S) {
  const int64_t most = std::min(Hv, H * T * S / std::max<int64_t>(1, 128 * (T + S)));
  int64_t groups = 1;
  while (2 * groups <= most) groups *= 2;
  return groups;
}

// query[d][m] = factor[d] * queries[d][m] over the features, both transposed, and zero where a row sees nothing.
template <typename Real>
inline void mix_queries(const Real* queries, const VisibleRows<Real>& visible, Ranges features, const Real* factor,
                        int64_t, Real* query) {
  for (const Range& range : features)
    for (int64_t d = range.begin; d < range.end; ++d)
      for (int m = 0; m < visible.columns; m += kLanes<Real>)
        store<Real>(query + d * BLOCK_M + m, visible.seeing(m, load(queries + d * BLOCK_M + m)) * factor[d]);
}

// The same in pairs of the D features.
inline void mix_queries(const float* queries, const VisibleRows<float>& visible, Ranges features, const float* factor,
                        int64_t D, Pair* query) {
  for (const Range& range : features) {
    for (int64_t d = range.begin; d < range.end; d += 2) {
      const float next = d + 1 < D ? factor[d + 1] : 0.0f;
      for (int m = 0; m < visible.columns; m += kLanes<float>) {
        const float* at = queries + d * BLOCK_M + m;
        const Vec<float> a = visible.seeing(m, load(at)) * factor[d];
        const Vec<float> b = visible.seeing(m, load(at + BLOCK_M)) * next;
        store(query + d / 2 * BLOCK_M + m, narrow_couples(a, b));
      }
    }
  }
  const int64_t end = ceil_div(D, 2);  // past it as `in_tiles` requires
  std::memset(query + end * BLOCK_M, 0, sizeof *query * BLOCK_M * (packed<Pair>(D) - end));
}

// One thread processes one group of heads of one batch element: dQ and dK are summed over the heads
// of a group, then over the groups.
template <typename Real, typename Operand>
struct CollaborativeAttentionBackward : Attention<Real, Operand> {
  const BackwardParams& backward;
  int64_t Ds_stride, Dv_stride;  // between rows of scratch
  int64_t Ds_padded;             // whole vectors
  int64_t tiles_together;        // query tiles of a head that share each window of keys
  int64_t groups;                // of heads

  explicit CollaborativeAttentionBackward(const BackwardParams& p)
      : Attention<Real, Operand>(p),
        backward(p),
        Ds_stride(row_stride<Real>(this->D)),
        Dv_stride(row_stride<Real>(this->Dv)),
        Ds_padded(round_up(this->D, kLanes<Real>)),
        tiles_together(std::clamp<int64_t>(this->query_tiles, 1,
                                           tiles_in_cache(BackwardTile<Real, Operand>::cached_bytes(*this)))),
        groups(groups_of_heads(this->H, value_heads(), this->T, this->S)) {}

  int64_t value_heads() const { return this->H / this->heads_per_value; }

  // Query tiles of all heads, transposed: [tiles][Ds_padded][64].
  int64_t tiles_count() const { return this->query_tiles * BLOCK_M * Ds_padded; }
  // Sums over the heads of a group: dQ as transposed tiles, then dK [S][Ds_stride].
  int64_t shared_count() const { return tiles_count() + sum_rows<Operand>(this->S) * Ds_stride; }

  int64_t dvalue_count() const { return sum_rows<Operand>(this->S) * Dv_stride; }

  // The queries of the batch element, and the accumulators of one head and of the heads that share its value.
  struct Group {
    Real* queries;  // transposed tiles
    Real* dvalue;   // [S][Dv]
    Real* dmixing;  // [Ds]
  };
  int64_t group_bytes() const {
    return buffer_bytes<Real>(tiles_count()) + buffer_bytes<Real>(dvalue_count()) + buffer_bytes<Real>(Ds_stride);
  }

  // All query tiles of head (b, h): adds to dquery (transposed tiles) and dkey [S][Ds_stride];
  // stores the gradients that heads do not share, and dV after the last of the heads that share it.
  void head_backward(int64_t b, int64_t h, Real* dquery, Real* dkey, const Group& own,
                     BackwardScratch<Real, Operand>& scratch, Workspace& workspace) const {
    const BackwardParams& p = backward;
    const Head<Real> head = this->head(b, h);
    const int64_t bh = b * this->H + h, D = this->D;
    Real* dcontent_bias = p.dcontent_bias ? static_cast<Real*>(p.dcontent_bias.data) + bh * this->S : nullptr;
    if (dcontent_bias) std::memset(dcontent_bias, 0, sizeof(Real) * this->S);
    Real* dvalue = p.dvalue ? own.dvalue : nullptr;
    if (dvalue && h % this->heads_per_value == 0) std::memset(dvalue, 0, sizeof(Real) * dvalue_count());
    std::memset(own.dmixing, 0, sizeof(Real) * Ds_stride);
    const HeadGradients<Real> gradients = head_gradients(*this, p, b, h, true);
    const KeyGradients<Real> keys{0, dkey, dvalue, dcontent_bias, {}};
    // dS K: the head's own features are enough for dQ; the gradient of its zero chunks needs all of them.
    Ranges dquery_features;
    if (p.dmixing && p.closed_grad) {
      dquery_features = {&this->all_features, 1};
    } else if (p.dmixing || dquery) {
      dquery_features = head.features;
    }
    const bool pairs = keys.dkey || keys.dvalue || keys.dcontent_bias || !dquery_features.empty();
    for (int64_t first = 0; first < this->T; first += tiles_together * BLOCK_M) {
      const size_t mark = workspace.mark();
      auto* tiles = workspace.take<BackwardTile<Real, Operand>>(tiles_together);
      int64_t count = 0;
      for (int64_t row = first; row < std::min(this->T, first + tiles_together * BLOCK_M); row += BLOCK_M) {
        const VisibleRows<Real> visible(p.mask, b, h, row, this->T, this->S);
        BackwardTile<Real, Operand>& tile =
            *new (tiles + count) BackwardTile<Real, Operand>(workspace, *this, b, h, visible);
        const auto pack = [&] {
          mix_queries(own.queries + row * Ds_padded, visible, head.features, this->factors_of(h), D, tile.query);
        };
        if (!prepare_tile(*this, gradients, tile, scratch, pack) || !pairs) continue;
        load_queries(tile, rows_at(p.query, b), this->mixing.data() + h * D, scratch);
        ++count;
      }
      attend_backward(tiles, count, p.dropout, static_cast<Real>(p.scale), {0, this->S}, dquery_features, keys,
                      scratch);
      if (!dquery_features.empty())
        for (int64_t i = 0; i < count; ++i) add_tile(tiles[i], dquery_features, dquery, own);
      workspace.rewind(mark);
    }
    if ((h + 1) % this->heads_per_value == 0)
      store_accumulator(rows_at(p.dvalue, b, h / this->heads_per_value), 0, this->S, this->Dv, dvalue);
    if (p.dmixing) std::memcpy(static_cast<Real*>(p.dmixing.data) + bh * D, own.dmixing, sizeof(Real) * D);
  }

  // Adds a finished tile, whose `dquery` is dS K, to dquery and to the head's dmixing. The tile's
  // part of dmixing is summed from zero, so that a long sum rounds once per tile.
  void add_tile(const BackwardTile<Real, Operand>& tile, Ranges features, Real* dquery, const Group& own) const {
    constexpr int L = kLanes<Real>;
    const Real* mixing = this->mixing.data() + tile.head.h * this->D;
    const int64_t first = tile.visible.first * Ds_padded;
    for (const Range& range : features) {
      for (int64_t d = range.begin; d < range.end; d += L) {
        Vec<Real> products[L] = {};
        for (int i = 0; i < std::min<int64_t>(L, range.end - d); ++i) {
          Vec<Real> product{};
          for (int m = 0; m < tile.visible.columns; m += L) {
            const int64_t at = (d + i) * BLOCK_M + m;
            const IntVec<Real> sees = load(tile.lse + m) != -kHidden<Real>;
            const Vec<Real> mixed = sees ? load(tile.dquery + at) : Vec<Real>{};
            product += mixed * (sees ? load(own.queries + first + at) : Vec<Real>{});
            if (!dquery) continue;
            Real* sum = dquery + first + at;
            store<Real>(sum, load(sum) + (sees ? mixed * mixing[d + i] : Vec<Real>{}));
          }
          products[i] = product;
        }
        store<Real>(own.dmixing + d, load(own.dmixing + d) + sums_of<Real>(products));
      }
    }
  }

  // Tiles of 64 rows, transposed; `rows` is scratch.
  void transpose_queries(int64_t b, Real* queries, Real* rows) const {
    const Rows query = rows_at(backward.query, b);
    for (int64_t first = 0; first < this->T; first += BLOCK_M) {
      const int64_t count = std::min<int64_t>(BLOCK_M, this->T - first);
      const int64_t columns = round_up(count, kLanes<Real>);
      std::memset(rows, 0, sizeof(Real) * columns * Ds_stride);
      for (int64_t m = 0; m < count; ++m) read_row(query, first + m, this->D, rows + m * Ds_stride);
      transpose(rows, Ds_stride, queries + first * Ds_padded, BLOCK_M, columns, Ds_padded);
    }
  }

  // The heads of group g of batch b; `shared` receives the sums of dQ and dK.
  void group(int64_t b, int64_t g, Real* shared, Workspace& workspace) const {
    const size_t mark = workspace.mark();
    BackwardScratch<Real, Operand> scratch(workspace, *this, tiles_together);
    const Group own{workspace.take<Real>(tiles_count()), workspace.take<Real>(dvalue_count()),
                    workspace.take<Real>(Ds_stride)};
    transpose_queries(b, own.queries, scratch.rows);
    std::memset(shared, 0, sizeof(Real) * shared_count());
    const auto first_head = [&](int64_t n) { return n * value_heads() / groups * this->heads_per_value; };
    for (int64_t h = first_head(g); h < first_head(g + 1); ++h)
      head_backward(b, h, backward.dquery ? shared : nullptr, backward.dkey ? shared + tiles_count() : nullptr, own,
                    scratch, workspace);
    workspace.rewind(mark);
  }

  // `rows` [64][Ds_stride] is scratch.
  void store_shared(int64_t b, const Real* shared, Real* rows) const {
    const Rows dquery = rows_at(backward.dquery, b);
    for (int64_t first = 0; dquery && first < this->T; first += BLOCK_M) {
      const int64_t count = std::min<int64_t>(BLOCK_M, this->T - first);
      transpose(shared + first * Ds_padded, BLOCK_M, rows, Ds_stride, Ds_padded, round_up(count, kLanes<Real>));
      store_accumulator(dquery, first, first + count, this->D, rows);
    }
    if (backward.dkey) store_accumulator(rows_at(backward.dkey, b), 0, this->S, this->D, shared + tiles_count());
  }
};

// sum[begin .. end) += part[begin .. end).
template <typename Real>
inline void add(const Real* part, int64_t begin, int64_t end, Real* sum) {
  for (int64_t i = begin; i < end; ++i) sum[i] += part[i];
}

// Memory for the sums of groups that are kept at once, but at least one per thread (heuristic).
constexpr int64_t kGroupBytes = int64_t{32} << 20;

// The threads divide the batch, or the groups of heads of all batch elements if the batch is too
// small. Either way the sums of the groups are added in the order of the heads.
template <typename Real, typename Operand>
void collaborative_attention_backward(const BackwardParams& params) {
  const CollaborativeAttentionBackward<Real, Operand> op(params);
  bias_backward<Real, Operand>(op, params);
  const BackwardParams& p = params;
  if (!p.dquery && !p.dkey && !p.dvalue && !p.dmixing && !p.dcontent_bias && !p.dgate && !p.dsinks) return;
  const int64_t B = op.B, groups = op.groups, count = op.shared_count();
  const int64_t work = 5 * op.multiply_adds() / 2;
  const int64_t row_bytes = buffer_bytes<Real>(BLOCK_M * op.Ds_stride);
  const int64_t bytes = BackwardScratch<Real, Operand>::bytes(op) + op.group_bytes() +
                        op.tiles_together * BackwardTile<Real, Operand>::bytes(op);
  if (B == 0 || B >= params.threads || groups == 1) {
    parallel_for(B, params.threads, work, bytes + 2 * buffer_bytes<Real>(count) + row_bytes,
                 [&](int64_t b, Workspace& workspace) {
                   Real* sum = workspace.take<Real>(count);
                   Real* part = workspace.take<Real>(count);
                   for (int64_t g = 0; g < groups; ++g) {
                     op.group(b, g, g ? part : sum, workspace);
                     if (g) add(part, 0, count, sum);
                   }
                   op.store_shared(b, sum, workspace.take<Real>(BLOCK_M * op.Ds_stride));
                 });
    return;
  }
  // Per batch element: the sum so far, then the sums of the next groups.
  const int64_t slots = std::min(
      groups, 1 + std::max<int64_t>(ceil_div(params.threads, B), kGroupBytes / (B * buffer_bytes<Real>(count))));
  const std::unique_ptr<Real[]> sums(new Real[B * slots * count]);
  const auto slot = [&](int64_t b, int64_t n) { return sums.get() + (b * slots + n) * count; };
  constexpr int64_t kPart = 1 << 14;  // elements one thread adds at a time: 64 KiB of float
  const int64_t parts = ceil_div(count, kPart);
  for (int64_t first = 0; first < groups;) {
    const int64_t before = first > 0, next = std::min(groups - first, slots - before);
    parallel_for(B * next, params.threads, work, bytes, [&](int64_t item, Workspace& workspace) {
      const int64_t b = item / next, n = item % next;
      op.group(b, first + n, slot(b, before + n), workspace);
    });
    parallel_for(B * parts, params.threads, B * next * count, 64, [&](int64_t item, Workspace&) {
      const int64_t b = item / parts, begin = item % parts * kPart;
      for (int64_t n = 1; n < before + next; ++n) add(slot(b, n), begin, std::min(count, begin + kPart), slot(b, 0));
    });
    first += next;
  }
  parallel_for(B, params.threads, B * count, row_bytes, [&](int64_t b, Workspace& workspace) {
    op.store_shared(b, slot(b, 0), workspace.take<Real>(BLOCK_M * op.Ds_stride));
  });
}

}  // namespace hk::HK_LEVEL
