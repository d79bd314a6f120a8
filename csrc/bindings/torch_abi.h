// The functions of PyTorch's stable C ABI that the library of ops calls, declared here so that it is built without
// PyTorch; one binary serves PyTorch 2.10 and newer. PyTorch declares them in torch/csrc/inductor/aoti_torch/c/shim.h
// and torch/csrc/stable/c/shim.h; a test compiles both declarations together.
#pragma once

#include <cstddef>
#include <cstdint>

using AOTITorchError = int32_t;  // 0: success

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct StringOpaque;
using StringHandle = StringOpaque*;

// An argument or a result of an op: a handle that its holder owns; the bytes of an integer, double or bool; for an
// optional argument null or a pointer to one of these, made with `new`.
using StableIValue = uint64_t;

extern "C" {
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_layout_strided();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_bool();

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* device_type);
AOTITorchError aoti_torch_get_layout(AtenTensorHandle tensor, int32_t* layout);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* tensor);

AOTITorchError torch_string_length(StringHandle string, size_t* length);
AOTITorchError torch_string_c_str(StringHandle string, const char** text);
AOTITorchError torch_delete_string(StringHandle string);
AOTITorchError torch_get_num_threads(uint32_t* threads);

AOTITorchError aoti_torch_library_init_def(const char* name, const char* file, uint32_t line,
                                           TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_init_impl(const char* name, const char* key, const char* file, uint32_t line,
                                            TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*kernel)(StableIValue*, uint64_t, uint64_t), uint64_t abi_version);
}
