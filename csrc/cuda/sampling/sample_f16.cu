// The sampler of float16 logits.
#include "cuda/sampling/sample_rows.cuh"

namespace photon::cuda {

template int sample_rows<__half>(const SampleParams& p, bool in_clusters, void* stream);

}  // namespace photon::cuda
