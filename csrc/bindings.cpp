// The only file that knows Python: torch tensors become hk::Tensor (pointer, dtype, sizes, strides)
// by their methods, so the extension is built without torch and serves every torch.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

namespace py = pybind11;

namespace {

// The Python names and the dtypes of torch, looked up once.
struct Torch {
  py::str data_ptr{"data_ptr"}, stride{"stride"}, shape{"shape"}, dtype{"dtype"};
  py::object dtypes[4];
  py::object int32, int64, boolean;

  Torch() {
    const py::module_ torch = py::module_::import("torch");
    const char* names[4] = {"float32", "float64", "bfloat16",
                            "float16"};  // in the order of hk::DType
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

py::object checked(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// The C API and not pybind11's casts: half a microsecond a tensor instead of one and a half.
py::object call(py::handle object, const py::str& method) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), method.ptr()));
}

py::object attribute(py::handle object, const py::str& name) {
  return checked(PyObject_GetAttr(object.ptr(), name.ptr()));
}

void* data_of(py::handle tensor) {
  return PyLong_AsVoidPtr(call(tensor, Torch::get().data_ptr).ptr());
}

void read_integers(py::handle tuple, int64_t* values) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.ptr()); ++i)
    values[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
}

// Pointer, sizes and strides.
hk::Tensor shape_of(py::handle tensor) {
  const Torch& torch = Torch::get();
  hk::Tensor result;
  const py::object shape = attribute(tensor, torch.shape), stride = call(tensor, torch.stride);
  result.rank = static_cast<int>(PyTuple_GET_SIZE(shape.ptr()));
  if (result.rank > hk::kMaxRank)
    throw std::invalid_argument("a tensor of more than 4 dimensions reached the kernels");
  read_integers(shape, result.size);
  read_integers(stride, result.stride);
  result.data = data_of(tensor);
  return result;
}

// A floating tensor; None becomes an absent one.
hk::Tensor floating(py::handle tensor) {
  if (tensor.is_none()) return {};
  const Torch& torch = Torch::get();
  hk::Tensor result = shape_of(tensor);
  const py::object dtype = attribute(tensor, torch.dtype);
  for (int i = 0; i < 4; ++i) {
    if (dtype.is(torch.dtypes[i])) {
      result.dtype = static_cast<hk::DType>(i);
      return result;
    }
  }
  throw std::invalid_argument("a tensor of dtype " + std::string(py::str(dtype)) +
                              " reached the kernels");
}

// Memory safety: what the kernels will walk over is there. Python has checked the call; this holds
// for whoever calls the op itself.
void require(bool holds, const char* what) {
  if (!holds)
    throw std::invalid_argument(std::string(what) + " does not fit the call of the kernels");
}

bool is(const hk::Tensor& t, std::initializer_list<int64_t> sizes) {
  return t.rank == static_cast<int>(sizes.size()) && std::equal(sizes.begin(), sizes.end(), t.size);
}

bool is_dense(const hk::Tensor& t) {
  if (std::count(t.size, t.size + t.rank, 0)) return true;
  int64_t expected = 1;
  for (int d = t.rank - 1; d >= 0; expected *= t.size[d--])
    if (t.size[d] > 1 && t.stride[d] != expected) return false;
  return true;
}

// A dense [B or 1, length] tensor of whole numbers; `stride` becomes the step between batches.
template <typename T>
const T* batched(py::handle tensor, const py::object& dtype, int64_t B, int64_t length,
                 int64_t* stride) {
  if (tensor.is_none()) return nullptr;
  require(attribute(tensor, Torch::get().dtype).is(dtype), "the dtype of a mask");
  const hk::Tensor t = shape_of(tensor);
  require((is(t, {B, length}) || is(t, {1, length})) && is_dense(t), "the shape of a mask");
  *stride = t.size[0] == 1 ? 0 : length;
  return static_cast<const T*>(t.data);
}

// Sizes of a call, read off its query, key and mixing.
struct Sizes {
  int64_t B, H, T, S, D;

  explicit Sizes(const hk::AttentionParams& p) {
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
    const hk::Tensor* operands[] = {&p.query, &p.key};
    for (const hk::Tensor* t : operands)
      require(t->size[rank - 1] <= 1 || t->stride[rank - 1] == 1,
              "the last stride of query or key");
  }
};

// What all kernels take: (k_lo, k_hi, key_visible, band_lo, band_hi).
hk::MaskParams mask_of(const py::tuple& mask, const Sizes& n) {
  const Torch& torch = Torch::get();
  hk::MaskParams result;
  int64_t k_hi_stride = 0;
  result.k_lo = batched<int32_t>(mask[0], torch.int32, n.B, n.T, &result.interval_stride);
  result.k_hi = batched<int32_t>(mask[1], torch.int32, n.B, n.T, &k_hi_stride);
  require(!result.k_lo == !result.k_hi && result.interval_stride == k_hi_stride, "k_hi");
  result.key_visible = batched<uint8_t>(mask[2], torch.boolean, n.B, n.S, &result.visible_stride);
  result.band_lo = py::cast<int64_t>(mask[3]);
  result.band_hi = py::cast<int64_t>(mask[4]);
  return result;
}

// The value, and outputs or gradients that have its shape; lse and the rows of gradients are dense,
// in the compute type.
void check_value(const hk::AttentionParams& p, const Sizes& n) {
  const int64_t heads = p.mixing ? n.H : p.key.size[1];
  require(p.value.rank == 4 && is(p.value, {n.B, heads, n.S, p.value.size[3]}), "value");
  require(p.value.dtype == p.query.dtype, "the dtype of value");
  require(p.value.size[3] <= 1 || p.value.stride[3] == 1, "the last stride of value");
  const int first = p.gate.rank == 1 ? 1 : 0;
  const int64_t full[4] = {n.B, n.H, n.T, p.value.size[3]};
  for (int d = 0; d < p.gate.rank; ++d)
    require(p.gate.size[d] == 1 || p.gate.size[d] == full[first + d], "gate");
}

void check_rows(const hk::AttentionParams& p, const hk::Tensor& t,
                std::initializer_list<int64_t> sizes, const char* name) {
  const bool twice = p.query.dtype == hk::DType::kFloat64;
  const hk::DType compute = twice ? hk::DType::kFloat64 : hk::DType::kFloat32;
  require(!t || (is(t, sizes) && is_dense(t) && t.dtype == compute), name);
}

void check_like(const hk::Tensor& t, const hk::Tensor& other, const char* name) {
  require(!t || (t.rank == other.rank && std::equal(t.size, t.size + t.rank, other.size) &&
                 t.dtype == other.dtype),
          name);
}

hk::Activation activation_of(const std::string& name) {
  if (name == "identity") return hk::Activation::kIdentity;
  if (name == "sigmoid") return hk::Activation::kSigmoid;
  if (name == "softplus") return hk::Activation::kSoftplus;
  throw std::invalid_argument("gate_activation is '" + name + "'");
}

// How the heads are gated and their probabilities dropped: (gate, activation, seed, dropout_p).
void set_head_options(hk::AttentionParams& params, const py::tuple& options) {
  params.gate = floating(options[0]);
  params.activation = activation_of(py::cast<std::string>(options[1]));
  const double p = py::cast<double>(options[3]);
  if (p == 0.0) return;
  params.dropout.active = true;
  params.dropout.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(data_of(options[2])));
  params.dropout.threshold = static_cast<uint32_t>(p * 4294967296.0);
  params.dropout.keep_scale = 1.0 / (1.0 - p);
}

// What scores are made of: (query, key, mixing, content_bias, scale).
void set_scores(hk::AttentionParams& params, const py::tuple& scores) {
  params.query = floating(scores[0]);
  params.key = floating(scores[1]);
  params.mixing = floating(scores[2]);
  params.content_bias = floating(scores[3]);
  params.scale = py::cast<double>(scores[4]);
}

template <typename Params>
void launch(void (*kernel)(const Params&), const Params& params) {
  const py::gil_scoped_release release;
  kernel(params);
}

// Gated where scores hold no mixing, else collaborative. Outputs (out, attended, lse), None is not
// kept.
void attention_forward(const py::tuple& scores, py::handle value, const py::tuple& mask,
                       const py::tuple& options, const py::sequence& outputs, int threads) {
  hk::ForwardParams params;
  set_scores(params, scores);
  params.value = floating(value);
  set_head_options(params, options);
  const Sizes n(params);
  params.mask = mask_of(mask, n);
  check_value(params, n);
  const int64_t Dv = params.value.size[3];
  params.out = floating(outputs[0]);
  params.attended = floating(outputs[1]);
  params.lse = floating(outputs[2]);
  require(!params.out || is(params.out, {n.B, n.H, n.T, Dv}), "out");
  check_like(params.attended, params.out, "attended");
  check_rows(params, params.lse, {n.B, n.H, n.T}, "lse");
  params.threads = threads;
  const hk::Kernels& k = hk::kernels();
  launch(scores[2].is_none() ? k.gated_attention_forward : k.collaborative_attention_forward,
         params);
}

// `saved` is (dout, attended, lse); gradients (dquery, dkey, dvalue, dmixing, dcontent_bias,
// dgate), None is not computed.
void attention_backward(const py::tuple& scores, py::handle value, const py::tuple& mask,
                        const py::tuple& options, bool closed_grad, const py::tuple& saved,
                        const py::sequence& gradients, int threads) {
  hk::BackwardParams params;
  set_scores(params, scores);
  params.value = floating(value);
  set_head_options(params, options);
  const Sizes n(params);
  params.mask = mask_of(mask, n);
  check_value(params, n);
  const int64_t Dv = params.value.size[3];
  params.closed_grad = closed_grad;
  params.dout = floating(saved[0]);
  params.attended = floating(saved[1]);
  params.lse = floating(saved[2]);
  params.dquery = floating(gradients[0]);
  params.dkey = floating(gradients[1]);
  params.dvalue = floating(gradients[2]);
  params.dmixing = floating(gradients[3]);
  params.dcontent_bias = floating(gradients[4]);
  params.dgate = floating(gradients[5]);
  require(is(params.dout, {n.B, n.H, n.T, Dv}) && is(params.attended, {n.B, n.H, n.T, Dv}), "dout");
  check_rows(params, params.lse, {n.B, n.H, n.T}, "lse");
  check_like(params.dquery, params.query, "dquery");
  check_like(params.dkey, params.key, "dkey");
  check_like(params.dvalue, params.value, "dvalue");
  check_rows(params, params.dmixing, {n.B, n.H, n.D}, "dmixing");
  check_rows(params, params.dcontent_bias, {n.B, n.H, n.S}, "dcontent_bias");
  const bool elementwise = params.gate.rank == 4 && params.gate.size[3] != 1;
  if (elementwise)
    check_rows(params, params.dgate, {n.B, n.H, n.T, Dv}, "dgate");
  else
    check_rows(params, params.dgate, {n.B, n.H, n.T}, "dgate");
  params.threads = threads;
  const hk::Kernels& k = hk::kernels();
  launch(scores[2].is_none() ? k.gated_attention_backward : k.collaborative_attention_backward,
         params);
}

// `outputs` is (lse, max_prob, argmax, entropy), contiguous [B, H, T].
void attention_statistics(const py::tuple& scores, py::handle excluded, const py::tuple& mask,
                          const py::sequence& outputs, int threads) {
  const Torch& torch = Torch::get();
  hk::StatisticsParams params;
  set_scores(params, scores);
  const Sizes n(params);
  params.excluded = batched<uint8_t>(excluded, torch.boolean, n.B, n.S, &params.excluded_stride);
  params.mask = mask_of(mask, n);
  params.lse = floating(outputs[0]);
  params.max_prob = floating(outputs[1]);
  params.entropy = floating(outputs[3]);
  for (const hk::Tensor* t : {&params.lse, &params.max_prob, &params.entropy})
    check_rows(params, *t, {n.B, n.H, n.T}, "a statistic");
  const hk::Tensor argmax = shape_of(outputs[2]);
  require(is(argmax, {n.B, n.H, n.T}) && is_dense(argmax), "argmax");
  params.argmax = static_cast<int64_t*>(argmax.data);
  params.threads = threads;
  launch(hk::kernels().attention_statistics, params);
}

py::list available_levels() {
  py::list names;
  for (const hk::Kernels* const* level = hk::available_levels(); *level; ++level)
    names.append((*level)->name);
  return names;
}

void use_level(const std::string& name) {
  if (!hk::use_level(name.c_str()))
    throw std::invalid_argument("level is '" + name + "'; this processor runs one of " +
                                std::string(py::str(available_levels())));
}

}  // namespace

PYBIND11_MODULE(_cpu, m, py::mod_gil_not_used()) {
  m.doc() = "C++ attention kernels for the CPU; called by the `native` backends, not by users.";
  m.def("attention_forward", &attention_forward);
  m.def("attention_backward", &attention_backward);
  m.def("attention_statistics", &attention_statistics);
  m.def("available_levels", &available_levels,
        "Instruction-set levels this processor can run, best first.");
  m.def("level", [] { return hk::kernels().name; }, "The level in use.");
  m.def("use_level", &use_level, "Use a level from now on (for tests and measurements).");
}
