// Selects the ISA level of the CPU kernels.
#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/kernels.h"

namespace hk {
namespace {

#if defined(HK_X86_LEVELS)
// Linux saves the 8 KiB of tile registers only for processes that request permission.
bool may_use_tiles() {
  if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16")) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, asm/fpu/types.h
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

struct Levels {
  const Kernels* list[6] = {};

  Levels() {
    int n = 0;
#if defined(HK_X86_LEVELS)
    __builtin_cpu_init();
    const bool fma = __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
    const bool avx512 = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
    // VDPBF16PS does twice the work of a float multiply-add. From Zen 4 on it takes the same time; on Intel's
    // processors it takes four times as long (84 against 174 GFLOP/s on one core of Sapphire Rapids), so there it ranks
    // below avx512.
    const bool pairs_gain = __builtin_cpu_is("amd");
    if (pairs && may_use_tiles()) list[n++] = &amx::kKernels;
    if (pairs && pairs_gain) list[n++] = &avx512bf16::kKernels;
    if (avx512) list[n++] = &avx512::kKernels;
    if (pairs && !pairs_gain) list[n++] = &avx512bf16::kKernels;
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
