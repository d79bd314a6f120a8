// Conversion of torch tensors to hk::Tensor (pointer, dtype, sizes, strides) through the table of functions that torch
// offers to other libraries, so that the modules are built without torch and work with every version of it; checks.h
// has the checks.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <type_traits>

#include "bindings/checks.h"

namespace py = pybind11;

// The part of DLPack's C interface that describes a tensor without owning it, as torch offers it from version 2.10 on
// (`torch.Tensor.__dlpack_c_exchange_api__`); names and order of fields are those of dlpack.h, whose layout is fixed
// within a major version.
namespace hk::bindings::dlpack {

constexpr uint32_t kMajorVersion = 1;

struct Device {
  int32_t type, index;

  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

constexpr Device kCpu = {1, 0};
constexpr Device cuda(int index) { return {2, index}; }

struct Tensor {  // DLTensor
  void* data;
  Device device;
  int32_t rank;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;

  void* begin() const { return data ? static_cast<char*>(data) + byte_offset : nullptr; }

  Element element() const {
    enum { kInt, kUInt, kFloat, kBfloat = 4, kBool = 6 };
    constexpr struct {
      uint8_t code, bits;
      Element element;
    } kKnown[] = {{kFloat, 32, Element::kFloat32}, {kFloat, 64, Element::kFloat64}, {kBfloat, 16, Element::kBFloat16},
                  {kFloat, 16, Element::kFloat16}, {kInt, 32, Element::kInt32},     {kInt, 64, Element::kInt64},
                  {kUInt, 8, Element::kUInt8},     {kBool, 8, Element::kBool}};
    for (const auto& known : kKnown)
      if (code == known.code && bits == known.bits) return known.element;
    return Element::kOther;
  }
};

// Describes a tensor of Python; not 0 if it cannot, with an exception of Python.
using Describe = int (*)(void* object, Tensor* tensor);

struct Exchange {  // DLPackExchangeAPI
  uint32_t major, minor;
  Exchange* previous;
  void *allocate, *from_object, *to_object;
  Describe describe;
  void* current_stream;
};

// The function of a capsule; null if it has none of this version.
inline Describe describe_of(PyObject* capsule) {
  auto* exchange = static_cast<Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  while (exchange && exchange->major != kMajorVersion) exchange = exchange->previous;
  return exchange ? exchange->describe : nullptr;
}

}  // namespace hk::bindings::dlpack

namespace hk::bindings {

// Objects of torch that are looked up once.
struct Torch {
  py::str device{"device"}, dtype{"dtype"}, requires_grad{"requires_grad"};
  py::str new_empty_strided{"new_empty_strided"};
  py::tuple names_of_dtype = py::make_tuple(dtype);
  py::object tensor, parameter, is_neg, empty_like;
  py::object dtypes[4];  // in the order of DType
  dlpack::Describe describe;

  Torch() {
    const py::module_ torch = py::module_::import("torch");
    tensor = torch.attr("Tensor");
    parameter = torch.attr("nn").attr("Parameter");
    is_neg = tensor.attr("is_neg");
    empty_like = torch.attr("empty_like");
    const char* names[4] = {"float32", "float64", "bfloat16", "float16"};
    for (int i = 0; i < 4; ++i) dtypes[i] = torch.attr(names[i]);
    describe = dlpack::describe_of(tensor.attr("__dlpack_c_exchange_api__").ptr());
    if (!describe) throw py::import_error("torch has another version of DLPack; install torch>=2.11");
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

inline py::object attribute(py::handle object, const py::str& name) {
  return checked(PyObject_GetAttr(object.ptr(), name.ptr()));
}

inline bool is_tensor(py::handle object) {
  return !object.is_none() &&
         PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(Torch::get().tensor.ptr()));
}

// A tensor on `device`: pointer, sizes, strides and dtype.
inline Given tensor_of(py::handle tensor, dlpack::Device device, const char* name) {
  const Torch& torch = Torch::get();
  if (!is_tensor(tensor)) refuse(name, tensor.is_none() ? "is None" : "is no tensor");
  dlpack::Tensor seen;
  if (torch.describe(tensor.ptr(), &seen)) {  // sparse, nested: no sizes, strides or pointer
    const py::error_already_set error;
    std::string why = error.what();
    why = why.substr(0, why.find('\n'));  // stack frames of C++ follow
    refuse(name, "has no dense memory (" + why + ")");
  }
  if (!(seen.device == device))
    refuse(name, "is on " + std::string(py::str(attribute(tensor, torch.device))) + ", not where the call runs");
  if (seen.rank < 1 || seen.rank > kMaxRank) refuse(name, "has " + std::to_string(seen.rank) + " dimensions");
  Given result;
  result.element = seen.element();
  if (result.element == Element::kOther) refuse(name, "is " + std::string(py::str(attribute(tensor, torch.dtype))));
  result.tensor.rank = seen.rank;
  result.tensor.data = seen.begin();
  int64_t count = 1;
  for (int d = 0; d < seen.rank; ++d) {
    result.tensor.size[d] = seen.shape[d];
    result.tensor.stride[d] = seen.strides[d];
    count *= seen.shape[d];
  }
  if (!result.tensor.data && count != 0) refuse(name, "has no memory");
  return result;
}

// Whether a tensor is fully described by its memory: a subclass may implement ops itself, and the sign of a negated
// view is not in memory.
inline bool is_plain(py::handle tensor) {
  const Torch& torch = Torch::get();
  const py::handle type = py::type::handle_of(tensor);
  if (!type.is(torch.tensor) && !type.is(torch.parameter)) return false;
  return checked(PyObject_CallOneArg(torch.is_neg.ptr(), tensor.ptr())).ptr() == Py_False;
}

inline DType dtype_of(py::handle dtype) {
  for (int i = 0; i < 4; ++i)
    if (dtype.is(Torch::get().dtypes[i])) return static_cast<DType>(i);
  refuse("dtype", "is " + std::string(py::str(dtype)));
}

// None becomes an absent one.
inline Given given(py::handle tensor, dlpack::Device device, const char* name) {
  return tensor.is_none() ? Given{} : tensor_of(tensor, device, name);
}

// The entries of a tuple, one after the other.
class Entries {
 public:
  Entries(const py::tuple& tuple, dlpack::Device device, const char* name, Py_ssize_t count)
      : tuple_(tuple), device_(device) {
    const Py_ssize_t found = PyTuple_GET_SIZE(tuple.ptr());
    if (found != count) refuse(name, "has " + std::to_string(found) + " entries, not " + std::to_string(count));
  }

  py::handle next() { return PyTuple_GET_ITEM(tuple_.ptr(), next_++); }
  Given given(const char* name) { return bindings::given(next(), device_, name); }
  // A required tensor, an optional one, and an output, which is absent if it is empty.
  Tensor needed(const char* name) { return bindings::needed(given(name), name); }
  Tensor floating(const char* name) { return bindings::floating(given(name), name); }
  Tensor output(const char* name) { return bindings::output(given(name), name); }

  // The next field of a call.
  template <typename T>
  void read(const char* name, T& field) {
    if constexpr (std::is_base_of_v<Given, T>)
      static_cast<Given&>(field) = given(name);
    else
      field = py::cast<T>(next());
  }

 private:
  const py::tuple& tuple_;
  dlpack::Device device_;
  Py_ssize_t next_ = 0;
};

inline CallArguments read_call(const py::tuple& call, dlpack::Device device) {
  CallArguments result;
  Py_ssize_t count = 0;
  result.each([&](const char*, const auto&) { ++count; });
  Entries fields(call, device, "call", count);
  result.each([&](const char* name, auto& field) { fields.read(name, field); });
  return result;
}

// (lse, max_score, max_prob, argmax, entropy), contiguous [B, H, T], and received, which is empty or [B, H, S].
inline void set_statistics(StatisticsParams& params, const CallArguments& call, const Sizes& n,
                           const py::tuple& results, dlpack::Device device) {
  Entries entries(results, device, "results", 6);
  params.lse = entries.needed("lse");
  params.max_score = entries.needed("max_score");
  params.max_prob = entries.needed("max_prob");
  const Given argmax = entries.given("argmax");
  require(static_cast<bool>(argmax), "argmax", "is None");
  params.entropy = entries.needed("entropy");
  params.received = entries.output("received");
  set_statistics(params, call, n, argmax);
}

// (out, attended, lse), the last two of which are optional.
inline void set_outputs(ForwardParams& params, const Sizes& n, const py::tuple& results, dlpack::Device device) {
  Entries entries(results, device, "results", 3);
  params.out = entries.floating("out");
  params.attended = entries.output("attended");
  params.lse = entries.output("lse");
  check_outputs(params, n);
}

// (dout, attended, lse, dlse), of which dlse may be None.
template <typename Params>
void set_saved(Params& params, const py::tuple& saved, dlpack::Device device) {
  Entries entries(saved, device, "saved", 4);
  params.dout = entries.needed("dout");
  params.attended = entries.needed("attended");
  params.lse = entries.needed("lse");
  params.dlse = entries.floating("dlse");
}

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, const Arguments&... arguments) {
  const py::gil_scoped_release release;
  kernel(arguments...);
}

}  // namespace hk::bindings
