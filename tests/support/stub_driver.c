// A libcuda that answers like a GPU of compute capability 9.0 and records the last launch in place of running it.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST_PARAMETERS 256

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
} LaunchConfig;  // CUlaunchConfig

// Set before a launch: how many parameters the kernel has, and the bytes of each.
int stub_parameter_count;
int stub_parameter_bytes[MOST_PARAMETERS];
// What the last launch passed.
uint64_t stub_parameters[MOST_PARAMETERS][16];  // of tensor maps 128 bytes
int stub_grid[3], stub_block[3], stub_shared_bytes, stub_launches;

int cuLaunchKernelEx(const LaunchConfig *config, void *function, void **parameters, void **extra) {
  (void)function, (void)extra;
  ++stub_launches;
  for (int i = 0; i < 3; ++i) {
    stub_grid[i] = (int)config->grid[i];
    stub_block[i] = (int)config->block[i];
  }
  stub_shared_bytes = (int)config->shared_bytes;
  for (int i = 0; i < stub_parameter_count; ++i) {
    memset(stub_parameters[i], 0, sizeof stub_parameters[i]);
    memcpy(stub_parameters[i], parameters[i], (size_t)stub_parameter_bytes[i]);
  }
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 8: *value = 48 << 10; break;               // shared memory of a block
    case 10: *value = 32; break;                    // threads of a warp
    case 12: case 82: *value = 64 << 10; break;     // registers of a block, of a multiprocessor
    case 16: *value = 132; break;                   // multiprocessors
    case 75: *value = 9; break;                     // compute capability
    case 76: *value = 0; break;
    case 81: *value = 228 << 10; break;             // shared memory of a multiprocessor
    case 97: *value = 227 << 10; break;             // shared memory that a block may ask for
    default: *value = 1024;
  }
  return 0;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
  (void)function;
  *value = attribute == 0 ? 1024 : 0;  // threads of a block; nothing else is used
  return 0;
}

// The pointer itself: what is launched on CPU tensors is taken for memory of the device.
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
  (void)attribute;
  memcpy(data, &pointer, sizeof pointer);
  return 0;
}

static int answer(void **handle) { return *handle = (void *)1, 0; }
static int number(int *value, int what) { return *value = what, 0; }

int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDriverGetVersion(int *v) { return number(v, 13000); }
int cuDeviceGetCount(int *v) { return number(v, 1); }
int cuDeviceGet(int *v, int ordinal) { return number(v, ordinal); }
int cuDevicePrimaryCtxRetain(void **context, int device) { return (void)device, answer(context); }
int cuCtxSetCurrent(void *context) { return (void)context, 0; }
int cuCtxGetCurrent(void **context) { return answer(context); }
int cuCtxGetDevice(int *device) { return number(device, 0); }
int cuCtxSetLimit(int limit, size_t value) { return (void)limit, (void)value, 0; }
int cuCtxGetLimit(size_t *value, int limit) { return (void)limit, *value = 1 << 20, 0; }
int cuGetErrorString(int error, const char **text) { return (void)error, *text = "stub", 0; }
int cuStreamIsCapturing(void *stream, int *v) { return (void)stream, number(v, 0); }
int cuModuleLoadData(void **module, const void *image) { return (void)image, answer(module); }
int cuModuleUnload(void *module) { return (void)module, 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { return (void)m, (void)n, answer(f); }
int cuFuncSetAttribute(void *f, int a, int v) { return (void)f, (void)a, (void)v, 0; }
int cuFuncSetCacheConfig(void *f, int c) { return (void)f, (void)c, 0; }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { return (void)f, (void)c, number(n, 1); }

// A tensor map of at most 4 dimensions holds what it was made of: address, sizes, strides in bytes, box.
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box) {
  (void)type;
  uint64_t words[16] = {(uint64_t)address};
  for (uint32_t i = 0; i < rank && i < 4; ++i) {
    words[1 + i] = sizes[i];
    words[5 + i] = i + 1 < rank ? strides[i] : 0;
    words[9 + i] = box[i];
  }
  return memcpy(map, words, sizeof words), 0;
}
int cuTensorMapEncodeIm2col(void *map) { return memset(map, 0, 128), 0; }
