// Blocks of CUDA threads on one host thread, a fiber each.
//
// What lanes of a warp or threads of a block do together is an operation: each leaves its arguments
// and waits, and the last to come computes for all. Every other instruction is a thread's own, so
// between two operations any order of threads is a correct one, and a schedule picks one.
//
// Mistakes become a `Fault` that reaches the caller of run_grid: lanes of a warp at different
// operations; threads that wait for what never comes, others having returned or waiting elsewhere;
// addresses of asynchronous copies and matrices that are misaligned or outside of the block's
// shared memory; copies that nobody waited for. Others show in results: shared memory starts as
// NaN, and what a copy is about to fill is NaN until it has landed, which it does at the thread's
// wait for it. For plain accesses outside of shared memory there is AddressSanitizer.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>

namespace hk::emulator {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kLanes = 32;

// Runs `kernel` as every thread of every block, one block after the other. `threads` and
// `shared_bytes` are those of a block, threads in whole warps.
void run_grid(int64_t blocks, int threads, int64_t shared_bytes,
              const std::function<void()>& kernel);

// What follows is for the thread that runs.
int thread_index();
int64_t block_index();
char* shared_memory();

// `arguments` are those of a warp's lanes, or of a block's threads, in order.
struct Operation {
  const char* name;
  bool of_block;
  void (*compute)(void* const* arguments, int count);
};
void take_part(const Operation& operation, void* arguments);

// Faults unless [address, address + 16) is shared memory and aligned; `what` is for the message.
void check_shared(const void* address, const char* what);

void copy_async(void* shared, const void* global, int bytes);
void commit_copies();
void wait_copies(int pending);

}  // namespace hk::emulator
