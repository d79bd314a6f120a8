// Tests of the emulator without Python: correct kernels give bitwise equal results under every schedule; mistakes are
// reported or change the results under some schedule.
//
// Prints a line for each failure.
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "cuda/launch.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace hk::selftest {
namespace {

using namespace cuda;
using emulator::Fault;
using Body = std::function<void()>;

constexpr int kThreads = 128, kShared = 1024;

int failures = 0;

void expect(bool held, const std::string& name) {
  if (held) return;
  std::printf("FAILED %s\n", name.c_str());
  ++failures;
}

uint32_t* shared_words() { return reinterpret_cast<uint32_t*>(shared_memory()); }

// Results of the threads of two blocks, as a schedule has them; each adds its own.
std::vector<uint32_t> results(const std::string& schedule, const std::function<uint32_t(int)>& thread) {
  std::vector<uint32_t> out(2 * kThreads);
  emulator::use_schedule(schedule);
  emulator::run_grid(2, kThreads, kShared, [&] {
    const int i = thread_index();
    out[static_cast<size_t>(block_index() * kThreads + i)] = thread(i);
  });
  return out;
}

// Under how many schedules every thread of every block gets what `wanted` says.
int right_schedules(const std::function<uint32_t(int)>& thread, const std::function<uint32_t(int)>& wanted) {
  int count = 0;
  for (const std::string& schedule : emulator::schedule_names()) {
    const std::vector<uint32_t> out = results(schedule, thread);
    bool right = true;
    for (int i = 0; i < 2 * kThreads; ++i) right = right && out[static_cast<size_t>(i)] == wanted(i % kThreads);
    count += right;
  }
  return count;
}

// A necessary barrier: results are right with it, and wrong under some schedule without it.
void needs(const std::string& name, const std::function<uint32_t(int, bool)>& thread,
           const std::function<uint32_t(int)>& wanted) {
  const int all = static_cast<int>(emulator::schedule_names().size());
  expect(right_schedules([&](int i) { return thread(i, true); }, wanted) == all, name);
  expect(right_schedules([&](int i) { return thread(i, false); }, wanted) < all, name + ", missing");
}

// A thread writes its number and reads that of another, which no schedule but one may show to be too early: operations
// of a warp keep threads in step under round_robin, and the other two run towards higher numbers and towards lower
// ones.
void barriers() {
  for (const int step : {kWarp, -kWarp}) {
    const auto other = [step](int i) {
      return static_cast<uint32_t>(i + step < 0 || i + step >= kThreads ? i : i + step);
    };
    needs(
        "sync_block before a read",
        [&](int i, bool whole) {
          shared_words()[i] = static_cast<uint32_t>(i);
          sync_warp();
          if (whole) sync_block();
          return shared_words()[other(i)];
        },
        other);
    needs(
        "sync_block before a write",
        [&](int i, bool whole) {
          shared_words()[i] = static_cast<uint32_t>(i);
          sync_block();
          const uint32_t read = shared_words()[other(i)];
          if (whole) sync_block();
          shared_words()[i] = kThreads;
          return read;
        },
        other);
  }
  for (const int step : {1, -1}) {
    const auto other = [step](int i) {
      return static_cast<uint32_t>((i + step) / kWarp == i / kWarp && i + step >= 0 ? i + step : i);
    };
    needs(
        "sync_warp",
        [&](int i, bool whole) {
          shared_words()[i] = static_cast<uint32_t>(i);
          if (whole) sync_warp();
          return shared_words()[other(i)];
        },
        other);
  }
}

alignas(16) const uint32_t kData[8] = {1, 2, 3, 4, 5, 6, 7, 8};

void copies() {
  uint32_t* there = nullptr;
  const auto start = [&](int i) {
    there = shared_words() + 4 * (i % 16);
    there[0] = there[1] = 7;
    copy_async(there, kData, 8);
    commit_copies();
  };
  const auto is_nan = [&] { return std::isnan(bits_float(*there)) && there[1] == *there; };
  int early = 0, other = 0;
  results("round_robin", [&](int i) {
    if (i > 0) return 0u;
    start(0);
    early += is_nan();
    start(1);
    wait_copies<1>();
    other += is_nan();
    wait_copies<0>();
    return 0u;
  });
  expect(early == 2 && other == 2, "NaN where a copy has not landed");
  // Those of other threads have landed behind a barrier, not before.
  needs(
      "sync_block behind copies",
      [&](int i, bool whole) {
        if (i == kThreads / 2) start(0);
        wait_copies<0>();
        if (whole) sync_block();
        return shared_words()[1] + shared_words()[2];
      },
      [](int) { return 2u; });
  int clean = 0;
  results("greedy", [&](int i) {
    clean += std::isnan(bits_float(shared_words()[i]));
    shared_words()[i] = 0;
    return 0u;
  });
  expect(clean == 2 * kThreads, "shared memory of every block starts as NaN");
}

// Under every schedule, and what is launched next runs.
void faults(const std::string& text, const Body& body) {
  for (const std::string& schedule : emulator::schedule_names()) {
    emulator::use_schedule(schedule);
    std::string message = "none";
    try {
      emulator::run_grid(3, kThreads, kShared, body);
    } catch (const Fault& fault) {
      message = fault.what();
    }
    expect(message.find(text) != std::string::npos, schedule + " reports \"" + text + "\", but: " + message);
    int ran = 0;
    emulator::run_grid(2, kThreads, kShared, [&] {
      sync_block();
      ++ran;
    });
    expect(ran == 2 * kThreads, "a launch behind \"" + text + "\"");
  }
}

void mistakes() {
  const auto warp = [] { return thread_index() / kWarp; };
  const auto lane = [] { return thread_index() % kWarp; };
  faults("threads 0-31 at sync_block, 32-127 at any_in_block", [&] {
    if (warp() == 0) {
      sync_block();
    } else {
      any_in_block(true);
    }
  });
  faults("deadlock", [&] {
    if (warp() != 2) sync_block();
  });
  faults("threads 0-31 at sync_block, 32 returned, 33-127 at sync_block", [] {
    if (thread_index() != 32) sync_block();
  });
  faults("diverges from its warp", [&] {
    if (lane() < 16) {
      sync_warp();
    } else {
      any_in_warp(true);
    }
  });
  faults("diverges from its warp", [&] {
    if (lane() % 2) {
      sync_block();
    } else {
      shuffle_xor(lane(), 3);
    }
  });
  faults("returns with copies that it has not waited for", [] { copy_async(shared_memory(), kData, 16); });
  faults("returns with copies that it has not waited for", [] {
    copy_async(shared_memory(), kData, 16);
    wait_copies<0>();  // of no group: nothing was committed
  });
  faults("returns with copies that it has not waited for", [] {
    copy_async(shared_memory(), kData, 16);
    commit_copies();
    wait_copies<1>();
  });
  faults("copies to byte 1016 of shared memory, which has 1024",
         [] { copy_async(shared_memory() + kShared - 8, kData, 4); });
  faults("copies to byte -16 of shared memory", [] { copy_async(shared_memory() - 16, kData, 4); });
  faults("copies to byte 8 of shared memory, not a multiple of 16", [] { copy_async(shared_memory() + 8, kData, 16); });
  faults("copies from an address", [] { copy_async(shared_memory(), kData + 1, 16); });
  faults("copies 17 bytes", [] { copy_async(shared_memory(), kData, 17); });
  uint32_t matrices[4];
  faults("loads a row of a matrix from byte 1024", [&] { load_matrices<false>(matrices, shared_memory() + kShared); });
  faults("loads a row of a matrix from byte ",
         [&] { load_matrices<true>(matrices, shared_memory() + 4 * (lane() % 4)); });
}

// What multiply_add<bf16> makes of c and one row of products, the first of which is `first` and the others `rest`.
float sum_of_products(float c, float first, float rest) {
  float result = 0;
  results("round_robin", [&](int i) {
    const int lane = i % kWarp;
    const uint32_t ones = pack<bf16>(1, 1), others = pack<bf16>(rest, rest);
    const uint32_t row[4] = {lane == 0 ? pack<bf16>(first, rest) : others, others, others, others};
    float sums[4] = {c, c, c, c};
    multiply_add<bf16>(sums, row, ones, ones);
    if (lane == 0) result = sums[0];
    return 0u;
  });
  return result;
}

void rounding() {
  for (const float sign : {1.0f, -1.0f}) {
    expect(sum_of_products(sign, sign * 0x3p-24f, 0) == sign * (1 + 0x1p-23f), "sums are rounded toward zero");
    expect(sum_of_products(sign, sign * 0x1p-22f, sign * 0x1p-25f) == sign * (1 + 0x1p-22f),
           "terms are cut off below the 24th binary place of the largest");
  }
}

template <typename Refusal>
bool refuses(const Body& body) {
  try {
    body();
  } catch (const Refusal&) {
    return true;
  }
  return false;
}

struct Count {
  struct Params {
    int* count;
  };
  static constexpr int kThreads = 32;
  HK_DEVICE static void run(const Params& params) { ++*params.count; }
};

void launches() {
  int count = 0;
  launch<Count>(0, 0, {&count}, {});
  expect(count == 0, "no blocks");
  launch<Count>(3, 0, {&count}, {});
  expect(count == 3 * Count::kThreads, "three blocks");
  expect(refuses<std::invalid_argument>([] { emulator::use_schedule("random"); }), "a schedule that is not there");
  expect(refuses<Error>([&] { launch<Count>(kMaxBlocks + 1, 0, {&count}, {}); }), "too many blocks");
  expect(refuses<Error>([&] { launch<Count>(1, kMaxSharedBytes + 1, {&count}, {}); }), "too much shared memory");
#if defined(__SANITIZE_ADDRESS__)
  emulator::run_grid(1, kThreads, 100, [] {
    const bool guarded =
        __asan_address_is_poisoned(shared_memory() + 100) && __asan_address_is_poisoned(shared_memory() - 1);
    expect(guarded, "shared memory has its size");
  });
#endif
}

}  // namespace
}  // namespace hk::selftest

int main() {
  using namespace hk::selftest;
  barriers();
  copies();
  mistakes();
  rounding();
  launches();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
