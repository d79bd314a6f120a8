// The order in which the emulator runs the threads of a block.
#pragma once

#include <string>
#include <vector>

namespace hk::emulator {

// Applies to all later launches in this process. A kernel with correct barriers gives bitwise equal
// results under every schedule:
//   round_robin   all threads to their next operation of a warp or block, in turn; the default;
//   greedy        the first warp that can, on to its next barrier of the block;
//   reversed      greedy, of the last block, warp and lane first.
void use_schedule(const std::string& name);

std::vector<std::string> schedule_names();

}  // namespace hk::emulator
