// Conversion of torch tensors to hk::Tensor (pointer, dtype, sizes, strides) through their Python
// methods, so that the modules are built without torch and work with every version of it; checks.h
// has what is checked of them.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

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

// Refuses a tuple or list of arguments with fewer than `count` entries.
inline void check_entries(py::handle entries, Py_ssize_t count, const char* name) {
  const Py_ssize_t found = PySequence_Size(entries.ptr());
  if (found < 0) throw py::error_already_set();
  if (found < count)
    refuse(name, "has " + std::to_string(found) + " entries, not " + std::to_string(count));
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

// Whether a tensor is no more than its memory: an instance of a subclass may have an implementation
// of ops of its own, a gradient may be recorded, and the sign of a negated view is not in memory.
inline bool is_plain(py::handle tensor, bool recording) {
  const Torch& torch = Torch::get();
  if (tensor.is_none()) return true;
  const py::handle type = py::type::handle_of(tensor);
  if (!type.is(torch.tensor) && !type.is(torch.parameter)) return false;
  if (recording && attribute(tensor, torch.requires_grad).ptr() == Py_True) return false;
  return call(tensor, torch.is_neg).ptr() == Py_False;
}

// The same for the first `count` entries of a tuple.
inline bool are_plain(const py::tuple& arguments, Py_ssize_t count, bool recording) {
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!is_plain(PyTuple_GET_ITEM(arguments.ptr(), i), recording)) return false;
  return true;
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

inline Tensor floating(py::handle tensor, const py::object& device, const char* name) {
  return floating(given(tensor, device, name), name);
}

inline Tensor needed(py::handle tensor, const py::object& device, const char* name) {
  return needed(given(tensor, device, name), name);
}

inline Tensor output(py::handle tensor, const py::object& device, const char* name) {
  return output(given(tensor, device, name), name);
}

// The mask of all kernels: (k_lo, k_hi, key_visible, dense, band_lo, band_hi).
inline MaskParams mask_of(const py::tuple& mask, const py::object& device, const Sizes& n) {
  check_entries(mask, 6, "mask");
  return mask_of({given(mask[0], device, "k_lo"), given(mask[1], device, "k_hi"),
                  given(mask[2], device, "key_visible"), given(mask[3], device, "dense_mask"),
                  py::cast<int64_t>(mask[4]), py::cast<int64_t>(mask[5])},
                 n);
}

// Gate and dropout: (gate, activation, seed, dropout_p).
inline void set_head_options(AttentionParams& params, const py::tuple& options,
                             const py::object& device) {
  check_entries(options, 4, "options");
  params.gate = floating(options[0], device, "gate");
  params.activation = activation_of(py::cast<std::string>(options[1]));
  const double p = py::cast<double>(options[3]);
  if (p != 0.0) set_dropout(params.dropout, given(options[2], device, "seed"), p);
}

// The score terms: (bias, offset_bias, sinks, softcap), or an empty tuple for None.
inline py::tuple terms_of(const py::tuple& scores) {
  check_entries(scores, 6, "scores");
  const py::handle terms = PyTuple_GET_ITEM(scores.ptr(), 5);
  if (terms.is_none()) return py::tuple();
  if (!PyTuple_Check(terms.ptr())) refuse("terms", "is no tuple");
  check_entries(terms, 4, "terms");
  return py::reinterpret_borrow<py::tuple>(terms);
}

inline void set_terms(ScoreTerms& terms, const py::tuple& scores, const py::object& device,
                      const Sizes& n) {
  const py::tuple parts = terms_of(scores);
  if (parts.empty()) return;
  set_terms(terms,
            {given(parts[0], device, "bias"), given(parts[1], device, "offset_bias"),
             given(parts[2], device, "sinks"), py::cast<double>(parts[3])},
            n);
}

// The inputs of scores: (query, key, mixing, content_bias, scale, terms).
inline void set_scores(AttentionParams& params, const py::tuple& scores, const py::object& device) {
  check_entries(scores, 6, "scores");
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
  set_terms(params.terms, scores, device, n);
  params.mask = mask_of(mask, device, n);
  check_value(params, n);
  check_gate(params.gate, {n.B, n.H, n.T, params.value.size[3]});
  return n;
}

// dbias, doffset_bias and dsinks: `gradients` from index 6 on.
inline void set_term_gradients(BackwardParams& params, const Sizes& n,
                               const py::sequence& gradients, const py::object& device) {
  params.dbias = output(gradients[6], device, "dbias");
  params.doffset_bias = output(gradients[7], device, "doffset_bias");
  params.dsinks = output(gradients[8], device, "dsinks");
  check_term_gradients(params, n);
}

// `outputs` is (lse, max_prob, argmax, entropy), contiguous [B, H, T].
inline void set_statistics(StatisticsParams& params, const Sizes& n, py::handle excluded,
                           const py::sequence& outputs, const py::object& device) {
  check_entries(outputs, 4, "outputs");
  params.lse = needed(outputs[0], device, "lse");
  params.max_prob = needed(outputs[1], device, "max_prob");
  params.entropy = needed(outputs[3], device, "entropy");
  const Given argmax = given(outputs[2], device, "argmax");
  require(static_cast<bool>(argmax), "argmax", "is None");
  set_statistics(params, n, given(excluded, device, "excluded"), argmax);
}

// (out, attended, lse), the last two of which are optional.
inline void set_outputs(ForwardParams& params, const Sizes& n, const py::sequence& outputs,
                        const py::object& device) {
  check_entries(outputs, 3, "outputs");
  params.out = floating(outputs[0], device, "out");
  params.attended = output(outputs[1], device, "attended");
  params.lse = output(outputs[2], device, "lse");
  check_outputs(params, n);
}

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, const Arguments&... arguments) {
  const py::gil_scoped_release release;
  kernel(arguments...);
}

}  // namespace hk::bindings
