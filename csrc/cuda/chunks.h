// The features of a head of collaborative attention: which ones its mixing vector uses, and how they are copied into
// tiles from the rows that all heads share.
//
// A mixing vector consists of chunks of kChunk features. Chunks that are all zero are skipped; the others are processed
// in steps of up to four, in ascending order, so that a ragged head costs only what it uses. The mixed query is never
// in global memory: a thread multiplies the elements that it has copied itself, before the barrier after which the
// others read them.
#pragma once

#include <cstring>

#include "cuda/gate.h"
#include "cuda/tensor_core.h"
#include "cuda/visible.h"

namespace hk::cuda {

constexpr int kChunk = 16;  // MIXING_CHUNK of call.py
constexpr int kStepChunks = 4, kStepWidth = kStepChunks * kChunk;

// One step over one tile of a list. The copies of a step run while the one before it is computed, also from one tile to
// the next, with two stages in turn.
struct Step {
  int tile = 0, place = 0, stage = 0;
  int turn = 0;  // which of two tiles, where a list is gone through with gaps

  // from(index) is the next tile of the list that counts, from `index` on.
  template <typename From>
  HK_DEVICE Step next(int steps, From&& from) const {
    if (place + 1 < steps) return {tile, place + 1, stage ^ 1, turn};
    return {from(tile + 1), 0, stage ^ 1, turn ^ 1};
  }

  // Which of two buffers has what is copied once per tile.
  template <bool kGaps>
  HK_DEVICE int half() const {
    return kGaps ? turn : tile % 2;
  }
};

// The position in a row of the features of a tile's columns, by chunks: the next ones of a list.
struct Gathered {
  const int* numbers;
  int count;

  HK_DEVICE int feature(int column) const {
    return column / kChunk < count ? numbers[column / kChunk] * kChunk + column % kChunk : -1;
  }
};

// The features from `first` on; only the `used` chunks are copied, one bit each.
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

  // Reads those of head h. All threads of the block take part; there are barriers before the first write and after the
  // last.
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

  // At least one: the scores of a head without features are its content bias.
  HK_DEVICE int steps() const { return count_ ? ceil_div(count_, kStepChunks) : 1; }
  HK_DEVICE bool ends(const Step& step) const { return step.place + 1 == steps(); }
  HK_DEVICE int chunks(const Step& step) const {
    const int left = count_ - step.place * kStepChunks;
    return left < kStepChunks ? left : kStepChunks;
  }
  HK_DEVICE int width(const Step& step) const { return chunks(step) * kChunk; }
  HK_DEVICE Gathered at(const Step& step) const { return {numbers_ + step.place * kStepChunks, chunks(step)}; }
  // kWidth features from `first` on: with `all`, those of the mixing vector, else those that the head uses.
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

// copy(step, stage) starts the copies of a step; use(step, stage) multiplies the elements that this thread has copied,
// and makes them visible to others by a barrier. With two stages in turn, the copies of a step run while the one before
// it is computed.
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

// Runs the steps of the tiles of a list, from tile `first` on, which exists; from(index) is the next tile to visit.
// Copies of a step run while the one before it is computed. The kernel defines:
//   copy(step)         starts its copies;
//   mix(step)          multiplies the elements that this thread has copied, once they have landed;
//   stage(step)        with kTerms, at the end of a tile: puts its terms on chip; returns whether
//                      they hide pairs;
//   use(step, hides)   computes it;
//   load(step)         at the end of a tile: reads a number while the step before is computed, and
//   put(number)        puts it on chip, in each of the first kLoaded threads.
// The list is read from shared memory, where it takes no registers.
template <bool kTerms, int kLoaded, typename From, typename Copy, typename Mix, typename Stage, typename Use,
          typename Load, typename Put>
HK_DEVICE void each_tile_step(const Features& features, int first, const TileList& list, From&& from, Copy&& copy,
                              Mix&& mix, Stage&& stage, Use&& use, Load&& load, Put&& put) {
  const int steps = features.steps();
  const auto loads = [&](const Step& step) {
    return step.tile < list.count() && features.ends(step) && thread_index() < kLoaded;
  };
  Step step = {first};
  copy(step);
  if (loads(step)) put(load(step));
  commit_copies();
  while (step.tile < list.count()) {
    const Step next = step.next(steps, from);
    const bool loads_next = loads(next);
    decltype(load(next)) loaded{};
    if (next.tile < list.count()) copy(next);
    if (loads_next) loaded = load(next);
    commit_copies();
    wait_copies<1>();
    mix(step);
    const bool hides = kTerms && features.ends(step) && stage(step);
    use(step, sync_block_any<kTerms>(hides));
    sync_block();  // no thread reads what belongs to this step
    if (loads_next) put(loaded);
    step = next;
  }
}

// Starts to copy the features of the rows from `first` on into a tile, with all threads of the block; columns for which
// `source` has none are unchanged.
template <int kThreads, typename AnyTile, typename Source>
HK_DEVICE void copy_features(const AnyTile& tile, const Rows<typename AnyTile::Element>& rows, int first,
                             const Source& source) {
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
          const LowHigh pair = unpack<T>(word);
          word = pack<T>(pair.low * factor[2 * i], pair.high * factor[2 * i + 1]);
        }
      }
      std::memcpy(&unit, words, sizeof(unit));
      *at = unit;
    }
  });
}

}  // namespace hk::cuda
