// Conversion of torch tensors to hk::Tensor (pointer, dtype, sizes, strides) through their Python
// methods, so that the modules are built without torch and work with every version of it; checks.h
// has what is checked of them.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <type_traits>

#include "bindings/checks.h"

namespace py = pybind11;

namespace hk::bindings {

// The Python names, the dtypes and the devices of torch, looked up once.
struct Torch {
  py::str data_ptr{"data_ptr"}, stride{"stride"}, shape{"shape"}, dtype{"dtype"}, device{"device"};
  py::str requires_grad{"requires_grad"}, is_neg{"is_neg"}, new_empty_strided{"new_empty_strided"};
  py::object dtypes[7];  // in the order of Element
  py::object uint8, boolean;
  py::object tensor, parameter, make_device, cpu;

  Torch() {
    const py::module_ torch = py::module_::import("torch");
    tensor = torch.attr("Tensor");
    parameter = torch.attr("nn").attr("Parameter");
    make_device = torch.attr("device");
    cpu = make_device("cpu");
    const char* names[7] = {"float32", "float64", "bfloat16", "float16", "int32", "int64", "bool"};
    for (int i = 0; i < 7; ++i) dtypes[i] = torch.attr(names[i]);
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

inline void read_integers(py::handle tuple, int64_t* values) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.ptr()); ++i) {
    values[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
    if (values[i] == -1 && PyErr_Occurred()) throw py::error_already_set();
  }
}

inline bool is_tensor(py::handle object) {
  return PyObject_TypeCheck(object.ptr(),
                            reinterpret_cast<PyTypeObject*>(Torch::get().tensor.ptr()));
}

// Pointer, sizes and strides of a tensor on `device`, an object of torch.
inline Tensor shape_of(py::handle tensor, const py::object& device, const char* name) {
  const Torch& torch = Torch::get();
  if (!is_tensor(tensor)) refuse(name, tensor.is_none() ? "is None" : "is no tensor");
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

// Whether a tensor is no more than its memory: an instance of a subclass may have an implementation
// of ops of its own, a gradient may be recorded, and the sign of a negated view is not in memory.
inline bool is_plain(py::handle tensor, bool recording) {
  const Torch& torch = Torch::get();
  const py::handle type = py::type::handle_of(tensor);
  if (!type.is(torch.tensor) && !type.is(torch.parameter)) return false;
  if (recording && attribute(tensor, torch.requires_grad).ptr() == Py_True) return false;
  return call(tensor, torch.is_neg).ptr() == Py_False;
}

inline Element element_of(py::handle dtype, const char* name) {
  const Torch& torch = Torch::get();
  for (int i = 0; i < 7; ++i)
    if (dtype.is(torch.dtypes[i])) return static_cast<Element>(i);
  refuse(name, "is " + std::string(py::str(dtype)));
}

inline DType dtype_of(py::handle dtype) {
  const Element element = element_of(dtype, "dtype");
  if (element > Element::kFloat16) refuse("dtype", "is " + std::string(py::str(dtype)));
  return static_cast<DType>(element);
}

// None becomes an absent one.
inline Given given(py::handle tensor, const py::object& device, const char* name) {
  if (tensor.is_none()) return {};
  const Tensor shape = shape_of(tensor, device, name);
  return {shape, element_of(attribute(tensor, Torch::get().dtype), name)};
}

// The entries of a tuple, one after the other.
class Entries {
 public:
  Entries(const py::tuple& tuple, const py::object& device, const char* name, Py_ssize_t count)
      : tuple_(tuple), device_(device) {
    const Py_ssize_t found = PyTuple_GET_SIZE(tuple.ptr());
    if (found != count)
      refuse(name, "has " + std::to_string(found) + " entries, not " + std::to_string(count));
  }

  py::handle next() { return PyTuple_GET_ITEM(tuple_.ptr(), next_++); }
  Given given(const char* name) { return bindings::given(next(), device_, name); }
  // One that must be there, one that may be absent, and an output, absent where it is empty.
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
  const py::object& device_;
  Py_ssize_t next_ = 0;
};

inline CallArguments read_call(const py::tuple& call, const py::object& device) {
  CallArguments result;
  Py_ssize_t count = 0;
  result.each([&](const char*, const auto&) { ++count; });
  Entries fields(call, device, "call", count);
  result.each([&](const char* name, auto& field) { fields.read(name, field); });
  return result;
}

// (lse, max_score, max_prob, argmax, entropy), contiguous [B, H, T], and received, which is empty
// or [B, H, S].
inline void set_statistics(StatisticsParams& params, const CallArguments& call, const Sizes& n,
                           const py::tuple& results, const py::object& device) {
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
inline void set_outputs(ForwardParams& params, const Sizes& n, const py::tuple& results,
                        const py::object& device) {
  Entries entries(results, device, "results", 3);
  params.out = entries.floating("out");
  params.attended = entries.output("attended");
  params.lse = entries.output("lse");
  check_outputs(params, n);
}

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, const Arguments&... arguments) {
  const py::gil_scoped_release release;
  kernel(arguments...);
}

}  // namespace hk::bindings
