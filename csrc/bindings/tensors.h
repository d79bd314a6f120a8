// Torch tensors become hk::Tensor (pointer, dtype, sizes, strides) by their methods, so the modules
// are built without torch and serve every torch; and what is checked of them. Only this folder
// knows Python.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "common/params.h"

namespace py = pybind11;

namespace hk::bindings {

// The Python names and the dtypes of torch, looked up once.
struct Torch {
  py::str data_ptr{"data_ptr"}, stride{"stride"}, shape{"shape"}, dtype{"dtype"};
  py::object dtypes[4];
  py::object int32, int64, boolean;

  Torch() {
    const py::module_ torch = py::module_::import("torch");
    const char* names[4] = {"float32", "float64", "bfloat16", "float16"};  // in the order of DType
    for (int i = 0; i < 4; ++i) dtypes[i] = torch.attr(names[i]);
    int32 = torch.attr("int32");
    int64 = torch.attr("int64");
    boolean = torch.attr("bool");
  }

  static const Torch& get() {
    static const Torch* torch = new Torch;  // never destroyed: the interpreter may be gone before
    return *torch;
  }
};

inline py::object checked(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// The C API and not pybind11's casts: half a microsecond a tensor instead of one and a half.
inline py::object call(py::handle object, const py::str& method) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), method.ptr()));
}

inline py::object attribute(py::handle object, const py::str& name) {
  return checked(PyObject_GetAttr(object.ptr(), name.ptr()));
}

inline void* data_of(py::handle tensor) {
  return PyLong_AsVoidPtr(call(tensor, Torch::get().data_ptr).ptr());
}

inline void read_integers(py::handle tuple, int64_t* values) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.ptr()); ++i)
    values[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
}

// Pointer, sizes and strides.
inline Tensor shape_of(py::handle tensor) {
  const Torch& torch = Torch::get();
  Tensor result;
  const py::object shape = attribute(tensor, torch.shape), stride = call(tensor, torch.stride);
  result.rank = static_cast<int>(PyTuple_GET_SIZE(shape.ptr()));
  if (result.rank > kMaxRank)
    throw std::invalid_argument("a tensor of more than 4 dimensions reached the kernels");
  read_integers(shape, result.size);
  read_integers(stride, result.stride);
  result.data = data_of(tensor);
  return result;
}

inline DType dtype_of(py::handle dtype) {
  const Torch& torch = Torch::get();
  for (int i = 0; i < 4; ++i)
    if (dtype.is(torch.dtypes[i])) return static_cast<DType>(i);
  throw std::invalid_argument("a tensor of dtype " + std::string(py::str(dtype)) +
                              " reached the kernels");
}

// A floating tensor; None becomes an absent one.
inline Tensor floating(py::handle tensor) {
  if (tensor.is_none()) return {};
  Tensor result = shape_of(tensor);
  result.dtype = dtype_of(attribute(tensor, Torch::get().dtype));
  return result;
}

// Memory safety: what the kernels will walk over is there. Python has checked the call; this holds
// for whoever calls the op itself.
inline void require(bool holds, const char* what) {
  if (!holds)
    throw std::invalid_argument(std::string(what) + " does not fit the call of the kernels");
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

// Elements of the last dimension lie side by side, where there are any.
inline bool has_rows(const Tensor& t) {
  const int last = t.rank - 1;
  return t.size[last] <= 1 || t.stride[last] == 1 || std::count(t.size, t.size + t.rank, 0);
}

// A dense [B or 1, length] tensor of whole numbers; `stride` becomes the step between batches.
template <typename T>
const T* batched(py::handle tensor, const py::object& dtype, int64_t B, int64_t length,
                 int64_t* stride) {
  if (tensor.is_none()) return nullptr;
  require(attribute(tensor, Torch::get().dtype).is(dtype), "the dtype of a mask");
  const Tensor t = shape_of(tensor);
  require((is(t, {B, length}) || is(t, {1, length})) && is_dense(t), "the shape of a mask");
  *stride = t.size[0] == 1 ? 0 : length;
  return static_cast<const T*>(t.data);
}

// Sizes of a call, read off its query, key and mixing.
struct Sizes {
  int64_t B, H, T, S, D;

  explicit Sizes(const AttentionParams& p) {
    const bool shared = static_cast<bool>(p.mixing);
    const int rank = shared ? 3 : 4;
    require(p.query.rank == rank && p.key.rank == rank, "the rank of query or key");
    B = p.query.size[0];
    H = shared ? p.mixing.size[0] : p.query.size[1];
    T = p.query.size[rank - 2];
    D = p.query.size[rank - 1];
    S = p.key.size[rank - 2];
    const int64_t Hk = shared ? 1 : p.key.size[1];
    require(p.key.size[0] == B && p.key.size[rank - 1] == D && (Hk == 0 ? H == 0 : H % Hk == 0),
            "key");
    require(p.query.dtype == p.key.dtype, "the dtype of key");
    require(!shared || is(p.mixing, {H, D}), "mixing");
    require(!p.content_bias || is(p.content_bias, {B, H, S}), "content_bias");
    require(has_rows(p.query) && has_rows(p.key), "the last stride of query or key");
  }
};

// What all kernels take: (k_lo, k_hi, key_visible, dense, band_lo, band_hi).
inline MaskParams mask_of(const py::tuple& mask, const Sizes& n) {
  const Torch& torch = Torch::get();
  MaskParams result;
  int64_t k_hi_stride = 0;
  result.k_lo = batched<int32_t>(mask[0], torch.int32, n.B, n.T, &result.interval_stride);
  result.k_hi = batched<int32_t>(mask[1], torch.int32, n.B, n.T, &k_hi_stride);
  require(!result.k_lo == !result.k_hi && result.interval_stride == k_hi_stride, "k_hi");
  result.key_visible = batched<uint8_t>(mask[2], torch.boolean, n.B, n.S, &result.visible_stride);
  if (!mask[3].is_none()) {
    require(attribute(mask[3], torch.dtype).is(torch.boolean), "the dtype of a dense mask");
    const Tensor dense = shape_of(mask[3]);
    const int64_t full[kMaxRank] = {n.B, n.H, n.T, n.S};
    require(dense.rank == kMaxRank, "the rank of a dense mask");
    for (int d = 0; d < kMaxRank; ++d) {
      require(dense.size[d] == 1 || dense.size[d] == full[d], "the shape of a dense mask");
      result.dense_stride[d] = dense.size[d] == 1 ? 0 : dense.stride[d];
    }
    result.dense = static_cast<const uint8_t*>(dense.data);
  }
  result.band_lo = py::cast<int64_t>(mask[4]);
  result.band_hi = py::cast<int64_t>(mask[5]);
  return result;
}

inline void check_gate(const Tensor& gate, const int64_t (&full)[4]) {
  const int first = gate.rank == 1 ? 1 : 0;
  for (int d = 0; d < gate.rank; ++d)
    require(gate.size[d] == 1 || gate.size[d] == full[first + d], "gate");
}

// The gate differs along the width of a head.
inline bool is_elementwise(const Tensor& gate) { return gate.rank == 4 && gate.size[3] != 1; }

inline void check_value(const AttentionParams& p, const Sizes& n) {
  const int64_t heads = p.mixing ? n.H : p.key.size[1];
  require(p.value.rank == 4 && is(p.value, {n.B, heads, n.S, p.value.size[3]}), "value");
  require(p.value.dtype == p.query.dtype, "the dtype of value");
  require(has_rows(p.value), "the last stride of value");
}

// lse and the rows of gradients: dense, in the compute type of `operand`.
inline void check_rows(DType operand, const Tensor& t, std::initializer_list<int64_t> sizes,
                       const char* name) {
  const DType compute = operand == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  require(!t || (is(t, sizes) && is_dense(t) && t.dtype == compute), name);
}

inline void check_like(const Tensor& t, const Tensor& other, const char* name) {
  require(!t || (t.rank == other.rank && std::equal(t.size, t.size + t.rank, other.size) &&
                 t.dtype == other.dtype),
          name);
}

inline Activation activation_of(const std::string& name) {
  if (name == "identity") return Activation::kIdentity;
  if (name == "sigmoid") return Activation::kSigmoid;
  if (name == "softplus") return Activation::kSoftplus;
  throw std::invalid_argument("gate_activation is '" + name + "'");
}

// How the heads are gated and their probabilities dropped: (gate, activation, seed, dropout_p).
inline void set_head_options(AttentionParams& params, const py::tuple& options) {
  params.gate = floating(options[0]);
  params.activation = activation_of(py::cast<std::string>(options[1]));
  const double p = py::cast<double>(options[3]);
  if (p == 0.0) return;
  const Torch& torch = Torch::get();
  const Tensor seed = shape_of(options[2]);
  require(is(seed, {1}) && attribute(options[2], torch.dtype).is(torch.int64), "seed");
  params.dropout.active = true;
  params.dropout.seed = static_cast<const int64_t*>(seed.data);
  params.dropout.threshold = static_cast<uint32_t>(p * 4294967296.0);
  params.dropout.keep_scale = 1.0 / (1.0 - p);
}

// What scores are made of: (query, key, mixing, content_bias, scale).
inline void set_scores(AttentionParams& params, const py::tuple& scores) {
  params.query = floating(scores[0]);
  params.key = floating(scores[1]);
  params.mixing = floating(scores[2]);
  params.content_bias = floating(scores[3]);
  params.scale = py::cast<double>(scores[4]);
}

// The arguments that every pass over scores shares.
inline Sizes set_call(AttentionParams& params, const py::tuple& scores, py::handle value,
                      const py::tuple& mask, const py::tuple& options) {
  set_scores(params, scores);
  params.value = floating(value);
  set_head_options(params, options);
  const Sizes n(params);
  params.mask = mask_of(mask, n);
  check_value(params, n);
  check_gate(params.gate, {n.B, n.H, n.T, params.value.size[3]});
  return n;
}

// (out, attended, lse), None is not kept.
inline void set_outputs(ForwardParams& params, const Sizes& n, const py::sequence& outputs) {
  params.out = floating(outputs[0]);
  params.attended = floating(outputs[1]);
  params.lse = floating(outputs[2]);
  require(!params.out || (is(params.out, {n.B, n.H, n.T, params.value.size[3]}) &&
                          params.out.dtype == params.query.dtype),
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
