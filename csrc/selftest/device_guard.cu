// Tests DeviceGuard (cuda/launch.h) without a GPU: linked with recorded_runtime.cpp in place of the CUDA runtime.
// Prints what does not hold.
#include <cstdio>

#include "cuda/launch.h"
#include "selftest/recorded_runtime.h"

// Whether a guard of device 1, where `current` was the current one, makes `expected` current.
bool makes_current(int current, bool active, std::vector<int> expected, const char* claim) {
  recorded.made_current.clear();
  recorded.current = current;
  recorded.active[current] = active;
  delete new hk::cuda::DeviceGuard(1);
  const bool holds = recorded.made_current == expected;
  if (!holds) std::puts(claim);
  return holds;
}

int main(int count, char**) {
  recorded.says_what_is_active = count == 1;
  bool holds = makes_current(1, true, {}, "the current device is left alone");
  holds &= makes_current(0, true, {1, 0}, "a device that is in use is current again");
  if (recorded.says_what_is_active)
    holds &= makes_current(0, false, {1}, "no context is created on another device");
  else
    holds &= makes_current(0, false, {1, 0}, "without an answer the device is current again");
  return holds ? 0 : 1;
}
