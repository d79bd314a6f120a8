// The arguments of a call, and what every binding checks of them before it fills in the parameters of a kernel. It
// ensures memory safety for every caller: tensors have memory on the right device, which the binding ensures, and the
// sizes and dtypes that the kernels expect. Free of Python and torch.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "common/params.h"

namespace hk::bindings {

[[noreturn]] inline void refuse(const char* name, const std::string& was) {
  throw std::invalid_argument(std::string(name) + " " + was + ", which does not fit the call of the kernels");
}

inline void require(bool holds, const char* name, const char* was = "has another shape or dtype") {
  if (!holds) refuse(name, was);
}

// The dtypes of arguments: those of DType, in its order, and others.
enum class Element : int {
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  kInt32,
  kInt64,
  kBool,
  kUInt8,
  kOther,
};

// An argument: a tensor with memory, or absent.
struct Given {
  Tensor tensor;  // its dtype is not set
  Element element = Element::kFloat32;

  explicit operator bool() const { return static_cast<bool>(tensor); }
};

// An argument that is never absent.
struct Required : Given {};

// The fields of `Call` (heads_kernels/call.py) in its order: their kinds and names.
// clang-format off
#define HK_CALL_FIELDS(FIELD) \
  FIELD(Required, query) FIELD(Required, key) FIELD(Given, value) FIELD(Given, mixing) \
  FIELD(Given, content_bias) FIELD(Given, gate) FIELD(Given, bias) FIELD(Given, offset_bias) \
  FIELD(Given, sinks) FIELD(Given, alpha) FIELD(Given, k_lo) FIELD(Given, k_hi) \
  FIELD(Given, first_keys) FIELD(Given, key_visible) FIELD(Given, dense_mask) \
  FIELD(Given, exclude_keys) FIELD(Given, row_weights) FIELD(Given, seed) \
  FIELD(int64_t, band_lo) FIELD(int64_t, band_hi) FIELD(double, scale) FIELD(double, softcap) \
  FIELD(double, dropout_p) FIELD(std::string, gate_activation) FIELD(bool, closed_grad)
// clang-format on

// A call as it comes from Python or from a program.
struct CallArguments {
#define HK_DECLARE(Kind, name) Kind name{};
  HK_CALL_FIELDS(HK_DECLARE)
#undef HK_DECLARE

  // f(name, field) in the order of `Call`.
  template <typename F>
  void each(F&& f) {
#define HK_VISIT(Kind, name) f(#name, name);
    HK_CALL_FIELDS(HK_VISIT)
#undef HK_VISIT
  }
};

inline const char* type_of(const Required&) { return "Tensor"; }
inline const char* type_of(const Given&) { return "Tensor?"; }
inline const char* type_of(int64_t) { return "SymInt"; }
inline const char* type_of(double) { return "float"; }
inline const char* type_of(const std::string&) { return "str"; }
inline const char* type_of(bool) { return "bool"; }

// The fields of a call as the arguments of a torch schema.
inline std::string call_fields() {
  std::string schema;
  CallArguments().each([&](const char* name, const auto& field) {
    schema += (schema.empty() ? "" : ", ") + std::string(type_of(field)) + " " + name;
  });
  return schema;
}

// A floating-point tensor; an absent one stays absent.
inline Tensor floating(const Given& given, const char* name) {
  require(given.element <= Element::kFloat16, name, "is not of a floating-point dtype");
  Tensor result = given.tensor;
  result.dtype = static_cast<DType>(given.element);
  return result;
}

// A required floating-point tensor.
inline Tensor needed(const Given& given, const char* name) {
  require(static_cast<bool>(given), name, "is None");
  return floating(given, name);
}

inline bool is(const Tensor& t, std::initializer_list<int64_t> sizes) {
  return t.rank == static_cast<int>(sizes.size()) && std::equal(sizes.begin(), sizes.end(), t.size);
}

inline bool is_dense(const Tensor& t) {
  if (std::count(t.size, t.size + t.rank, 0)) return true;
  int64_t expected = 1;
  for (int d = t.rank - 1; d >= 0; expected *= t.size[d--])
    if (t.size[d] > 1 && t.stride[d] != expected) return false;
  return true;
}

// A contiguous tensor of these sizes, without memory.
inline Tensor contiguous(std::initializer_list<int64_t> sizes) {
  Tensor t;
  t.rank = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), t.size);
  int64_t step = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    t.stride[d] = step;
    step *= std::max<int64_t>(1, t.size[d]);
  }
  return t;
}

// Whether the last dimension is contiguous.
inline bool has_rows(const Tensor& t) {
  const int last = t.rank - 1;
  return t.size[last] <= 1 || t.stride[last] == 1 || std::count(t.size, t.size + t.rank, 0);
}

// A floating-point output; absent and empty tensors become absent ones.
inline Tensor output(const Given& given, const char* name) {
  const Tensor t = floating(given, name);
  return std::count(t.size, t.size + t.rank, 0) ? Tensor{} : t;
}

// Sets the strides of broadcast dimensions to 0; every size must be that of `full` or 1.
inline void broadcast(Tensor& t, std::initializer_list<int64_t> full, const char* name) {
  require(t.rank == static_cast<int>(full.size()), name);
  int d = 0;
  for (const int64_t size : full) {
    require(t.size[d] == 1 || t.size[d] == size, name);
    if (t.size[d] == 1) t.stride[d] = 0;
    ++d;
  }
}

// A contiguous tensor of integers or bools, all dimensions of which may broadcast but the last, of `length`; absent
// ones stay absent.
inline Tensor vectors(const Given& given, const char* name, Element element, std::initializer_list<int64_t> full,
                      int64_t length) {
  if (!given) return {};
  Tensor t = given.tensor;
  require(given.element == element && is_dense(t), name);
  broadcast(t, full, name);
  require(t.size[t.rank - 1] == length, name);
  return t;
}

// MAX_LENGTH and MAX_COUNT of checks.py: the kernels hold rows, keys, heads and batches in 32 bits, and a band limit
// that limits nothing is kUnbounded.
constexpr int64_t kUnbounded = int64_t{1} << 30;
constexpr int64_t kMaxLength = kUnbounded - 1024, kMaxCount = 0x7fffffff;

// The sizes of a call, from its query, key and mixing, and the type of its scores, lse and sums.
struct Sizes {
  int64_t B, H, T, S, D;
  DType compute;

  explicit Sizes(const AttentionParams& p) {
    const bool shared = static_cast<bool>(p.mixing);
    const int rank = shared ? 3 : 4;
    require(p.query.rank == rank, "query");
    require(p.key.rank == rank, "key");
    B = p.query.size[0];
    H = p.heads();
    T = p.rows();
    S = p.keys();
    D = p.query.size[rank - 1];
    const int64_t Hk = shared ? 1 : p.key.size[1];
    require(p.key.size[0] == B && p.key.size[rank - 1] == D && (Hk == 0 ? H == 0 : H % Hk == 0), "key");
    require(p.query.dtype == p.key.dtype, "key");
    require(!shared || is(p.mixing, {H, D}), "mixing");
    require(!p.content_bias || (shared && is(p.content_bias, {B, H, S})), "content_bias");
    require(has_rows(p.query), "query", "has rows that are not contiguous");
    require(has_rows(p.key), "key", "has rows that are not contiguous");
    require(T <= kMaxLength && B <= kMaxCount && H <= kMaxCount, "query", "is too long");
    require(S <= kMaxLength, "key", "is too long");
    compute = p.query.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }

  // Checks that a tensor is contiguous and in the compute type; absent ones pass.
  void check(const Tensor& t, std::initializer_list<int64_t> sizes, const char* name) const {
    require(!t || (is(t, sizes) && is_dense(t) && t.dtype == compute), name,
            "has another shape or dtype, or is not dense");
  }

  // The same of one number for each row, [B, H, T].
  void check_rows(const Tensor& t, const char* name) const { check(t, {B, H, T}, name); }
};

inline void set_mask(MaskParams& mask, const CallArguments& call, const Sizes& n) {
  const Tensor lo = vectors(call.k_lo, "k_lo", Element::kInt32, {n.B, n.H, n.T}, n.T);
  const Tensor hi = vectors(call.k_hi, "k_hi", Element::kInt32, {n.B, n.H, n.T}, n.T);
  require(lo.rank == hi.rank && lo.size[0] == hi.size[0] && lo.size[1] == hi.size[1], "k_hi",
          "is not there or shaped as k_lo is");
  mask.k_lo = static_cast<const int32_t*>(lo.data);
  mask.k_hi = static_cast<const int32_t*>(hi.data);
  mask.interval_stride = lo.stride[0];
  mask.interval_head_stride = lo.stride[1];
  if (call.first_keys) {
    require(static_cast<bool>(lo), "first_keys", "comes without k_lo and k_hi");
    const Tensor first = vectors(call.first_keys, "first_keys", Element::kInt32, {n.H}, call.first_keys.tensor.size[0]);
    mask.first_keys = static_cast<const int32_t*>(first.data);
    mask.first_stride = first.stride[0];
  }
  const Tensor visible = vectors(call.key_visible, "key_visible", Element::kBool, {n.B, n.S}, n.S);
  mask.key_visible = static_cast<const uint8_t*>(visible.data);
  mask.visible_stride = visible.stride[0];
  if (call.dense_mask) {
    Tensor dense = call.dense_mask.tensor;
    require(call.dense_mask.element == Element::kBool, "dense_mask");
    broadcast(dense, {n.B, n.H, n.T, n.S}, "dense_mask");
    std::copy_n(dense.stride, 4, mask.dense_stride);
    mask.dense = static_cast<const uint8_t*>(dense.data);
  }
  mask.band_lo = call.band_lo;
  mask.band_hi = call.band_hi;
  for (const int64_t limit : {mask.band_lo, mask.band_hi})
    require(-kUnbounded <= limit && limit <= kUnbounded, "band", "is past 2^30");
}

// Whether the gate varies along the width of a head.
inline bool is_elementwise(const Tensor& gate) { return gate.rank == 4 && gate.size[3] != 1; }

// Checks that a tensor has the sizes of another; absent ones pass.
inline void check_like(const Tensor& t, const Tensor& other, const char* name) {
  require(!t || (t.rank == other.rank && std::equal(t.size, t.size + t.rank, other.size) && t.dtype == other.dtype),
          name);
}

inline Activation activation_of(const std::string& name) {
  if (name == "identity") return Activation::kIdentity;
  if (name == "sigmoid") return Activation::kSigmoid;
  if (name == "softplus") return Activation::kSoftplus;
  refuse("gate_activation", "is '" + name + "'");
}

inline void set_dropout(DropoutParams& dropout, const Given& seed, double p) {
  if (p == 0.0) return;
  require(p > 0.0 && p < 1.0, "dropout_p", "is no probability in [0, 1)");
  require(is(seed.tensor, {5}) && is_dense(seed.tensor) && seed.element == Element::kInt64, "seed");
  dropout.active = true;
  dropout.seed = static_cast<const int64_t*>(seed.tensor.data);
  dropout.threshold = static_cast<uint32_t>(p * 4294967296.0);
  dropout.keep_scale = 1.0 / (1.0 - p);
}

inline void set_terms(ScoreTerms& terms, const CallArguments& given, const Sizes& n) {
  if ((terms.bias = floating(given.bias, "bias"))) {
    Tensor& bias = terms.bias;
    require(bias.rank == 5, "bias");
    const int64_t outer = bias.size[0], inner = bias.size[1];
    terms.bias_inner = std::max<int64_t>(1, inner != 1 ? inner : outer != 1 && outer ? n.B / outer : 1);
    require(n.B % terms.bias_inner == 0, "bias");
    broadcast(bias, {n.B / terms.bias_inner, terms.bias_inner, n.H, n.T, n.S}, "bias");
  }
  if ((terms.offset_bias = floating(given.offset_bias, "offset_bias"))) {
    broadcast(terms.offset_bias, {n.H, std::max<int64_t>(1, n.T + n.S - 1)}, "offset_bias");
    require(!terms.bias, "offset_bias", "comes beside bias");
  }
  if ((terms.sinks = floating(given.sinks, "sinks"))) {
    require(is(terms.sinks, {n.H}), "sinks");
    terms.sinks.rank = 2;  // [H, 1]
    terms.sinks.size[1] = 1;
  }
  terms.softcap = given.softcap;
  require(terms.softcap >= 0.0 && terms.softcap < 1e300, "softcap", "is negative or not finite");
}

inline void set_gate(AttentionParams& p, const CallArguments& call, const Sizes& n) {
  p.activation = activation_of(call.gate_activation);
  p.gate = floating(call.gate, "gate");
  require(p.gate.rank <= 4, "gate");
  const int64_t full[4] = {n.B, n.H, n.T, p.value.size[3]};
  const int first = p.gate.rank == 1 ? 1 : 0;
  for (int d = 0; d < p.gate.rank; ++d) require(p.gate.size[d] == 1 || p.gate.size[d] == full[first + d], "gate");
}

// Sets the value, in every pass but statistics, which have none.
inline void set_value(AttentionParams& p, const Given& value, const Sizes& n) {
  p.value = needed(value, "value");
  require(p.value.rank == 4, "value");
  const int64_t heads = p.mixing ? p.value.size[1] : p.key.size[1];
  require(is(p.value, {n.B, heads, n.S, p.value.size[3]}) && (heads == 0 ? n.H == 0 : n.H % heads == 0), "value");
  require(p.value.dtype == p.query.dtype, "value");
  require(has_rows(p.value), "value", "has rows that are not contiguous");
}

// The parameters of every pass.
inline Sizes set_call(AttentionParams& p, const CallArguments& call, bool has_value = true) {
  p.query = needed(call.query, "query");
  p.key = needed(call.key, "key");
  p.mixing = floating(call.mixing, "mixing");
  p.content_bias = floating(call.content_bias, "content_bias");
  p.scale = call.scale;
  p.closed_grad = call.closed_grad;
  const Sizes n(p);
  if (has_value) set_value(p, call.value, n);
  set_gate(p, call, n);
  set_terms(p.terms, call, n);
  set_mask(p.mask, call, n);
  set_dropout(p.dropout, call.seed, call.dropout_p);
  p.alpha = floating(call.alpha, "alpha");
  require(!p.alpha || !p.mixing, "alpha", "comes with mixing");
  require(!p.alpha || !p.terms.sinks, "sinks", "comes with alpha");
  n.check(p.alpha, {n.H}, "alpha");
  return n;
}

// The tensor whose memory order the output has: the value if the query is shared, else the query.
inline const Tensor& order_of_heads(const AttentionParams& p) { return p.mixing ? p.value : p.query; }

// A [B, H, T, Dv] without memory, in the order of `order_of_heads`, like `empty_heads` of ops/buffers.py.
inline Tensor heads_like(const AttentionParams& p, const Sizes& n) {
  const Tensor& like = order_of_heads(p);
  Tensor t = contiguous({n.B, n.H, n.T, p.value.size[3]});
  if (like.stride[1] < like.stride[2]) {  // tokens first
    t.stride[1] = t.stride[2];
    t.stride[2] *= std::max<int64_t>(1, n.H);
  }
  return t;
}

// Checks the numbers of an `alpha` in memory of the CPU.
inline void check_alpha(const Tensor& alpha) {
  for (int64_t h = 0; alpha && h < alpha.size[0]; ++h) {
    const double given = alpha.dtype == DType::kFloat64 ? static_cast<const double*>(alpha.data)[h]
                                                        : static_cast<const float*>(alpha.data)[h];
    if (given > 1 && given <= 2) continue;
    std::ostringstream words;
    words << "alpha has the value " << given
          << "; pass values in (1, 2]: 2 is sparsemax, and towards 1 it is softmax (gated_attention)";
    throw std::invalid_argument(words.str());
  }
}

// f(name, gradient, operand, sizes) for the gradients of the operands of a call, in their order. Those without sizes
// are as their operand, others are sums of these sizes in the compute type.
template <typename F>
void each_gradient(BackwardParams& p, const Sizes& n, F&& f) {
  using List = std::initializer_list<int64_t>;
  const int64_t Dv = p.value.size[3], diagonals = std::max<int64_t>(1, n.T + n.S - 1);
  const int64_t* bias = p.terms.bias.size;
  f("dquery", p.dquery, p.query, List{});
  f("dkey", p.dkey, p.key, List{});
  f("dvalue", p.dvalue, p.value, List{});
  f("dmixing", p.dmixing, p.mixing, List{n.B, n.H, n.D});
  f("dcontent_bias", p.dcontent_bias, p.content_bias, List{n.B, n.H, n.S});
  if (is_elementwise(p.gate))
    f("dgate", p.dgate, p.gate, List{n.B, n.H, n.T, Dv});
  else
    f("dgate", p.dgate, p.gate, List{n.B, n.H, n.T});
  f("dbias", p.dbias, p.terms.bias, List{bias[0], bias[1], bias[2], bias[3], bias[4]});
  f("doffset_bias", p.doffset_bias, p.terms.offset_bias, List{n.B, n.H, diagonals});
  f("dsinks", p.dsinks, p.terms.sinks, List{n.B, n.H, n.T});
  f("dalpha", p.dalpha, p.alpha, List{n.B, n.H, n.T});
}

// The keys that statistics exclude from the maximum, the weights of rows, and the outputs.
inline void set_statistics(StatisticsParams& params, const CallArguments& call, const Sizes& n, const Given& argmax) {
  const Tensor excluded = vectors(call.exclude_keys, "exclude_keys", Element::kBool, {n.B, n.S}, n.S);
  params.excluded = static_cast<const uint8_t*>(excluded.data);
  params.excluded_stride = excluded.stride[0];
  n.check_rows(params.lse, "lse");
  n.check_rows(params.max_score, "max_score");
  n.check_rows(params.max_prob, "max_prob");
  n.check_rows(params.entropy, "entropy");
  require(is(argmax.tensor, {n.B, n.H, n.T}) && is_dense(argmax.tensor) && argmax.element == Element::kInt64, "argmax");
  params.argmax = static_cast<int64_t*>(argmax.tensor.data);
  if ((params.row_weights = floating(call.row_weights, "row_weights"))) {
    broadcast(params.row_weights, {n.B, n.H, n.T}, "row_weights");
    require(params.row_weights.dtype == params.lse.dtype, "row_weights");
  }
  n.check(params.received, {n.B, n.H, n.S}, "received");
  const bool asked = params.row_weights && n.B && n.H && n.S;
  require(asked == static_cast<bool>(params.received), "received", asked ? "is empty" : "comes without row_weights");
}

// Checks lse, or with entmax the two numbers per row.
inline void check_lse(const AttentionParams& params, const Tensor& lse, const Sizes& n) {
  if (params.alpha)
    n.check(lse, {2, n.B, n.H, n.T}, "lse");
  else
    n.check_rows(lse, "lse");
}

// Checks out, attended and lse, the last two of which are optional.
inline void check_outputs(const ForwardParams& params, const Sizes& n) {
  const int64_t Dv = params.value.size[3];
  const bool empty = n.B == 0 || n.H == 0 || n.T == 0 || Dv == 0;
  require(params.out ? is(params.out, {n.B, n.H, n.T, Dv}) && params.out.dtype == params.query.dtype : empty, "out");
  check_like(params.attended, params.out, "attended");
  check_lse(params, params.lse, n);
}

}  // namespace hk::bindings
