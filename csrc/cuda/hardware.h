// Every instruction and every builtin of CUDA that the kernels use, and nothing else. nvcc compiles the device half, in
// PTX for sm_80 and newer; a C++ compiler compiles software that does the same (emulator/hardware.h), so that the same
// kernels run without a GPU.
//
// Fragments are those of the PTX ISA, section "Matrix fragments". With row = lane / 4 and pair = 2 * (lane % 4), a lane
// of a warp holds of a product of tiles C[16][8] += A[16][k] B[k][8]
//   C: [row][pair], [row][pair + 1], [row + 8][pair], [row + 8][pair + 1];
//   A and B of 16 bits, k = 16, two neighbours along k in a word, the first in its low half:
//     A[row][pair], A[row + 8][pair], A[row][pair + 8], A[row + 8][pair + 8]; B[pair][row],
//     B[pair + 8][row];
//   A and B of tf32, k = 8, with column = lane % 4:
//     A[row][column], A[row + 8][column], A[row][column + 4], A[row + 8][column + 4];
//     B[column][row], B[column + 4][row].
// All lanes of a warp must call functions of a warp, and all threads of a block those of a block.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define HK_DEVICE __device__ __forceinline__
#else
#define HK_DEVICE inline
#endif

namespace hk::cuda {

constexpr int kWarp = 32;

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
struct tf32;  // names operands of multiply_add that are floats, less their last 13 bits

struct LowHigh {
  float low, high;
};

// Blocks and grids have one dimension.
HK_DEVICE int thread_index();
HK_DEVICE int64_t block_index();
// The shared memory of the block, of the size given at launch; aligned to 128 bytes, undefined.
HK_DEVICE char* shared_memory();

// Afterwards all threads of the block, or lanes of the warp, see what the others wrote before.
HK_DEVICE void sync_block();
HK_DEVICE void sync_warp();

HK_DEVICE bool any_in_block(bool vote);
HK_DEVICE bool any_in_warp(bool vote);

// The value of lane `lane ^ mask`, modulo 32. V: int, uint32_t, float.
template <typename V>
HK_DEVICE V shuffle_xor(V value, int mask);

// Four matrices [8][8] of 16 bits from shared memory. `row` is the address of a row, 16 bytes,
// aligned: that of lane i is row i % 8 of matrix i / 8. A lane receives of each matrix
// [lane / 4][2 * (lane % 4)] and its right neighbour, or with kTransposed those two of the matrix transposed.
template <bool kTransposed>
HK_DEVICE void load_matrices(uint32_t (&matrices)[4], const void* row);

// C += A B, summed in float and rounded toward zero. T: bf16, fp16, tf32 (whose last 13 bits are ignored).
template <typename T>
HK_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// Starts to copy 16 bytes into shared memory, of which `bytes` are read and the rest is zero; both addresses are
// aligned to 16 bytes. This thread may read the copy after wait_copies for its group (all copies since the last
// commit_copies), other threads after a barrier.
HK_DEVICE void copy_async(void* shared, const void* global, int bytes);
HK_DEVICE void commit_copies();
// Waits until at most the latest kPending groups are pending.
template <int kPending>
HK_DEVICE void wait_copies();

// Stores 16 bytes, the first word at the lowest address, which is aligned to 16 bytes.
HK_DEVICE void store_words(void* global, const uint32_t (&words)[4]);

// 2^x, within 2 units in the last place; subnormal numbers count as 0.
HK_DEVICE float exp2_approx(float x);

// T: bf16, fp16, float. To nearest, ties to even.
template <typename T>
HK_DEVICE float to_float(T x);
template <typename T>
HK_DEVICE T from_float(float x);
// T: bf16, fp16. `low` is in the low half, as the number at the lower address is in memory.
template <typename T>
HK_DEVICE uint32_t pack(float low, float high);
template <typename T>
HK_DEVICE LowHigh unpack(uint32_t word);

HK_DEVICE uint32_t float_bits(float x);
HK_DEVICE float bits_float(uint32_t bits);

}  // namespace hk::cuda

#if !defined(__CUDACC__)
#include "emulator/hardware.h"
#else

namespace hk::cuda {

HK_DEVICE int thread_index() {
  const unsigned index = threadIdx.x;
  __builtin_assume(index < 1024);  // saves registers: what is divided has no sign
  return static_cast<int>(index);
}
HK_DEVICE int64_t block_index() { return blockIdx.x; }

HK_DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char bytes[];
  return bytes;
}

HK_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

constexpr uint32_t kAllLanes = 0xffffffffu;

HK_DEVICE void sync_block() { __syncthreads(); }
HK_DEVICE void sync_warp() { __syncwarp(); }
HK_DEVICE bool any_in_block(bool vote) { return __syncthreads_or(vote) != 0; }
HK_DEVICE bool any_in_warp(bool vote) { return __any_sync(kAllLanes, vote) != 0; }

template <typename V>
HK_DEVICE V shuffle_xor(V value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}

// Instructions that all lanes must reach are volatile: the compiler does not move them across barriers or into
// branches.
template <bool kTransposed>
HK_DEVICE void load_matrices(uint32_t (&matrices)[4], const void* row) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared_address(row)));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared_address(row)));
}

#define HK_MULTIPLY_ADD(shape_and_types)                                                                              \
  asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

template <typename T>
HK_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>) {
    HK_MULTIPLY_ADD("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else if constexpr (std::is_same_v<T, fp16>) {
    HK_MULTIPLY_ADD("m16n8k16.row.col.f32.f16.f16.f32");
  } else {
    static_assert(std::is_same_v<T, tf32>);
    HK_MULTIPLY_ADD("m16n8k8.row.col.f32.tf32.tf32.f32");
  }
}

#undef HK_MULTIPLY_ADD

HK_DEVICE void copy_async(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}
HK_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
HK_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

HK_DEVICE void store_words(void* global, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(global)), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

HK_DEVICE float exp2_approx(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

HK_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
HK_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }

template <typename T>
HK_DEVICE float to_float(T x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return bits_float(static_cast<uint32_t>(x.bits) << 16);
  } else if constexpr (std::is_same_v<T, fp16>) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
  } else {
    static_assert(std::is_same_v<T, float>);
    return x;
  }
}
template <typename T>
HK_DEVICE T from_float(float x) {
  if constexpr (std::is_same_v<T, bf16>) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return {bits};
  } else if constexpr (std::is_same_v<T, fp16>) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return {bits};
  } else {
    static_assert(std::is_same_v<T, float>);
    return x;
  }
}
template <typename T>
HK_DEVICE uint32_t pack(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    static_assert(std::is_same_v<T, fp16>);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}
template <typename T>
HK_DEVICE LowHigh unpack(uint32_t word) {
  return {to_float(T{static_cast<uint16_t>(word)}), to_float(T{static_cast<uint16_t>(word >> 16)})};
}

}  // namespace hk::cuda

#endif
