// What the CUDA kernels and the emulator assume of NVIDIA's instructions, which lane holds what, against CuTe, which is
// NVIDIA's own description of them. CuTe computes layouts on the host, so neither nvcc nor a GPU is needed.
//
// Prints a line for each check and the first differences of each.
#include <cstdio>
#include <cute/tensor.hpp>
#include <functional>
#include <random>
#include <string>

#include "cuda/tensor_core.h"

namespace hk::selftest {
namespace {

using namespace cuda;

int failures = 0;

// Counts differences and reports them at its end. A check that compared nothing fails, too.
class Check {
 public:
  explicit Check(std::string name) : name_(std::move(name)) {}
  Check(const Check&) = delete;
  ~Check() {
    std::printf("%s %s: %d of %d differ\n", failed() ? "FAILED" : "ok", name_.c_str(), differ_, compared_);
    failures += failed();
  }

  void equal(int got, int wanted, int lane, int index) {
    ++compared_;
    if (got == wanted || ++differ_ > 3) return;
    std::printf("  %s: lane %d, %d: %d instead of %d\n", name_.c_str(), lane, index, got, wanted);
  }

 private:
  bool failed() const { return differ_ > 0 || compared_ == 0; }

  std::string name_;
  int compared_ = 0, differ_ = 0;
};

// Runs `body` as every lane of one warp.
void run_warp(int64_t shared_bytes, const std::function<void()>& body) {
  emulator::run_grid(1, kWarp, shared_bytes, body);
}

// Which element of C [16][8] += A [16][kDepth] B [kDepth][8] a lane's value is. CuTe numbers the elements of a matrix,
// the first dimension fastest; B's first dimension is n.
struct Place {
  int first, second;
};
template <typename T, typename Instruction>
struct Fragments {
  using Traits = cute::MMA_Traits<Instruction>;
  static constexpr int kDepth = TensorCore<T>::kDepth;
  static constexpr int kLeft = 16 * kDepth / kWarp, kRight = 8 * kDepth / kWarp, kSums = 4;

  static Place left(int lane, int value) { return place(typename Traits::ALayout{}(lane, value), 16); }  // (m, k)
  static Place right(int lane, int value) { return place(typename Traits::BLayout{}(lane, value), 8); }  // (n, k)
  static Place sum(int lane, int value) { return place(typename Traits::CLayout{}(lane, value), 16); }   // (m, n)
  static Place place(int number, int first_size) { return {number % first_size, number / first_size}; }

  static_assert(cute::size<1>(typename Traits::ALayout{}) == kLeft);
  static_assert(cute::size<1>(typename Traits::BLayout{}) == kRight);
  static_assert(cute::size<1>(typename Traits::CLayout{}) == kSums);
};

// Sets a lane's value, two of 16 bits in a word; the words were 0.
template <typename T>
void set_value(uint32_t* words, int index, float value) {
  if constexpr (sizeof(T) == 4)
    words[index] = float_bits(value);
  else
    words[index / 2] |= static_cast<uint32_t>(from_float<T>(value).bits) << 16 * (index % 2);
}

// Operands are placed by CuTe, and results read where it says. They are small integers, so that all is exact.
template <typename T, typename Operand, typename Instruction>
void multiply_add_computes_the_product(const std::string& name) {
  using F = Fragments<T, Instruction>;
  Check check(name);
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 20; ++repeat) {
    int a[16][F::kDepth], b[F::kDepth][8], c[16][8];
    const auto draw = [&](auto& matrix) {
      for (auto& row : matrix)
        for (int& x : row) x = static_cast<int>(random() % 17) - 8;
    };
    draw(a), draw(b), draw(c);
    run_warp(0, [&] {
      uint32_t left[4] = {}, right[2] = {};
      float sums[F::kSums];
      for (int v = 0; v < F::kLeft; ++v) {
        const auto [m, k] = F::left(lane(), v);
        set_value<T>(left, v, static_cast<float>(a[m][k]));
      }
      for (int v = 0; v < F::kRight; ++v) {
        const auto [n, k] = F::right(lane(), v);
        set_value<T>(right, v, static_cast<float>(b[k][n]));
      }
      for (int v = 0; v < F::kSums; ++v) {
        const auto [m, n] = F::sum(lane(), v);
        sums[v] = static_cast<float>(c[m][n]);
      }
      multiply_add<Operand>(sums, left, right[0], right[1]);
      for (int v = 0; v < F::kSums; ++v) {
        const auto [m, n] = F::sum(lane(), v);
        int wanted = c[m][n];
        for (int k = 0; k < F::kDepth; ++k) wanted += a[m][k] * b[k][n];
        check.equal(static_cast<int>(sums[v]), wanted, lane(), v);
      }
    });
  }
}

// CuTe numbers the bits of the rows that the lanes name, lane after lane.
template <typename Atom, bool kTransposed>
void matrices_are_loaded(const std::string& name) {
  using Traits = cute::Copy_Traits<Atom>;
  constexpr int kRowBits = 128;
  Check check(name);
  std::mt19937 random(2);
  uint32_t rows[kWarp][kRowBits / 32];
  for (auto& row : rows)
    for (uint32_t& word : row) word = random();
  run_warp(sizeof rows, [&] {
    if (lane() == 0) std::memcpy(shared_memory(), rows, sizeof rows);
    sync_warp();
    const int row = typename Traits::SrcLayout{}(lane(), 0) / kRowBits;
    uint32_t words[4];
    load_matrices<kTransposed>(words, shared_memory() + row * kRowBits / 8);
    for (int bit = 0; bit < 4 * 32; ++bit) {
      const int from = typename Traits::DstLayout{}(lane(), bit);
      const uint32_t word = rows[from / kRowBits][from % kRowBits / 32];
      check.equal(words[bit / 32] >> bit % 32 & 1, word >> from % 32 & 1, lane(), bit);
    }
  });
}

}  // namespace
}  // namespace hk::selftest

int main() {
  using namespace hk::selftest;
  matrices_are_loaded<cute::SM75_U32x4_LDSM_N, false>("load_matrices");
  matrices_are_loaded<cute::SM75_U16x8_LDSM_T, true>("load_matrices_transposed");
  using hk::cuda::bf16, hk::cuda::fp16, hk::cuda::tf32;
  multiply_add_computes_the_product<bf16, bf16, cute::SM80_16x8x16_F32BF16BF16F32_TN>("multiply_add, bf16");
  multiply_add_computes_the_product<fp16, fp16, cute::SM80_16x8x16_F32F16F16F32_TN>("multiply_add, fp16");
  multiply_add_computes_the_product<float, tf32, cute::SM80_16x8x8_F32TF32TF32F32_TN>("multiply_add, float");
  std::printf("%d failures\n", failures);
  return failures != 0;
}
