// All kernels at one ISA level. The build compiles this file once per level, with HK_LEVEL its name. A level that has
// products of pairs of bfloat16 serves bfloat16 alone; HK_PLAIN is the level that it uses for all other dtypes.
#include "cpu/attention_statistics.h"
#include "cpu/collaborative_attention.h"
#include "cpu/forward.h"
#include "cpu/gated_attention.h"
#include "cpu/kernels.h"
#include "cpu/peak.h"

namespace hk::HK_LEVEL {
namespace {

template <typename Real, typename Operand>
void attention_backward(const BackwardParams& p) {
  p.mixing ? collaborative_attention_backward<Real, Operand>(p) : gated_attention_backward<Real, Operand>(p);
}

template <typename, typename Operand>
int64_t products(DType, int64_t steps, int threads) {
  return on_threads(threads, [=] { return chain_products<Operand>(steps); });
}
template <typename, typename Operand>
int64_t powers(DType, int64_t steps, int threads) {
  return on_threads(threads, [=] { return chain_powers<Operand>(steps); });
}

// A call of the kernel for a dtype.
#ifdef HK_PLAIN
constexpr bool kPairs = true;
#define HK_KERNEL(kernel, dtype, ...) \
  dtype == DType::kBFloat16 ? kernel<float, Pair>(__VA_ARGS__) : HK_PLAIN::kKernels.kernel(__VA_ARGS__)

void statistics(const StatisticsParams& p) { HK_PLAIN::kKernels.attention_statistics(p); }
#else
constexpr bool kPairs = false;
// float64 tensors are computed in double, all others in float.
#define HK_KERNEL(kernel, dtype, ...) \
  dtype == DType::kFloat64 ? kernel<double, double>(__VA_ARGS__) : kernel<float, float>(__VA_ARGS__)

void statistics(const StatisticsParams& p) {
  p.query.dtype == DType::kFloat64 ? attention_statistics<double>(p) : attention_statistics<float>(p);
}
#endif

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {
    HK_STRING(HK_LEVEL),
    kPairs,
    [](const ForwardParams& p) { HK_KERNEL(attention_forward, p.query.dtype, p); },
    [](const BackwardParams& p) { HK_KERNEL(attention_backward, p.query.dtype, p); },
    statistics,
    [](DType dtype, int64_t steps, int threads) { return HK_KERNEL(products, dtype, dtype, steps, threads); },
    [](DType dtype, int64_t steps, int threads) { return HK_KERNEL(powers, dtype, dtype, steps, threads); }};

}  // namespace hk::HK_LEVEL
