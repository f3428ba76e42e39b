// The ops of torch.ops.photon_ext. All write into their arguments and return nothing: no
// allocation, no synchronization, safe in a graph capture. photon_ext/ops.py documents each;
// photon_ext/reference.py is what it must compute.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(photon_ext, m) {
  // step: the head and the tail of a step, over the int32 tables
  m.def(
      "begin_step_(Tensor(a!)[] tables, Tensor(b!) deltas, Tensor segments, Tensor(c!) staged_ids, "
      "Tensor(d!) decode_meta, Tensor(e!) counts) -> ()");
  m.def("carry_over_ids_(Tensor(a!) next, Tensor prev, Tensor idx) -> ()");
  m.def(
      "decode_meta_set_(Tensor(a!) decode_meta, Tensor tokens, Tensor positions, Tensor? "
      "rows=None) -> ()");
  m.def(
      "publish_(Tensor(a!)[] tables, Tensor(b!) out_record, Tensor sampled, Tensor segments, "
      "Tensor? row_errors=None, Tensor? automata=None) -> ()");
  // sample
  m.def(
      "apply_token_mask_(Tensor(a!) logits, Tensor mask, Tensor mask_keys, Tensor segments, Tensor "
      "row_state, "
      "Tensor(b!) row_errors) -> ()");
  m.def(
      "sample_into(Tensor(a!) out, Tensor(b!) logits, Tensor segments, Tensor row_state, "
      "Tensor(c!)? row_errors=None, bool hopper=False, Tensor[]? tables=None, "
      "Tensor(d!)? logprobs=None, Tensor? automata=None) -> ()");
  // embedding
  m.def(
      "embedding_into(Tensor(a!) out, Tensor decode_meta, Tensor weight, Tensor? embeds=None, "
      "Tensor? weight_scale=None, int weight_format=0, Tensor? weight_zero=None, Tensor? "
      "weight_divisor=None) -> ()");
  m.def("select_tokens_into(Tensor(a!) out, Tensor x, Tensor segments) -> ()");
  // norm
  m.def("rms_norm_into(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()");
  m.def(
      "add_rms_norm_into(Tensor(a!) out, Tensor(b!) residual, Tensor x, Tensor weight, float eps) "
      "-> ()");
  // linear
  m.def(
      "linear_into(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias=None, Tensor? "
      "counts=None, bool hopper=False, bool pdl=False, Tensor? weight_scale=None, int "
      "weight_format=0, Tensor? weight_zero=None, Tensor? weight_divisor=None, Tensor? "
      "x_scale=None) -> ()");
  m.def(
      "gemv_into(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias=None, Tensor? "
      "weight_scale=None, int weight_format=0, Tensor? weight_zero=None, Tensor? "
      "weight_divisor=None) -> ()");
  m.def(
      "dequantize_into(Tensor(a!) out, Tensor weight, Tensor? weight_scale=None, int "
      "weight_format=0, Tensor? weight_zero=None, Tensor? weight_divisor=None) -> ()");
  m.def("quantize_fp8_into(Tensor(a!) out, Tensor(b!) scale, Tensor x, Tensor? counts=None) -> ()");
  // mlp
  m.def("silu_mul_into(Tensor(a!) out, Tensor gate_up) -> ()");
  m.def(
      "fused_mlp_into(Tensor(a!) out, Tensor(b!) act, Tensor x, Tensor gate_up_weight, Tensor "
      "down_weight, "
      "Tensor? counts=None) -> ()");
  // fused_linear
  m.def(
      "norm_linear_into(Tensor(a!) out, Tensor x, Tensor norm_weight, float eps, Tensor weight, "
      "Tensor? bias=None, "
      "Tensor? counts=None, bool hopper=False, bool pdl=False, Tensor(b!)? workspace=None, Tensor? "
      "weight_scale=None, int weight_format=0, Tensor? weight_zero=None, Tensor? "
      "weight_divisor=None) -> ()");
  m.def(
      "linear_residual_(Tensor(a!) residual, Tensor x, Tensor weight, Tensor? bias=None, Tensor? "
      "counts=None, bool hopper=False, bool pdl=False, Tensor(b!)? workspace=None, Tensor? "
      "weight_scale=None, int weight_format=0, Tensor? weight_zero=None, Tensor? "
      "weight_divisor=None) -> ()");
  m.def(
      "norm_swiglu_into(Tensor(a!) out, Tensor x, Tensor norm_weight, float eps, Tensor "
      "gate_up_weight, Tensor? bias=None, "
      "Tensor? counts=None, bool hopper=False, bool pdl=False, Tensor(b!)? workspace=None, Tensor? "
      "weight_scale=None, int weight_format=0, Tensor? weight_zero=None, Tensor? "
      "weight_divisor=None) -> ()");
  m.def(
      "swiglu_into(Tensor(a!) out, Tensor x, Tensor gate_up_weight, Tensor? bias=None, Tensor? "
      "counts=None, bool hopper=False, bool pdl=False, Tensor? weight_scale=None, int "
      "weight_format=0, Tensor? weight_zero=None, Tensor? weight_divisor=None, Tensor? "
      "x_scale=None) -> ()");
  m.def(
      "linear_norm_into(Tensor(a!) out, Tensor(b!) residual, Tensor x, Tensor weight, Tensor "
      "norm_weight, float eps, Tensor? bias=None, Tensor? counts=None, bool hopper=False, bool "
      "pdl=False, Tensor(c!)? workspace=None, Tensor? weight_scale=None, int weight_format=0, "
      "Tensor? weight_zero=None, Tensor? weight_divisor=None, Tensor? x_scale=None, Tensor(d!)? "
      "out_scale=None) -> ()");
  // lora
  m.def(
      "lora_shrink_into(Tensor(a!) out, Tensor x, Tensor a, Tensor decode_meta, Tensor row_state) "
      "-> ()");
  m.def(
      "lora_expand_(Tensor(a!) out, Tensor h, Tensor b, Tensor decode_meta, Tensor row_state, int "
      "first_rows) -> ()");
  m.def(
      "lora_link_(Tensor(a!) x, Tensor decode_meta, Tensor row_state, Tensor? before=None, Tensor? "
      "b=None, int first_rows=0, float? eps=None, Tensor(b!)? act=None, Tensor(c!)? after=None, "
      "Tensor? a=None, Tensor? norm_weight=None, bool pdl=False) -> ()");
  // spatial
  m.def(
      "spatial_features_into(Tensor(a!) out, Tensor decode_meta, Tensor coordinate, Tensor size, "
      "int vocab, int bins) -> ()");
  m.def(
      "choose_value_(Tensor(a!) sampled, Tensor logits, Tensor segments, Tensor[] tables, int "
      "vocab) -> ()");
  // attention
  m.def(
      "rope_append_kv_(Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, "
      "Tensor decode_meta, "
      "Tensor? page_table, Tensor cos, Tensor sin, Tensor? q_norm=None, Tensor? k_norm=None, float "
      "eps=1e-6, Tensor? counts=None, Tensor(d!)? kv_scale=None) -> ()");
  m.def(
      "chunk_plan_into(Tensor(a!) plan, Tensor q, Tensor k_cache, Tensor v_cache, Tensor "
      "decode_meta, Tensor? page_table, Tensor workspace, Tensor? counts=None, Tensor? "
      "kv_scale=None, bool exact=False) -> ()");
  m.def(
      "paged_attention_into(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor "
      "decode_meta, Tensor segments, "
      "Tensor? page_table, float scale, bool hopper=False, Tensor? counts=None, Tensor(b!)? "
      "workspace=None, bool pdl=False, Tensor? kv_scale=None, Tensor? plan=None, bool "
      "exact=False) -> ()");
  m.def(
      "fused_attention_decode_into(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor(b!) "
      "k_cache, Tensor(c!) v_cache, "
      "Tensor decode_meta, Tensor? page_table, Tensor cos, Tensor sin, float scale, Tensor? "
      "q_norm=None, Tensor? k_norm=None, "
      "float eps=1e-6, Tensor(d!)? workspace=None, bool hopper=False, bool pdl=False, "
      "Tensor? counts=None, bool batch=False, Tensor(e!)? kv_scale=None) -> ()");
}
