// The CPU kernels: one function per op, and one for all linears, over the params of common. They
// run on the calling thread and the pool of parallel.h, throw nothing but std::bad_alloc (a scratch
// buffer that cannot grow), and never index outside the tables whatever decode_meta holds. A
// token's result depends on its own inputs, shape and length only: never on the other tokens, the
// thread count or the tiling.
#pragma once
#include "common/embedding.h"
#include "common/linear.h"
#include "common/params.h"

namespace photon::cpu {

void begin_step(const BeginStepParams& p);
void carry_over_ids(const CarryOverIdsParams& p);
void decode_meta_set(const DecodeMetaSetParams& p);
void publish(const PublishParams& p);

void apply_token_mask(const ApplyTokenMaskParams& p);
void sample(const SampleParams& p);

void embedding(const EmbeddingParams& p);
void select_tokens(const SelectTokensParams& p);

void rms_norm(const RmsNormParams& p);  // and add_rms_norm, where residual is set
void linear(const LinearParams& p);
void quantize_fp8(const QuantizeFp8Params& p);
void dequantize(const DequantizeParams& p);
void silu_mul(const SiluMulParams& p);

void rope_append_kv(const RopeAppendKvParams& p);
void chunk_plan(const PagedAttentionParams& p);
void paged_attention(const PagedAttentionParams& p);
void fused_attention_decode(const FusedAttentionDecodeParams& p);

}  // namespace photon::cpu
