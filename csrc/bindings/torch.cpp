// libheads_kernels.so: the ops of the operators with their CPU kernels, for programs without Python and for Python
// without the package. Loading it registers them with PyTorch. The Python package `heads_kernels` registers the same
// ops for all backends; if it is loaded, the library adds nothing.
//
// Schemas, and how results are allocated, are those of heads_kernels/ops/attention.py and statistics.py; tests compare
// them. There are no backward ops: programs that are exported compute no gradients.
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings/checks.h"
#include "bindings/torch_abi.h"
#include "cpu/kernels.h"

// Python's own functions, null in a program without Python.
extern "C" {
struct _object;
__attribute__((weak)) int Py_IsInitialized();
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int);
__attribute__((weak)) _object* PyImport_GetModuleDict();
__attribute__((weak)) _object* PyDict_GetItemString(_object*, const char*);
}

namespace {

using namespace hk::bindings;

void check(AOTITorchError error) {
  if (error) throw std::runtime_error("heads_kernels: PyTorch failed; its message is above");
}

// ---------------------------------------------------------------------- tensors
struct Delete {
  void operator()(AtenTensorOpaque* tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using Handle = std::unique_ptr<AtenTensorOpaque, Delete>;

int32_t number_of(Element element) {
  static const int32_t numbers[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float64(), aoti_torch_dtype_bfloat16(),
                                    aoti_torch_dtype_float16(), aoti_torch_dtype_int32(),   aoti_torch_dtype_int64(),
                                    aoti_torch_dtype_bool()};
  return numbers[static_cast<int>(element)];
}

Element element_of(AtenTensorHandle tensor, const char* name) {
  int32_t number;
  check(aoti_torch_get_dtype(tensor, &number));
  for (int i = 0; i <= static_cast<int>(Element::kBool); ++i)
    if (number_of(static_cast<Element>(i)) == number) return static_cast<Element>(i);
  refuse(name, "has dtype number " + std::to_string(number));
}

// Pointer, dtype, sizes and strides of an input; null becomes an absent one.
Given given(const Handle& handle, const char* name) {
  AtenTensorHandle const tensor = handle.get();
  if (!tensor) return {};
  int32_t device, layout;
  check(aoti_torch_get_device_type(tensor, &device));
  check(aoti_torch_get_layout(tensor, &layout));
  require(device == aoti_torch_device_type_cpu(), name, "is not on the CPU");
  require(layout == aoti_torch_layout_strided(), name, "has no dense memory");
  Given result;
  result.element = element_of(tensor, name);
  int64_t rank, *sizes, *strides;
  check(aoti_torch_get_dim(tensor, &rank));
  check(aoti_torch_get_sizes(tensor, &sizes));
  check(aoti_torch_get_strides(tensor, &strides));
  if (rank < 1 || rank > hk::kMaxRank) refuse(name, "has " + std::to_string(rank) + " dimensions");
  hk::Tensor& to = result.tensor;
  to.rank = static_cast<int>(rank);
  std::copy_n(sizes, rank, to.size);
  std::copy_n(strides, rank, to.stride);
  const void* data;
  check(torch_get_const_data_ptr(tensor, &data));
  to.data = const_cast<void*>(data);  // one struct serves inputs and outputs of kernels
  require(data || std::count(sizes, sizes + rank, 0), name, "has no memory");
  return result;
}

// A tensor with these sizes and strides.
struct Output {
  Handle handle;
  Given given;

  Output(const hk::Tensor& like, Element element) {
    hk::Tensor& t = given.tensor;
    t = like;
    given.element = element;
    AtenTensorHandle made;
    check(
        aoti_torch_empty_strided(t.rank, t.size, t.stride, number_of(element), aoti_torch_device_type_cpu(), 0, &made));
    handle.reset(made);
    check(torch_get_mutable_data_ptr(made, &t.data));
  }
};

// ---------------------------------------------------------------------- arguments
// The arguments of an op, read one after the other; each becomes the reader's.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}

  // The fields of a call and the arguments after them, the last of which is the backend. All arguments are read before
  // any is refused, else those after it would leak.
  template <typename... More>
  CallArguments call(More&... more) {
    CallArguments result;
    std::string backend;
    result.each([&](const char*, auto& field) { read(field); });
    (read(more), ...);
    read(backend);
    if (backend != "cpu")
      throw std::invalid_argument("backend is '" + backend +
                                  "', but this library has only 'cpu'; export the program "
                                  "with tensors on the CPU and without backend=.");
    auto tensor = tensors_.begin();
    result.each([&](const char* name, auto& field) {
      if constexpr (std::is_base_of_v<Given, std::decay_t<decltype(field)>>)
        static_cast<Given&>(field) = given(*tensor++, name);
    });
    return result;
  }

 private:
  void read(Required&) { tensors_.emplace_back(take<AtenTensorHandle>()); }
  void read(Given&) {
    const std::unique_ptr<StableIValue> held(take<StableIValue*>());
    tensors_.emplace_back(held ? reinterpret_cast<AtenTensorHandle>(*held) : nullptr);
  }
  void read(std::string& text) {
    StringHandle const string = take<StringHandle>();
    size_t length = 0;
    const char* characters = "";
    torch_string_length(string, &length);
    torch_string_c_str(string, &characters);
    text.assign(characters, length);
    torch_delete_string(string);
  }
  template <typename T>
  void read(T& value) {
    value = take<T>();
  }

  template <typename T>
  T take() {
    T value;
    std::memcpy(&value, next_++, sizeof value);
    return value;
  }

  const StableIValue* next_;
  std::vector<Handle> tensors_;
};

int threads() {
  uint32_t count;
  check(torch_get_num_threads(&count));
  return static_cast<int>(count);
}

// The results of an op, which the caller owns.
template <typename... Outputs>
void give(StableIValue* stack, Outputs&... outputs) {
  ((*stack++ = reinterpret_cast<StableIValue>(outputs.handle.release())), ...);
}

// ---------------------------------------------------------------------- ops
const std::string kAttention =
    "attention(" + call_fields() + ", bool save, str backend) -> (Tensor out, Tensor attended, Tensor lse)";

void attention(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  bool save;
  const CallArguments call = arguments.call(save);
  hk::ForwardParams params;
  const Sizes n = set_call(params, call);
  check_alpha(params.alpha);
  params.threads = threads();
  require(params.value.size[3] > 0 || !save, "value", "has no columns");
  const Element element = call.query.element, compute = static_cast<Element>(n.compute);
  const hk::Tensor heads = heads_like(params, n);
  Output out(heads, element), attended(save && params.gate ? heads : contiguous({0}), element);
  const hk::Tensor rows = params.alpha ? contiguous({2, n.B, n.H, n.T}) : contiguous({n.B, n.H, n.T});
  Output lse(save ? rows : contiguous({0}), compute);
  params.out = output(out.given, "out");
  params.attended = output(attended.given, "attended");
  params.lse = output(lse.given, "lse");
  check_outputs(params, n);
  if (params.out) hk::kernels().attention_forward(params);
  give(stack, out, attended, lse);
}

const std::string kStatistics = "attention_statistics(" + call_fields() +
                                ", str backend) -> (Tensor lse, Tensor max_score, Tensor "
                                "max_prob, Tensor argmax, Tensor entropy, Tensor received)";

void attention_statistics(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const CallArguments call = arguments.call();
  hk::StatisticsParams params;
  const Sizes n = set_call(params, call, false);
  params.threads = threads();
  const Element compute = static_cast<Element>(n.compute);
  const hk::Tensor rows = contiguous({n.B, n.H, n.T});
  Output lse(rows, compute), max_score(rows, compute), max_prob(rows, compute), entropy(rows, compute);
  Output argmax(rows, Element::kInt64);
  params.lse = floating(lse.given, "lse");
  params.max_score = floating(max_score.given, "max_score");
  params.max_prob = floating(max_prob.given, "max_prob");
  params.entropy = floating(entropy.given, "entropy");
  Output received(call.row_weights ? contiguous({n.B, n.H, n.S}) : contiguous({0}), compute);
  params.received = output(received.given, "received");
  set_statistics(params, call, n, argmax.given);
  hk::kernels().attention_statistics(params);
  give(stack, lse, max_score, max_prob, argmax, entropy, received);
}

// ---------------------------------------------------------------------- registration
bool package_is_loaded() {
  if (!Py_IsInitialized || !Py_IsInitialized()) return false;
  const int state = PyGILState_Ensure();
  const bool loaded = PyDict_GetItemString(PyImport_GetModuleDict(), "heads_kernels.ops.library");
  PyGILState_Release(state);
  return loaded;
}

// Registered for as long as the process runs.
const bool registered = [] {
  if (package_is_loaded()) return false;
  constexpr uint64_t kVersion = uint64_t{2} << 56 | uint64_t{10} << 48;  // of the ABI: PyTorch 2.10
  TorchLibraryHandle schemas, kernels;
  check(aoti_torch_library_init_def("heads_kernels", __FILE__, __LINE__, &schemas));
  for (const std::string& schema : {kAttention, kStatistics}) check(aoti_torch_library_def(schemas, schema.c_str()));
  check(aoti_torch_library_init_impl("heads_kernels", "CPU", __FILE__, __LINE__, &kernels));
  check(torch_library_impl(kernels, "attention", &attention, kVersion));
  check(torch_library_impl(kernels, "attention_statistics", &attention_statistics, kVersion));
  return true;
}();

}  // namespace
