// What a plan says of a call whose memory is not there yet: dense tensors at null, which is aligned
// as memory of torch is. "hopper" is asked for throughout.
#include "python/plans.h"

#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/attention_plan.h"
#include "common/balanced_plan.h"
#include "common/balanced_workspace.h"
#include "common/block_layout.h"
#include "common/linear_plan.h"
#include "common/lora.h"

namespace py = pybind11;
using namespace photon;

namespace {

// A workspace that is there.
alignas(kVectorBytes) float some_workspace[kVectorBytes / sizeof(float)];
const int32_t some_pages[1] = {};

std::optional<std::string> as_python(const Unsupported& why) {
  if (!why) return std::nullopt;
  const std::string reason = why.reason;
  return why.value < 0 ? reason : reason + " (" + std::to_string(why.value) + ")";
}

template <typename Kernel>
std::pair<std::string, std::optional<std::string>> as_python(const KernelChoice<Kernel>& choice) {
  return {name_of(choice.kernel), as_python(choice.why)};
}

DType dtype_named(const std::string& name) {
  if (name == "float32") return DType::kF32;
  if (name == "float16") return DType::kF16;
  if (name == "bfloat16") return DType::kBF16;
  throw py::value_error("dtype is '" + name + "'; give 'float32', 'float16' or 'bfloat16'");
}

LinearParams linear_named(const std::string& op) {
  LinearParams p{};
  for (const Prologue prologue : {Prologue::kNone, Prologue::kRmsNorm}) {
    for (const Epilogue epilogue :
         {Epilogue::kStore, Epilogue::kAdd, Epilogue::kSwiglu, Epilogue::kAddNorm}) {
      p.prologue = prologue;
      p.epilogue = epilogue;
      if (op == linear_op(p)) return p;
    }
  }
  throw py::value_error("op is '" + op + "'; give the name of a linear, as 'norm_linear_into'");
}

WeightFormat format_named(const std::string& name) {
  for (int i = 0; i < kWeightFormats; ++i) {
    if (name == kFormatNames[i]) return static_cast<WeightFormat>(i);
  }
  throw py::value_error("format is '" + name + "'; give one of weight_formats()");
}

// `scale_columns`, `scale_rows`: that share a scale; scales, zero points and offsets lie beside the
// numbers. `fp8_tokens`: x is in fp8.
auto linear_choice(const Gpu& gpu, const std::string& op, const std::string& dtype, int64_t tokens,
                   int64_t n, int64_t k, bool workspace, const std::string& format,
                   int64_t scale_columns, const std::string& scale_dtype, bool zeros, bool offsets,
                   int64_t scale_rows, bool fp8_tokens) {
  LinearParams p = linear_named(op);
  p.weight = dense_weight(nullptr, n, k, k);
  p.weight.format = format_named(format);
  if (p.weight.format != WeightFormat::kDense) {
    const auto [columns, bytes] = block_layout(p.weight.format);
    p.weight.stride = k / columns * bytes;
    p.weight.scales.columns = scale_columns;
    p.weight.scales.rows = scale_rows;
    if (!is_fp4(p.weight.format)) p.weight.scales.dtype = dtype_named(scale_dtype);
    if (zeros) p.weight.scales.zeros = reinterpret_cast<const uint8_t*>(some_workspace);
    if (offsets) p.weight.scales.offsets = some_workspace;
  }
  p.x_scales = fp8_tokens ? some_workspace : nullptr;
  p.workspace = workspace ? some_workspace : nullptr;
  p.tokens = tokens;
  if (p.epilogue != Epilogue::kAdd) p.out_stride = p.outputs();
  if (p.epilogue == Epilogue::kAdd || p.epilogue == Epilogue::kAddNorm) p.residual_stride = n;
  p.x_stride = k;
  p.backend = Backend::kHopper;
  p.dtype = dtype_named(dtype);
  return as_python(plan_linear(p, gpu));
}

struct Heads {
  int64_t q_heads, kv_heads, head_dim;
};

KvCache cache_of(const Heads& heads, int64_t page_size, bool fp8) {
  KvCache c{};
  c.scales = fp8 ? some_workspace : nullptr;
  c.page_table = some_pages;
  c.num_pages = c.rows = c.pages_per_row = 1;
  c.page_size = page_size;
  c.k_head_stride = c.v_head_stride = heads.head_dim;
  c.k_token_stride = c.v_token_stride = heads.kv_heads * heads.head_dim;
  c.k_page_stride = c.v_page_stride = page_size * c.k_token_stride;
  return c;
}

// What the params of both kinds of attention have in common.
template <typename Params>
Params attention_params(const std::string& dtype, int64_t tokens, const Heads& heads,
                        int64_t page_size, bool fp8) {
  Params p{};
  p.cache = cache_of(heads, page_size, fp8);
  p.tokens = tokens;
  p.q_heads = heads.q_heads;
  p.kv_heads = heads.kv_heads;
  p.head_dim = heads.head_dim;
  p.q_head_stride = p.out_head_stride = heads.head_dim;
  p.q_stride = p.out_stride = heads.q_heads * heads.head_dim;
  p.scale = 1.0f;
  p.hopper = true;
  p.dtype = dtype_named(dtype);
  return p;
}

auto decode_choice(const Gpu& gpu, const std::string& dtype, int64_t tokens, int64_t q_heads,
                   int64_t kv_heads, int64_t head_dim, int64_t page_size, bool batch, bool fp8_kv) {
  auto p = attention_params<FusedAttentionDecodeParams>(
      dtype, tokens, {q_heads, kv_heads, head_dim}, page_size, fp8_kv);
  p.k_head_stride = p.v_head_stride = head_dim;
  p.k_stride = p.v_stride = kv_heads * head_dim;
  p.workspace = some_workspace;
  p.batch = batch;
  return as_python(plan_attention(p, gpu));
}

auto paged_choice(const Gpu& gpu, const std::string& dtype, int64_t tokens, int64_t q_heads,
                  int64_t kv_heads, int64_t head_dim, int64_t page_size, bool workspace,
                  bool fp8_kv) {
  auto p = attention_params<PagedAttentionParams>(dtype, tokens, {q_heads, kv_heads, head_dim},
                                                  page_size, fp8_kv);
  p.workspace = workspace ? some_workspace : nullptr;
  return as_python(plan_attention(p, gpu));
}

std::optional<std::string> link_reason(const std::string& dtype,
                                       const std::vector<int64_t>& widths) {
  for (const int64_t width : widths) {
    if (const Unsupported why = link_unsupported(dtype_named(dtype), width)) return as_python(why);
  }
  return std::nullopt;
}

// By name: number, and columns and bytes of a block.
auto weight_formats() {
  std::map<std::string, std::tuple<int, int64_t, int64_t>> found;
  for (int i = 0; i < kWeightFormats; ++i) {
    const auto [columns, bytes] = block_layout(static_cast<WeightFormat>(i));
    found[kFormatNames[i]] = {i, columns, bytes};
  }
  return found;
}

}  // namespace

void bind_plans(py::module_& m) {
  py::class_<Gpu>(m, "Gpu").def(py::init(&gpu_of), py::arg("major"), py::arg("minor"),
                                py::arg("hopper_on_10") = false);
  m.def("weight_formats", &weight_formats);
  m.def(
      "hopper_unsupported", [](const Gpu& gpu) { return as_python(hopper_unsupported(gpu)); },
      py::arg("gpu"));
  m.def("plan_linear", &linear_choice, py::arg("gpu"), py::arg("op"), py::arg("dtype"),
        py::arg("tokens"), py::arg("n"), py::arg("k"), py::arg("workspace") = true,
        py::arg("format") = "dense", py::arg("scale_columns") = kScaleBlock,
        py::arg("scale_dtype") = "float32", py::arg("zeros") = false, py::arg("offsets") = false,
        py::arg("scale_rows") = 1, py::arg("fp8_tokens") = false);
  m.def("plan_decode_attention", &decode_choice, py::arg("gpu"), py::arg("dtype"),
        py::arg("tokens"), py::arg("q_heads"), py::arg("kv_heads"), py::arg("head_dim"),
        py::arg("page_size"), py::arg("batch") = false, py::arg("fp8_kv") = false);
  m.def("plan_paged_attention", &paged_choice, py::arg("gpu"), py::arg("dtype"), py::arg("tokens"),
        py::arg("q_heads"), py::arg("kv_heads"), py::arg("head_dim"), py::arg("page_size"),
        py::arg("workspace") = true, py::arg("fp8_kv") = false);
  m.def("link_unsupported", &link_reason, py::arg("dtype"), py::arg("widths"));
  m.attr("plan_tokens") = py::make_tuple(kNarrowTokens, kStoredTokens, kMidTokens, kWarpTokens - 1,
                                         kBatchWarpTokens - 1, kBalancedTokens);
  m.def("linear_workspace_words", &linear_workspace_words, py::arg("tokens"), py::arg("k"));
  m.def("linear_norm_workspace_words", &linear_norm_workspace_words, py::arg("tokens"),
        py::arg("n"));
  m.def("attention_workspace_words", &attention_workspace_words, py::arg("tokens"),
        py::arg("q_heads"), py::arg("kv_heads"), py::arg("head_dim"));
  m.def("chunk_workspace_words", &chunk_workspace_words, py::arg("head_dim"), py::arg("ctas"),
        py::arg("exact") = false);
  m.def("chunk_plan_words", &chunk_plan_words, py::arg("tokens"), py::arg("ctas"),
        py::arg("exact") = false);
}
