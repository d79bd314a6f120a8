// One tiny kernel for each wrapper of cuda/hardware.h, so that a test can compare what it does,
// emulated or on a GPU, with what its documentation says. No CUDA header is needed to include it.
#pragma once

#include <string>
#include <vector>

#include "common/params.h"
#include "cuda/kernels.h"

namespace hk::cuda {

// Tensors are contiguous words of 32 bits, whatever they mean, declared as float; the last one is
// the result. Each thread has some words of each, one thread's behind another's, in whole blocks:
// the kernels (wrapper_checks.cu) say how many. Throws std::invalid_argument for unknown names and
// for tensors that do not fit.
void check_wrapper(const std::string& name, const std::vector<Tensor>& tensors,
                   const LaunchTarget& target);

std::vector<std::string> wrapper_names();

}  // namespace hk::cuda
