// The module heads_kernels._cpu.
#include "bindings/tensors.h"
#include "cpu/kernels.h"

namespace {

using namespace hk::bindings;

int checked_threads(int threads) {
  require(threads >= 1, "threads", "is less than 1");
  return threads;
}

// The parameters of a pass of attention.
Sizes set_attention(hk::AttentionParams& params, const py::tuple& call) {
  const Sizes n = set_call(params, read_call(call, dlpack::kCpu));
  check_alpha(params.alpha);
  require(params.gate || params.activation == hk::Activation::kIdentity, "gate_activation", "comes without gate");
  return n;
}

void run(hk::ForwardParams& params, int threads) {
  params.threads = checked_threads(threads);
  launch(hk::kernels().attention_forward, params);
}

// `results` is (out, attended, lse).
void attention_forward(const py::tuple& call, const py::tuple& results, int threads) {
  hk::ForwardParams params;
  const Sizes n = set_attention(params, call);
  set_outputs(params, n, results, dlpack::kCpu);
  run(params, threads);
}

using Numbers = std::initializer_list<int64_t>;

py::object tuple_of(const int64_t* numbers, int count) {
  py::object result = checked(PyTuple_New(count));
  for (int i = 0; i < count; ++i)
    PyTuple_SET_ITEM(result.ptr(), i, checked(PyLong_FromLongLong(numbers[i])).release().ptr());
  return result;
}

// An empty tensor of the sizes, strides and dtype of another.
py::object empty_like(py::handle tensor) {
  return checked(PyObject_CallOneArg(Torch::get().empty_like.ptr(), tensor.ptr()));
}

// An empty tensor with these sizes and strides of this dtype, or null for that of the query, whose method makes it.
py::object empty(py::handle query, const hk::Tensor& t, PyObject* dtype = nullptr) {
  const Torch& torch = Torch::get();
  const py::object sizes = tuple_of(t.size, t.rank), strides = tuple_of(t.stride, t.rank);
  PyObject* const arguments[] = {query.ptr(), sizes.ptr(), strides.ptr(), dtype};
  return checked(PyObject_VectorcallMethod(torch.new_empty_strided.ptr(), arguments, 3,
                                           dtype ? torch.names_of_dtype.ptr() : nullptr));
}

// An empty contiguous tensor in the compute dtype of the query.
py::object empty_sums(py::handle query, const Sizes& n, Numbers sizes) {
  return empty(query, contiguous(sizes), Torch::get().dtypes[static_cast<int>(n.compute)].ptr());
}

// An empty [B, H, T, Dv] in the dtype of the query and the memory order of `heads_like`.
py::object empty_heads(const hk::AttentionParams& params, const Sizes& n, const py::tuple& call) {
  const hk::Tensor& like = order_of_heads(params);
  const hk::Tensor t = heads_like(params, n);
  if (std::equal(t.size, t.size + 4, like.size) && std::equal(t.stride, t.stride + 4, like.stride))
    return empty_like(call[params.mixing ? 2 : 0]);  // in half of the time
  return empty(call[0], t);
}

// Whether every tensor of a tuple is plain.
bool are_plain(const py::tuple& tuple) {
  return std::all_of(tuple.begin(), tuple.end(), [](py::handle entry) { return !is_tensor(entry) || is_plain(entry); });
}

// Whether a tensor of a tuple requires a gradient.
bool requires_grad(const py::tuple& tuple) {
  const py::str& name = Torch::get().requires_grad;
  return std::any_of(tuple.begin(), tuple.end(),
                     [&](py::handle entry) { return is_tensor(entry) && attribute(entry, name).ptr() == Py_True; });
}

// Runs a call without dropout and without an op: returns `out`, or (out, attended, lse) if `recording` and an operand
// requires a gradient. None if it is empty, or if a tensor is not plain.
py::object attend(const py::tuple& call, bool recording, int threads) {
  if (!are_plain(call)) return py::none();
  hk::ForwardParams params;
  const Sizes n = set_attention(params, call);
  if (!n.B || !n.H || !n.T || !params.value.size[3]) return py::none();
  const py::object out = empty_heads(params, n, call);
  params.out = needed(given(out, dlpack::kCpu, "out"), "out");
  if (!recording || !requires_grad(call)) {
    run(params, threads);
    return out;
  }
  const py::object attended = params.gate ? empty_heads(params, n, call) : py::none();
  const py::object lse =
      params.alpha ? empty_sums(call[0], n, {2, n.B, n.H, n.T}) : empty_sums(call[0], n, {n.B, n.H, n.T});
  params.attended = floating(given(attended, dlpack::kCpu, "attended"), "attended");
  params.lse = needed(given(lse, dlpack::kCpu, "lse"), "lse");
  run(params, threads);
  return py::make_tuple(out, attended, lse);
}

// The parameters of a backward pass, but for its gradients.
Sizes set_backward(hk::BackwardParams& params, const py::tuple& call, const py::tuple& saved) {
  const Sizes n = set_attention(params, call);
  set_saved(params, saved, dlpack::kCpu);
  const int64_t Dv = params.value.size[3];
  require(is(params.dout, {n.B, n.H, n.T, Dv}), "dout");
  require(is(params.attended, {n.B, n.H, n.T, Dv}), "attended");
  check_lse(params, params.lse, n);
  n.check_rows(params.dlse, "dlse");
  require(!params.alpha || !params.dlse, "dlse", "comes with alpha");
  return n;
}

void run(hk::BackwardParams& params, const Sizes& n, int threads) {
  each_gradient(params, n, [&](const char* name, const hk::Tensor& gradient, const hk::Tensor& operand, Numbers sizes) {
    if (sizes.size() == 0) return check_like(gradient, operand, name);
    require(operand || !gradient, name, "comes without its operand");
    n.check(gradient, sizes, name);
  });
  params.threads = checked_threads(threads);
  launch(hk::kernels().attention_backward, params);
}

// `gradients` are those of the operands, empty if not requested.
void attention_backward(const py::tuple& call, const py::tuple& saved, const py::tuple& gradients, int threads) {
  hk::BackwardParams params;
  const Sizes n = set_backward(params, call, saved);
  Entries written(gradients, dlpack::kCpu, "gradients", 10);
  each_gradient(params, n, [&](const char* name, hk::Tensor& gradient, const hk::Tensor&, Numbers) {
    gradient = written.output(name);
  });
  run(params, n, threads);
}

// A buffer for the gradient of a tensor, like `empty_gradient` of ops/buffers.py.
py::object empty_gradient(py::handle tensor) {
  py::object like = empty_like(tensor);
  const hk::Tensor seen = given(like, dlpack::kCpu, "gradient").tensor;
  if (seen.stride[seen.rank - 1] == 1) return like;
  return tensor.attr("new_empty")(tensor.attr("shape"));
}

// Runs a backward pass without an op: returns what the op does, the gradients of the operands that `needs` names, or
// partial sums of them. None if a tensor is not plain.
py::object backward(const py::tuple& call, const py::tuple& saved, const py::tuple& needs, int threads) {
  if (!are_plain(call) || !are_plain(saved)) return py::none();
  require(needs.size() == 10, "needs", "does not have one entry for each operand");
  hk::BackwardParams params;
  const Sizes n = set_backward(params, call, saved);
  py::list results;
  Py_ssize_t at = 0;
  each_gradient(params, n, [&](const char* name, hk::Tensor& gradient, const hk::Tensor&, Numbers sizes) {
    const Py_ssize_t operand = at++;
    if (PyTuple_GET_ITEM(needs.ptr(), operand) != Py_True) return;
    const py::object made = sizes.size() ? empty_sums(call[0], n, sizes) : empty_gradient(call[operand]);
    gradient = output(given(made, dlpack::kCpu, name), name);
    results.append(made);
  });
  run(params, n, threads);
  return std::move(results);
}

// `results` is that of set_statistics.
void attention_statistics(const py::tuple& call, const py::tuple& results, int threads) {
  hk::StatisticsParams params;
  const CallArguments arguments = read_call(call, dlpack::kCpu);
  const Sizes n = set_call(params, arguments, false);
  set_statistics(params, arguments, n, results, dlpack::kCpu);
  params.threads = checked_threads(threads);
  launch(hk::kernels().attention_statistics, params);
}

// Returns the number of multiply-adds (`products`) or powers computed.
template <auto kPeak>
int64_t run_peak(py::handle dtype, int64_t steps, int threads) {
  const hk::DType of = dtype_of(dtype);
  require(steps >= 0, "steps", "is negative");
  checked_threads(threads);
  const py::gil_scoped_release release;
  return (hk::kernels().*kPeak)(of, steps, threads);
}

py::list available_levels() {
  py::list names;
  for (const hk::Kernels* const* level = hk::available_levels(); *level; ++level) names.append((*level)->name);
  return names;
}

void use_level(const std::string& name) {
  if (!hk::use_level(name.c_str()))
    throw std::invalid_argument("level is '" + name + "'; this processor runs one of " +
                                std::string(py::str(available_levels())));
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  Torch::get();  // here, not at the first call, which two threads may make at once
  m.doc() = "C++ attention kernels for the CPU; called by the `cpu` backend, not by users.";
  m.def("call_fields", &call_fields, "The fields of a call as the arguments of a torch schema.");
  m.def("attend", &attend);
  m.def("backward", &backward);
  m.def("attention_forward", &attention_forward);
  m.def("attention_backward", &attention_backward);
  m.def("attention_statistics", &attention_statistics);
  m.def("run_products", &run_peak<&hk::Kernels::products>,
        "Run `steps` of multiply-adds in registers per thread and return their number.");
  m.def("run_powers", &run_peak<&hk::Kernels::powers>, "The same for powers of 2.");
  m.def("available_levels", &available_levels, "ISA levels that this processor supports, best first.");
  m.def("level", [] { return hk::kernels().name; }, "The ISA level in use.");
  m.def("use_level", &use_level, "Select an ISA level (for tests and benchmarks).");
}
