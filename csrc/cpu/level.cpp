// All kernels at one ISA level. The build compiles this file once per level, with HK_LEVEL its
// name.
#include "cpu/attention_statistics.h"
#include "cpu/collaborative_attention.h"
#include "cpu/gated_attention.h"
#include "cpu/kernels.h"
#include "cpu/peak.h"

namespace hk::HK_LEVEL {
namespace {

// float64 tensors are computed in double, all others in float.
bool in_double(const AttentionParams& p) { return p.query.dtype == DType::kFloat64; }

void gated_forward(const ForwardParams& p) {
  in_double(p) ? gated_attention_forward<double, double>(p)
               : gated_attention_forward<float, float>(p);
}
void gated_backward(const BackwardParams& p) {
  in_double(p) ? gated_attention_backward<double, double>(p)
               : gated_attention_backward<float, float>(p);
}
void collaborative_forward(const ForwardParams& p) {
  in_double(p) ? collaborative_attention_forward<double, double>(p)
               : collaborative_attention_forward<float, float>(p);
}
void collaborative_backward(const BackwardParams& p) {
  in_double(p) ? collaborative_attention_backward<double, double>(p)
               : collaborative_attention_backward<float, float>(p);
}
void statistics(const StatisticsParams& p) {
  in_double(p) ? attention_statistics<double>(p) : attention_statistics<float>(p);
}
int64_t products(DType dtype, int64_t steps, int threads) {
  return on_threads(threads, [=] {
    return dtype == DType::kFloat64 ? chain_products<double>(steps) : chain_products<float>(steps);
  });
}
int64_t powers(DType dtype, int64_t steps, int threads) {
  return on_threads(threads, [=] {
    return dtype == DType::kFloat64 ? chain_powers<double>(steps) : chain_powers<float>(steps);
  });
}

}  // namespace

const Kernels kKernels = {
    HK_STRING(HK_LEVEL),    false,      gated_forward, gated_backward, collaborative_forward,
    collaborative_backward, statistics, products,      powers};

}  // namespace hk::HK_LEVEL
