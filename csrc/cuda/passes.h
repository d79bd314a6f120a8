// The launchers of the kernels, one a pass, compiled once for each dtype of the operands.
#pragma once

#include "cuda/kernels.h"

namespace hk::cuda {

// T: bf16, fp16, float.
template <typename T>
void gated_forward(const AttendParams&, const LaunchTarget&);
template <typename T>
void gated_decode(const AttendParams&, const LaunchTarget&);
template <typename T>
void combine_pass(const AttendParams&, const LaunchTarget&);
template <typename T>
void gated_keys(const KeysParams&, const LaunchTarget&);
// Whether its blocks have the wide sizes (kHasWideKeys) on a device.
template <typename T>
bool runs_wide_keys(int device);
template <typename T>
void gated_queries(const QueriesParams&, const LaunchTarget&);
template <typename T>
void collaborative_forward(const AttendParams&, const LaunchTarget&);
template <typename T>
void collaborative_keys(const KeysParams&, const LaunchTarget&);
template <typename T>
void collaborative_queries(const QueriesParams&, const LaunchTarget&);
template <typename T>
void rows_pass(const RowsParams&, const LaunchTarget&);
template <typename T>
void bias_pass(const BiasParams&, const LaunchTarget&);
template <typename T>
void statistics_pass(const StatisticsPass&, const LaunchTarget&);

}  // namespace hk::cuda
