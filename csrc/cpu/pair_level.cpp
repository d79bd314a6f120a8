// The bfloat16 kernels with products of pairs at one ISA level. The build compiles this file once
// per level that has such products, with HK_LEVEL its name and HK_PLAIN the level used for all
// other dtypes.
#include "cpu/collaborative_attention.h"
#include "cpu/gated_attention.h"
#include "cpu/kernels.h"
#include "cpu/peak.h"

namespace hk::HK_LEVEL {
namespace {

bool in_pairs(const AttentionParams& p) { return p.query.dtype == DType::kBFloat16; }

void gated_forward(const ForwardParams& p) {
  in_pairs(p) ? gated_attention_forward<float, Pair>(p)
              : HK_PLAIN::kKernels.gated_attention_forward(p);
}
void gated_backward(const BackwardParams& p) {
  in_pairs(p) ? gated_attention_backward<float, Pair>(p)
              : HK_PLAIN::kKernels.gated_attention_backward(p);
}
void collaborative_forward(const ForwardParams& p) {
  in_pairs(p) ? collaborative_attention_forward<float, Pair>(p)
              : HK_PLAIN::kKernels.collaborative_attention_forward(p);
}
void collaborative_backward(const BackwardParams& p) {
  in_pairs(p) ? collaborative_attention_backward<float, Pair>(p)
              : HK_PLAIN::kKernels.collaborative_attention_backward(p);
}
void statistics(const StatisticsParams& p) { HK_PLAIN::kKernels.attention_statistics(p); }
int64_t products(DType dtype, int64_t steps, int threads) {
  if (dtype != DType::kBFloat16) return HK_PLAIN::kKernels.products(dtype, steps, threads);
  return on_threads(threads, [=] { return chain_products<Pair>(steps); });
}
int64_t powers(DType dtype, int64_t steps, int threads) {
  return HK_PLAIN::kKernels.powers(dtype, steps, threads);
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {
    HK_STRING(HK_LEVEL),    true,       gated_forward, gated_backward, collaborative_forward,
    collaborative_backward, statistics, products,      powers};

}  // namespace hk::HK_LEVEL
