// A fake CUDA runtime with two GPUs that records which of them are made current.
#pragma once

#include <vector>

struct RecordedRuntime {
  bool says_what_is_active = true;  // the driver has the function for it
  bool active[2] = {};              // whether a device has a primary context
  int current = 0;
  std::vector<int> made_current;
};
extern RecordedRuntime recorded;
