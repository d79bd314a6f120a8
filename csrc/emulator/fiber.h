// Functions that take turns on one host thread, each on a stack of its own.
#pragma once

#include <cstddef>

namespace hk::emulator {

struct Stack {
  char* bottom;
  size_t bytes;
};

// A point of execution: the caller's own, or that of a function on another stack.
class Fiber {
 public:
  // Calls `entry` on the stack once it is resumed. `entry` begins with a call of `arrive` and never
  // returns; it may be abandoned wherever it stands.
  void start(Stack stack, void (*entry)());

  // Goes on in `next` until another fiber resumes this one. A fiber whose turn is the `last` is not
  // resumed.
  void resume(Fiber& next, bool last = false);

  void arrive();

 private:
  void* stack_pointer_ = nullptr;
  // For AddressSanitizer, which has to know every change of stacks.
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
