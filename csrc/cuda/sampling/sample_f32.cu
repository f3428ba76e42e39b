// The sampler of float32 logits.
#include "cuda/sampling/sample_rows.cuh"

namespace photon::cuda {

template int sample_rows<float>(const SampleParams& p, bool in_clusters, void* stream);

}  // namespace photon::cuda
