// The GPU that the emulator stands for, as far as launches depend on it.
#pragma once

#include <cstdint>

namespace hk::emulator {

// Bytes of shared memory that a block and a multiprocessor have, for all later launches in this
// process. The default is the least that a part of sm_80 and up has (sm_86).
struct SharedBytes {
  int per_block = 99 << 10, per_multiprocessor = 100 << 10;
};
void use_shared_bytes(int per_block, int per_multiprocessor);
SharedBytes shared_bytes();

// What the last launch of this thread asked for.
struct Launch {
  int64_t blocks = 0;
  int threads = 0;
  int64_t shared_bytes = 0;
};
Launch last_launch();

}  // namespace hk::emulator
