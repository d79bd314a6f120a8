// From raw products to scores, for the kernels of both operators:
//
//   score = softcap * tanh(scale * raw / softcap) + bias        slope = 1 - tanh^2
//
// A kernel is compiled with terms and without them (kThere). Without terms, scores stay raw: the softmax scales them.
// With terms, which of them exist is decided at run time, once per tile: what is added to the scores of a tile is in
// shared memory, -inf where a dense mask hides the pair; a bias may be -inf too.
#pragma once

#include "cuda/gate.h"
#include "cuda/score_layout.h"

namespace hk::cuda {

// The content bias of a head of collaborative attention: a number per key, added to its products inside the scale.
class ContentBias {
  // Larger ones are clamped to this, so that the product with the scale is finite. A power of 2 makes that product
  // exact, so that equal ones are equal to their maximum in the softmax.
  static constexpr float kMost = 1.329227995784916e36f;

 public:
  HK_DEVICE ContentBias(const Tensor& t, int64_t b, int64_t h) : t_(t), offset_(b * t.stride[0] + h * t.stride[1]) {}

  // 0 without a content bias.
  HK_DEVICE float at(int key) const {
    if (t_.rank == 0 || key >= t_.size[2]) return 0.0f;
    const float value = load_number(t_.data, t_.dtype, offset_ + key * t_.stride[2]);
    return is_finite(value) ? fminf(fmaxf(value, -kMost), kMost) : value;
  }

 private:
  const Tensor& t_;
  int64_t offset_;
};

// The head whose scores are computed, and their sizes.
struct Head {
  int b, h, T, S;
};

// What is added to the scores of a head, pair by pair: a bias, or a table of offsets, read as a bias whose rows overlap
// and are shifted by one.
class Addends {
 public:
  HK_DEVICE Addends(const AttentionParams& p, const Head& at)
      : data_(nullptr), dtype_(DType::kFloat32), mask_(nullptr) {
    const Tensor &bias = p.terms.bias, &table = p.terms.offset_bias;
    if (bias.rank > 0) {
      const int inner = static_cast<int>(p.terms.bias_inner);
      set(bias, at.b / inner * bias.stride[0] + at.b % inner * bias.stride[1] + at.h * bias.stride[2], bias.stride[3],
          bias.stride[4]);
    } else if (table.rank > 0) {
      const int64_t step = table.stride[1];
      set(table, at.h * table.stride[0] + (at.T - 1) * step, -step, step);
    }
    if (p.mask.dense) {
      const int64_t* const stride = p.mask.dense_stride;
      mask_ = p.mask.dense + at.b * stride[0] + at.h * stride[1];
      mask_row_ = stride[2];
      mask_key_ = stride[3];
    }
  }

  HK_DEVICE bool any() const { return data_ != nullptr; }

  // The addend of a pair within T and S; -inf hides it. Without `masked` the dense mask is not read.
  HK_DEVICE float at(int row, int key, bool masked) const {
    if (masked && !mask_[row * mask_row_ + key * mask_key_]) return -kInfinity;
    return data_ ? load_number(data_, dtype_, first_ + row * row_ + key * key_) : 0.0f;
  }

 private:
  HK_DEVICE void set(const Tensor& t, int64_t first, int64_t row, int64_t key) {
    data_ = t.data;
    dtype_ = t.dtype;
    first_ = first;
    row_ = row;
    key_ = key;
  }

  const void* data_;
  DType dtype_;
  int64_t first_, row_, key_;
  const uint8_t* mask_;
  int64_t mask_row_, mask_key_;
};

// The terms of tiles of kRows query rows and kKeys keys. Functions take the parameters of the kernel, which are
// available everywhere and cost no registers. A dense mask comes with its cells (MaskParams).
template <bool kThere, ScoreLayout kLayout, int kRows, int kKeys>
class ScoreTile {
  // Padded as tiles are (16 columns are not: the widest kernels have no shared memory left).
  static constexpr int kStride = kKeys > 16 ? kKeys + 4 : kKeys;

 public:
  constexpr explicit ScoreTile(SharedMemory& memory) : addends_(memory.take<float>(kThere ? kRows * kStride : 0)) {}

  // What the dense mask shows of a tile, by the cells that it is in.
  HK_DEVICE static DenseCell shown(const AttentionParams& p, const Head& at, int first_row, int first_key) {
    const int64_t* const stride = p.mask.cell_stride;
    const uint8_t* const cells = p.mask.dense_cells + at.b * stride[0] + at.h * stride[1];
    const int last_row = min_of(first_row + kRows, at.T) - 1;
    const int last_key = min_of(first_key + kKeys, at.S) - 1;
    bool any = false, all = true;
    HK_ROLLED
    for (int row = first_row / kCell; row <= last_row / kCell; ++row) {
      HK_ROLLED
      for (int key = first_key / kCell; key <= last_key / kCell; ++key) {
        const uint8_t cell = cells[row * stride[2] + key * stride[3]];
        any |= cell != kHidden;
        all &= cell == kShown;
      }
    }
    return all ? kShown : any ? kMixed : kHidden;
  }

  // The first tile of a list, from `index` on, in which the dense mask shows a pair. `first` is the first row of all
  // tiles, or in a pass by keys their first key.
  HK_DEVICE static int shown_from(int index, const TileList& list, int first, const AttentionParams& p,
                                  const Head& at) {
    if constexpr (kThere) {
      while (p.mask.dense_cells && index < list.count()) {
        const int first_row = kLayout == ScoreLayout::kRowsFirst ? first : list[index] * kRows;
        const int first_key = kLayout == ScoreLayout::kRowsFirst ? list[index] * kKeys : first;
        if (shown(p, at, first_row, first_key) != kHidden) break;
        ++index;
      }
    }
    return index;
  }

  // Puts what is added to the scores of a tile on chip; returns whether this thread found a hidden pair. Other threads
  // may read it after a barrier. All threads of the block take part.
  template <int kThreads>
  HK_DEVICE bool stage(const AttentionParams& p, const Head& at, int first_row, int first_key) const {
    bool hides = false;
    if constexpr (kThere) {
      const bool masked = p.mask.dense_cells && shown(p, at, first_row, first_key) != kShown;
      const Addends addends(p, at);
      if (!masked && !addends.any()) return false;
      constexpr int kBatch = 4;  // reads that are under way at once
      static_assert(kRows * kKeys % (kBatch * kThreads) == 0);
      HK_ROLLED
      for (int first = thread_index(); first < kRows * kKeys; first += kBatch * kThreads) {
        float values[kBatch];
        HK_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          const int row = first_row + (first + i * kThreads) / kKeys;
          const int key = first_key + (first + i * kThreads) % kKeys;
          values[i] = row < at.T && key < at.S ? addends.at(row, key, masked) : 0.0f;
        }
        HK_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          const int index = first + i * kThreads;
          hides |= values[i] == -kInfinity;
          addends_[index / kKeys * kStride + index % kKeys] = values[i];
        }
      }
    }
    return hides;
  }

  // Scales and caps the raw products of a tile; multiplies `dp`, if it is given, by the slope.
  template <int kGroups, int kColumns>
  HK_DEVICE static void cap(const AttentionParams& p, Accumulator<kGroups, kColumns>& scores,
                            Accumulator<kGroups, kColumns>* dp = nullptr) {
    if constexpr (kThere) {
      const bool capped = p.terms.softcap != 0.0;
      const float scale = static_cast<float>(p.scale);
      const float softcap = fmaxf(static_cast<float>(p.terms.softcap), kSmallest);
      const float inside = capped ? scale / softcap : scale;
      scores.each([&](float& score, int, int, int) { score *= inside; });
      if (capped) {
        scores.each([&](float& score, int m, int n, int e) {
          const float share = tanhf(score);
          score = softcap * share;
          if (dp) dp->c[m][n][e] *= 1.0f - share * share;
        });
      }
    }
  }

  // The same, then adds the addends, which gives the scores.
  template <int kGroups, int kColumns>
  HK_DEVICE void to_scores(const AttentionParams& p, Accumulator<kGroups, kColumns>& scores,
                           Accumulator<kGroups, kColumns>* dp = nullptr) const {
    if constexpr (kThere) {
      cap(p, scores, dp);
      if (adds(p)) {
        scores.each([&](float& score, int m, int n, int e) { score += at<kGroups>(row_of(m, e), column_of(n, e)); });
      }
    }
  }

  // The factor that makes scores exponents of 2.
  HK_DEVICE static float scale_log2(const AttentionParams& p) {
    return kThere ? kLog2e : static_cast<float>(p.scale) * kLog2e;
  }

  // Adds the pairs that the terms of a tile hide, if `stage` found some.
  template <int kGroups, int kColumns>
  HK_DEVICE void add_hidden(Pairs<kGroups, kColumns>& pairs) const {
    using Word = typename Pairs<kGroups, kColumns>::Word;
    if constexpr (kThere) {
      each_row<kGroups>([&](int m, int half, int row) {
        each_column<kColumns>([&](int bit, int column) {
          if (at<kGroups>(row, column) == -kInfinity) pairs.word(m, half) |= Word{1} << bit;
        });
      });
    }
  }

 private:
  // Whether there is something to add, besides what a mask hides.
  HK_DEVICE static bool adds(const AttentionParams& p) { return p.terms.bias.rank > 0 || p.terms.offset_bias.rank > 0; }

  // The addend of an element of this warp's part of a tile.
  template <int kGroups>
  HK_DEVICE float at(int row, int column) const {
    const int own = warp() * kGroups * 16 + row;
    return addends_[kLayout == ScoreLayout::kRowsFirst ? own * kStride + column : column * kStride + own];
  }

  Buffer<float> addends_;
};

}  // namespace hk::cuda
