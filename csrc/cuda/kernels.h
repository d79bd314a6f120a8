// What the bindings call: every CUDA kernel as a host function. No CUDA header is needed to include
// it, and none of them waits for the GPU.
#pragma once

#include "common/params.h"

namespace hk::cuda {

// The device of all tensors of a call, and the stream on it (a cudaStream_t).
struct Where {
  int device = 0;
  void* stream = nullptr;
};

// The forward pass; or, where `dgate` is there, the rows of the gate's gradient of closed heads,
// rowsum(dout * attended), and nothing else.
struct AttendParams : ForwardParams {
  Tensor dout;   // [B, H, T, Dv]
  Tensor dgate;  // [B, H, T] float
};

// The first pass of the backward, one for both operators.
struct RowsParams {
  Tensor dout, attended;  // [B, H, T, Dv]
  Tensor gate;
  Activation activation = Activation::kIdentity;
  Tensor lse;        // [B, H, T] float
  Tensor delta;      // [B, H, T] float
  Tensor dgate;      // as BackwardParams, or absent
  Tensor dattended;  // [B, H, T, Dv], dout times an elementwise gate; absent for any other
};

// What the passes of the backward read that follow. `gate` is what `dattended` still lacks: none,
// or one value a row.
struct GradientParams : AttentionParams {
  Tensor dattended;   // [B, H, T, Dv]
  Tensor lse, delta;  // [B, H, T] float
  // Over how many blocks of threads the heads are spread that one would sum over; every one of them
  // writes a part of its own, float, [splits * B, ...], where there is more than one.
  int splits = 1;
};

// By tiles of keys. Absent gradients are not computed; they have the dtype of the key, or float.
struct KeysParams : GradientParams {
  Tensor dkey, dvalue;
  Tensor dcontent_bias;  // [B, H, S] float
};

// By tiles of query rows.
struct QueriesParams : GradientParams {
  bool closed_grad = true;
  Tensor dquery;   // collaborative attention: float parts
  Tensor dmixing;  // [B, tiles of rows, H, Ds] float parts
};

void gated_attention_forward(const AttendParams&, const Where&);
void gated_attention_keys(const KeysParams&, const Where&);
void gated_attention_queries(const QueriesParams&, const Where&);
void collaborative_attention_forward(const AttendParams&, const Where&);
void collaborative_attention_keys(const KeysParams&, const Where&);
void collaborative_attention_queries(const QueriesParams&, const Where&);
void attention_rows(const RowsParams&, const Where&);

// What one block of threads of a kernel owns: query rows, keys, features of the shared width.
struct Tiles {
  int block_m, block_n, slice;
};

// `kernel` is "gated_attention.keys" and the like; `D` is the width of scores, Ds where it is
// shared.
Tiles tiles_of(const char* kernel, DType dtype, int64_t D, int64_t Dv);

}  // namespace hk::cuda
