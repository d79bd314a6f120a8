// The host functions of kernels.h: which launcher serves the dtype of a call.
#include <stdexcept>
#include <string>

#include "cuda/collaborative_tiles.h"
#include "cuda/kernels.h"
#include "cuda/passes.h"
#include "cuda/tiles.h"

namespace hk::cuda {
namespace {

// f of a value of the type that the operands have.
template <typename F>
auto with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(bf16{});
    case DType::kFloat16:
      return f(fp16{});
    case DType::kFloat32:
      return f(float{});
    default:
      throw std::invalid_argument("the CUDA kernels serve float32, bfloat16 and float16");
  }
}

}  // namespace

#define HK_PASS(name, launcher, Params, operand)                                                \
  void name(const Params& p, const LaunchTarget& target) {                                      \
    with_dtype(p.operand.dtype, [&](auto element) { launcher<decltype(element)>(p, target); }); \
  }

HK_PASS(gated_attention_forward, gated_forward, AttendParams, query)
HK_PASS(gated_attention_decode, gated_decode, AttendParams, query)
HK_PASS(attention_combine, combine_pass, AttendParams, query)
HK_PASS(gated_attention_keys, gated_keys, KeysParams, query)
HK_PASS(gated_attention_queries, gated_queries, QueriesParams, query)
HK_PASS(collaborative_attention_forward, collaborative_forward, AttendParams, query)
HK_PASS(collaborative_attention_keys, collaborative_keys, KeysParams, query)
HK_PASS(collaborative_attention_queries, collaborative_queries, QueriesParams, query)
HK_PASS(attention_rows, rows_pass, RowsParams, dout)
HK_PASS(attention_bias, bias_pass, BiasParams, query)
HK_PASS(attention_statistics, statistics_pass, StatisticsPass, query)

#undef HK_PASS

Tiles tiles_of(const char* kernel, DType dtype, int64_t D, int64_t Dv, bool terms, int device) {
  const std::string name = kernel, pass = name.substr(name.find('.') + 1);
  const bool gated = name == "gated_attention." + pass;
  const Tiles tiles = with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    if (pass == "bias") return Tiles{kBiasTile, kBiasTile, 0};
    return gated ? gated_tiles<T>(pass, D, Dv, terms, runs_wide_keys<T>(device))
                 : collaborative_tiles<T>(pass, Dv, terms);
  });
  if (tiles.block_m == 0 || !(gated || name == "collaborative_attention." + pass))
    throw std::invalid_argument("no kernel is called " + name);
  return tiles;
}

}  // namespace hk::cuda
