// What the machine can run. No CUDA header is needed to include it.
#pragma once

#include <string>

namespace hk::cuda {

// Why this build's kernels cannot run on the device, in words; empty if they can.
std::string unsupported_device(int device);

// Bytes of shared memory that one block can have, and those that all blocks of a multiprocessor
// have together.
struct SharedMemoryLimits {
  int per_block, per_multiprocessor;
};
SharedMemoryLimits shared_memory_limits(int device);

// What CUDA takes of every block.
constexpr int kSharedOfBlock = 1 << 10;

// Whether two blocks of that many bytes fit into a multiprocessor.
inline bool two_blocks_fit(int bytes, int device) {
  return 2 * (bytes + kSharedOfBlock) <= shared_memory_limits(device).per_multiprocessor;
}

}  // namespace hk::cuda
