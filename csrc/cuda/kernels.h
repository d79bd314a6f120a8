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

// Which pairs of a cell of kCell x kCell a dense mask shows: none, some or all.
constexpr int kCell = 32;
enum DenseCell : uint8_t { kHidden, kMixed, kShown };

// Fills the map of a mask [B or 1, H or 1, T or 1, S or 1], contiguous.
struct DenseCellsParams {
  Tensor mask, cells;  // bytes
};

// Whether a call has a bias, a cap or a dense mask. Kernels are compiled with and without these terms. Sinks are not
// among them: they change neither scores nor the gradients of scores.
inline bool has_terms(const AttentionParams& p) {
  return p.terms.bias || p.terms.offset_bias || p.terms.softcap != 0.0 || p.mask.dense;
}

// The keys of a tile of query rows are divided among `count` blocks of threads. Each block stores its sums: `acc`
// [count, B, H, T, Dv], and `row_max` and `row_sum` [count, B, H, T] as in OnlineSoftmax, all contiguous. Nothing is
// stored for closed heads.
struct KeySplits {
  int count = 1;
  float *acc = nullptr, *row_max = nullptr, *row_sum = nullptr;
};

// What a forward kernel stores for each of its rows:
//
//   kOutputs          the outputs
//   kSplits           the sums over one split of the keys; attention_combine computes the outputs from them
//   kClosedGradient   the gradient of the gate, rowsum(dout * attended), for rows of closed heads only
//
// This is a run-time argument: compiling each forward kernel three times would triple the size of the library.
enum class Stores { kOutputs, kSplits, kClosedGradient };
struct ForwardTask : ForwardParams {
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

// The inputs of the other passes of the backward. `dattended` does not include the gate yet, unless that is
// elementwise: the passes multiply it by one value per row.
struct GradientParams : AttentionParams {
  Tensor dattended;   // [B, H, T, Dv]
  Tensor lse, delta;  // [B, H, T] float
  // The heads of one sum are divided among this many blocks of threads. If there is more than one, each block writes
  // its own part, in float, [splits * B, ...]. In the pass by keys of gated attention all heads of a block have the
  // same tiles, so a block has a single head if intervals differ between heads.
  int splits = 1;
};

// The pass by tiles of keys. Absent gradients are not computed; others have the dtype of the key, or float.
struct KeysParams : GradientParams {
  Tensor dkey, dvalue;
  Tensor dcontent_bias;  // [B, H, S] float
};

// The pass by tiles of query rows.
struct QueriesParams : GradientParams {
  Tensor dquery;   // collaborative attention: float parts
  Tensor dmixing;  // [B, tiles of rows, H, Ds] float parts
};

// Sums of dscores = p * (dp - delta), before the cap and the scale, over the dimensions along which a bias broadcasts,
// or over diagonals. Exactly one of the two is present.
struct BiasParams : GradientParams {
  Tensor dbias;         // as the bias, float, dense; `splits` consecutive parts of it
  Tensor doffset_bias;  // two parts [B, H, blocks of offsets] float: attention_bias.cu
};

// The pass by rows stores the largest score of each row (`reference`) and its `share`, from which the pass by keys
// computes a probability times the weight of its row: exp(score - reference) * share. Both are null unless `received`
// is requested.
struct StatisticsPass : StatisticsParams {
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

// kIsBuilt: whether the kernels for T are compiled; HK_ONLY is the only dtype of a build for tests.
// HK_INSTANTIATE_KERNELS is at the end of every file of kernels. All dtypes of a kernel are in one object, because
// their machine code is so similar that it compresses to two thirds.
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
