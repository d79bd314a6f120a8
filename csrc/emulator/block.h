// Blocks of CUDA threads on one host thread, one fiber per CUDA thread.
//
// An operation is a collective of the lanes of a warp or the threads of a block: each stores its arguments and waits,
// and the last to arrive computes for all. All other instructions are independent, so between operations any order of
// threads is valid; a schedule picks one.
//
// A mistake throws a `Fault` from run_grid: lanes of a warp at different operations; a deadlock, because other threads
// have returned or wait elsewhere; an asynchronous copy or a matrix whose address is misaligned or outside of the
// shared memory of the block; a copy that is never waited for. Other mistakes change results: shared memory starts as
// NaN, and so does the destination of a copy until the thread waits for it. AddressSanitizer finds ordinary accesses
// outside of shared memory.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace hk::emulator {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kLanes = 32;

// Runs `kernel` as every thread of every block, one block after the other. `threads` and `shared_bytes` are those of a
// block, threads in whole warps.
void run_grid(int64_t blocks, int threads, int64_t shared_bytes, const std::function<void()>& kernel);

// The sizes of the last launch of this host thread.
struct Launch {
  int64_t blocks = 0;
  int threads = 0;
  int64_t shared_bytes = 0;
};
Launch last_launch();

// The order in which the threads of a block run in all later launches of this process. A kernel with correct barriers
// gives bitwise equal results under every schedule:
//   round_robin   all threads to their next operation of a warp or block, in turn; the default;
//   greedy        the first warp that can, on to its next barrier of the block;
//   reversed      greedy, of the last block, warp and lane first.
void use_schedule(const std::string& name);
std::vector<std::string> schedule_names();

// Bytes of shared memory that a block and a multiprocessor have from now on. The default is the least that a part of
// sm_80 and up has (sm_86).
struct SharedBytes {
  int per_block = 99 << 10, per_multiprocessor = 100 << 10;
};
void use_shared_bytes(int per_block, int per_multiprocessor);
SharedBytes shared_bytes();

// The following functions act on the running thread.
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

// Faults unless [address, address + 16) is shared memory and aligned; `what` is named in the message.
void check_shared(const void* address, const char* what);

void copy_async(void* shared, const void* global, int bytes);
void commit_copies();
void wait_copies(int pending);

}  // namespace hk::emulator
