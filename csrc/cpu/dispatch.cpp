// Which level of the CPU kernels runs here.
#include <atomic>
#include <cstring>

#include "cpu/kernels.h"

namespace hk {
namespace {

struct Levels {
  const Kernels* list[4] = {};

  Levels() {
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool fma = __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
    if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      list[n++] = &avx512::kKernels;
    if (fma) list[n++] = &avx2::kKernels;
#endif
    list[n] = &baseline::kKernels;
  }
};

const Levels& levels() {
  static const Levels found;
  return found;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> level{levels().list[0]};
  return level;
}

}  // namespace

const Kernels* const* available_levels() { return levels().list; }

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

bool use_level(const char* name) {
  for (const Kernels* const* level = available_levels(); *level; ++level) {
    if (std::strcmp((*level)->name, name) == 0) {
      chosen().store(*level);
      return true;
    }
  }
  return false;
}

}  // namespace hk
