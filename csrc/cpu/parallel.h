// Distributes work items over PyTorch's OpenMP threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "cpu/workspace.h"

namespace hk::HK_LEVEL {

// Below this many multiply-adds a second thread does not pay off (heuristic: 4 us of work on one thread, about the time
// to wake the others).
constexpr int64_t kSerialWork = 1 << 17;

// Calls body(item, workspace) for every item in [0, items). Free threads take the next few items, so put the longest
// first, and neighbours in memory next to each other. Each thread has a workspace of `bytes`. Exceptions are rethrown
// in the caller.
template <typename Body>
inline void parallel_for(int64_t items, int threads, int64_t work, int64_t bytes, Body body) {
  if (items == 0) return;
  threads = work < kSerialWork ? 1 : static_cast<int>(std::min<int64_t>(threads, items));
  // About 16 turns per thread: few enough to keep neighbours together (heads of one batch element, whose rows share
  // pages), enough to balance the load.
  const int64_t turn = std::max<int64_t>(1, items / (16 * threads));
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  const auto work_off = [&] {
    try {
      for (int64_t first = next.fetch_add(turn); first < items; first = next.fetch_add(turn))
        for (int64_t item = first; item < std::min(items, first + turn); ++item)
          body(item, Workspace::of_thread(bytes));
    } catch (...) {
#pragma omp critical(heads_kernels_failure)
      failure = std::current_exception();
    }
    Workspace::of_thread(0).release();
  };
  if (threads == 1) {  // libgomp makes a system call at the end of a region of one thread too
    work_off();
  } else {
#pragma omp parallel num_threads(threads)
    work_off();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace hk::HK_LEVEL
