// The sampler of bfloat16 logits.
#include "cuda/sampling/sample_rows.cuh"

namespace photon::cuda {

template int sample_rows<__nv_bfloat16>(const SampleParams& p, bool in_clusters, void* stream);

}  // namespace photon::cuda
