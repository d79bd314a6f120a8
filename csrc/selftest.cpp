// The CPU kernels without Python: every kernel at every level that this processor runs, on small edge cases, against
// the formula in double (selftest/reference.h, which bounds the error), so that levels agree within those bounds. Gaps
// of results must come back untouched. The same call gives the same bits, and so does any number of threads where no
// sum is split over them.
//
// `selftest [--level NAME] [CASE...]` prints a line for each failure. NAME is a level of pairs that this processor can
// run although it does not report it.
#include <cstdio>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "bindings/checks.h"
#include "cpu/kernels.h"
#include "selftest/reference.h"

// Pairs are tested at the level that csrc/build.py adds for this program, which needs none of the instructions.
#define HK_LEVEL emulated
#include "selftest/pairs.h"

namespace hk {
namespace emulated {
extern const Kernels kKernels;
}

namespace selftest {
namespace {

// One a line, named by what differs from the values in selftest/inputs.h: sizes; the band (lo, hi), the intervals of
// rows, the visible keys; gate, a letter or 1 a dimension, its activation and whether that of head 0 is zero; zeros of
// mixing; percent of alpha; memory layout; percent of dropout; the place of a NaN that some rows see; the only
// gradients requested.
const char* const kCases = R"(T=1 S=1
T=3 S=3
T=63 S=63
T=64 S=64
T=65 S=65
T=130 S=130
T=3 S=130
T=130 S=65
T=130 S=1
S=0
S=0 gate=BHTD
S=0 gate=H zero=1 layout=padded
T=0 S=70
B=0 S=130 gate=BH
H=0 Hk=0 S=70
T=67 S=66 D=1 Dv=1
T=67 S=66 D=5 Dv=40
T=67 S=66 D=40 Dv=5
T=67 S=66 D=72 Dv=40
T=67 S=66 D=16 Dv=72
T=67 S=66 D=64 Dv=64
T=90 S=90 B=1 D=72 Dv=72
T=70 S=330 B=1 H=2 Hk=1 D=24 Dv=80 rows=random
T=70 S=330 B=1 H=2 Hk=1 D=72 Dv=72 lo=-3 hi=2 nan=value
T=65 H=6 Hk=2
S=70 H=3 Hk=3
T=66 S=70 H=6 Hk=3 Hv=3
T=66 S=70 H=3 Hk=3 Hv=1 gate=BHT
T=70 S=70 sharp=30
T=130 S=194 B=1 H=4 Hk=2 D=16 Dv=16 gate=BHT rows=random
T=130 S=130 hi=1
T=65 S=130 hi=1
T=3 S=130 hi=128
T=130 S=65 hi=-64
T=130 S=130 H=4 lo=-5 hi=3
T=130 S=130 lo=-1 hi=71
T=130 S=40 lo=-3 hi=1
T=67 S=130 rows=lengths
T=130 S=130 rows=documents
T=65 S=130 rows=random
T=65 S=130 keys=holes
T=65 S=130 rows=random keys=holes shared=1
T=130 S=130 hi=1 rows=random keys=holes
S=200 keys=tile
T=65 S=70 gate=BH keys=batch
gate=H rows=none
gate=BHTD keys=none
T=70 S=70 lo=-3 hi=2 nan=query
T=70 S=70 lo=-3 hi=2 nan=key
T=70 S=70 lo=-3 hi=2 nan=value gate=BHT
T=70 S=70 lo=-3 hi=2 nan=content_bias
T=70 S=70 lo=-3 hi=2 nan=dout gate=BHTD
T=67 Dv=9 gate=H
T=67 Dv=9 gate=H act=1
T=67 Dv=9 gate=1 act=2
T=67 Dv=9 gate=BH act=2
T=67 Dv=9 gate=1H act=1
T=67 Dv=9 gate=B1
T=67 Dv=9 gate=BHT
T=67 Dv=9 gate=BHT act=1
T=67 Dv=9 gate=11T act=2
T=67 Dv=9 gate=BH1
T=67 Dv=9 gate=BHTD
T=67 Dv=9 gate=BHTD act=1
T=67 Dv=9 gate=1H1D act=2
T=67 Dv=9 gate=1H1D
T=67 Dv=9 gate=B1T1 act=1
T=67 Dv=9 gate=1111
T=67 S=66 H=3 Hk=3 rows=lengths gate=H zero=1
T=67 S=66 H=3 Hk=3 rows=lengths gate=H zero=1 closed_grad=0
T=67 S=66 H=4 gate=BH11 zero=1
T=67 S=66 H=4 gate=BH zero=1 closed_grad=0
T=67 H=3 gate=BHT zero=1
T=67 H=3 gate=BHT zero=1 closed_grad=0
T=67 H=3 gate=BHTD zero=1
T=67 H=3 gate=BH1D zero=1 closed_grad=0
T=67 S=66 H=3 D=72 mixing=chunks keys=holes
T=67 S=66 H=3 D=40 mixing=chunks closed_grad=0
T=67 S=66 H=3 D=72 mixing=head keys=holes bias=0
T=67 S=66 H=3 D=40 mixing=head closed_grad=0
T=65 S=67 H=4 Hk=2 D=16 Dv=16 rows=lengths gate=BHT layout=heads
T=65 S=67 H=4 Hk=2 D=5 Dv=9 gate=BHTD layout=heads
T=65 S=67 H=4 Hk=2 D=16 Dv=16 rows=lengths gate=BHT layout=padded
T=65 S=67 H=4 Hk=2 D=5 Dv=9 gate=BHTD layout=padded
T=65 S=67 H=4 Hk=2 Hv=2 D=5 Dv=9 gate=BHTD layout=heads rows=lengths
T=130 S=194 B=1 H=8 Hk=4 Hv=4 D=16 Dv=16 gate=BH zero=1 rows=random
T=65 S=67 H=4 D=16 Dv=16 gate=H layout=padded
T=1 S=600 H=6 Hk=2 D=72 Dv=40 keys=holes gate=BHT
T=2 S=257 H=3 Hk=1 D=64 Dv=136 hi=256 rows=random
T=10 S=300 H=4 Hk=2 D=5 Dv=9 layout=heads gate=BHTD keys=tile
T=3 S=300 H=5 Hk=1 D=16 lo=-3 hi=2 nan=value
T=3 S=520 H=3 Hk=3 D=40 mixing=chunks keys=holes gate=H zero=1
T=7 S=320 H=4 Hk=2 drop=30 layout=padded
T=2 S=300 H=6 Hk=2 Hv=2 D=40 Dv=24 mixing=chunks keys=holes gate=H zero=1
T=70 S=70 drop=30
T=130 S=67 H=4 Hk=2 drop=90 rows=random gate=H zero=1
T=130 S=130 B=1 drop=50 hi=1
T=130 S=194 H=4 Hk=2 D=5 Dv=9 alpha=150
T=130 S=130 H=3 Hk=3 alpha=120 hi=1 gate=H zero=1
T=67 S=130 H=4 alpha=177 rows=random keys=holes drop=30 layout=padded sharp=9
T=70 S=70 alpha=150 lo=-3 hi=2 nan=value gate=BHTD
T=3 S=300 alpha=105 keys=tile gate=BHT act=1
S=0 alpha=150 gate=H zero=1
T=130 S=67 alpha=150 gate=H zero=1 only=dgate
T=130 S=67 alpha=150 only=dalpha
T=70 S=70 B=1 gate=H zero=1 only=none
T=70 S=70 B=1 gate=H zero=1 only=dquery
T=70 S=70 B=1 gate=H zero=1 only=dkey
T=70 S=70 B=1 gate=H zero=1 only=dvalue
T=70 S=70 B=1 gate=H zero=1 only=dmixing
T=70 S=70 B=1 gate=H zero=1 only=dcontent_bias
T=70 S=70 B=1 gate=H zero=1 only=dgate
T=70 S=70 B=1 H=4 gate=BHT only=dkey,dgate
T=70 S=70 B=1 H=4 mixing=head closed_grad=0 only=dquery,dvalue
)";

using Results = std::map<std::string, Array>;

struct Call {
  const Kernels& run;
  const Inputs& in;
  const int threads;
  Results results = {};

  Tensor make(const char* name, DType dtype, const std::vector<int64_t>& size, const std::string& layout = "") {
    return (results[name] = Array(dtype, size, layout)).tensor;
  }
  Tensor make_like(const char* name, const Tensor& t) {
    return make(name, in.dtype, {t.size, t.size + t.rank}, in.layout);
  }
  Tensor make_rows(const char* name) { return make(name, in.compute, {in.B, in.H, in.T}); }

  ForwardParams forward(bool save) {
    ForwardParams p{in.params(threads), {}, {}, {}};
    p.out = make_like("out", in.dout.tensor);
    if (save && !in.gated.empty()) p.attended = make_like("attended", in.dout.tensor);
    if (save && in.alpha.tensor) p.lse = make("lse", in.compute, {2, in.B, in.H, in.T});
    if (save && !in.alpha.tensor) p.lse = make_rows("lse");
    run.attention_forward(p);
    return p;
  }

  void backward(const ForwardParams& saved) {
    BackwardParams p;
    static_cast<AttentionParams&>(p) = in.params(threads);
    p.dout = in.dout.tensor;
    p.attended = in.gated.empty() ? saved.out : saved.attended;
    p.lse = saved.lse;
    const std::string only = "," + in.words.word("only") + ",";
    const auto asked = [&](const std::string& name) {
      return only == ",," || only.find("," + name + ",") != std::string::npos;
    };
    const auto make_asked = [&](const char* name, Tensor& gradient, const Tensor& operand, std::vector<int64_t> sizes) {
      if (!operand || !asked(name)) return;
      gradient = sizes.empty() ? make_like(name, operand) : make(name, in.compute, sizes);
    };
    bindings::each_gradient(p, bindings::Sizes(p), make_asked);
    run.attention_backward(p);
  }

  void statistics() {
    StatisticsParams p;
    static_cast<AttentionParams&>(p) = in.params(threads);
    p.value = p.gate = Tensor{};
    p.dropout = {};
    p.excluded = in.excluded.data();
    p.lse = make_rows("row lse");
    p.max_score = make_rows("max_score");
    p.max_prob = make_rows("max_prob");
    p.entropy = make_rows("entropy");
    std::vector<int64_t> keys(in.B * in.H * in.T, -2);
    p.argmax = keys.data();
    run.attention_statistics(p);
    make("argmax", DType::kFloat64, {static_cast<int64_t>(keys.size())});
    Array& argmax = results["argmax"];
    argmax.each([&](const Index& at) { argmax.set(at, static_cast<double>(keys[at[0]])); });
  }

  void all() {
    backward(forward(true));
    if (in.words.word("nan").empty()) statistics();
  }
};

// Describes what is wrong with a result; empty if it is correct.
std::string compare(Array& got, const Expected& expected) {
  if (!got.gaps_untouched()) return "writes between its elements";
  const double u = roundoff(got.tensor.dtype);
  // Half the smallest float16; elsewhere probabilities below 2^-126 (1e-38) are flushed to zero.
  const double tiny = got.tensor.dtype == DType::kFloat16 ? std::ldexp(1, -25) : 1e-36;
  std::vector<double> values = got.values();
  const size_t count = expected.value.size();
  if (values.size() == 2 * count) {  // a threshold of entmax, above the largest score of its row
    for (size_t n = 0; n < count; ++n) values[n] += values[count + n];
    values.resize(count);
  }
  double worst = 0;
  char text[160] = "";
  for (size_t n = 0; n < values.size(); ++n) {
    const double value = expected.value[n], error = std::abs(values[n] - value);
    if (expected.bound[n] == kInfinity) continue;
    const double bound = expected.bound[n] + (expected.bound[n] > 0 ? tiny : 0) + u * std::abs(value);
    const bool right = std::isnan(value) ? !std::isfinite(values[n]) : values[n] == value || error <= bound;
    const double ratio = std::isnan(error) ? kInfinity : error / bound;
    if (right || ratio < worst) continue;
    worst = ratio;
    std::snprintf(text, sizeof text, "element %zu is %g, not %g: error %.2g, bound %.2g", n, values[n], value, error,
                  bound);
  }
  return text;
}

struct Tally {
  int passed = 0, failed = 0;

  void check(const std::string& where, const std::string& what, const std::string& wrong) {
    ++(wrong.empty() ? passed : failed);
    if (!wrong.empty()) std::printf("FAIL %s, %s: %s\n", where.c_str(), what.c_str(), wrong.c_str());
  }
};

// Levels that multiply pairs, or the others: those of this processor, the emulated one and that of a name.
std::vector<const Kernels*> levels_of(bool pairs, const std::string& name) {
  const Kernels* const more[] = {&emulated::kKernels,
#if defined(HK_X86_LEVELS)
                                 &avx512bf16::kKernels, &amx::kKernels
#endif
  };
  std::vector<const Kernels*> levels;
  for (const Kernels* const* level = available_levels(); *level; ++level)
    if ((*level)->pairs == pairs) levels.push_back(*level);
  for (const Kernels* level : more)
    if (level->pairs == pairs && (level == more[0] || level->name == name)) levels.push_back(level);
  return levels;
}

void test(const Inputs& in, const std::vector<const Kernels*>& levels, Tally& tally) {
  const Reference reference(in, levels[0]->pairs);
  for (const Kernels* level : levels) {
    const char* const dtypes[] = {"float32", "float64", "bfloat16", "float16"};
    const std::string where = std::string(level->name) + ", \"" + in.words.text + "\", " +
                              (in.collaborative ? "collaborative " : "gated ") + dtypes[static_cast<int>(in.dtype)];
    Call one{*level, in, 1}, three{*level, in, 3}, again{*level, in, 3}, bare{*level, in, 1};
    one.all(), three.all(), again.all(), bare.forward(false);
    for (const auto& [name, expected] : reference.results()) {
      if (!one.results.count(name)) continue;
      Array &serial = one.results[name], &parallel = three.results[name];
      tally.check(where, name, compare(serial, *expected));
      tally.check(where, name + " with 3 threads", compare(parallel, *expected));
      tally.check(where, name, parallel.same_bits(again.results[name]) ? "" : "other bits again");
      tally.check(where, name, serial.same_bits(parallel) ? "" : "other bits with 3 threads");
    }
    const bool same = bare.results["out"].same_bits(one.results["out"]);
    tally.check(where, "out", same ? "" : "other bits where nothing is kept");
  }
}

}  // namespace
}  // namespace selftest
}  // namespace hk

int main(int count, char** words) {
  using namespace hk::selftest;
  std::vector<std::string> cases(words + 1, words + count);
  std::string more;
  if (count > 2 && cases[0] == "--level") {
    more = cases[1];
    cases.erase(cases.begin(), cases.begin() + 2);
  }
  std::istringstream lines(kCases);
  if (cases.empty())
    for (std::string line; std::getline(lines, line);) cases.push_back(line);
  Tally tally;
  std::mt19937 random(1);
  for (int n = 0; n < 300; ++n) tally.check("pairs", "rounding", hk::emulated::test_rounding(random));
  for (const hk::Kernels* const* level = hk::available_levels(); *level; ++level) {
    const bool used = hk::use_level((*level)->name) && &hk::kernels() == *level;
    tally.check((*level)->name, "use_level", used ? "" : "another level is in use");
  }
  const auto plain = levels_of(false, more), pairs = levels_of(true, more);
  for (size_t n = 0; n < cases.size(); ++n) {
    for (const bool collaborative : {false, true}) {
      // Each in float32 and in one of the other dtypes, and in pairs of bfloat16.
      test(Inputs(cases[n], collaborative, hk::DType::kFloat32), plain, tally);
      test(Inputs(cases[n], collaborative, static_cast<hk::DType>(1 + n % 3)), plain, tally);
      test(Inputs(cases[n], collaborative, hk::DType::kBFloat16), pairs, tally);
    }
  }
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed ? 1 : 0;
}
