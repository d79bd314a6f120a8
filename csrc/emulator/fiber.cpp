#include "emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Pushes the callee-saved registers, stores the stack pointer in *from and continues at `to`, the stack pointer that
// another call stored.
extern "C" __attribute__((visibility("hidden"))) void hk_switch_stacks(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl hk_switch_stacks
.hidden hk_switch_stacks
.type hk_switch_stacks, @function
.p2align 4
hk_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hk_switch_stacks, .-hk_switch_stacks
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl hk_switch_stacks
.hidden hk_switch_stacks
.type hk_switch_stacks, %function
.p2align 4
hk_switch_stacks:
  sub sp, sp, #160
  stp x29, x30, [sp]
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x29, x30, [sp]
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size hk_switch_stacks, .-hk_switch_stacks
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64, where CUDA is"
#endif

namespace hk::emulator {
namespace {

// Words of a new stack as hk_switch_stacks leaves them: `kReturn` is where the return address is.
#if defined(__x86_64__)
constexpr int kFrame = 8, kReturn = 6;  // 8: as after a call, 8 bytes off 16
#else
constexpr int kFrame = 20, kReturn = 1;
#endif

constexpr size_t kGuard = size_t{64} << 10;   // the largest page size
constexpr size_t kStack = size_t{256} << 10;  // sanitizers' frames are large; heuristic
// Stack starts are staggered over the sets of the cache. Otherwise the frames of all threads compete for the same few
// sets, and a switch costs twice as much.
constexpr size_t kColours = 32, kColour = 704;

#if defined(__SANITIZE_ADDRESS__)
thread_local Fiber* leaving = nullptr;
#endif

}  // namespace

void Fiber::start(Stack stack, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack.bottom, stack.bytes);  // of a fiber that was abandoned
#endif
  auto* const frame = reinterpret_cast<uintptr_t*>(stack.bottom + stack.bytes) - kFrame;
  for (int i = 0; i < kFrame; ++i) frame[i] = 0;
  frame[kReturn] = reinterpret_cast<uintptr_t>(entry);
  stack_pointer_ = frame;
  bottom_ = stack.bottom;
  bytes_ = stack.bytes;
  fake_stack_ = nullptr;
}

void Fiber::resume(Fiber& next, [[maybe_unused]] bool last) {
#if defined(__SANITIZE_ADDRESS__)
  leaving = this;
  __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, next.bottom_, next.bytes_);
#endif
  hk_switch_stacks(&stack_pointer_, next.stack_pointer_);
  arrive();
}

void Fiber::arrive() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, &leaving->bottom_, &leaving->bytes_);
#endif
}

Stacks& Stacks::of_thread(int count) {
  thread_local Stacks stacks;
  if (count > stacks.count_) stacks.reserve(count);
  return stacks;
}

Stack Stacks::operator[](int i) const {
  const auto index = static_cast<size_t>(i);
  return {base_ + index * (kGuard + kStack) + kGuard, kStack - index % kColours * kColour};
}

Stacks::~Stacks() { release(); }

void Stacks::reserve(int count) {
  release();
  const size_t bytes = static_cast<size_t>(count) * (kGuard + kStack);
  void* const block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(block);
  count_ = count;
  for (int i = 0; i < count; ++i) mprotect((*this)[i].bottom - kGuard, kGuard, PROT_NONE);
}

void Stacks::release() {
  if (base_) munmap(base_, static_cast<size_t>(count_) * (kGuard + kStack));
  base_ = nullptr;
  count_ = 0;
}

}  // namespace hk::emulator
