// rope_append_kv_, chunk_plan_into, paged_attention_into, fused_attention_decode_into: all over KV
// memory in pages.
#include "common/balanced_plan.h"
#include "common/balanced_workspace.h"
#include "common/decode_meta.h"
#include "common/kv_split.h"
#include "ops/dispatch.h"
#include "ops/tables.h"

namespace photon::ops {
namespace {

// [tokens, heads, head_dim] arguments, their head counts agreeing.
struct HeadShape {
  int64_t tokens, q_heads, kv_heads, head_dim;
};

HeadShape check_heads(const Arg& q, const Arg& k_cache) {
  q.floating().rank(3, "[tokens, q heads, head_dim]").last_contiguous();
  const HeadShape shape{q.size(0), q.size(1), k_cache.size(2), q.size(2)};
  if (shape.head_dim < 2 || shape.head_dim > kMaxHeadDim || shape.head_dim % 2 != 0) {
    fail(q.op(), q.name(), " has head_dim ", shape.head_dim, ", expected an even number, 2 to ",
         kMaxHeadDim);
  }
  if (shape.kv_heads < 1 || shape.q_heads % shape.kv_heads != 0) {
    fail(q.op(), q.name(), " has ", shape.q_heads,
         " heads, expected a multiple of the KV heads, which are ", shape.kv_heads,
         " (dimension 2 of ", k_cache.name(),
         "; a [B, H, L, D] cache is passed as its transpose(1, 2))");
  }
  if (!k_cache.is_fp8()) k_cache.dtype_of(q);
  k_cache.shape({Arg::kAny, Arg::kAny, shape.kv_heads, shape.head_dim},
                "[pages, page size, KV heads, head_dim of q]");
  return shape;
}

// The new keys; the op checks later that they are contiguous.
Arg new_keys(Args& arg, const Tensor& k, const Arg& q, const HeadShape& s) {
  return arg("k", k).dtype_of(q).shape({s.tokens, s.kv_heads, s.head_dim},
                                       "[tokens of q, KV heads of k_cache, head_dim of q]");
}

Arg new_values(Args& arg, const Tensor& v, const Arg& q, const HeadShape& s) {
  return arg("v", v)
      .dtype_of(q)
      .shape({s.tokens, s.kv_heads, s.head_dim}, "the shape of k")
      .last_contiguous();
}

Arg output_of(Args& arg, const Tensor& out, const Arg& q, const HeadShape& s) {
  return arg("out", out)
      .dtype_of(q)
      .shape({s.tokens, s.q_heads, s.head_dim}, "the shape of q")
      .last_contiguous();
}

// The cache arguments of one call, checked against each other; the op checks them against q.
struct CacheArgs {
  Arg k, v;
  OptionalArg page_table, scale;

  CacheArgs(Args& arg, const Tensor& k_cache, const Tensor& v_cache,
            const std::optional<Tensor>& table, const std::optional<Tensor>& scale_)
      : k(arg("k_cache", k_cache)),
        v(arg("v_cache", v_cache)),
        page_table(arg("page_table", table)),
        scale(arg("kv_scale", scale_)) {
    if (!k.is_fp8()) k.floating();
    k.rank(4, "[pages, page size, KV heads, head_dim]")
        .at_least(1, 1, "a page's tokens")
        .last_contiguous();
    v.dtype_of(k)
        .shape({k.size(0), k.size(1), k.size(2), k.size(3)}, "the shape of k_cache")
        .last_contiguous();
    if (page_table) page_table->int32().rank(2, "[rows, pages per row]").contiguous();
    check_scale();
  }

  KvCache params() const {
    KvCache cache{};
    cache.k = k.data<void>();
    cache.v = v.data<void>();
    cache.page_table = page_table.data<int32_t>();
    cache.num_pages = k.size(0);
    cache.page_size = k.size(1);
    cache.rows = page_table ? page_table->size(0) : k.size(0);
    cache.pages_per_row = page_table ? page_table->size(1) : 1;
    cache.k_page_stride = k.stride(0);
    cache.k_token_stride = k.stride(1);
    cache.k_head_stride = k.stride(2);
    cache.v_page_stride = v.stride(0);
    cache.v_token_stride = v.stride(1);
    cache.v_head_stride = v.stride(2);
    cache.scales = scale.data<float>();
    cache.scale_heads = k.size(2);
    return cache;
  }

 private:
  void check_scale() const {
    constexpr const char* kShape = "[pages, 2, KV heads, page size] of k_cache";
    if (k.is_fp8() && !scale)
      fail(k.op(), "kv_scale is None, expected float32 ", kShape, ", because k_cache is fp8");
    if (!scale) return;
    if (!k.is_fp8())
      fail(k.op(), "kv_scale is a tensor, expected None, because k_cache is not float8_e4m3fn");
    scale->float32().shape({k.size(0), 2, k.size(2), k.size(1)}, kShape).contiguous();
  }
};

template <typename Params>
void set_queries(Params& p, const Arg& q, const HeadShape& shape) {
  p.q = q.data<void>();
  p.tokens = shape.tokens;
  p.q_heads = shape.q_heads;
  p.kv_heads = shape.kv_heads;
  p.head_dim = shape.head_dim;
  p.q_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  p.dtype = q.dtype();
}

template <typename Params>
void set_new_vectors(Params& p, const Arg& k, const Arg& v) {
  p.k = k.data<void>();
  p.v = v.data<void>();
  p.k_stride = k.stride(0);
  p.k_head_stride = k.stride(1);
  p.v_stride = v.stride(0);
  p.v_head_stride = v.stride(1);
}

// The rotation arguments of one call, checked against q.
struct RopeArgs {
  Arg cos, sin;
  OptionalArg q_norm, k_norm;

  RopeArgs(Args& arg, const Arg& q, const Tensor& cos_, const Tensor& sin_,
           const std::optional<Tensor>& q_norm_, const std::optional<Tensor>& k_norm_)
      : cos(arg("cos", cos_)),
        sin(arg("sin", sin_)),
        q_norm(arg("q_norm", q_norm_)),
        k_norm(arg("k_norm", k_norm_)) {
    cos.float32().shape({Arg::kAny, q.size(2)}, "[positions, head_dim of q]").contiguous();
    sin.float32().shape({cos.size(0), q.size(2)}, "the shape of cos").contiguous();
    if (q_norm) q_norm->dtype_of(q).shape({q.size(2)}, "[head_dim of q]").contiguous();
    if (k_norm) k_norm->dtype_of(q).shape({q.size(2)}, "[head_dim of q]").contiguous();
  }

  RopeParams params(double eps) const {
    RopeParams rope{};
    rope.cos = cos.data<float>();
    rope.sin = sin.data<float>();
    rope.q_norm = q_norm.data<void>();
    rope.k_norm = k_norm.data<void>();
    rope.max_len = cos.size(0);
    rope.eps = check_epsilon(cos.op(), eps);
    return rope;
  }
};

// counts of a mixed step, whose first entry counts its decode tokens. Absent: the op has all
// tokens.
OptionalArg step_counts(Args& arg, const std::optional<Tensor>& counts_) {
  const OptionalArg counts = arg("counts", counts_);
  if (counts)
    counts->int32()
        .rank(1, "[decode tokens]")
        .at_least(0, 1, "the number of decode tokens")
        .contiguous();
  return counts;
}

void rope_append_kv(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& k_cache,
                    const Tensor& v_cache, const Tensor& decode_meta_,
                    const std::optional<Tensor>& page_table, const Tensor& cos, const Tensor& sin,
                    const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                    double eps, const std::optional<Tensor>& counts_,
                    const std::optional<Tensor>& kv_scale) {
  Args arg("rope_append_kv_");
  const Arg q = arg("q", q_);
  const CacheArgs cache(arg, k_cache, v_cache, page_table, kv_scale);
  const HeadShape shape = check_heads(q, cache.k);
  const Arg k = new_keys(arg, k_, q, shape), v = new_values(arg, v_, q, shape);
  const Arg decode_meta = meta_of(arg, decode_meta_, shape.tokens, "[tokens of q, 4]");
  const RopeArgs rope(arg, q, cos, sin, q_norm, k_norm);
  k.last_contiguous();
  const OptionalArg counts = step_counts(arg, counts_);
  const Arg *table = cache.page_table.get(), *q_norm_arg = rope.q_norm.get(),
            *k_norm_arg = rope.k_norm.get(), *counts_arg = counts.get(),
            *scale_arg = cache.scale.get();
  q.written({&k, &v, &cache.k, &cache.v, &decode_meta, table, &rope.cos, &rope.sin, q_norm_arg,
             k_norm_arg, counts_arg, scale_arg});
  cache.k.written({&k, &v, &cache.v, &decode_meta, table, &rope.cos, &rope.sin, q_norm_arg,
                   k_norm_arg, counts_arg, scale_arg});
  cache.v.written({&k, &v, &decode_meta, table, &rope.cos, &rope.sin, q_norm_arg, k_norm_arg,
                   counts_arg, scale_arg});
  if (scale_arg != nullptr) {
    scale_arg->written(
        {&k, &v, &decode_meta, table, &rope.cos, &rope.sin, q_norm_arg, k_norm_arg, counts_arg});
  }

  RopeAppendKvParams p{};
  p.decode_meta = decode_meta.data<int32_t>();
  p.counts = counts.data<int32_t>();
  p.cache = cache.params();
  p.rope = rope.params(eps);
  set_queries(p, q, shape);
  set_new_vectors(p, k, v);
  PHOTON_DISPATCH(rope_append_kv, q, p);
}

// The workspace of balanced attention.
void check_chunk_workspace(const Arg& workspace, const HeadShape& shape, bool exact) {
  workspace.float32()
      .rank(1, "[words]")
      .contiguous()
      .at_least(0, chunk_workspace_words(shape.head_dim, 1, exact),
                "chunk_workspace_words of one CTA");
}

// The plan of calls with this workspace.
void check_plan(const Arg& plan, const Arg& workspace, const HeadShape& shape, bool exact) {
  const int64_t ctas = workspace_ctas(workspace.size(0), shape.head_dim, exact);
  plan.int32()
      .rank(1, "[words]")
      .contiguous()
      .at_least(0, chunk_plan_words(shape.tokens, ctas, exact),
                "chunk_plan_words of the tokens, and of the CTAs that the workspace is for");
}

void chunk_plan(const Tensor& plan_, const Tensor& q_, const Tensor& k_cache, const Tensor& v_cache,
                const Tensor& decode_meta_, const std::optional<Tensor>& page_table,
                const Tensor& workspace_, const std::optional<Tensor>& counts_,
                const std::optional<Tensor>& kv_scale, bool exact) {
  Args arg("chunk_plan_into");
  const Arg q = arg("q", q_);
  const CacheArgs cache(arg, k_cache, v_cache, page_table, kv_scale);
  const HeadShape shape = check_heads(q, cache.k);
  const Arg decode_meta = meta_of(arg, decode_meta_, shape.tokens, "[tokens of q, 4]");
  const Arg workspace = arg("workspace", workspace_), plan = arg("plan", plan_);
  check_chunk_workspace(workspace, shape, exact);
  check_plan(plan, workspace, shape, exact);
  const OptionalArg counts = step_counts(arg, counts_);
  plan.written({&q, &cache.k, &cache.v, &decode_meta, cache.page_table.get(), &workspace,
                counts.get(), cache.scale.get()});

  PagedAttentionParams p{};
  p.decode_meta = decode_meta.data<int32_t>();
  p.counts = counts.data<int32_t>();
  p.workspace = workspace.data<float>();
  p.workspace_words = workspace.size(0);
  p.plan = plan.data<int32_t>();
  p.cache = cache.params();
  set_queries(p, q, shape);
  p.scale = 1.0f;  // any that attention takes
  p.hopper = true;
  p.exact = exact;
  PHOTON_DISPATCH(chunk_plan, plan, p);
}

void paged_attention(const Tensor& out_, const Tensor& q_, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& decode_meta_, const Tensor& segments_,
                     const std::optional<Tensor>& page_table, double scale, bool hopper,
                     const std::optional<Tensor>& counts_, const std::optional<Tensor>& workspace_,
                     bool pdl, const std::optional<Tensor>& kv_scale,
                     const std::optional<Tensor>& plan_, bool exact) {
  Args arg("paged_attention_into");
  const Arg q = arg("q", q_);
  const CacheArgs cache(arg, k_cache, v_cache, page_table, kv_scale);
  const HeadShape shape = check_heads(q, cache.k);
  const Arg decode_meta = meta_of(arg, decode_meta_, shape.tokens, "[tokens of q, 4]");
  const Arg segments = segments_of(arg, segments_);
  const Arg out = output_of(arg, out_, q, shape);
  const OptionalArg counts = step_counts(arg, counts_);
  const OptionalArg workspace = arg("workspace", workspace_), plan = arg("plan", plan_);
  if (workspace) {
    check_chunk_workspace(*workspace.get(), shape, exact);
    if (!plan)
      fail(arg.op(),
           "plan is None, expected what chunk_plan_into has written, because workspace is "
           "a tensor");
    check_plan(*plan.get(), *workspace.get(), shape, exact);
  }
  const Arg *table = cache.page_table.get(), *counts_arg = counts.get(),
            *scale_arg = cache.scale.get(), *plan_arg = plan.get();
  out.written(
      {&q, &cache.k, &cache.v, &decode_meta, &segments, table, counts_arg, scale_arg, plan_arg});
  if (workspace) {
    workspace->written({&out, &q, &cache.k, &cache.v, &decode_meta, &segments, table, counts_arg,
                        scale_arg, plan_arg});
  }

  PagedAttentionParams p{};
  p.out = out.data<void>();
  p.decode_meta = decode_meta.data<int32_t>();
  p.segments = segments.data<int32_t>();
  p.counts = counts.data<int32_t>();
  p.workspace = workspace.data<float>();
  p.workspace_words = workspace ? workspace->size(0) : 0;
  p.plan = plan.data<int32_t>();
  p.cache = cache.params();
  set_queries(p, q, shape);
  p.num_segments = segments.size(0);
  p.out_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  p.scale = check_scale(out.op(), scale);
  p.hopper = hopper;
  p.pdl = pdl;
  p.exact = exact;
  PHOTON_DISPATCH(paged_attention, out, p);
}

// `words`: what the shapes of this call need.
void check_workspace(const Arg& q, const OptionalArg& workspace, int64_t words, bool hopper) {
  if (!workspace) {
    if (!hopper) return;
    fail(q.op(), "workspace is not given, expected float32 zeros [", words,
         "] or more (attention_workspace_words), because hopper is set");
  }
  workspace->float32()
      .rank(1, "[words]")
      .contiguous()
      .at_least(0, words, "attention_workspace_words of this call's shapes");
}

void fused_attention_decode(const Tensor& out_, const Tensor& q_, const Tensor& k_,
                            const Tensor& v_, const Tensor& k_cache, const Tensor& v_cache,
                            const Tensor& decode_meta_, const std::optional<Tensor>& page_table,
                            const Tensor& cos, const Tensor& sin, double scale,
                            const std::optional<Tensor>& q_norm,
                            const std::optional<Tensor>& k_norm, double eps,
                            const std::optional<Tensor>& workspace_, bool hopper, bool pdl,
                            const std::optional<Tensor>& counts_, bool batch,
                            const std::optional<Tensor>& kv_scale) {
  Args arg("fused_attention_decode_into");
  const Arg q = arg("q", q_);
  const CacheArgs cache(arg, k_cache, v_cache, page_table, kv_scale);
  const HeadShape shape = check_heads(q, cache.k);
  const Arg k = new_keys(arg, k_, q, shape), v = new_values(arg, v_, q, shape);
  const Arg decode_meta = meta_of(arg, decode_meta_, shape.tokens, "[tokens of q, 4]");
  const Arg out = output_of(arg, out_, q, shape);
  const RopeArgs rope(arg, q, cos, sin, q_norm, k_norm);
  k.last_contiguous();
  const OptionalArg workspace = arg("workspace", workspace_);
  check_workspace(
      q, workspace,
      attention_workspace_words(shape.tokens, shape.q_heads, shape.kv_heads, shape.head_dim),
      hopper);
  const OptionalArg counts = step_counts(arg, counts_);
  const Arg *table = cache.page_table.get(), *q_norm_arg = rope.q_norm.get(),
            *k_norm_arg = rope.k_norm.get(), *counts_arg = counts.get(),
            *scale_arg = cache.scale.get();
  out.written({&q, &k, &v, &cache.k, &cache.v, &decode_meta, table, &rope.cos, &rope.sin,
               q_norm_arg, k_norm_arg, counts_arg, scale_arg});
  cache.k.written({&q, &k, &v, &cache.v, &decode_meta, table, &rope.cos, &rope.sin, q_norm_arg,
                   k_norm_arg, counts_arg, scale_arg});
  cache.v.written({&q, &k, &v, &decode_meta, table, &rope.cos, &rope.sin, q_norm_arg, k_norm_arg,
                   counts_arg, scale_arg});
  if (scale_arg != nullptr) {
    scale_arg->written({&q, &k, &v, &decode_meta, table, &rope.cos, &rope.sin, q_norm_arg,
                        k_norm_arg, counts_arg});
  }
  if (workspace) {
    workspace->written({&out, &q, &k, &v, &cache.k, &cache.v, &decode_meta, table, &rope.cos,
                        &rope.sin, q_norm_arg, k_norm_arg, counts_arg, scale_arg});
  }

  FusedAttentionDecodeParams p{};
  p.out = out.data<void>();
  p.decode_meta = decode_meta.data<int32_t>();
  p.counts = counts.data<int32_t>();
  p.cache = cache.params();
  p.rope = rope.params(eps);
  set_queries(p, q, shape);
  set_new_vectors(p, k, v);
  p.out_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  p.workspace = workspace.data<float>();
  p.workspace_words = workspace ? workspace->size(0) : 0;
  p.hopper = hopper;
  p.pdl = pdl;
  p.batch = batch;
  p.scale = check_scale(out.op(), scale);
  PHOTON_DISPATCH(fused_attention_decode, out, p);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("rope_append_kv_", TORCH_BOX(&rope_append_kv));
  m.impl("chunk_plan_into", TORCH_BOX(&chunk_plan));
  m.impl("paged_attention_into", TORCH_BOX(&paged_attention));
  m.impl("fused_attention_decode_into", TORCH_BOX(&fused_attention_decode));
}

}  // namespace
}  // namespace photon::ops

PHOTON_REGISTER(photon::ops::register_ops)
