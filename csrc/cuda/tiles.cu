// The sizes of tiles, for callers that allocate the outputs of kernels.
#include "cuda/collaborative_tiles.h"
#include "cuda/tiles.h"

namespace hk::cuda {
namespace {

template <typename T>
Tiles tiles_for(Kernels<T> kernels, const std::string& name, int64_t D, int64_t Dv, bool terms, int device) {
  const std::string pass = name.substr(name.find('.') + 1);
  const bool gated = name == "gated_attention." + pass;
  if (!gated && name != "collaborative_attention." + pass) return {};
  if (pass == "bias") return {kBiasTile, kBiasTile, 0};
  return gated ? gated_tiles<T>(pass, D, Dv, terms, kernels.runs_wide_keys(device))
               : collaborative_tiles<T>(pass, Dv, terms);
}

}  // namespace

Tiles tiles_of(const std::string& kernel, DType dtype, int64_t D, int64_t Dv, bool terms, int device) {
  const Tiles tiles =
      with_kernels(dtype, [&](auto kernels) { return tiles_for(kernels, kernel, D, Dv, terms, device); });
  if (tiles.block_m == 0) throw std::invalid_argument("no kernel is called " + kernel);
  return tiles;
}

}  // namespace hk::cuda
