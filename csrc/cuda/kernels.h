// What the bindings call: every CUDA kernel as a host function. The functions do not wait for the GPU, and including
// this file needs no CUDA header.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/params.h"

namespace hk::cuda {

// Why the kernels of this build cannot run on the device; empty if they can.
std::string unsupported_device(int device);

// The device of all tensors of a call, and the stream on it (a cudaStream_t).
struct LaunchTarget {
  int device = 0;
  void* stream = nullptr;
};

// Which pairs a dense mask shows in cells of kCell x kCell pairs, a DenseCell each; strides are 0 where the mask
// broadcasts.
constexpr int kCell = 32;
enum DenseCell : uint8_t { kHidden, kMixed, kShown };
struct DenseCells {
  const uint8_t* data = nullptr;  // [B, H, cells of rows, cells of keys]; null without a dense mask
  int64_t stride[4] = {};
};

// Fills the map of a mask [B or 1, H or 1, T or 1, S or 1], contiguous.
struct DenseCellsParams {
  Tensor mask, cells;  // bytes
};

// Whether scores are more than scaled products, or single pairs are hidden. Kernels are compiled for either; sinks
// concern neither products nor gradients of scores.
inline bool has_terms(const AttentionParams& p) {
  return p.terms.bias || p.terms.offset_bias || p.terms.softcap != 0.0 || p.mask.dense;
}

// The number of blocks of threads that share the keys of a tile of query rows, and the sums of each for its rows: `acc`
// [count, B, H, T, Dv], `row_max` and `row_sum` [count, B, H, T] as in OnlineSoftmax. All are contiguous. A closed head
// writes none.
struct KeySplits {
  int count = 1;
  float *acc = nullptr, *row_max = nullptr, *row_sum = nullptr;
};

// What a forward kernel stores of its rows: the outputs; the sums of splits, from which attention_combine computes the
// outputs; or of closed heads alone the rows of their gate's gradient, rowsum(dout * attended). Chosen at run time:
// compiled for each, forward kernels would take three times the space.
enum class Stores { kOutputs, kSplits, kClosedGradient };
struct ForwardTask : ForwardParams {
  DenseCells dense_cells;
  KeySplits splits;
  Stores stores = Stores::kOutputs;
  Tensor dout, dgate;  // of kClosedGradient: [B, H, T, Dv], [B, H, T] float
};

// The first pass of the backward, for both operators.
struct RowsParams : AttentionParams {
  Tensor dout, attended;  // [B, H, T, Dv]
  Tensor lse;             // [B, H, T] float
  Tensor dlse;            // [B, H, T] float; absent: 0
  Tensor delta;           // [B, H, T] float
  Tensor dgate;           // as BackwardParams, or absent
  Tensor dattended;       // [B, H, T, Dv], dout times an elementwise gate; absent for any other
  Tensor dsinks;          // [B, H, T] float, or absent
};

// The inputs of the passes of the backward that follow. `gate` is still to be applied to `dattended`: none, or one
// value per row.
struct GradientParams : AttentionParams {
  DenseCells dense_cells;
  Tensor dattended;   // [B, H, T, Dv]
  Tensor lse, delta;  // [B, H, T] float
  // The number of blocks of threads over which the heads of one sum are split; with more than one, each writes its own
  // part, float, [splits * B, ...]. In the pass by keys of gated attention, a block has one list of tiles, so it has
  // one head if intervals differ by head.
  int splits = 1;
};

// The pass by tiles of keys. Absent gradients are not computed; others have the dtype of the key, or float.
struct KeysParams : GradientParams {
  Tensor dkey, dvalue;
  Tensor dcontent_bias;  // [B, H, S] float
};

// The pass by tiles of query rows.
struct QueriesParams : GradientParams {
  bool closed_grad = true;
  Tensor dquery;   // collaborative attention: float parts
  Tensor dmixing;  // [B, tiles of rows, H, Ds] float parts
};

// Sums of dscores = p * (dp - delta), before cap and scale: over what a bias broadcasts along, or over diagonals. One
// of the two is present.
struct BiasParams : GradientParams {
  Tensor dbias;         // as the bias, float, dense; `splits` consecutive parts of it
  Tensor doffset_bias;  // two parts [B, H, blocks of offsets] float: attention_bias.cu
};

// What the statistics of rows read and store. The pass by rows writes the largest score of a row
// and its share for the pass by keys: a probability times the row's weight is
// exp(score - reference) * share. Null if `received` is not requested.
struct StatisticsPass : StatisticsParams {
  DenseCells dense_cells;
  float *reference = nullptr, *share = nullptr;  // [B, H, T]
};

struct bf16;
struct fp16;

// The attention kernels for operands of T: bf16, fp16, float. Each is defined in the file of its name.
template <typename T>
struct Kernels {
  static void gated_attention_forward(const ForwardTask&, const LaunchTarget&);
  // For up to 16 query rows; it always writes `splits`, even a single one.
  static void gated_attention_decode(const ForwardTask&, const LaunchTarget&);
  static void gated_attention_keys(const KeysParams&, const LaunchTarget&);
  static void gated_attention_queries(const QueriesParams&, const LaunchTarget&);
  static void collaborative_attention_forward(const ForwardTask&, const LaunchTarget&);
  static void collaborative_attention_keys(const KeysParams&, const LaunchTarget&);
  static void collaborative_attention_queries(const QueriesParams&, const LaunchTarget&);
  static void attention_combine(const ForwardTask&, const LaunchTarget&);
  static void attention_rows(const RowsParams&, const LaunchTarget&);
  static void attention_bias(const BiasParams&, const LaunchTarget&);
  // Also computes what keys receive, if it is requested.
  static void attention_statistics(const StatisticsPass&, const LaunchTarget&);
  // Whether blocks of gated_attention_keys have the wide sizes (kHasWideKeys) on a device.
  static bool runs_wide_keys(int device);
};

// kIsBuilt: whether the kernels for T are compiled; HK_ONLY is the single dtype of a build for tests.
// HK_INSTANTIATE_KERNELS ends a file of kernels: its dtypes share one object, since their machine code differs in few
// instructions and together compresses to two thirds.
#ifdef HK_ONLY
template <typename T>
constexpr bool kIsBuilt = std::is_same_v<T, HK_ONLY>;
#define HK_INSTANTIATE_KERNELS template struct Kernels<HK_ONLY>;
#else
template <typename T>
constexpr bool kIsBuilt = true;
#define HK_INSTANTIATE_KERNELS   \
  template struct Kernels<bf16>; \
  template struct Kernels<fp16>; \
  template struct Kernels<float>;
#endif

template <typename T, typename F>
auto with_kernels_of(F&& f) -> decltype(f(Kernels<T>{})) {
  if constexpr (kIsBuilt<T>) return f(Kernels<T>{});
  throw std::invalid_argument("the CUDA kernels were built for another dtype alone");
}

// Calls f with the kernels for a dtype.
template <typename F>
auto with_kernels(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return with_kernels_of<bf16>(f);
    case DType::kFloat16:
      return with_kernels_of<fp16>(f);
    case DType::kFloat32:
      return with_kernels_of<float>(f);
    default:
      throw std::invalid_argument("the CUDA kernels serve float32, bfloat16 and float16");
  }
}

void dense_cells(const DenseCellsParams&, const LaunchTarget&);

// The sizes of a kernel's tiles: query rows, keys, and features of the shared width. A block of threads owns one tile
// of rows or of keys, and visits those of the other side.
struct Tiles {
  int block_m = 0, block_n = 0, slice = 0;
};

// `kernel` is "gated_attention.keys" or similar; `D` is the width of scores, Ds if it is shared; `terms` is has_terms
// of the call. Some sizes depend on the shared memory of the device.
Tiles tiles_of(const std::string& kernel, DType dtype, int64_t D, int64_t Dv, bool terms, int device);

}  // namespace hk::cuda
