// Functions that take turns on one host thread, each on a stack of its own.
#pragma once

#include <cstddef>

namespace hk::emulator {

struct Stack {
  char* bottom;
  size_t bytes;
};

// An execution context: the caller's, or that of a function on another stack.
class Fiber {
 public:
  // Calls `entry` on the stack once it is resumed. `entry` begins with a call of `arrive` and never returns; it may be
  // abandoned at any point.
  void start(Stack stack, void (*entry)());

  // Switches to `next` until another fiber resumes this one. With `last` this fiber is never resumed.
  void resume(Fiber& next, bool last = false);

  void arrive();

 private:
  void* stack_pointer_ = nullptr;
  // For AddressSanitizer, which must be informed of every stack switch.
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
  void* fake_stack_ = nullptr;
};

// Stacks of this host thread with a guard page below each; kept between calls.
class Stacks {
 public:
  static Stacks& of_thread(int count);
  Stack operator[](int i) const;

  Stacks() = default;
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  ~Stacks();

 private:
  void reserve(int count);
  void release();

  char* base_ = nullptr;
  int count_ = 0;
};

}  // namespace hk::emulator
