// The module heads_kernels._cpu.
#include "bindings/tensors.h"
#include "cpu/kernels.h"

namespace {

using namespace hk::bindings;

const py::object& cpu() { return Torch::get().cpu; }

int checked_threads(int threads) {
  require(threads >= 1, "threads", "is less than 1");
  return threads;
}

// `alpha` of entmax, or None.
void set_alpha(hk::AttentionParams& params, const Sizes& n, py::handle alpha) {
  params.alpha = floating(alpha, cpu(), "alpha");
  require(!params.alpha || !params.mixing, "alpha", "comes with mixing");
  require(!params.alpha || !params.terms.sinks, "sinks", "comes with alpha");
  check_rows(params.query.dtype, params.alpha, {n.H}, "alpha");
  for (int64_t h = 0; params.alpha && h < n.H; ++h) {
    const double given = params.alpha.dtype == hk::DType::kFloat64
                             ? static_cast<const double*>(params.alpha.data)[h]
                             : static_cast<const float*>(params.alpha.data)[h];
    if (!(given > 1 && given <= 2))
      throw std::invalid_argument(
          "alpha has the value " + std::string(py::str(py::float_(given))) +
          "; pass values in (1, 2]: 2 is sparsemax, and towards 1 it is softmax (gated_attention)");
  }
}

void run(hk::ForwardParams& params, int threads) {
  params.threads = checked_threads(threads);
  const hk::Kernels& k = hk::kernels();
  launch(params.mixing ? k.collaborative_attention_forward : k.gated_attention_forward, params);
}

// Collaborative attention if `scores` contains mixing, else gated attention, with entmax if there
// is `alpha`.
void attention_forward(const py::tuple& scores, py::handle value, const py::tuple& mask,
                       const py::tuple& options, const py::sequence& outputs, int threads,
                       py::handle alpha) {
  hk::ForwardParams params;
  const Sizes n = set_call(params, scores, value, mask, options, cpu());
  set_alpha(params, n, alpha);
  set_outputs(params, n, outputs, cpu());
  run(params, threads);
}

// An empty output in the memory order of `like`, as `empty_heads` of ops/buffers.py makes it.
py::object empty_heads(hk::ForwardParams& params, const Sizes& n, py::handle query) {
  const hk::Tensor& like = params.mixing ? params.value : params.query;
  const bool tokens_first = like.stride[1] < like.stride[2];
  const int64_t Dv = params.value.size[3];
  const int64_t stride[3] = {n.H * n.T * Dv, tokens_first ? Dv : n.T * Dv,
                             tokens_first ? n.H * Dv : Dv};
  const py::object sizes = checked(Py_BuildValue("(LLLL)", n.B, n.H, n.T, Dv));
  const py::object strides = checked(Py_BuildValue("(LLLL)", stride[0], stride[1], stride[2], 1LL));
  PyObject* const arguments[] = {query.ptr(), sizes.ptr(), strides.ptr()};
  const py::str& method = Torch::get().new_empty_strided;
  py::object out = checked(PyObject_VectorcallMethod(method.ptr(), arguments, 3, nullptr));
  params.out = {PyLong_AsVoidPtr(call(out, Torch::get().data_ptr).ptr()),
                params.query.dtype,
                4,
                {n.B, n.H, n.T, Dv},
                {stride[0], stride[1], stride[2], 1}};
  return out;
}

// The output of a call without dropout; None if it is empty, or if a tensor is not plain.
py::object attend(const py::tuple& scores, py::handle value, const py::tuple& mask,
                  const py::tuple& options, bool recording, int threads) {
  const py::tuple terms = terms_of(scores);
  check_entries(options, 4, "options");
  if (!are_plain(scores, 4, recording) || !is_plain(value, recording) ||
      !are_plain(options, 1, recording) || !(terms.empty() || are_plain(terms, 3, recording)))
    return py::none();
  hk::ForwardParams params;
  const Sizes n = set_call(params, scores, value, mask, options, cpu());
  if (!n.B || !n.H || !n.T || !params.value.size[3]) return py::none();
  py::object out = empty_heads(params, n, scores[0]);
  run(params, threads);
  return out;
}

// `saved` is (dout, attended, lse, dlse), of which dlse may be None; gradients (dquery, dkey,
// dvalue, dmixing, dcontent_bias, dgate, dbias, doffset_bias, dsinks, dalpha); None skips one.
void attention_backward(const py::tuple& scores, py::handle value, const py::tuple& mask,
                        const py::tuple& options, bool closed_grad, const py::tuple& saved,
                        const py::sequence& gradients, int threads, py::handle alpha) {
  check_entries(saved, 4, "saved");
  check_entries(gradients, 10, "gradients");
  hk::BackwardParams params;
  const Sizes n = set_call(params, scores, value, mask, options, cpu());
  set_alpha(params, n, alpha);
  params.dalpha = output(gradients[9], cpu(), "dalpha");
  require(params.alpha || !params.dalpha, "dalpha", "comes without alpha");
  check_rows(params.query.dtype, params.dalpha, {n.B, n.H, n.T}, "dalpha");
  const int64_t Dv = params.value.size[3];
  params.closed_grad = closed_grad;
  params.dout = needed(saved[0], cpu(), "dout");
  params.attended = needed(saved[1], cpu(), "attended");
  params.lse = needed(saved[2], cpu(), "lse");
  params.dlse = floating(saved[3], cpu(), "dlse");
  params.dquery = output(gradients[0], cpu(), "dquery");
  params.dkey = output(gradients[1], cpu(), "dkey");
  params.dvalue = output(gradients[2], cpu(), "dvalue");
  params.dmixing = output(gradients[3], cpu(), "dmixing");
  params.dcontent_bias = output(gradients[4], cpu(), "dcontent_bias");
  params.dgate = output(gradients[5], cpu(), "dgate");
  require(is(params.dout, {n.B, n.H, n.T, Dv}), "dout");
  require(is(params.attended, {n.B, n.H, n.T, Dv}), "attended");
  check_lse(params, n);
  check_rows(params.query.dtype, params.dlse, {n.B, n.H, n.T}, "dlse");
  require(!params.alpha || !params.dlse, "dlse", "comes with alpha");
  check_like(params.dquery, params.query, "dquery");
  check_like(params.dkey, params.key, "dkey");
  check_like(params.dvalue, params.value, "dvalue");
  require(params.mixing || !params.dmixing, "dmixing", "comes without mixing");
  require(params.mixing || !params.dcontent_bias, "dcontent_bias", "comes without mixing");
  check_rows(params.query.dtype, params.dmixing, {n.B, n.H, n.D}, "dmixing");
  check_rows(params.query.dtype, params.dcontent_bias, {n.B, n.H, n.S}, "dcontent_bias");
  if (is_elementwise(params.gate))
    check_rows(params.query.dtype, params.dgate, {n.B, n.H, n.T, Dv}, "dgate");
  else
    check_rows(params.query.dtype, params.dgate, {n.B, n.H, n.T}, "dgate");
  set_term_gradients(params, n, gradients, cpu());
  params.threads = checked_threads(threads);
  const hk::Kernels& k = hk::kernels();
  launch(params.mixing ? k.collaborative_attention_backward : k.gated_attention_backward, params);
}

// `outputs` is (lse, max_prob, argmax, entropy), contiguous [B, H, T].
void attention_statistics(const py::tuple& scores, py::handle excluded, const py::tuple& mask,
                          const py::sequence& outputs, int threads) {
  hk::StatisticsParams params;
  set_scores(params, scores, cpu());
  const Sizes n(params);
  set_terms(params.terms, scores, cpu(), n);
  params.mask = mask_of(mask, cpu(), n);
  set_statistics(params, n, excluded, outputs, cpu());
  params.threads = checked_threads(threads);
  launch(hk::kernels().attention_statistics, params);
}

// Returns the number of multiply-adds (`products`) or powers computed.
int64_t run_peak(int64_t (*peak)(hk::DType, int64_t, int), py::handle dtype, int64_t steps,
                 int threads) {
  const hk::DType of = dtype_of(dtype);
  require(steps >= 0, "steps", "is negative");
  checked_threads(threads);
  const py::gil_scoped_release release;
  return peak(of, steps, threads);
}

int64_t run_products(py::handle dtype, int64_t steps, int threads) {
  return run_peak(hk::kernels().products, dtype, steps, threads);
}

int64_t run_powers(py::handle dtype, int64_t steps, int threads) {
  return run_peak(hk::kernels().powers, dtype, steps, threads);
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
  Torch::get();  // here, not at the first call, which two threads may make at once
  m.doc() = "C++ attention kernels for the CPU; called by the `native` backends, not by users.";
  m.def("attend", &attend);
  m.def("attention_forward", &attention_forward);
  m.def("attention_backward", &attention_backward);
  m.def("attention_statistics", &attention_statistics);
  m.def("run_products", &run_products,
        "Run `steps` of multiply-adds in registers per thread and return the number of "
        "multiply-adds.");
  m.def("run_powers", &run_powers, "The same for powers of 2.");
  m.def("available_levels", &available_levels,
        "ISA levels that this processor supports, best first.");
  m.def("level", [] { return hk::kernels().name; }, "The ISA level in use.");
  m.def("use_level", &use_level, "Select an ISA level (for tests and benchmarks).");
}
