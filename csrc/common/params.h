// The parameters of the kernels: plain structs of pointers, sizes and strides, without libtorch or Python.
//
// Sizes: B batch, T query length, S key length, H query heads, Hk key/value heads, D query/key width of a head, Dv
// value width; of collaborative attention Hv value heads, Ds shared width. Strides count elements.
#pragma once

#include <cstdint>

namespace hk {

enum class DType : int { kFloat32, kFloat64, kBFloat16, kFloat16 };

enum class Activation : int { kIdentity, kSigmoid, kSoftplus };

// A number of the call as double, which the CPU kernels need for float64, and as float, which the CUDA kernels use: a
// conversion there would be in their loops, where registers are scarce.
struct Number {
  double exact;
  float rounded;

  constexpr Number(double value) : exact(value), rounded(static_cast<float>(value)) {}
  constexpr operator double() const { return exact; }
  constexpr explicit operator float() const { return rounded; }
};

constexpr int kMaxRank = 5;

// A strided tensor of one of the dtypes above; an absent optional tensor has rank 0.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int rank = 0;
  int64_t size[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};

  constexpr explicit operator bool() const { return rank > 0; }
};

// The mask as data: query row i of head (b, h) sees key j where j is in the band [i + band_lo, i + band_hi), in the
// interval [k_lo[b][h][i], k_hi[b][h][i]), and key_visible[b][j] and dense[b][h][i][j] are not 0. The lower limits do
// not hide keys j < first_keys[h]. A null pointer hides nothing.
struct MaskParams {
  int64_t band_lo = 0;
  int64_t band_hi = 0;
  const int32_t* k_lo = nullptr;         // [B or 1, H or 1, T]
  const int32_t* k_hi = nullptr;         // [B or 1, H or 1, T]
  const int32_t* first_keys = nullptr;   // [H or 1], only with k_lo and k_hi
  const uint8_t* key_visible = nullptr;  // [B or 1, S]
  const uint8_t* dense = nullptr;        // [B, H, T, S]; dense_stride is 0 where it broadcasts
  int64_t interval_stride = 0;           // elements between batch entries, 0 if shared
  int64_t interval_head_stride = 0;      // elements between heads, 0 if shared
  int64_t first_stride = 0;              // elements between heads, 0 if shared
  int64_t visible_stride = 0;            // elements between batch entries, 0 if shared
  int64_t dense_stride[4] = {};
  // CUDA kernels only: which pairs `dense` shows in cells of kCell x kCell pairs, a DenseCell each (cuda/kernels.h).
  // A pass with a ScoreTile (cuda/scores.h) has them whenever it has `dense`. attention_rows has neither cells nor a
  // ScoreTile.
  const uint8_t* dense_cells = nullptr;  // [B, H, cells of rows, cells of keys]
  int64_t cell_stride[4] = {};           // 0 where it broadcasts

  // Whether intervals differ between heads.
  constexpr bool by_head() const { return interval_head_stride != 0 || first_stride != 0; }
};

// The cap, biases and sinks of scores. Strides are 0 where a tensor broadcasts.
struct ScoreTerms {
  Tensor bias;             // [B1, B2, H, T, S]: batch b reads entry (b / bias_inner, b % bias_inner)
  int64_t bias_inner = 1;  // at least 1
  Tensor offset_bias;      // [H or 1, T + S - 1]: pair (i, j) reads column j - i + T - 1
  Tensor sinks;            // [H, T or 1]
  Number softcap = 0.0;    // 0: none
};

// Dropout of probabilities: one is kept if the Philox word of (b, h, i, j) is at least `threshold`.
struct DropoutParams {
  bool active = false;
  // Seed, then the index (b, h, i, j) of the call's first element in the whole; j is a multiple of 4. On the device of
  // the tensors.
  const int64_t* seed = nullptr;
  uint32_t threshold = 0;
  Number keep_scale = 1.0;  // 1 / (1 - p)
};

// Common to both operators and both passes. Gated attention: query [B, H, T, D], key [B, Hk, S, D], value [B, Hk, S,
// Dv]. Collaborative attention: query [B, T, Ds], key [B, S, Ds], value [B, Hv, S, Dv], mixing [H, Ds], content_bias
// [B, H, S].
struct AttentionParams {
  Tensor query, key, value;
  Tensor mixing, content_bias;  // absent for gated attention
  Tensor gate;                  // [H], [B, H], [B, H, T] or [B, H, T, Dv], size 1 broadcasts; absent: no gate
  Tensor alpha;                 // [H] in the compute type: entmax; absent: softmax. CPU kernels only
  ScoreTerms terms;
  MaskParams mask;
  DropoutParams dropout;
  Number scale = 1.0;
  Activation activation = Activation::kIdentity;
  bool closed_grad = true;  // false: entries of gate and mixing that are exactly 0 get gradient 0
  int threads = 1;

  // The sizes H, T and S of either operator.
  constexpr int64_t heads() const { return mixing ? mixing.size[0] : query.size[1]; }
  constexpr int64_t rows() const { return query.size[query.rank - 2]; }
  constexpr int64_t keys() const { return key.size[key.rank - 2]; }
};

struct ForwardParams : AttentionParams {
  Tensor out;       // [B, H, T, Dv]
  Tensor attended;  // [B, H, T, Dv], out before the gate; absent if not requested
  // [B, H, T] in the compute type; absent if not requested. Entmax: [2, B, H, T], the largest score of each row and the
  // distance of its threshold above it.
  Tensor lse;
};

// Absent gradients are not computed.
struct BackwardParams : AttentionParams {
  Tensor dout, attended;        // [B, H, T, Dv]
  Tensor lse;                   // as of the forward pass
  Tensor dlse;                  // [B, H, T] in the compute type; absent: 0. Comes without a gate that closes heads
  Tensor dquery, dkey, dvalue;  // as query, key, value
  Tensor dmixing;               // [B, H, Ds] in the compute type, to be summed over B
  Tensor dcontent_bias;         // [B, H, S] in the compute type
  Tensor dgate;                 // dout * attended: [B, H, T] summed over Dv, or [B, H, T, Dv]
  Tensor dbias;                 // as bias, contiguous, in the compute type
  Tensor doffset_bias;          // [B, H, T + S - 1] in the compute type
  Tensor dsinks;                // [B, H, T] in the compute type
  Tensor dalpha;                // [B, H, T] in the compute type
  // [B, H, T] in the compute type: dS = slope (dP - delta). Null: rowsum(dout * attended) - dlse.
  const void* delta = nullptr;
};

struct StatisticsParams : AttentionParams {
  const uint8_t* excluded = nullptr;  // [B or 1, S], nonzero: the key is not counted for max_score, max_prob and argmax
  int64_t excluded_stride = 0;
  Tensor lse, max_score, max_prob, entropy;  // [B, H, T] in the compute type
  int64_t* argmax = nullptr;                 // [B, H, T] contiguous; of max_score
  // received[b][h][j] = sum over i of row_weights[b][h][i] p_ij; a row of weight 0 is left out. Both are in the compute
  // type, and absent if received is not requested.
  Tensor row_weights;  // [B, H, T]; strides are 0 where it broadcasts
  Tensor received;     // [B, H, S] contiguous
};

}  // namespace hk
