// The module heads_kernels._cuda; with HK_EMULATED heads_kernels._cuda_emulated, the same kernels run by the emulator
// on tensors in CPU memory.
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/tensors.h"
#include "cuda/kernels.h"

#ifdef HK_EMULATED
#include "emulator/block.h"
#define HK_MODULE _cuda_emulated
#else
#define HK_MODULE _cuda
#endif

#ifdef HK_CHECKS
namespace hk::cuda {  // selftest/wrapper_checks.cu
void check_wrapper(const std::string& name, const std::vector<Tensor>& tensors, const LaunchTarget& target);
std::vector<std::string> wrapper_names();
}  // namespace hk::cuda
#endif

namespace {

using namespace hk::bindings;
namespace cuda = hk::cuda;

// The device of all tensors of a call, and its stream as an integer.
using Target = std::pair<int, uintptr_t>;

cuda::LaunchTarget target_of(const Target& target) { return {target.first, reinterpret_cast<void*>(target.second)}; }

dlpack::Device device_of([[maybe_unused]] const Target& target) {
#ifdef HK_EMULATED
  return dlpack::kCpu;
#else
  return dlpack::cuda(target.first);
#endif
}

// The kernels have no double.
void check_single(const hk::Tensor& t, const char* name) {
  require(t.dtype != hk::DType::kFloat64, name, "is float64");
}

int64_t cells_along(int64_t length) { return (length + cuda::kCell - 1) / cuda::kCell; }

// The cells of a dense mask, bytes; sizes of 1 broadcast.
hk::Tensor cells_of(py::handle cells, dlpack::Device device) {
  const Given result = tensor_of(cells, device, "dense_cells");
  require(result.element == Element::kUInt8, "dense_cells");
  return result.tensor;
}

Sizes set_single_call(hk::AttentionParams& params, const CallArguments& call, bool has_value) {
  const Sizes n = set_call(params, call, has_value);
  check_single(params.query, "query");
  check_single(params.gate, "gate");
  check_single(params.mixing, "mixing");
  check_single(params.content_bias, "content_bias");
  check_single(params.terms.bias, "bias");
  check_single(params.terms.offset_bias, "offset_bias");
  check_single(params.terms.sinks, "sinks");
  require(!params.alpha, "alpha", "is given");
  return n;
}

// The parameters of a pass that skips what the cells of a dense mask hide: every one but the first of the backward.
Sizes set_tiled_call(hk::AttentionParams& params, const CallArguments& call, py::handle cells, dlpack::Device device,
                     bool has_value = true) {
  const Sizes n = set_single_call(params, call, has_value);
  hk::MaskParams& mask = params.mask;
  if (!mask.dense) return n;
  const hk::Tensor found = cells_of(cells, device);
  const int64_t full[4] = {n.B, n.H, cells_along(n.T), cells_along(n.S)};
  require(found.rank == 4, "dense_cells");
  for (int d = 0; d < 4; ++d) {
    const bool broadcasts = mask.dense_stride[d] == 0;
    require(found.size[d] == full[d] || (found.size[d] == 1 && broadcasts), "dense_cells");
    mask.cell_stride[d] = found.size[d] == 1 ? 0 : found.stride[d];
  }
  mask.dense_cells = static_cast<const uint8_t*>(found.data);
  return n;
}

// Checks a gradient, or its parts: rows of the operands' dtype, or of float; with several `splits`, which are to be
// summed, they are consecutive and float.
void check_gradient(const hk::AttentionParams& p, const hk::Tensor& t, int splits, std::initializer_list<int64_t> sizes,
                    const char* name) {
  const bool single = t.dtype == hk::DType::kFloat32;
  require(!t || (is(t, sizes) && has_rows(t) && (single || (splits == 1 && t.dtype == p.query.dtype))), name);
}

void check_dout(const hk::AttentionParams& p, const Sizes& n, const hk::Tensor& t) {
  require(is(t, {n.B, n.H, n.T, p.value.size[3]}) && has_rows(t) && t.dtype == p.query.dtype, "dout");
}

// Absent outputs pass.
void check_written(const hk::Tensor& t, const char* name) {
  require(!t || has_rows(t), name, "has rows that are not contiguous");
}

// f(kernels, target) with the kernels of the dtype of a call.
template <typename F>
void launch(const hk::AttentionParams& params, const Target& target, F&& f) {
  const cuda::LaunchTarget to = target_of(target);
  const py::gil_scoped_release release;
  cuda::with_kernels(params.query.dtype, [&](auto kernels) { f(kernels, to); });
}

// (acc, row_max, row_sum) of the splits of the keys.
void set_splits(cuda::ForwardTask& params, const Sizes& n, const py::tuple& parts, dlpack::Device device) {
  Entries entries(parts, device, "parts", 3);
  const hk::Tensor acc = entries.needed("acc"), row_max = entries.needed("row_max"),
                   row_sum = entries.needed("row_sum");
  require(acc.rank == 5, "acc");
  const int64_t count = acc.size[0];
  require(count >= (params.mixing ? 2 : 1), "acc", "has parts of too few splits");
  n.check(acc, {count, n.B, n.H, n.T, params.value.size[3]}, "acc");
  n.check(row_max, {count, n.B, n.H, n.T}, "row_max");
  n.check(row_sum, {count, n.B, n.H, n.T}, "row_sum");
  params.stores = cuda::Stores::kSplits;
  params.splits = {static_cast<int>(count), static_cast<float*>(acc.data), static_cast<float*>(row_max.data),
                   static_cast<float*>(row_sum.data)};
}

// `results` is (out, attended, lse); `parts` is None if one pass computes them.
void attention_forward(const py::tuple& call, const py::tuple& results, py::handle parts, py::handle cells,
                       const Target& target) {
  cuda::ForwardTask params;
  const dlpack::Device device = device_of(target);
  const Sizes n = set_tiled_call(params, read_call(call, device), cells, device);
  set_outputs(params, n, results, device);
  check_written(params.out, "out");
  check_written(params.attended, "attended");
  if (!parts.is_none()) set_splits(params, n, py::cast<py::tuple>(parts), device);
  const bool splits = params.stores == cuda::Stores::kSplits;
  launch(params, target, [&](auto kernels, auto& to) {
    params.mixing ? kernels.collaborative_attention_forward(params, to)
    : splits      ? kernels.gated_attention_decode(params, to)
                  : kernels.gated_attention_forward(params, to);
    if (splits) kernels.attention_combine(params, to);
  });
}

// Rows of the gate's gradient of closed heads, into `dgate` [B, H, T].
void attention_closed(const py::tuple& call, py::handle dout, py::handle dgate, py::handle cells,
                      const Target& target) {
  cuda::ForwardTask params;
  const dlpack::Device device = device_of(target);
  const Sizes n = set_tiled_call(params, read_call(call, device), cells, device);
  params.stores = cuda::Stores::kClosedGradient;
  params.dout = needed(given(dout, device, "dout"), "dout");
  params.dgate = needed(given(dgate, device, "dgate"), "dgate");
  check_dout(params, n, params.dout);
  require(static_cast<bool>(params.gate), "gate", "is None");
  for (int d = 2; d < params.gate.rank; ++d) require(params.gate.size[d] == 1, "gate");
  n.check_rows(params.dgate, "dgate");
  launch(params, target, [&](auto kernels, auto& to) {
    params.mixing ? kernels.collaborative_attention_forward(params, to) : kernels.gated_attention_forward(params, to);
  });
}

// `read` is (dout, attended, lse, dlse), of which dlse may be None; `written` is (delta, dgate, dattended, dsinks), of
// which dgate and dsinks are empty if not requested, and dattended is None unless the gate is elementwise.
void attention_rows(const py::tuple& call, const py::tuple& read, const py::tuple& written, const Target& target) {
  cuda::RowsParams params;
  const dlpack::Device device = device_of(target);
  const Sizes n = set_single_call(params, read_call(call, device), true);
  set_saved(params, read, device);
  Entries outputs(written, device, "written", 4);
  params.delta = outputs.needed("delta");
  params.dgate = outputs.output("dgate");
  params.dattended = outputs.floating("dattended");
  params.dsinks = outputs.output("dsinks");
  check_dout(params, n, params.dout);
  check_written(params.attended, "attended");
  check_like(params.attended, params.dout, "attended");
  n.check_rows(params.lse, "lse");
  n.check_rows(params.dlse, "dlse");
  n.check_rows(params.delta, "delta");
  n.check_rows(params.dsinks, "dsinks");
  require(!params.dsinks || params.terms.sinks, "dsinks", "comes without sinks");
  require(is_elementwise(params.gate) == static_cast<bool>(params.dattended), "dattended");
  if (params.dattended) {
    check_written(params.dattended, "dattended");
    check_like(params.dattended, params.dout, "dattended");
    n.check(params.dgate, {n.B, n.H, n.T, params.value.size[3]}, "dgate");
  } else {
    n.check_rows(params.dgate, "dgate");
  }
  launch(params, target, [&](auto kernels, auto& to) { kernels.attention_rows(params, to); });
}

// Sets the inputs of the last passes of the backward: a call, (dattended, lse, delta) and splits.
Sizes set_gradient_call(cuda::GradientParams& params, const CallArguments& call, const py::tuple& read, int splits,
                        py::handle cells, dlpack::Device device) {
  const Sizes n = set_tiled_call(params, call, cells, device);
  Entries entries(read, device, "read", 3);
  params.dattended = entries.needed("dattended");
  params.lse = entries.needed("lse");
  params.delta = entries.needed("delta");
  params.splits = splits;
  check_dout(params, n, params.dattended);
  require(splits >= 1, "splits", "is less than 1");
  n.check_rows(params.lse, "lse");
  n.check_rows(params.delta, "delta");
  return n;
}

// `gradients` is (dkey, dvalue, dcontent_bias); None and empty ones are not computed.
void attention_keys(const py::tuple& call, const py::tuple& read, const py::tuple& gradients, int splits,
                    py::handle cells, const Target& target) {
  cuda::KeysParams params;
  const dlpack::Device device = device_of(target);
  const Sizes n = set_gradient_call(params, read_call(call, device), read, splits, cells, device);
  Entries written(gradients, device, "gradients", 3);
  params.dkey = written.output("dkey");
  params.dvalue = written.output("dvalue");
  params.dcontent_bias = written.output("dcontent_bias");
  const int64_t parts = n.B * splits, Hv = params.value.size[1], Dv = params.value.size[3];
  if (params.mixing) {
    check_gradient(params, params.dkey, splits, {parts, n.S, n.D}, "dkey");
    check_gradient(params, params.dvalue, 1, {n.B, Hv, n.S, Dv}, "dvalue");
  } else {
    require(!params.mask.by_head() || splits >= n.H / std::max<int64_t>(1, Hv), "splits",
            "is less than the heads of a group, whose intervals differ");
    check_gradient(params, params.dkey, splits, {parts, Hv, n.S, n.D}, "dkey");
    check_gradient(params, params.dvalue, splits, {parts, Hv, n.S, Dv}, "dvalue");
  }
  require(params.mixing || !params.dcontent_bias, "dcontent_bias", "comes without mixing");
  n.check(params.dcontent_bias, {n.B, n.H, n.S}, "dcontent_bias");
  launch(params, target, [&](auto kernels, auto& to) {
    params.mixing ? kernels.collaborative_attention_keys(params, to) : kernels.gated_attention_keys(params, to);
  });
}

// `gradients` is (dquery, dmixing); None and empty ones are not computed.
void attention_queries(const py::tuple& call, const py::tuple& read, const py::tuple& gradients, int splits,
                       py::handle cells, const Target& target) {
  cuda::QueriesParams params;
  const dlpack::Device device = device_of(target);
  const Sizes n = set_gradient_call(params, read_call(call, device), read, splits, cells, device);
  Entries written(gradients, device, "gradients", 2);
  params.dquery = written.output("dquery");
  params.dmixing = written.output("dmixing");
  if (params.mixing) {
    const int block_m = cuda::tiles_of("collaborative_attention.queries", params.query.dtype, n.D, params.value.size[3],
                                       cuda::has_terms(params), target.first)
                            .block_m;
    const int64_t tiles = (n.T + block_m - 1) / block_m;
    check_gradient(params, params.dquery, splits, {n.B * splits, n.T, n.D}, "dquery");
    require(!params.dquery || params.dquery.dtype == hk::DType::kFloat32, "dquery", "is not float32");
    n.check(params.dmixing, {n.B, tiles, n.H, n.D}, "dmixing");
  } else {
    require(splits == 1, "splits", "is not 1");
    require(!params.dmixing, "dmixing", "comes without mixing");
    check_gradient(params, params.dquery, 1, {n.B, n.H, n.T, n.D}, "dquery");
  }
  launch(params, target, [&](auto kernels, auto& to) {
    params.mixing ? kernels.collaborative_attention_queries(params, to) : kernels.gated_attention_queries(params, to);
  });
}

// `gradients` is (dbias, doffset_bias), one of which is present: `splits` consecutive parts of a bias, float, or two
// parts of the diagonals of every head.
void attention_bias(const py::tuple& call, const py::tuple& read, const py::tuple& gradients, int splits,
                    py::handle cells, const Target& target) {
  cuda::BiasParams params;
  const dlpack::Device device = device_of(target);
  const Sizes n = set_gradient_call(params, read_call(call, device), read, splits, cells, device);
  Entries written(gradients, device, "gradients", 2);
  params.dbias = written.output("dbias");
  params.doffset_bias = written.output("doffset_bias");
  require(params.terms.bias || !params.dbias, "dbias", "comes without bias");
  require(params.terms.offset_bias || !params.doffset_bias, "doffset_bias", "comes without offset_bias");
  const hk::DType dtype = params.query.dtype;
  const int64_t* const size = params.terms.bias.size;
  n.check(params.dbias, {splits * size[0], size[1], size[2], size[3], size[4]}, "dbias");
  const int tile = cuda::tiles_of("gated_attention.bias", dtype, n.D, 0, true, target.first).block_m;
  const int64_t blocks = (n.T + tile - 1) / tile + (n.S + tile - 1) / tile;
  n.check(params.doffset_bias, {2, n.B, n.H, blocks * tile}, "doffset_bias");
  if (!params.dbias && !params.doffset_bias) return;
  require(splits == 1 || params.dbias, "splits", "is not 1");
  launch(params, target, [&](auto kernels, auto& to) { kernels.attention_bias(params, to); });
}

// `results` is that of set_statistics. If `received` is requested, `rows` is float [2, B, H, T], contiguous, where the
// pass by rows stores what the pass by keys reads; otherwise it is None.
void attention_statistics(const py::tuple& call, const py::tuple& results, py::handle rows, py::handle cells,
                          const Target& target) {
  cuda::StatisticsPass params;
  const dlpack::Device device = device_of(target);
  const CallArguments arguments = read_call(call, device);
  const Sizes n = set_tiled_call(params, arguments, cells, device, false);
  set_statistics(params, arguments, n, results, device);
  const hk::Tensor shares = floating(given(rows, device, "rows"), "rows");
  n.check(shares, {2, n.B, n.H, n.T}, "rows");
  require(static_cast<bool>(shares) == static_cast<bool>(params.row_weights), "rows",
          "comes without row_weights, or they without it");
  if (shares) {
    params.reference = static_cast<float*>(shares.data);
    params.share = params.reference + n.B * n.H * n.T;
  }
  launch(params, target, [&](auto kernels, auto& to) { kernels.attention_statistics(params, to); });
}

// Fills the cells of a dense mask: a byte for each kCell x kCell pairs.
void dense_cells(py::handle mask, py::handle cells, const Target& target) {
  const dlpack::Device device = device_of(target);
  cuda::DenseCellsParams params;
  const Given dense = tensor_of(mask, device, "dense_mask");
  require(dense.element == Element::kBool && dense.tensor.rank == 4, "dense_mask");
  params.mask = dense.tensor;
  params.cells = cells_of(cells, device);
  const int64_t* const size = params.mask.size;
  require(is(params.cells, {size[0], size[1], cells_along(size[2]), cells_along(size[3])}) && is_dense(params.cells),
          "dense_cells");
  hk::bindings::launch(cuda::dense_cells, params, target_of(target));
}

// (query rows, keys, features of a slice) of one block of threads.
py::tuple tiles_of(const std::string& kernel, py::handle dtype, int64_t D, int64_t Dv, bool terms, int device) {
  const cuda::Tiles tiles = cuda::tiles_of(kernel, dtype_of(dtype), D, Dv, terms, device);
  return py::make_tuple(tiles.block_m, tiles.block_n, tiles.slice);
}

#ifdef HK_CHECKS
void check_wrapper(const std::string& name, const py::sequence& tensors, const Target& target) {
  std::vector<hk::Tensor> words;
  for (const py::handle tensor : tensors)
    words.push_back(needed(given(tensor, device_of(target), "a tensor"), "a tensor"));
  cuda::check_wrapper(name, words, target_of(target));
}
#endif

}  // namespace

PYBIND11_MODULE(HK_MODULE, m) {
  Torch::get();  // not at the first call, which may be two at once
  m.doc() = "CUDA attention kernels; called by the `cuda` backends, not by users.";
  m.def("call_fields", &call_fields, "The fields of a call as the arguments of a torch schema.");
  m.def("attention_forward", &attention_forward);
  m.def("attention_closed", &attention_closed);
  m.def("attention_rows", &attention_rows);
  m.def("attention_keys", &attention_keys);
  m.def("attention_queries", &attention_queries);
  m.def("attention_bias", &attention_bias);
  m.def("attention_statistics", &attention_statistics);
  m.def("dense_cells", &dense_cells);
  m.def("tiles_of", &tiles_of);
  m.def("unsupported_device", &cuda::unsupported_device, "Why the kernels cannot run on a device; empty if they can.");
#ifdef HK_CHECKS
  m.def("wrapper_names", &cuda::wrapper_names);
  m.def("check_wrapper", &check_wrapper, "Run the kernel of one wrapper (for tests).");
#endif
#ifdef HK_EMULATED
  m.def("schedule_names", &hk::emulator::schedule_names);
  m.def("use_schedule", &hk::emulator::use_schedule, "For all launches from now on (for tests).");
  m.def("use_shared_bytes", &hk::emulator::use_shared_bytes,
        "Bytes of shared memory of a block and of a multiprocessor, from now on (for tests).");
  m.def("last_launch", [] {
    const hk::emulator::Launch launch = hk::emulator::last_launch();
    return py::make_tuple(launch.blocks, launch.threads, launch.shared_bytes);
  });
#endif
}
