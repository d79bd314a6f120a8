// Conversion of torch tensors to hk::Tensor (pointer, dtype, sizes, strides) through their Python
// methods, so that the modules are built without torch and work with every version of it. Only this
// folder depends on Python.
//
// The checks here ensure memory safety for every caller: tensors have memory on the right device
// and the sizes and dtypes that the kernels expect. Python has checked everything else.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "common/params.h"

namespace py = pybind11;

namespace hk::bindings {

// The Python names, the dtypes and the devices of torch, looked up once.
struct Torch {
  py::str data_ptr{"data_ptr"}, stride{"stride"}, shape{"shape"}, dtype{"dtype"}, device{"device"};
  py::object dtypes[4];
  py::object int32, int64, uint8, boolean;
  py::object tensor, make_device, cpu;

  Torch() {
    const py::module_ torch = py::module_::import("torch");
    tensor = torch.attr("Tensor");
    make_device = torch.attr("device");
    cpu = make_device("cpu");
    const char* names[4] = {"float32", "float64", "bfloat16", "float16"};  // in the order of DType
    for (int i = 0; i < 4; ++i) dtypes[i] = torch.attr(names[i]);
    int32 = torch.attr("int32");
    int64 = torch.attr("int64");
    uint8 = torch.attr("uint8");
    boolean = torch.attr("bool");
  }

  static const Torch& get() {
    static const Torch* torch = new Torch;  // never destroyed: the interpreter may exit first
    return *torch;
  }
};

inline py::object checked(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// The C API instead of pybind11's casts: 0.5 us per tensor instead of 1.5.
inline py::object call(py::handle object, const py::str& method) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), method.ptr()));
}

inline py::object attribute(py::handle object, const py::str& name) {
  return checked(PyObject_GetAttr(object.ptr(), name.ptr()));
}

[[noreturn]] inline void refuse(const char* name, const std::string& was) {
  throw std::invalid_argument(std::string(name) + " " + was +
                              ", which does not fit the call of the kernels");
}

inline void require(bool holds, const char* name, const char* was = "has another shape or dtype") {
  if (!holds) refuse(name, was);
}

inline void read_integers(py::handle tuple, int64_t* values) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.ptr()); ++i) {
    values[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
    if (values[i] == -1 && PyErr_Occurred()) throw py::error_already_set();
  }
}

// Pointer, sizes and strides of a tensor on `device`, an object of torch.
inline Tensor shape_of(py::handle tensor, const py::object& device, const char* name) {
  const Torch& torch = Torch::get();
  if (!PyObject_TypeCheck(tensor.ptr(), reinterpret_cast<PyTypeObject*>(torch.tensor.ptr())))
    refuse(name, tensor.is_none() ? "is None" : "is no tensor");
  Tensor result;
  int64_t count = 1;
  try {
    const py::object place = attribute(tensor, torch.device);
    const int same = PyObject_RichCompareBool(place.ptr(), device.ptr(), Py_EQ);
    if (same < 0) throw py::error_already_set();
    if (!same)
      refuse(name,
             "is on " + std::string(py::str(place)) + ", not " + std::string(py::str(device)));
    const py::object shape = attribute(tensor, torch.shape), stride = call(tensor, torch.stride);
    const Py_ssize_t rank = PyTuple_GET_SIZE(shape.ptr());
    if (rank < 1 || rank > kMaxRank || PyTuple_GET_SIZE(stride.ptr()) != rank)
      refuse(name, "has " + std::to_string(rank) + " dimensions");
    result.rank = static_cast<int>(rank);
    read_integers(shape, result.size);
    read_integers(stride, result.stride);
    result.data = PyLong_AsVoidPtr(call(tensor, torch.data_ptr).ptr());
    for (int d = 0; d < result.rank; ++d) count *= result.size[d];
  } catch (const py::error_already_set& error) {  // sparse, nested: no sizes, strides or pointer
    refuse(name, std::string("has no dense memory (") + error.what() + ")");
  }
  if (!result.data && count != 0) refuse(name, "has no memory");
  return result;
}

inline DType dtype_of(py::handle dtype, const char* name = "dtype") {
  const Torch& torch = Torch::get();
  for (int i = 0; i < 4; ++i)
    if (dtype.is(torch.dtypes[i])) return static_cast<DType>(i);
  refuse(name, "is " + std::string(py::str(dtype)));
}

// A floating-point tensor; None becomes an absent one.
inline Tensor floating(py::handle tensor, const py::object& device, const char* name) {
  if (tensor.is_none()) return {};
  Tensor result = shape_of(tensor, device, name);
  result.dtype = dtype_of(attribute(tensor, Torch::get().dtype), name);
  return result;
}

// A required floating-point tensor.
inline Tensor needed(py::handle tensor, const py::object& device, const char* name) {
  if (tensor.is_none()) refuse(name, "is None");
  return floating(tensor, device, name);
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

// Whether the last dimension is contiguous.
inline bool has_rows(const Tensor& t) {
  const int last = t.rank - 1;
  return t.size[last] <= 1 || t.stride[last] == 1 || std::count(t.size, t.size + t.rank, 0);
}

// A floating-point output; None and empty tensors become absent ones.
inline Tensor output(py::handle tensor, const py::object& device, const char* name) {
  const Tensor t = floating(tensor, device, name);
  return std::count(t.size, t.size + t.rank, 0) ? Tensor{} : t;
}

// A contiguous integer tensor [B or 1, length]; `stride` becomes the step between batch entries.
template <typename T>
const T* batched(py::handle tensor, const py::object& device, const char* name,
                 const py::object& dtype, int64_t B, int64_t length, int64_t* stride) {
  if (tensor.is_none()) return nullptr;
  const Tensor t = shape_of(tensor, device, name);
  require(attribute(tensor, Torch::get().dtype).is(dtype), name);
  require((is(t, {B, length}) || is(t, {1, length})) && is_dense(t), name);
  *stride = t.size[0] == 1 ? 0 : length;
  return static_cast<const T*>(t.data);
}

// MAX_LENGTH and MAX_COUNT of checks.py: the kernels hold rows, keys, heads and batches in 32 bits,
// and a band limit that limits nothing is kUnbounded.
constexpr int64_t kUnbounded = int64_t{1} << 30;
constexpr int64_t kMaxLength = kUnbounded - 1024, kMaxCount = 0x7fffffff;

// The sizes of a call, from its query, key and mixing.
struct Sizes {
  int64_t B, H, T, S, D;

  explicit Sizes(const AttentionParams& p) {
    const bool shared = static_cast<bool>(p.mixing);
    const int rank = shared ? 3 : 4;
    require(p.query.rank == rank, "query");
    require(p.key.rank == rank, "key");
    B = p.query.size[0];
    H = shared ? p.mixing.size[0] : p.query.size[1];
    T = p.query.size[rank - 2];
    D = p.query.size[rank - 1];
    S = p.key.size[rank - 2];
    const int64_t Hk = shared ? 1 : p.key.size[1];
    require(p.key.size[0] == B && p.key.size[rank - 1] == D && (Hk == 0 ? H == 0 : H % Hk == 0),
            "key");
    require(p.query.dtype == p.key.dtype, "key");
    require(!shared || is(p.mixing, {H, D}), "mixing");
    require(!p.content_bias || (shared && is(p.content_bias, {B, H, S})), "content_bias");
    require(has_rows(p.query), "query", "has rows that are not contiguous");
    require(has_rows(p.key), "key", "has rows that are not contiguous");
    require(T <= kMaxLength && B <= kMaxCount && H <= kMaxCount, "query", "is too long");
    require(S <= kMaxLength, "key", "is too long");
  }
};

// The mask of all kernels: (k_lo, k_hi, key_visible, dense, band_lo, band_hi).
inline MaskParams mask_of(const py::tuple& mask, const py::object& device, const Sizes& n) {
  const Torch& torch = Torch::get();
  MaskParams result;
  int64_t k_hi_stride = 0;
  result.k_lo =
      batched<int32_t>(mask[0], device, "k_lo", torch.int32, n.B, n.T, &result.interval_stride);
  result.k_hi = batched<int32_t>(mask[1], device, "k_hi", torch.int32, n.B, n.T, &k_hi_stride);
  require(!result.k_lo == !result.k_hi && result.interval_stride == k_hi_stride, "k_hi",
          "is not there or shaped as k_lo is");
  result.key_visible = batched<uint8_t>(mask[2], device, "key_visible", torch.boolean, n.B, n.S,
                                        &result.visible_stride);
  if (!mask[3].is_none()) {
    const Tensor dense = shape_of(mask[3], device, "dense_mask");
    const int64_t full[4] = {n.B, n.H, n.T, n.S};
    require(dense.rank == 4 && attribute(mask[3], torch.dtype).is(torch.boolean), "dense_mask");
    for (int d = 0; d < 4; ++d) {
      require(dense.size[d] == 1 || dense.size[d] == full[d], "dense_mask");
      result.dense_stride[d] = dense.size[d] == 1 ? 0 : dense.stride[d];
    }
    result.dense = static_cast<const uint8_t*>(dense.data);
  }
  result.band_lo = py::cast<int64_t>(mask[4]);
  result.band_hi = py::cast<int64_t>(mask[5]);
  for (const int64_t limit : {result.band_lo, result.band_hi})
    require(-kUnbounded <= limit && limit <= kUnbounded, "band", "is past 2^30");
  return result;
}

inline void check_gate(const Tensor& gate, const int64_t (&full)[4]) {
  const int first = gate.rank == 1 ? 1 : 0;
  require(gate.rank <= 4, "gate");
  for (int d = 0; d < gate.rank; ++d)
    require(gate.size[d] == 1 || gate.size[d] == full[first + d], "gate");
}

// Whether the gate varies along the width of a head.
inline bool is_elementwise(const Tensor& gate) { return gate.rank == 4 && gate.size[3] != 1; }

inline void check_value(const AttentionParams& p, const Sizes& n) {
  const int64_t heads = p.mixing ? n.H : p.key.size[1];
  require(p.value.rank == 4 && is(p.value, {n.B, heads, n.S, p.value.size[3]}), "value");
  require(p.value.dtype == p.query.dtype, "value");
  require(has_rows(p.value), "value", "has rows that are not contiguous");
}

// Checks that a tensor is contiguous and in the compute type of `operand`; absent ones pass.
inline void check_rows(DType operand, const Tensor& t, std::initializer_list<int64_t> sizes,
                       const char* name) {
  const DType compute = operand == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  require(!t || (is(t, sizes) && is_dense(t) && t.dtype == compute), name,
          "has another shape or dtype, or is not dense");
}

// Absent ones pass.
inline void check_like(const Tensor& t, const Tensor& other, const char* name) {
  require(!t || (t.rank == other.rank && std::equal(t.size, t.size + t.rank, other.size) &&
                 t.dtype == other.dtype),
          name);
}

inline Activation activation_of(const std::string& name) {
  if (name == "identity") return Activation::kIdentity;
  if (name == "sigmoid") return Activation::kSigmoid;
  if (name == "softplus") return Activation::kSoftplus;
  refuse("gate_activation", "is '" + name + "'");
}

// Gate and dropout: (gate, activation, seed, dropout_p).
inline void set_head_options(AttentionParams& params, const py::tuple& options,
                             const py::object& device) {
  params.gate = floating(options[0], device, "gate");
  params.activation = activation_of(py::cast<std::string>(options[1]));
  const double p = py::cast<double>(options[3]);
  if (p == 0.0) return;
  require(p > 0.0 && p < 1.0, "dropout_p", "is no probability in [0, 1)");
  const Torch& torch = Torch::get();
  const Tensor seed = shape_of(options[2], device, "seed");
  require(is(seed, {5}) && is_dense(seed) && attribute(options[2], torch.dtype).is(torch.int64),
          "seed");
  params.dropout.active = true;
  params.dropout.seed = static_cast<const int64_t*>(seed.data);
  params.dropout.threshold = static_cast<uint32_t>(p * 4294967296.0);
  params.dropout.keep_scale = 1.0 / (1.0 - p);
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

// The score terms: None, or (bias, offset_bias, sinks, softcap).
inline void set_terms(ScoreTerms& terms, py::handle given, const py::object& device,
                      const Sizes& n) {
  if (given.is_none()) return;
  const auto parts = py::reinterpret_borrow<py::tuple>(given);
  if ((terms.bias = floating(parts[0], device, "bias"))) {
    Tensor& bias = terms.bias;
    require(bias.rank == 5, "bias");
    const int64_t outer = bias.size[0], inner = bias.size[1];
    terms.bias_inner = std::max<int64_t>(1, inner != 1            ? inner
                                            : outer != 1 && outer ? n.B / outer
                                                                  : 1);
    require(n.B % terms.bias_inner == 0, "bias");
    broadcast(bias, {n.B / terms.bias_inner, terms.bias_inner, n.H, n.T, n.S}, "bias");
  }
  if ((terms.offset_bias = floating(parts[1], device, "offset_bias"))) {
    broadcast(terms.offset_bias, {n.H, std::max<int64_t>(1, n.T + n.S - 1)}, "offset_bias");
    require(!terms.bias, "offset_bias", "comes beside bias");
  }
  if ((terms.sinks = floating(parts[2], device, "sinks"))) {
    require(is(terms.sinks, {n.H}), "sinks");
    terms.sinks.rank = 2;  // [H, 1]
    terms.sinks.size[1] = 1;
  }
  terms.softcap = py::cast<double>(parts[3]);
  require(terms.softcap >= 0.0 && terms.softcap < 1e300, "softcap", "is negative or not finite");
}

// The inputs of scores: (query, key, mixing, content_bias, scale, terms).
inline void set_scores(AttentionParams& params, const py::tuple& scores, const py::object& device) {
  params.query = needed(scores[0], device, "query");
  params.key = needed(scores[1], device, "key");
  params.mixing = floating(scores[2], device, "mixing");
  params.content_bias = floating(scores[3], device, "content_bias");
  params.scale = py::cast<double>(scores[4]);
}

// The arguments that every pass over scores shares.
inline Sizes set_call(AttentionParams& params, const py::tuple& scores, py::handle value,
                      const py::tuple& mask, const py::tuple& options, const py::object& device) {
  set_scores(params, scores, device);
  params.value = needed(value, device, "value");
  set_head_options(params, options, device);
  const Sizes n(params);
  set_terms(params.terms, scores[5], device, n);
  params.mask = mask_of(mask, device, n);
  check_value(params, n);
  check_gate(params.gate, {n.B, n.H, n.T, params.value.size[3]});
  return n;
}

// dbias, doffset_bias and dsinks: `gradients` from index 6 on.
inline void set_term_gradients(BackwardParams& params, const Sizes& n,
                               const py::sequence& gradients, const py::object& device) {
  const ScoreTerms& terms = params.terms;
  params.dbias = output(gradients[6], device, "dbias");
  params.doffset_bias = output(gradients[7], device, "doffset_bias");
  params.dsinks = output(gradients[8], device, "dsinks");
  require(terms.bias || !params.dbias, "dbias", "comes without bias");
  require(terms.offset_bias || !params.doffset_bias, "doffset_bias", "comes without offset_bias");
  require(terms.sinks || !params.dsinks, "dsinks", "comes without sinks");
  const int64_t* size = terms.bias.size;
  const DType dtype = params.query.dtype;
  check_rows(dtype, params.dbias, {size[0], size[1], size[2], size[3], size[4]}, "dbias");
  check_rows(dtype, params.doffset_bias, {n.B, n.H, std::max<int64_t>(1, n.T + n.S - 1)},
             "doffset_bias");
  check_rows(dtype, params.dsinks, {n.B, n.H, n.T}, "dsinks");
}

// `outputs` is (lse, max_prob, argmax, entropy), contiguous [B, H, T].
inline void set_statistics(StatisticsParams& params, const Sizes& n, py::handle excluded,
                           const py::sequence& outputs, const py::object& device) {
  const Torch& torch = Torch::get();
  params.excluded = batched<uint8_t>(excluded, device, "excluded", torch.boolean, n.B, n.S,
                                     &params.excluded_stride);
  params.lse = needed(outputs[0], device, "lse");
  params.max_prob = needed(outputs[1], device, "max_prob");
  params.entropy = needed(outputs[3], device, "entropy");
  check_rows(params.query.dtype, params.lse, {n.B, n.H, n.T}, "lse");
  check_rows(params.query.dtype, params.max_prob, {n.B, n.H, n.T}, "max_prob");
  check_rows(params.query.dtype, params.entropy, {n.B, n.H, n.T}, "entropy");
  const Tensor argmax = shape_of(outputs[2], device, "argmax");
  require(is(argmax, {n.B, n.H, n.T}) && is_dense(argmax) &&
              attribute(outputs[2], torch.dtype).is(torch.int64),
          "argmax");
  params.argmax = static_cast<int64_t*>(argmax.data);
}

// (out, attended, lse), the last two of which are optional.
inline void set_outputs(ForwardParams& params, const Sizes& n, const py::sequence& outputs,
                        const py::object& device) {
  const int64_t Dv = params.value.size[3];
  params.out = floating(outputs[0], device, "out");
  params.attended = output(outputs[1], device, "attended");
  params.lse = output(outputs[2], device, "lse");
  const bool empty = n.B == 0 || n.H == 0 || n.T == 0 || Dv == 0;
  require(params.out ? is(params.out, {n.B, n.H, n.T, Dv}) && params.out.dtype == params.query.dtype
                     : empty,
          "out");
  check_like(params.attended, params.out, "attended");
  check_rows(params.query.dtype, params.lse, {n.B, n.H, n.T}, "lse");
}

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, const Arguments&... arguments) {
  const py::gil_scoped_release release;
  kernel(arguments...);
}

}  // namespace hk::bindings
