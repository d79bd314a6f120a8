// One tiny kernel for each wrapper of cuda/hardware.h, so that a test can compare its results, emulated or on a GPU,
// with the documentation of the instruction. Built into the emulator, and into the CUDA module with
// HEADS_KERNELS_CUDA_CHECKS=1.
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/launch.h"

namespace hk::cuda {
namespace {

constexpr int kMaxInputs = 3;
constexpr int kBlock = 128;
constexpr int kSharedWords = 12;  // of a thread; the most that a check needs

struct Words {
  const uint32_t* in[kMaxInputs];
  uint32_t* out;
};

// Words of the result and of the inputs that a thread has, and threads of a block.
template <int kResult, int kFirst = 0, int kSecond = 0, int kThird = 0, int kThreadCount = kBlock>
struct Shape {
  static constexpr int kOut = kResult, kIn0 = kFirst, kIn1 = kSecond, kIn2 = kThird;
  static constexpr int kThreads = kThreadCount;
};

// The words of this thread.
template <typename Check>
struct Kernel {
  using Params = Words;
  static constexpr int kThreads = Check::kThreads;
  HK_DEVICE static void run(const Words& all) {
    const int64_t i = block_index() * kThreads + thread_index();
    Check::run({{all.in[0] + i * Check::kIn0, all.in[1] + i * Check::kIn1, all.in[2] + i * Check::kIn2},
                all.out + i * Check::kOut});
  }
};

HK_DEVICE uint32_t* shared_words() { return reinterpret_cast<uint32_t*>(shared_memory()); }

struct Index : Shape<2> {
  HK_DEVICE static void run(const Words& w) {
    w.out[0] = static_cast<uint32_t>(thread_index());
    w.out[1] = static_cast<uint32_t>(block_index());
  }
};

// Threads in the opposite order, of the block or of each warp.
template <bool kOfBlock>
struct Mirror : Shape<1, 1> {
  HK_DEVICE static void run(const Words& w) {
    const int other = thread_index() ^ (kOfBlock ? kBlock - 1 : kWarp - 1);
    shared_words()[thread_index()] = w.in[0][0];
    kOfBlock ? sync_block() : sync_warp();
    w.out[0] = shared_words()[other];
  }
};

template <bool kOfBlock>
struct Any : Shape<1, 1> {
  HK_DEVICE static void run(const Words& w) {
    const bool vote = w.in[0][0] != 0;
    w.out[0] = kOfBlock ? any_in_block(vote) : any_in_warp(vote);
  }
};

// In: value, mask.
template <typename V>
struct Shuffle : Shape<1, 1, 1> {
  HK_DEVICE static void run(const Words& w) {
    V value;
    std::memcpy(&value, w.in[0], sizeof value);
    value = shuffle_xor(value, static_cast<int>(w.in[1][0]));
    std::memcpy(w.out, &value, sizeof value);
  }
};

// In: row 0 to 31 of shared memory, 16 bytes; the number of the row that this lane names.
template <bool kTransposed>
struct LoadMatrices : Shape<4, 4, 1, 0, kWarp> {
  HK_DEVICE static void run(const Words& w) {
    for (int i = 0; i < 4; ++i) shared_words()[4 * thread_index() + i] = w.in[0][i];
    sync_warp();
    uint32_t matrices[4];
    load_matrices<kTransposed>(matrices, shared_words() + 4 * w.in[1][0]);
    for (int i = 0; i < 4; ++i) w.out[i] = matrices[i];
  }
};

// In: fragments of A, B and C. Out: of the sum.
template <typename T>
struct MultiplyAdd : Shape<4, 4, 2, 4, kWarp> {
  HK_DEVICE static void run(const Words& w) {
    uint32_t a[4];
    float c[4];
    for (int i = 0; i < 4; ++i) a[i] = w.in[0][i], c[i] = bits_float(w.in[2][i]);
    multiply_add<T>(c, a, w.in[1][0], w.in[1][1]);
    for (int i = 0; i < 4; ++i) w.out[i] = float_bits(c[i]);
  }
};

// In: 16 bytes, how many of them are read. Out: what arrived.
struct CopyAsync : Shape<4, 4, 1> {
  HK_DEVICE static void run(const Words& w) {
    uint32_t* const there = shared_words() + 4 * thread_index();
    copy_async(there, w.in[0], static_cast<int>(w.in[1][0]));
    commit_copies();
    wait_copies<0>();
    for (int i = 0; i < 4; ++i) w.out[i] = there[i];
  }
};

// Three groups, each read when its copies have been waited for and not later.
struct CopyGroups : Shape<12, 12> {
  HK_DEVICE static void run(const Words& w) {
    uint32_t* const there = shared_words() + 12 * thread_index();
    for (int group = 0; group < 3; ++group) {
      copy_async(there + 4 * group, w.in[0] + 4 * group, 16);
      commit_copies();
    }
    wait_copies<2>();
    for (int i = 0; i < 4; ++i) w.out[i] = there[i];
    wait_copies<1>();
    for (int i = 4; i < 8; ++i) w.out[i] = there[i];
    wait_copies<0>();
    for (int i = 8; i < 12; ++i) w.out[i] = there[i];
  }
};

struct StoreWords : Shape<4, 4> {
  HK_DEVICE static void run(const Words& w) { store_words(w.out, {w.in[0][0], w.in[0][1], w.in[0][2], w.in[0][3]}); }
};

struct Exp2 : Shape<1, 1> {
  HK_DEVICE static void run(const Words& w) { w.out[0] = float_bits(exp2_approx(bits_float(w.in[0][0]))); }
};
// In the low half of a word, of a number of 16 bits.
template <typename T>
struct ToFloat : Shape<1, 1> {
  HK_DEVICE static void run(const Words& w) { w.out[0] = float_bits(to_float(T{static_cast<uint16_t>(w.in[0][0])})); }
};
template <typename T>
struct FromFloat : Shape<1, 1> {
  HK_DEVICE static void run(const Words& w) { w.out[0] = from_float<T>(bits_float(w.in[0][0])).bits; }
};
template <typename T>
struct Pack : Shape<1, 2> {
  HK_DEVICE static void run(const Words& w) { w.out[0] = pack<T>(bits_float(w.in[0][0]), bits_float(w.in[0][1])); }
};
template <typename T>
struct Unpack : Shape<2, 1> {
  HK_DEVICE static void run(const Words& w) {
    const LowHigh pair = unpack<T>(w.in[0][0]);
    w.out[0] = float_bits(pair.low);
    w.out[1] = float_bits(pair.high);
  }
};

int64_t words_of(const Tensor& t) {
  int64_t count = 1;
  for (int d = t.rank - 1; d >= 0; count *= t.size[d--])
    if (t.stride[d] != count && t.size[d] != 1) throw std::invalid_argument("tensors are contiguous");
  if (t.dtype != DType::kFloat32) throw std::invalid_argument("tensors are float32");
  return count;
}

template <typename Check>
void check(const std::vector<Tensor>& tensors, const LaunchTarget& target) {
  const int inputs[] = {Check::kIn0, Check::kIn1, Check::kIn2};
  const int64_t threads = tensors.empty() ? 0 : words_of(tensors.back()) / Check::kOut;
  if (threads % Check::kThreads != 0)
    throw std::invalid_argument("the result is that of blocks of " + std::to_string(Check::kThreads) + " threads");
  Words words{};
  size_t given = 0;
  for (int i = 0; i < kMaxInputs && inputs[i] > 0; ++i, ++given) {
    if (given + 1 >= tensors.size() || words_of(tensors[given]) != threads * inputs[i])
      throw std::invalid_argument("input " + std::to_string(i) + " has " + std::to_string(inputs[i]) +
                                  " words a thread");
    words.in[i] = static_cast<const uint32_t*>(tensors[given].data);
  }
  if (given + 1 != tensors.size()) throw std::invalid_argument(std::to_string(given) + " inputs and a result");
  words.out = static_cast<uint32_t*>(tensors.back().data);
  constexpr int kShared = Check::kThreads * kSharedWords * static_cast<int>(sizeof(uint32_t));
  launch<Kernel<Check>>(threads / Check::kThreads, kShared, words, target);
}

constexpr struct {
  const char* name;
  void (*check)(const std::vector<Tensor>&, const LaunchTarget&);
} kChecks[] = {
    {"index", check<Index>},
    {"sync_block", check<Mirror<true>>},
    {"sync_warp", check<Mirror<false>>},
    {"any_in_block", check<Any<true>>},
    {"any_in_warp", check<Any<false>>},
    {"shuffle_xor<int>", check<Shuffle<int>>},
    {"shuffle_xor<uint32_t>", check<Shuffle<uint32_t>>},
    {"shuffle_xor<float>", check<Shuffle<float>>},
    {"load_matrices", check<LoadMatrices<false>>},
    {"load_matrices_transposed", check<LoadMatrices<true>>},
    {"multiply_add<bf16>", check<MultiplyAdd<bf16>>},
    {"multiply_add<fp16>", check<MultiplyAdd<fp16>>},
    {"multiply_add<tf32>", check<MultiplyAdd<tf32>>},
    {"copy_async", check<CopyAsync>},
    {"wait_copies", check<CopyGroups>},
    {"store_words", check<StoreWords>},
    {"exp2_approx", check<Exp2>},
    {"to_float<bf16>", check<ToFloat<bf16>>},
    {"to_float<fp16>", check<ToFloat<fp16>>},
    {"from_float<bf16>", check<FromFloat<bf16>>},
    {"from_float<fp16>", check<FromFloat<fp16>>},
    {"pack<bf16>", check<Pack<bf16>>},
    {"pack<fp16>", check<Pack<fp16>>},
    {"unpack<bf16>", check<Unpack<bf16>>},
    {"unpack<fp16>", check<Unpack<fp16>>},
};

}  // namespace

// Tensors are contiguous words of 32 bits, whatever they mean, declared as float; the last one is the result. Each
// thread has some words of each, one thread's behind another's, in whole blocks: the kernels say how many. Throws
// std::invalid_argument for unknown names and for tensors that do not fit.
void check_wrapper(const std::string& name, const std::vector<Tensor>& tensors, const LaunchTarget& target) {
  for (const auto& known : kChecks)
    if (name == known.name) return known.check(tensors, target);
  throw std::invalid_argument("no check of " + name);
}

std::vector<std::string> wrapper_names() {
  std::vector<std::string> names;
  for (const auto& known : kChecks) names.push_back(known.name);
  return names;
}

}  // namespace hk::cuda
