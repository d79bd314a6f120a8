// Scratch memory of one thread: one aligned block with stack allocation. Small blocks are kept between calls.
#pragma once

#include <cstdlib>
#include <new>

#include "cpu/simd.h"

namespace hk::HK_LEVEL {

// The size in a workspace of a buffer of `count` values.
template <typename Value>
constexpr int64_t buffer_bytes(int64_t count) {
  return round_up(count * static_cast<int64_t>(sizeof(Value)), 64);
}

class Workspace {
 public:
  // A buffer of `count` values, aligned to a cache line, which are not constructed.
  template <typename Value>
  Value* take(int64_t count) {
    const size_t bytes = buffer_bytes<Value>(count);
    if (used_ + bytes > capacity_) throw std::bad_alloc();
    char* buffer = block_ ? block_ + used_ : nullptr;
    used_ += bytes;
    return reinterpret_cast<Value*>(buffer);
  }

  // `rewind` frees the buffers taken since `mark`.
  size_t mark() const { return used_; }
  void rewind(size_t mark) { used_ = mark; }

  // An empty workspace of at least `bytes`, this thread's own.
  static Workspace& of_thread(int64_t bytes) {
    thread_local Workspace workspace;
    workspace.reserve(static_cast<size_t>(round_up(bytes, 64)));
    return workspace;
  }

  // A workspace without memory, which only counts bytes; its buffers are null.
  static Workspace counter() { return Workspace(~size_t{0}); }

  // Gives a large block back to the system; a small one stays for the next call.
  void release() {
    if (capacity_ > kKeep) free_block();
  }

  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { free_block(); }

 private:
  static constexpr size_t kKeep = size_t{4} << 20;  // 4 MiB: a tile's scratch and the accumulators of short sequences

  explicit Workspace(size_t capacity) : capacity_(capacity) {}

  void reserve(size_t bytes) {
    used_ = 0;
    if (bytes <= capacity_) return;
    free_block();
    block_ = static_cast<char*>(std::aligned_alloc(64, bytes));
    if (!block_) throw std::bad_alloc();
    capacity_ = bytes;
  }

  void free_block() {
    std::free(block_);
    block_ = nullptr;
    capacity_ = 0;
  }

  char* block_ = nullptr;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

// The bytes that the constructor of Object takes from its workspace. It must not access its buffers.
template <typename Object, typename... Arguments>
int64_t bytes_of(const Arguments&... arguments) {
  Workspace counter = Workspace::counter();
  Object(counter, arguments...);
  return static_cast<int64_t>(counter.mark());
}

}  // namespace hk::HK_LEVEL
