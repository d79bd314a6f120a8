// The layouts that the CUDA kernels and the emulator assume, in registers and in shared memory,
// against CuTe's, which are NVIDIA's own description of the same instructions. CuTe computes
// layouts on the host, so neither nvcc nor a GPU is needed.
//
// Prints a line for each check and the first differences of each.
#include "selftest/cute.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda/collaborative_tiles.h"
#include "cuda/tensor_core.h"
#include "cuda/tiles.h"

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

// ---------------------------------------------------------------------- instructions
template <typename T>
uint32_t to_bits(T x) {
  if constexpr (sizeof(T) == 4)
    return float_bits(x);
  else
    return x.bits;
}
template <typename T>
T from_bits(uint32_t bits) {
  if constexpr (sizeof(T) == 4)
    return bits_float(bits);
  else
    return {static_cast<uint16_t>(bits)};
}

// The bits of value `index` in a lane's registers, two values of 16 bits in a word.
template <typename T>
uint32_t value_bits(const uint32_t* words, int index) {
  return sizeof(T) == 4 ? words[index] : words[index / 2] >> 16 * (index % 2) & 0xffffu;
}
// Of words that were 0.
template <typename T>
void set_value(uint32_t* words, int index, float value) {
  const uint32_t bits = to_bits(from_float<T>(value));
  if (sizeof(T) == 4)
    words[index] = bits;
  else
    words[index / 2] |= bits << 16 * (index % 2);
}

// Operands are placed by CuTe, and results read where it says. They are small integers, so that all
// is exact.
template <typename T>
void multiply_add_computes_the_product() {
  using F = Fragments<T>;
  Check check(named<T>("multiply_add"));
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
      multiply_add<typename Instruction<T>::Operand>(sums, left, right[0], right[1]);
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
template <typename Atom, typename Load>
void matrices_are_loaded(const std::string& name, Load&& load) {
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
    load(words, shared_memory() + row * kRowBits / 8);
    for (int bit = 0; bit < 4 * 32; ++bit) {
      const int from = typename Traits::DstLayout{}(lane(), bit);
      const uint32_t word = rows[from / kRowBits][from % kRowBits / 32];
      check.equal(words[bit / 32] >> bit % 32 & 1, word >> from % 32 & 1, lane(), bit);
    }
  });
}

// ---------------------------------------------------------------------- accumulators
void accumulators_have_places() {
  constexpr int kGroups = 2, kColumns = 64;
  Check check("row_of and column_of");
  const auto mma = cute::make_tiled_mma(cute::MMA_Atom<Instruction<bf16>::Mma>{});
  const auto places = cute::make_identity_tensor(cute::make_shape(16 * kGroups, kColumns));
  run_warp(0, [&] {
    const auto own = mma.get_slice(lane()).partition_C(places);
    Accumulator<kGroups, kColumns> acc;
    int index = 0;
    acc.each([&](float&, int m, int n, int e) {
      const auto place = own(e, m, n);
      check.equal(row_of(m, e), cute::get<0>(place), lane(), index);
      check.equal(column_of(n, e), cute::get<1>(place), lane(), index++);
    });
  });
}

// An accumulator as left operand: row m of the operand is row m of the accumulator, and its depth k
// is one of the columns, each once. Returns the column of every k; load_transposed has to use the
// same order.
template <typename T>
std::vector<int> depths_of_take() {
  using F = Fragments<T>;
  constexpr int kDepth = F::kDepth, kSteps = 2;
  Check check(named<T>("an accumulator as left operand"));
  std::vector<int> depths(kDepth, -1);
  run_warp(0, [&] {
    for (int step = 0; step < kSteps; ++step) {
      Accumulator<1, kSteps * kDepth> acc;
      acc.each([&](float& value, int m, int n, int e) {
        const int column = column_of(n, e) - step * kDepth;
        const bool taken = column >= 0 && column < kDepth;
        value = taken ? static_cast<float>(16 * column + row_of(m, e)) : -1.0f;
      });
      Left left;
      TensorCore<T>::take(left, acc.c[0], step);
      for (int v = 0; v < F::kLeft; ++v) {
        const int number = static_cast<int>(to_float(from_bits<T>(value_bits<T>(left.a, v))));
        const auto [m, k] = F::left(lane(), v);
        if (depths[k] < 0) depths[k] = number / 16;
        check.equal(number, 16 * depths[k] + m, lane(), v);
      }
    }
  });
  std::vector<int> sorted = depths;
  std::sort(sorted.begin(), sorted.end());
  for (int k = 0; k < kDepth; ++k) check.equal(sorted[k], k, 0, k);
  return depths;
}

// ---------------------------------------------------------------------- tiles
// In these checks the elements of a tile are their own indices, so that a loaded value shows where
// it comes from.
using Words = uint32_t[kWarp][4];

// The first element of the row whose address each lane gave to load_matrices.
template <typename T, typename Atom>
std::vector<int> row_starts(const Words& loaded) {
  constexpr int kRowBits = 128, kBits = 8 * sizeof(T);
  std::vector<int> starts(kWarp, -1);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int bit = 0; bit < 4 * 32; bit += kBits) {
      const int from = typename cute::Copy_Traits<Atom>::DstLayout{}(lane, bit);
      if (from % kRowBits == 0) starts[from / kRowBits] = static_cast<int>(value_bits<T>(loaded[lane], bit / kBits));
    }
  }
  return starts;
}

// Every way from a tile with rows of kWidth elements into operands, at every place of the tile.
template <typename T, int kWidth>
class TileLoads {
 public:
  // `depths` are those of depths_of_take.
  static void check(const std::vector<int>& depths) {
    const std::string width = ", width " + std::to_string(kWidth);
    TileLoads loads(named<T>("no bank conflicts") + width);
    loads.left(named<T>("left operand of rows") + width);
    loads.right(named<T>("right operand of rows") + width);
    loads.right_transposed(named<T>("right operand of rows, transposed") + width, depths);
  }

 private:
  static constexpr int kRows = 32, kDepth = TensorCore<T>::kDepth, kSize = sizeof(T);
  using F = Fragments<T>;
  using Element = typename Instruction<T>::Element;
  using Rows = Tile<T, kRows, kWidth>;
  static constexpr int kElements = Rows::kBytes / kSize;
  static_assert(kElements <= 1 << 16, "numbers have 16 bits");

  explicit TileLoads(const std::string& banks) : banks_(banks) {}

  static int number(int row, int column) { return row * Rows::kStride + column; }

  // load(words, tile) by every lane.
  template <typename Load>
  static void run(Words& words, Load&& load) {
    run_warp(Rows::kBytes, [&] {
      const Rows tile = Ring<Rows>{}[0];
      for (int i = lane(); i < kElements; i += kWarp) tile.data[i] = from_bits<T>(i);
      sync_warp();
      load(words[lane()], tile);
    });
  }

  void left(const std::string& name) {
    const auto load_left = [](uint32_t* words, const Rows& tile, int row, int k) {
      Left left;
      load(left, tile, row, k);
      std::copy_n(left.a, 4, words);
    };
    rows(name, F::kLeft, F::left, load_left,
         cute::make_tiled_copy_A(cute::Copy_Atom<LoadRows, Element>{}, tiled_mma<T>()));
  }

  void right(const std::string& name) {
    const auto load_right = [](uint32_t* words, const Rows& tile, int n, int k) {
      Right right;
      load(right, tile, n, k);
      std::copy_n(right.b, 4, words);
    };
    rows(name, 2 * F::kRight, F::right_pair, load_right,
         cute::make_tiled_copy_B(cute::Copy_Atom<LoadRows, Element>{}, tiled_mma<T>()));
  }

  // Operands whose m or n is a row of the tile: `values` of them per lane.
  template <typename LoadOperand, typename Copy>
  void rows(const std::string& name, int values, Place (*place_of)(int, int), LoadOperand&& load_operand,
            const Copy& copy) {
    Check check(name);
    for (int row = 0; row < kRows; row += 16) {
      for (int k = 0; k < kWidth; k += kDepth) {
        Words words;
        run(words, [&](uint32_t* to, const Rows& tile) { load_operand(to, tile, row, k); });
        for (int lane = 0; lane < kWarp; ++lane) {
          for (int v = 0; v < values; ++v) {
            const Place place = place_of(lane, v);
            check.equal(value_bits<T>(words[lane], v), number(row + place.first, k + place.second), lane, v);
          }
        }
        expect_addresses<LoadRows>(check, words, copy, row_major(), number(row, k));
      }
    }
  }

  // Operands whose k is a row of the tile.
  void right_transposed(const std::string& name, const std::vector<int>& depths) {
    Check check(name);
    for (int k = 0; k < kRows; k += kDepth) {
      for (int n = 0; n < kWidth; n += 16) {
        Words words;
        run(words, [&](uint32_t* to, const Rows& tile) {
          Right right;
          TensorCore<T>::load_transposed(right, tile, k, n);
          std::copy_n(right.b, 4, to);
        });
        for (int lane = 0; lane < kWarp; ++lane) {
          for (int v = 0; v < 2 * F::kRight; ++v) {
            const Place place = F::right_pair(lane, v);
            check.equal(value_bits<T>(words[lane], v), number(k + depths[place.second], n + place.first), lane, v);
          }
        }
        if constexpr (kSize == 4) {
          expect_no_conflicts_of_words(words);
        } else {
          const auto copy = cute::make_tiled_copy_B(cute::Copy_Atom<LoadTransposed, Element>{}, tiled_mma<T>());
          expect_addresses<LoadTransposed>(check, words, copy, column_major(), number(k, n));
        }
      }
    }
  }

  // [m or n][k] with a row of the tile for each m or n, and with one for each k.
  static auto row_major() {
    return cute::make_layout(cute::Shape<cute::_16, cute::Int<kDepth>>{},
                             cute::Stride<cute::Int<Rows::kStride>, cute::_1>{});
  }
  static auto column_major() {
    return cute::make_layout(cute::Shape<cute::_16, cute::Int<kDepth>>{},
                             cute::Stride<cute::_1, cute::Int<Rows::kStride>>{});
  }

  // Lanes give the addresses that CuTe's copy of `layout`, from element `first` of the tile on, has
  // them give, multiples of 16 bytes. A matrix is read in one pass if its 8 rows are in different
  // groups of four banks; shared memory has 32 banks of 4 bytes.
  template <typename Atom, typename Copy, typename Layout>
  void expect_addresses(Check& check, const Words& words, const Copy& copy, const Layout& layout, int first) {
    const auto numbers = cute::make_tensor(cute::counting_iterator<int>(first), layout);
    const std::vector<int> starts = row_starts<T, Atom>(words);
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::set<int> groups;
      for (int lane = 8 * matrix; lane < 8 * matrix + 8; ++lane) {
        check.equal(starts[lane], copy.get_slice(lane).partition_S(numbers)(0), lane, first);
        check.equal(starts[lane] * kSize % 16, 0, lane, first);
        groups.insert(starts[lane] * kSize / 16 % 8);
      }
      banks_.equal(static_cast<int>(groups.size()), 8, 8 * matrix, first);
    }
  }

  // Words that the lanes load one by one, each lane from another bank.
  void expect_no_conflicts_of_words(const Words& words) {
    for (int i = 0; i < 4; ++i) {
      std::set<uint32_t> banks;
      for (const auto& lane : words) banks.insert(lane[i] % 32);
      banks_.equal(static_cast<int>(banks.size()), kWarp, 0, i);
    }
  }

  Check banks_;
};

// f(width) for every width of a tile from which the kernels load operands, as a constant.
template <typename T, typename F>
void with_every_width(F&& f) {
  std::set<int> seen;
  const auto once = [&](auto width) {
    if (seen.insert(width).second) f(width);
  };
  const auto of_terms = [&](auto terms) {
    for (int64_t D = 1; D <= 256; ++D) {
      with_width<T, terms>(D, D, once);
      with_value_width<T, terms>(D, [&](auto width) {
        once(width);
        once(std::integral_constant<int, CollaborativeKeysSizes<T, width>::kSlice>{});
        once(std::integral_constant<int, CollaborativeQueriesSizes<T, width, terms>::kSlice>{});
      });
    }
  };
  of_terms(std::false_type{});
  of_terms(std::true_type{});
  once(std::integral_constant<int, kStepWidth>{});
}

template <typename T>
void check_dtype() {
  multiply_add_computes_the_product<T>();
  const std::vector<int> depths = depths_of_take<T>();
  with_every_width<T>([&](auto width) { TileLoads<T, width>::check(depths); });
}

}  // namespace
}  // namespace hk::selftest

int main() {
  using namespace hk::selftest;
  matrices_are_loaded<LoadRows>("load_matrices",
                                [](auto& words, const char* row) { hk::cuda::load_matrices(words, row); });
  matrices_are_loaded<LoadTransposed>(
      "load_matrices_transposed", [](auto& words, const char* row) { hk::cuda::load_matrices_transposed(words, row); });
  accumulators_have_places();
  check_dtype<hk::cuda::bf16>();
  check_dtype<hk::cuda::fp16>();
  check_dtype<float>();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
