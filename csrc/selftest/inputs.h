// The inputs of one case of the self test. Elements that no kernel may read (hidden keys, and query rows that see no
// key) are NaN and infinity.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "common/philox.h"
#include "selftest/array.h"

namespace hk::selftest {

constexpr int64_t kMixingChunk = 16;  // features of mixing that are skipped together

// Words name=value.
struct Case {
  std::string text;

  std::string word(const std::string& name, const std::string& otherwise = "") const {
    const std::string words = " " + text + " ";
    const size_t at = words.find(" " + name + "=");
    if (at == std::string::npos) return otherwise;
    const size_t begin = at + name.size() + 2;
    return words.substr(begin, words.find(' ', begin) - begin);
  }
  int64_t number(const char* name, int64_t otherwise) const {
    return std::stoll(word(name, std::to_string(otherwise)));
  }
};

struct Inputs {
  const Case words;
  const bool collaborative;
  const DType dtype, compute = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
  const int64_t B = words.number("B", 2), H = words.number("H", 2);
  const int64_t Hk = collaborative ? words.number("Hv", H) : words.number("Hk", 1);  // of values
  const int64_t T = words.number("T", 9), S = words.number("S", 11);
  const int64_t D = words.number("D", 8), Dv = words.number("Dv", 8);
  const int64_t band_lo = words.number("lo", -(1 << 30)), band_hi = words.number("hi", 1 << 30);
  const bool shared_mask = words.number("shared", 0);  // by the whole batch
  const bool closed_grad = words.number("closed_grad", 1);
  const double dropout_p = static_cast<double>(words.number("drop", 0)) / 100;
  const double sharpness = static_cast<double>(words.number("sharp", 1));
  const double scale = sharpness / std::sqrt(std::max(1.0, static_cast<double>(D)));
  const std::string rows = words.word("rows"), keys = words.word("keys");
  const std::string gated = words.word("gate"), zeros = words.word("mixing");
  const std::string layout = words.word("layout"), spread = layout == "padded" ? "spread" : layout;
  const Activation activation = static_cast<Activation>(words.number("act", 0));
  Array query, key, value, mixing, content_bias, gate, dout, alpha;
  std::vector<int32_t> k_lo, k_hi;
  std::vector<uint8_t> key_visible, excluded;

  Inputs(const std::string& text, bool shared_query, DType type)
      : words{text}, collaborative(shared_query), dtype(type) {
    query = collaborative ? random({B, T, D}, layout) : random({B, H, T, D}, layout);
    key = collaborative ? random({B, S, D}, layout) : random({B, Hk, S, D}, layout);
    value = random({B, Hk, S, Dv}, layout);
    dout = random({B, H, T, Dv}, spread);
    if (collaborative) make_mixing();
    if (!gated.empty()) make_gate();
    if (words.number("alpha", 0) && !collaborative) {
      alpha = Array(compute, {H});
      alpha.each(
          [&](const Index& at) { alpha.set(at, at[0] % 2 ? 2 : static_cast<double>(words.number("alpha", 0)) / 100); });
    }
    make_mask();
    poison();
  }

  AttentionParams params(int threads) const {
    AttentionParams p;
    p.query = query.tensor, p.key = key.tensor, p.value = value.tensor;
    p.mixing = mixing.tensor, p.content_bias = content_bias.tensor, p.gate = gate.tensor;
    p.alpha = alpha.tensor;
    p.mask.band_lo = band_lo, p.mask.band_hi = band_hi;
    if (!rows.empty()) p.mask.k_lo = k_lo.data(), p.mask.k_hi = k_hi.data();
    if (!keys.empty()) p.mask.key_visible = key_visible.data();
    p.mask.interval_stride = shared_mask ? 0 : T, p.mask.visible_stride = shared_mask ? 0 : S;
    p.dropout = {dropout_p > 0, kSeed, threshold(), 1 / (1 - dropout_p)};
    p.scale = scale, p.activation = activation, p.closed_grad = closed_grad, p.threads = threads;
    return p;
  }

  bool sees(int64_t b, int64_t i, int64_t j) const {
    const int64_t row = (shared_mask ? 0 : b * T) + i, key = (shared_mask ? 0 : b * S) + j;
    return j >= i + band_lo && j < i + band_hi && j >= k_lo[row] && j < k_hi[row] && key_visible[key];
  }

  // The factor by which dropout multiplies a probability.
  double kept(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (dropout_p == 0) return 1;
    const auto u32 = [](int64_t n) { return static_cast<uint32_t>(n); };
    const Philox4 random = philox(u32(kSeed[4] / 4 + j / 4), u32(kSeed[3] + i), u32(kSeed[2] + h), u32(kSeed[1] + b),
                                  static_cast<uint64_t>(kSeed[0]));
    return random.word[j % 4] >= threshold() ? 1 / (1 - dropout_p) : 0;
  }

  double gate_at(int64_t b, int64_t h, int64_t i, int64_t w) const {
    if (gated.empty()) return 1;
    const double x = gate.get(gate.tensor.rank == 1 ? Index{h, 0, 0, 0} : Index{b, h, i, w});
    if (activation == Activation::kSigmoid) return 1 / (1 + std::exp(-x));
    return activation == Activation::kSoftplus ? std::log1p(std::exp(x)) : x;
  }

  bool elementwise() const { return gated.size() == 4 && gated[3] == 'D'; }

  // An identity gate of a whole head that is exactly 0.
  bool closed(int64_t b, int64_t h) const {
    const bool whole = gated.size() < 3 || (gated[2] == '1' && !elementwise());
    return whole && activation == Activation::kIdentity && gate_at(b, h, 0, 0) == 0;
  }

  // Feature d is in a chunk of zeros of mixing[h].
  bool skipped(int64_t h, int64_t d) const {
    return (zeros == "head" && h == 0) || (zeros == "chunks" && (d / kMixingChunk + h) % 2 == 0);
  }

 private:
  static constexpr int64_t kSeed[5] = {-0x0123456789abcdf0, 3, 1, 1000, 64};
  std::mt19937_64 generator_{1};

  uint32_t threshold() const { return static_cast<uint32_t>(dropout_p * 4294967296.0); }

  double uniform(double low, double high) {
    return low + (high - low) * std::ldexp(static_cast<double>(generator_() >> 11), -53);
  }

  Array random(const std::vector<int64_t>& size, const std::string& how) {
    Array a(dtype, size, how);
    a.each([&](const Index& at) { a.set(at, uniform(-2, 2)); });
    return a;
  }

  void make_mixing() {
    mixing = random({H, D}, spread);
    if (words.number("bias", 1)) content_bias = random({B, H, S}, spread);
    mixing.each([&](const Index& at) {
      if (skipped(at[0], at[1])) mixing.set(at, 0);
    });
  }

  void make_gate() {
    const std::map<char, int64_t> sizes = {{'1', 1}, {'B', B}, {'H', H}, {'T', T}, {'D', Dv}};
    std::vector<int64_t> size;
    for (char letter : gated) size.push_back(sizes.at(letter));
    gate = random(size, spread);
    const int head = size.size() == 1 ? 0 : 1;
    if (!words.number("zero", 0)) return;
    gate.each([&](const Index& at) {
      if (at[head] == 0) gate.set(at, 0);
    });
  }

  void make_mask() {
    const auto below = [&](int64_t low, int64_t high) {  // an integer in [low, high)
      return static_cast<int64_t>(std::floor(uniform(static_cast<double>(low), static_cast<double>(high))));
    };
    for (int64_t b = 0; b < (shared_mask ? 1 : B); ++b) {
      for (int64_t i = 0; i < T; ++i) {
        int64_t lo = 0, hi = S;
        if (rows == "lengths") hi = i < T * (b + 2) / 4 ? S * (b + 1) / 3 : 0;
        if (rows == "documents") lo = i * 3 / T * S / 3, hi = (i * 3 / T + 1) * S / 3;
        if (rows == "random") lo = below(-2, S), hi = below(0, S + 3);
        if (rows == "none") lo = hi = S / 2;
        k_lo.push_back(static_cast<int32_t>(lo));
        k_hi.push_back(static_cast<int32_t>(hi));
      }
      for (int64_t j = 0; j < S; ++j) {
        const bool hole = keys == "holes" && uniform(0, 1) < 0.3;
        const bool hidden = (keys == "tile" && j / 64 == 1) || (keys == "batch" && b > 0);
        key_visible.push_back(!(hole || hidden || keys == "none"));
      }
    }
    for (int64_t j = 0; j < S; ++j) excluded.push_back(keys == "holes" && j % 3 == 0);
    k_lo.shrink_to_fit(), k_hi.shrink_to_fit();
    key_visible.shrink_to_fit(), excluded.shrink_to_fit();
  }

  // NaN and infinity in hidden elements, and the visible NaN of a case.
  void poison() {
    std::vector<bool> row_sees(B * T), key_seen(B * S);
    for (int64_t b = 0; b < B; ++b)
      for (int64_t i = 0; i < T; ++i)
        for (int64_t j = 0; j < S; ++j)
          if (sees(b, i, j)) row_sees[b * T + i] = key_seen[b * S + j] = true;
    const auto spoil = [&](Array& a, int dim, const std::vector<bool>& seen, const char* name) {
      a.each([&](const Index& at) {
        if (!seen[at[0] * a.tensor.size[dim] + at[dim]]) a.set(at, at[3] % 2 ? kInfinity : kNaN);
        if (words.word("nan") == name && at[dim] == T / 2 && at[3] == 0) a.set(at, kNaN);
      });
    };
    spoil(query, collaborative ? 1 : 2, row_sees, "query");
    spoil(key, collaborative ? 1 : 2, key_seen, "key");
    spoil(value, 2, key_seen, "value");
    spoil(content_bias, 2, key_seen, "content_bias");
    spoil(dout, 2, row_sees, "dout");
  }
};

}  // namespace hk::selftest
