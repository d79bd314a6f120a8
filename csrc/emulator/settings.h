// What tests choose of the emulator, for all later launches in this process, and see of a launch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hk::emulator {

// The order in which the threads of a block run. A kernel with correct barriers gives bitwise equal results under every
// schedule:
//   round_robin   all threads to their next operation of a warp or block, in turn; the default;
//   greedy        the first warp that can, on to its next barrier of the block;
//   reversed      greedy, of the last block, warp and lane first.
void use_schedule(const std::string& name);
std::vector<std::string> schedule_names();

// Bytes of shared memory that a block and a multiprocessor have. The default is the least that a part of sm_80 and up
// has (sm_86).
struct SharedBytes {
  int per_block = 99 << 10, per_multiprocessor = 100 << 10;
};
void use_shared_bytes(int per_block, int per_multiprocessor);
SharedBytes shared_bytes();

// The sizes of the last launch of this thread.
struct Launch {
  int64_t blocks = 0;
  int threads = 0;
  int64_t shared_bytes = 0;
};
Launch last_launch();

}  // namespace hk::emulator
