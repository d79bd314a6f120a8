// Functions of the CUDA runtime by their names and in C's types: no header of CUDA says them here.
#include "selftest/recorded_runtime.h"

#include <cstdlib>
#include <string>

RecordedRuntime recorded;

static int get_state(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = recorded.active[device];
  return 0;
}

extern "C" {

int cudaGetDevice(int* device) {
  *device = recorded.current;
  return 0;
}
int cudaSetDevice(int device) {
  recorded.current = device;
  recorded.active[device] = true;
  recorded.made_current.push_back(device);
  return 0;
}
int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int*) {
  if (!recorded.says_what_is_active || std::string(name) != "cuDevicePrimaryCtxGetState") return 1;
  *function = reinterpret_cast<void*>(get_state);
  return 0;
}
int cudaGetLastError() { return 0; }

// Called when the program starts and ends.
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction() {}
char __cudaInitModule(void**) { return 1; }

// Other functions that cuda/launch.cu refers to; a guard does not call them.
#define HK_NOT_CALLED(name) \
  void name() { std::abort(); }
HK_NOT_CALLED(cudaDeviceGetAttribute)
HK_NOT_CALLED(cudaDriverGetVersion)
HK_NOT_CALLED(cudaFuncGetAttributes)
HK_NOT_CALLED(cudaFuncSetAttribute)
HK_NOT_CALLED(cudaGetDeviceCount)
HK_NOT_CALLED(cudaGetErrorName)
HK_NOT_CALLED(cudaGetErrorString)
HK_NOT_CALLED(cudaLaunchKernel)
HK_NOT_CALLED(__cudaGetKernel)
HK_NOT_CALLED(__cudaLaunchKernel)
HK_NOT_CALLED(__cudaPopCallConfiguration)
HK_NOT_CALLED(__cudaPushCallConfiguration)

}  // extern "C"
