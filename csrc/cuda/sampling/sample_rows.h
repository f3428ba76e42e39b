// The launcher of the sampler, which sample.cu calls. Its kernels (sample_rows.cuh) take long to
// compile, so each element type has a source of its own: sample_bf16.cu, sample_f16.cu,
// sample_f32.cu.
#pragma once
#include "common/params.h"

namespace photon::cuda {

// T: the element type of the logits. `in_clusters`: several CTAs share a row.
template <typename T>
int sample_rows(const SampleParams& p, bool in_clusters, void* stream);

}  // namespace photon::cuda
