// Launches of kernels.
//
// A kernel is a struct with `using Params`, a plain struct that is passed to the device; `static constexpr int
// kThreads`, the threads of a block; and `HK_DEVICE static void run(const Params&)`, the code of a thread.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/hardware.h"
#include "cuda/kernels.h"

namespace hk::cuda {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Bytes of shared memory that one block can have, and those that all blocks of a multiprocessor have together.
struct SharedMemoryLimits {
  int per_block, per_multiprocessor;
};
SharedMemoryLimits shared_memory_limits(int device);

// Bytes of shared memory that CUDA reserves in every block.
constexpr int kSharedOfBlock = 1 << 10;

// Whether two blocks of that many bytes fit into a multiprocessor.
inline bool two_blocks_fit(int bytes, int device) {
  return 2 * (bytes + kSharedOfBlock) <= shared_memory_limits(device).per_multiprocessor;
}

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kMaxSharedBytes = 227 << 10;  // of a block, where a part has the most: sm_90, sm_100

// The most blocks that fit into the shared memory of a multiprocessor, on the GPUs with most.
constexpr int blocks_by_memory(int shared_bytes) {
  return (kMaxSharedBytes + kSharedOfBlock) / (shared_bytes + kSharedOfBlock);
}

inline void check_grid(int64_t blocks, int shared_bytes) {
  if (blocks > kMaxBlocks)
    throw Error("the call needs " + std::to_string(blocks) + " blocks of threads, but a launch takes " +
                std::to_string(kMaxBlocks) + ": call with fewer rows or heads");
  if (shared_bytes > kMaxSharedBytes)
    throw Error("the kernel needs " + std::to_string(shared_bytes) +
                " bytes of shared memory, but no GPU has more than " + std::to_string(kMaxSharedBytes));
}

#if defined(__CUDACC__)

// Makes `device` the current one during its lifetime. The previous device is restored only if this process already uses
// it: cudaSetDevice would create a context there, which takes hundreds of MB.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  int previous_;
  bool changed_;
};

// Allows `entry` to use `bytes` of dynamic shared memory on the device, which is the current one.
void allow_shared_memory(const void* entry, int device, int bytes);

// Throws an Error with a message if there is an error.
void check_error(cudaError_t error, int device);

template <typename Kernel, int kLeastBlocks>
__global__ void __launch_bounds__(Kernel::kThreads, kLeastBlocks)
    entry(const __grid_constant__ typename Kernel::Params params) {
  Kernel::run(params);
}

#endif

// Starts `blocks` blocks, each with `shared_bytes` of shared memory. Does not wait for them, and may be captured in a
// CUDA graph. At least kLeastBlocks of them must fit into a multiprocessor. With 0, ptxas may spill some registers to
// fit one more block, even if shared memory has no space for it: it does not know how much a block takes.
template <typename Kernel, int kLeastBlocks = 0>
void launch(int64_t blocks, int shared_bytes, const typename Kernel::Params& params,
            [[maybe_unused]] const LaunchTarget& target) {
  using Params = typename Kernel::Params;
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= 4096,
                "parameters of a kernel are 4 KB of plain data");
  static_assert(Kernel::kThreads % kWarp == 0 && Kernel::kThreads <= 1024);
  if (blocks == 0) return;
  check_grid(blocks, shared_bytes);
#if defined(__CUDACC__)
  const DeviceGuard guard(target.device);
  const auto function = reinterpret_cast<const void*>(&entry<Kernel, kLeastBlocks>);
  allow_shared_memory(function, target.device, shared_bytes);
  void* arguments[] = {const_cast<Params*>(&params)};
  check_error(cudaLaunchKernel(function, dim3(static_cast<unsigned>(blocks)), dim3(Kernel::kThreads), arguments,
                               static_cast<size_t>(shared_bytes), static_cast<cudaStream_t>(target.stream)),
              target.device);
#else
  emulator::run_grid(blocks, Kernel::kThreads, shared_bytes, [&params] { Kernel::run(params); });
#endif
}

}  // namespace hk::cuda
