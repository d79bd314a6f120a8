#include "emulator/block.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <new>

#include "emulator/fiber.h"

namespace hk::emulator {
namespace {

constexpr int kUnit = 16;       // bytes of an asynchronous copy, and of a row of a matrix
constexpr int kPoison = 0xff;   // NaN in every floating-point format
constexpr size_t kBanks = 128;  // alignment of shared memory

struct Schedule {
  const char* name;
  bool greedy;    // the first ready thread; else round robin
  bool reversed;  // the last block, warp and lane are the first
};
constexpr Schedule kSchedules[] = {{"round_robin", false, false}, {"greedy", true, false}, {"reversed", true, true}};
std::atomic<const Schedule*> chosen{kSchedules};
std::atomic<SharedBytes> of_part{SharedBytes{}};
thread_local Launch last;

struct Copy {
  char* to;
  const void* from;
  int bytes;
  int64_t group;
};

struct Thread {
  Fiber fiber;
  const Operation* waits_at = nullptr;
  bool returned = false;
  std::vector<Copy> copies;  // pending, the oldest first
  int64_t groups = 0;        // number of committed groups of copies
};

struct Warp {
  const Operation* operation = nullptr;
  int arrived = 0;
};

class Block {
 public:
  Block(int threads, int64_t shared_bytes, const std::function<void()>& kernel);

  void run_grid(int64_t blocks);
  void take_part(const Operation& operation, void* arguments);

  Thread& thread() { return threads_[running_]; }
  int thread_index() const { return running_; }
  int64_t index() const { return index_; }
  char* shared() const { return shared_.get(); }
  int64_t shared_bytes() const { return shared_bytes_; }
  [[noreturn]] void fault(const std::string& message) const;

 private:
  struct Free {
    void operator()(char* bytes) const { ::operator delete(bytes, std::align_val_t{kBanks}); }
  };

  void run(int64_t index);
  static void enter();
  void pause();
  bool all_at(const Operation& operation) const;
  void release(const Operation& operation, int first, int count);
  int next() const;
  void leave(Fiber& fiber, bool last);
  std::string whereabouts() const;

  // The thread at a position of the schedule, and the inverse.
  int at(int place) const { return schedule_.reversed ? size() - 1 - place : place; }
  int size() const { return static_cast<int>(threads_.size()); }

  const std::function<void()>& kernel_;
  const Schedule& schedule_ = *chosen;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<void*> arguments_;        // of every waiting thread
  std::vector<uint32_t> can_run_;       // one bit per position
  std::unique_ptr<char, Free> shared_;  // of exactly its size, for AddressSanitizer
  int64_t shared_bytes_;
  int64_t index_ = 0;
  int running_ = 0;
  int returned_ = 0;
  Fiber host_;
  std::exception_ptr failure_;
};

thread_local Block* block = nullptr;

Block::Block(int threads, int64_t shared_bytes, const std::function<void()>& kernel)
    : kernel_(kernel),
      threads_(threads),
      warps_(threads / kLanes),
      arguments_(threads),
      can_run_(threads / kLanes),
      shared_(static_cast<char*>(::operator new(static_cast<size_t>(shared_bytes), std::align_val_t{kBanks}))),
      shared_bytes_(shared_bytes) {}

void Block::run_grid(int64_t blocks) {
  block = this;
  for (int64_t i = 0; i < blocks; ++i) run(schedule_.reversed ? blocks - 1 - i : i);
}

void Block::run(int64_t index) {
  const Stacks& stacks = Stacks::of_thread(size());
  for (int i = 0; i < size(); ++i) {
    threads_[i] = Thread();
    threads_[i].fiber.start(stacks[i], enter);
  }
  std::memset(shared(), kPoison, static_cast<size_t>(shared_bytes_));
  for (uint32_t& warp : can_run_) warp = ~uint32_t{0};
  index_ = index;
  returned_ = 0;
  running_ = at(0);
  host_.resume(thread().fiber);
  if (failure_) std::rethrow_exception(failure_);
}

// The body of a thread's fiber.
void Block::enter() {
  Block& self = *block;
  Thread& thread = self.thread();
  thread.fiber.arrive();
  try {
    self.kernel_();
    if (!thread.copies.empty()) self.fault("returns with copies that it has not waited for");
  } catch (...) {
    self.failure_ = std::current_exception();
  }
  thread.returned = true;
  ++self.returned_;
  self.pause();
  self.leave(thread.fiber, true);
}

// Switches to the next thread of the schedule, or to the host.
void Block::leave(Fiber& fiber, bool last) {
  const int place = failure_ ? -1 : next();
  if (place < 0 && !failure_ && returned_ < size())
    failure_ = std::make_exception_ptr(Fault("deadlock in block " + std::to_string(index_) + ": " + whereabouts()));
  if (place < 0) return fiber.resume(host_, last);
  const int thread = at(place);
  if (thread == running_) return;
  running_ = thread;
  fiber.resume(threads_[thread].fiber, last);
}

// The next position of the schedule; -1 if no thread can run.
int Block::next() const {
  const int start = schedule_.greedy ? 0 : (at(running_) + 1) % size();
  const int words = static_cast<int>(can_run_.size());
  uint32_t mask = ~uint32_t{0} << start % kLanes;
  for (int i = 0; i <= words; ++i) {  // the first word twice: after the start, then before it
    const int word = (start / kLanes + i) % words;
    if (const uint32_t ready = can_run_[word] & mask) return word * kLanes + __builtin_ctz(ready);
    mask = ~uint32_t{0};
  }
  return -1;
}

void Block::take_part(const Operation& operation, void* arguments) {
  Thread& self = thread();
  Warp& warp = warps_[running_ / kLanes];
  self.waits_at = &operation;
  if (warp.arrived > 0 && warp.operation != &operation) fault("diverges from its warp: " + whereabouts());
  warp.operation = &operation;
  arguments_[running_] = arguments;
  pause();
  if (++warp.arrived == kLanes) {
    if (!operation.of_block) release(operation, running_ / kLanes * kLanes, kLanes);
    if (operation.of_block && all_at(operation)) release(operation, 0, size());
  }
  leave(self.fiber, false);
}

// The running thread waits, or has returned.
void Block::pause() {
  const int place = at(running_);
  can_run_[place / kLanes] &= ~(1u << place % kLanes);
}

bool Block::all_at(const Operation& operation) const {
  for (const Warp& warp : warps_)
    if (warp.arrived < kLanes || warp.operation != &operation) return false;
  return true;
}

// All of [first, first + count) have arrived: computes the operation and lets them run.
void Block::release(const Operation& operation, int first, int count) {
  if (operation.compute) operation.compute(&arguments_[first], count);
  for (int i = first; i < first + count; i += kLanes) {
    warps_[i / kLanes].arrived = 0;
    can_run_[at(i) / kLanes] = ~uint32_t{0};
  }
  for (int i = first; i < first + count; ++i) threads_[i].waits_at = nullptr;
}

void Block::fault(const std::string& message) const {
  throw Fault("thread " + std::to_string(running_) + " of block " + std::to_string(index_) + " " + message);
}

// The state of all threads: "threads 0-31 at sync_block, 32 returned, 33-63 on the way".
std::string Block::whereabouts() const {
  const auto state = [this](int i) -> std::string {
    const Thread& thread = threads_[i];
    return thread.returned ? "returned" : thread.waits_at ? std::string("at ") + thread.waits_at->name : "on the way";
  };
  std::string text;
  for (int first = 0, end; first < size(); first = end) {
    for (end = first + 1; end < size() && state(end) == state(first);) ++end;
    text += (text.empty() ? "threads " : ", ") + std::to_string(first);
    if (end - first > 1) text += "-" + std::to_string(end - 1);
    text += " " + state(first);
  }
  return text;
}

}  // namespace

void use_schedule(const std::string& name) {
  std::string names;
  for (const Schedule& known : kSchedules) {
    if (name == known.name) {
      chosen = &known;
      return;
    }
    names += std::string(names.empty() ? "" : ", ") + known.name;
  }
  throw std::invalid_argument("no schedule " + name + ", but " + names);
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const Schedule& known : kSchedules) names.push_back(known.name);
  return names;
}

void use_shared_bytes(int per_block, int per_multiprocessor) { of_part = {per_block, per_multiprocessor}; }
SharedBytes shared_bytes() { return of_part; }
Launch last_launch() { return last; }

void run_grid(int64_t blocks, int threads, int64_t shared_bytes, const std::function<void()>& kernel) {
  last = {blocks, threads, shared_bytes};
  Block(threads, shared_bytes, kernel).run_grid(blocks);
}

int thread_index() { return block->thread_index(); }
int64_t block_index() { return block->index(); }
char* shared_memory() { return block->shared(); }

void take_part(const Operation& operation, void* arguments) { block->take_part(operation, arguments); }

void check_shared(const void* address, const char* what) {
  const int64_t offset = static_cast<const char*>(address) - block->shared();
  if (offset < 0 || offset + kUnit > block->shared_bytes())
    block->fault(std::string(what) + " byte " + std::to_string(offset) + " of shared memory, which has " +
                 std::to_string(block->shared_bytes()));
  if (offset % kUnit != 0)
    block->fault(std::string(what) + " byte " + std::to_string(offset) + " of shared memory, not a multiple of 16");
}

void copy_async(void* shared, const void* global, int bytes) {
  check_shared(shared, "copies to");
  if (reinterpret_cast<uintptr_t>(global) % kUnit != 0)
    block->fault("copies from an address that is not a multiple of 16");
  if (bytes < 0 || bytes > kUnit) block->fault("copies " + std::to_string(bytes) + " bytes");
  Thread& thread = block->thread();
  thread.copies.push_back({static_cast<char*>(shared), global, bytes, thread.groups});
  std::memset(shared, kPoison, kUnit);
}

void commit_copies() { ++block->thread().groups; }

void wait_copies(int pending) {
  Thread& thread = block->thread();
  auto copy = thread.copies.begin();
  for (; copy != thread.copies.end() && copy->group < thread.groups - pending; ++copy) {
    std::memset(copy->to, 0, kUnit);
    std::memcpy(copy->to, copy->from, static_cast<size_t>(copy->bytes));
  }
  thread.copies.erase(thread.copies.begin(), copy);
}

}  // namespace hk::emulator
