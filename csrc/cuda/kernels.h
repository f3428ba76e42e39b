// Launchers of the CUDA kernels: one function per op, and one for all linears; `stream` is a
// cudaStream_t. Each enqueues its
// kernels and returns at once with the cudaError_t of the launch as an int (0: fine). Nothing is
// allocated and nothing is synchronized, so that every launcher is safe inside a graph capture; the
// one state that is kept is common/fallbacks.h. Shapes were checked by the caller; params are
// passed to the kernels by value.
#pragma once
#include "common/embedding.h"
#include "common/linear.h"
#include "common/params.h"

namespace photon::cuda {

// Whether the current device has the Hopper kernels: those that ops run where `hopper` is asked for
// and shapes fit.
bool has_hopper();

int begin_step(const BeginStepParams& p, void* stream);
int carry_over_ids(const CarryOverIdsParams& p, void* stream);
int decode_meta_set(const DecodeMetaSetParams& p, void* stream);
int publish(const PublishParams& p, void* stream);

int apply_token_mask(const ApplyTokenMaskParams& p, void* stream);
int sample(const SampleParams& p, void* stream);

int embedding(const EmbeddingParams& p, void* stream);
int select_tokens(const SelectTokensParams& p, void* stream);

int rms_norm(const RmsNormParams& p, void* stream);  // add_rms_norm too: residual != null

int linear(const LinearParams& p, void* stream);
// Why the current device does not read x in fp8 in this call; null: it does.
const char* fp8_tokens_refused(const LinearParams& p);
int quantize_fp8(const QuantizeFp8Params& p, void* stream);
int dequantize(const DequantizeParams& p, void* stream);
int silu_mul(const SiluMulParams& p, void* stream);

int rope_append_kv(const RopeAppendKvParams& p, void* stream);
int chunk_plan(const PagedAttentionParams& p, void* stream);
int paged_attention(const PagedAttentionParams& p, void* stream);
int fused_attention_decode(const FusedAttentionDecodeParams& p, void* stream);

}  // namespace photon::cuda
