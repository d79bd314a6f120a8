// What launches have in common: the current device, limits, error messages.
#include "cuda/launch.h"

#if defined(__CUDACC__)

#include <map>
#include <mutex>
#include <utility>

namespace hk::cuda {
namespace {

constexpr int kOldestPart = 80;         // compute capability 8.0: cp.async, mma of bfloat16
constexpr int kPlainShared = 48 << 10;  // bytes that every kernel may have

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

std::string part(int device) {
  return "GPU " + std::to_string(device) + ", compute capability " +
         std::to_string(attribute(cudaDevAttrComputeCapabilityMajor, device)) + "." +
         std::to_string(attribute(cudaDevAttrComputeCapabilityMinor, device));
}

std::string words(cudaError_t error, int device) {
  switch (error) {
    case cudaErrorInsufficientDriver: {
      int driver = 0;
      cudaDriverGetVersion(&driver);
      if (driver == 0) return "there is no NVIDIA driver: install one";
      return "the NVIDIA driver is made for CUDA " + version(driver) + ", but this build for CUDA " +
             version(CUDART_VERSION) + ": update the driver";
    }
    case cudaErrorNoDevice:
      return "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES";
    case cudaErrorInvalidDevice:
      return "there is no GPU " + std::to_string(device);
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
      return "this build has no code for " + part(device) + ": build for it";
    case cudaErrorMemoryAllocation:
      return "out of memory on GPU " + std::to_string(device);
    default:
      return std::string(cudaGetErrorName(error)) + " on GPU " + std::to_string(device) + ": " +
             cudaGetErrorString(error);
  }
}

// The last error of the thread stays set until it is read.
cudaError_t taken(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// Whether this process has a primary context on the device; true if that is not known.
bool has_context(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* active);  // of cuda.h
  static const GetState get_state = [] {
    constexpr unsigned kSince = 7000;  // CUDA 7.0
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const auto error = taken(
        cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &function, kSince, cudaEnableDefault, &found));
    return error == cudaSuccess ? reinterpret_cast<GetState>(function) : nullptr;
  }();
  unsigned flags = 0;
  int active = 1;
  return !get_state || get_state(device, &flags, &active) != 0 || active != 0;
}

__global__ void nothing() {}

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  check_error(cudaGetDevice(&previous_), device);
  changed_ = previous_ != device;
  if (changed_) check_error(cudaSetDevice(device), device);
}

DeviceGuard::~DeviceGuard() {
  if (changed_ && has_context(previous_)) cudaSetDevice(previous_);
}

void allow_shared_memory(const void* entry, int device, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> allowed;
  if (bytes <= kPlainShared) return;
  const std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{entry, device}];
  if (bytes <= most) return;
  const int limit = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (limit > 0 && bytes > limit)
    throw Error("the kernel needs " + std::to_string(bytes) + " bytes of shared memory, but " + part(device) +
                ", has " + std::to_string(limit));
  check_error(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), device);
  most = bytes;
}

void check_error(cudaError_t error, int device) {
  if (taken(error) != cudaSuccess) throw Error(words(error, device));
}

std::string unsupported_device(int device) {
  int count = 0;
  if (const auto error = taken(cudaGetDeviceCount(&count))) return words(error, device);
  if (device < 0 || device >= count) return words(cudaErrorInvalidDevice, device);
  if (attribute(cudaDevAttrComputeCapabilityMajor, device) * 10 < kOldestPart)
    return "the kernels need compute capability 8.0 or higher, not that of " + part(device);
  try {
    const DeviceGuard guard(device);
    cudaFuncAttributes found;
    check_error(cudaFuncGetAttributes(&found, nothing), device);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

SharedMemoryLimits shared_memory_limits(int device) {
  return {attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)};
}

}  // namespace hk::cuda

#else

namespace hk::cuda {

std::string unsupported_device(int) { return ""; }

SharedMemoryLimits shared_memory_limits(int) {
  const emulator::SharedBytes bytes = emulator::shared_bytes();
  return {bytes.per_block, bytes.per_multiprocessor};
}

}  // namespace hk::cuda

#endif
