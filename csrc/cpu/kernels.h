// The table of CPU kernels of an ISA level: level.cpp is compiled once per level and defines one table.
#pragma once

#include "common/params.h"

// A macro's value as text: the name of HK_LEVEL.
#define HK_STRING_(x) #x
#define HK_STRING(x) HK_STRING_(x)

// What the Python module calls in libheads_kernels.so.
#define HK_EXPORT __attribute__((visibility("default")))

namespace hk {

struct Kernels {
  const char* name;
  bool pairs;  // operands of bfloat16 tensors are rounded to bfloat16
  // Collaborative attention of a call with mixing, else gated attention, with entmax if there is `alpha`.
  void (*attention_forward)(const ForwardParams&);
  void (*attention_backward)(const BackwardParams&);
  void (*attention_statistics)(const StatisticsParams&);
  // Peak throughput (peak.h): the number of multiply-adds of operands of this dtype, and of powers, computed in `steps`
  // on each thread.
  int64_t (*products)(DType, int64_t steps, int threads);
  int64_t (*powers)(DType, int64_t steps, int threads);
};

namespace baseline {
extern const Kernels kKernels;
}
// HK_BASELINE: the level of any processor alone, for a self test that compiles quickly.
#if defined(__x86_64__) && !defined(HK_BASELINE)
#define HK_X86_LEVELS
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512bf16 {
extern const Kernels kKernels;
}
namespace amx {
extern const Kernels kKernels;
}
#endif

// Levels that this processor can run, best first, null-terminated.
HK_EXPORT const Kernels* const* available_levels();

// The level in use: the best one, unless `use_level` chose another.
HK_EXPORT const Kernels& kernels();

// Selects the level of this name; returns false if the processor does not support it.
HK_EXPORT bool use_level(const char* name);

}  // namespace hk
