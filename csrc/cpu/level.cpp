// All kernels at one ISA level. The build compiles this file once per level, with HK_LEVEL its
// name. A level that has products of pairs of bfloat16 serves bfloat16 alone; HK_PLAIN is the level
// that it uses for all other dtypes.
#include "cpu/attention_statistics.h"
#include "cpu/collaborative_attention.h"
#include "cpu/gated_attention.h"
#include "cpu/kernels.h"
#include "cpu/peak.h"

namespace hk::HK_LEVEL {
namespace {

#ifdef HK_PLAIN
constexpr bool kPairs = true;
#define HK_KERNEL(kernel, p) p.query.dtype == DType::kBFloat16 ? kernel<float, Pair>(p) : HK_PLAIN::kKernels.kernel(p)

void statistics(const StatisticsParams& p) { HK_PLAIN::kKernels.attention_statistics(p); }
int64_t products(DType dtype, int64_t steps, int threads) {
  if (dtype != DType::kBFloat16) return HK_PLAIN::kKernels.products(dtype, steps, threads);
  return on_threads(threads, [=] { return chain_products<Pair>(steps); });
}
int64_t powers(DType dtype, int64_t steps, int threads) {
  if (dtype != DType::kBFloat16) return HK_PLAIN::kKernels.powers(dtype, steps, threads);
  return on_threads(threads, [=] { return chain_powers<Pair>(steps); });
}
#else
constexpr bool kPairs = false;
// float64 tensors are computed in double, all others in float.
#define HK_KERNEL(kernel, p) p.query.dtype == DType::kFloat64 ? kernel<double, double>(p) : kernel<float, float>(p)

void statistics(const StatisticsParams& p) {
  p.query.dtype == DType::kFloat64 ? attention_statistics<double>(p) : attention_statistics<float>(p);
}
int64_t products(DType dtype, int64_t steps, int threads) {
  return on_threads(
      threads, [=] { return dtype == DType::kFloat64 ? chain_products<double>(steps) : chain_products<float>(steps); });
}
int64_t powers(DType dtype, int64_t steps, int threads) {
  return on_threads(
      threads, [=] { return dtype == DType::kFloat64 ? chain_powers<double>(steps) : chain_powers<float>(steps); });
}
#endif

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {HK_STRING(HK_LEVEL),
                          kPairs,
                          [](const ForwardParams& p) { HK_KERNEL(gated_attention_forward, p); },
                          [](const BackwardParams& p) { HK_KERNEL(gated_attention_backward, p); },
                          [](const ForwardParams& p) { HK_KERNEL(collaborative_attention_forward, p); },
                          [](const BackwardParams& p) { HK_KERNEL(collaborative_attention_backward, p); },
                          statistics,
                          products,
                          powers};

}  // namespace hk::HK_LEVEL
