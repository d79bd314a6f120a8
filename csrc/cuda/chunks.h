// The features of a head of collaborative attention: those of its mixing vector that count, and
// their way from the rows that all heads share into tiles.
//
// A mixing vector is made of chunks of kChunk features. Chunks that are all zero are left out; the
// others are taken in steps of up to four, in the order of their numbers, so that a ragged head
// costs what it uses. The mixed query is never in global memory: a thread multiplies what it has
// copied itself, before the barrier that shows it to the others.
#pragma once

#include <cstring>

#include "cuda/gate.h"
#include "cuda/tensor_core.h"

namespace hk::cuda {

constexpr int kChunk = 16;  // MIXING_CHUNK of call.py
constexpr int kStepChunks = 4, kStepWidth = kStepChunks * kChunk;

// One step over one tile of a list. The tiles of a list follow each other without a break; the
// copies of a step are under way while the one before it is computed, on two stages in turn.
struct Step {
  int tile = 0, place = 0, stage = 0;
  int turn = 0;  // which of two tiles, where a list is gone through with gaps

  // from(index) is the next tile of the list that counts, from `index` on.
  template <typename From>
  HK_DEVICE Step next(int steps, From&& from) const {
    if (place + 1 < steps) return {tile, place + 1, stage ^ 1, turn};
    return {from(tile + 1), 0, stage ^ 1, turn ^ 1};
  }

  // Where what is copied once a tile stands, one of two.
  template <bool kGaps>
  HK_DEVICE int half() const {
    return kGaps ? turn : tile % 2;
  }
};

// Where the features of a tile's columns stand in a row, by chunks: the next ones of a list.
struct Gathered {
  const int* numbers;
  int count;

  HK_DEVICE int feature(int column) const {
    return column / kChunk < count ? numbers[column / kChunk] * kChunk + column % kChunk : -1;
  }
};

// Or those from `first` on, of which only the `used` chunks are asked for, a bit each.
struct Slice {
  int first;
  uint32_t used;

  HK_DEVICE bool has(int column) const { return used >> (column / kChunk) & 1; }
  HK_DEVICE int feature(int column) const { return has(column) ? first + column : -1; }
};

// The features of one head after another.
class Features {
 public:
  constexpr Features(SharedMemory& memory, int64_t width)
      : width_(static_cast<int>(width)),
        count_(0),
        factors_(memory.take<float>(chunks_of(width_) * kChunk)),
        used_(memory.take<int>(chunks_of(width_))),
        numbers_(memory.take<int>(chunks_of(width_))) {}

  // Those of head h. All threads of the block come here; barriers stand before the first write and
  // after the last.
  template <int kThreads>
  HK_DEVICE void set(const Tensor& mixing, int64_t h) {
    const int chunks = chunks_of(width_);
    sync_block();
    for (int d = thread_index(); d < chunks * kChunk; d += kThreads) {
      const int64_t index = h * mixing.stride[0] + d * mixing.stride[1];
      factors_[d] = d < width_ ? load_number(mixing.data, mixing.dtype, index) : 0.0f;
    }
    sync_block();
    for (int chunk = thread_index(); chunk < chunks; chunk += kThreads) {
      bool used = false;
      for (int d = 0; d < kChunk; ++d) used |= factors_[chunk * kChunk + d] != 0.0f;
      used_[chunk] = used;
    }
    sync_block();
    count_ = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (!used_[chunk]) continue;
      if (thread_index() == 0) numbers_[count_] = chunk;
      ++count_;
    }
    sync_block();
  }

  // At least one: a head without features has its content bias for scores.
  HK_DEVICE int steps() const { return count_ ? ceil_div(count_, kStepChunks) : 1; }
  HK_DEVICE bool ends(const Step& step) const { return step.place + 1 == steps(); }
  HK_DEVICE int chunks(const Step& step) const {
    const int left = count_ - step.place * kStepChunks;
    return left < kStepChunks ? left : kStepChunks;
  }
  HK_DEVICE int width(const Step& step) const { return chunks(step) * kChunk; }
  HK_DEVICE Gathered at(const Step& step) const {
    return {numbers_ + step.place * kStepChunks, chunks(step)};
  }
  // Features `first` and on, kWidth of them; `all` those that the mixing vector has, else those
  // that the head uses.
  template <int kWidth>
  HK_DEVICE Slice slice(int first, bool all) const {
    static_assert(kWidth <= 32 * kChunk);
    uint32_t used = 0;
    for (int i = 0; i < kWidth / kChunk; ++i) {
      const int chunk = first / kChunk + i;
      if (chunk < chunks_of(width_) && (all || used_[chunk])) used |= 1u << i;
    }
    return {first, used};
  }

  HK_DEVICE const float* factors() const { return factors_; }

 private:
  static constexpr int chunks_of(int width) { return ceil_div(width, kChunk); }

  int width_, count_;
  Buffer<float> factors_;  // of all features, 0 beyond them
  Buffer<int> used_, numbers_;
};

// Features `step * kStepWidth` and on, without a mixing vector.
HK_DEVICE Slice whole_step(int step) { return {step * kStepWidth, (1u << kStepChunks) - 1}; }

// copy(step, stage) starts the copies of a step, use(step, stage) multiplies what has landed for
// this thread and shows it to others by a barrier: in turn on two stages, so that the copies of a
// step are under way while the one before it is computed.
template <typename Copy, typename Use>
HK_DEVICE void each_step(int steps, Copy&& copy, Use&& use) {
  for (int step = -1; step < steps; ++step) {  // the first only copies
    if (step + 1 < steps) copy(step + 1, (step + 1) % 2);
    commit_copies();
    if (step < 0) continue;
    wait_copies<1>();
    use(step, step % 2);
    sync_block();
  }
}

// Starts to copy the features of rows `first` and on into a tile, with all threads of the block;
// columns for which `source` has none are left as they are.
template <int kThreads, typename AnyTile, typename Source>
HK_DEVICE void copy_features(const AnyTile& tile, const Rows<typename AnyTile::Element>& rows,
                             int first, const Source& source) {
  OwnUnits<kThreads, AnyTile>::each_column([&](int column) {
    const int feature = source.feature(column);
    if (feature >= 0) copy_column<kThreads>(tile, column, rows, first, feature);
  });
}

// Multiplies what this thread has copied into the tile by the features' factors, rounded to T.
template <int kThreads, typename AnyTile, typename Source>
HK_DEVICE void mix_features(const AnyTile& tile, const float* factors, const Source& source) {
  using Own = OwnUnits<kThreads, AnyTile>;
  using T = typename AnyTile::Element;
  static_assert(kChunk % Own::kUnit == 0);
  Own::each_column([&](int column) {
    const int feature = source.feature(column);
    if (feature < 0) return;
    float factor[Own::kUnit];
    HK_UNROLL
    for (int i = 0; i < Own::kUnit; ++i) factor[i] = factors[feature + i];
    HK_UNROLL_BY(4)
    for (int row = Own::first_row(); row < AnyTile::kRows; row += Own::kRowStep) {
      auto* const at = reinterpret_cast<Unit<T>*>(tile.at(row, column));
      Unit<T> unit = *at;
      uint32_t words[4];
      std::memcpy(words, &unit, sizeof(unit));
      HK_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t& word = words[i];
        if constexpr (sizeof(T) == 4) {
          word = float_bits(bits_float(word) * factor[i]);
        } else {
          const Pair pair = unpack<T>(word);
          word = pack<T>(pair.low * factor[2 * i], pair.high * factor[2 * i + 1]);
        }
      }
      std::memcpy(&unit, words, sizeof(unit));
      *at = unit;
    }
  });
}

}  // namespace hk::cuda
