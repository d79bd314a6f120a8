// The part of DLPack's C interface that describes a tensor without owning it, as torch offers it
// from version 2.10 on (`torch.Tensor.__dlpack_c_exchange_api__`); names and order of fields are
// those of dlpack.h, whose layout is fixed within a major version.
#pragma once

#include <Python.h>

#include <cstdint>

#include "bindings/checks.h"

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
    const int kind = code << 8 | bits;
    switch (kind) {
      case kFloat << 8 | 32:
        return Element::kFloat32;
      case kFloat << 8 | 64:
        return Element::kFloat64;
      case kBfloat << 8 | 16:
        return Element::kBFloat16;
      case kFloat << 8 | 16:
        return Element::kFloat16;
      case kInt << 8 | 32:
        return Element::kInt32;
      case kInt << 8 | 64:
        return Element::kInt64;
      case kUInt << 8 | 8:
        return Element::kUInt8;
      case kBool << 8 | 8:
        return Element::kBool;
      default:
        return Element::kOther;
    }
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
