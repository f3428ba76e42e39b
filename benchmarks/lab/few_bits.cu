// Linears of up to 8 tokens whose weights have 4 or 8 bits: how much of the bus they reach. One
// kernel, y[t, r] = sum over slices of 64 columns of scale[r, slice] * (x[t] . w[r]), decoded:
//
//     nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a benchmarks/lab/few_bits.cu -o
//     /tmp/few_bits && /tmp/few_bits
//
// It checks the kernel against the host, then times it at the shapes of an 8B, behind itself under
// programmatic launch, weights from memory, beside a kernel that only reads the same bytes.
//
// Weights are prepacked: a stage of the ring is one run of bytes, which one bulk copy brings (no
// tensor map). It has T tiles of 16 rows by 512 columns, then their scales, one a row and 128
// columns. A lane's 16 bytes are the left operands of four matrix instructions (int4), or of two
// (fp8): the columns of a K block are permuted so that the lane's part of x is 32 consecutive
// bytes. int4: (w >> 4 i) & 0x000f000f | 0x43004300 is 128 + q in bfloat16; 128 and the zero point
// 8 are taken out with the sum of x, which an instruction with a left operand of ones gives where
// it is needed. fp8: sign and magnitude are moved to where bfloat16 has them; 2^120 is left to the
// end (kFp8), or is a multiplication (kFp8Mul). Each slice is summed from zero, and enters the sum
// of its row by one fma with its scale: the number of tokens changes no bits.
//
// What it found stands in benchmarks/FINDINGS.md, "Weights of few bits".
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>
#define CHECK(x)                                                       \
  do {                                                                 \
    cudaError_t e = (x);                                               \
    if (e != cudaSuccess) {                                            \
      printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e)); \
      exit(1);                                                         \
    }                                                                  \
  } while (0)

constexpr int kWarps = 8, kThreads = kWarps * 32, kChunk = 512;
enum Format {
  kInt4,
  kFp8,
  kFp8Mul
};  // kFp8Mul: 2^120 by a multiplication of each pair; kFp8: it is in the scale
template <int F>
constexpr int kTileBytes = F == kInt4 ? 512 : 1024;  // 16 rows x 64 columns
template <int F>
constexpr int kLoads = kTileBytes<F> / 512;

template <int F, int T>
struct Stage {  // 16 T rows x 512 columns: [K block][tile][lane]16 x kLoads, then scales [group of
                // 128][tile][8] bf16x2 of rows g, g + 8
  static constexpr int weights = 8 * T * kTileBytes<F>, scales = 4 * T * 32,
                       bytes = weights + scales;
};

struct Params {
  const unsigned char* weight;
  const __nv_bfloat16* x;
  __nv_bfloat16* out;
  int groups, chunks, n, k, tokens, stages;
};

__device__ inline uint32_t smem(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ inline void init(uint64_t* b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem(b)), "r"(n));
}
__device__ inline void expect(uint64_t* b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem(b)), "r"(n)
               : "memory");
}
__device__ inline void arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem(b)) : "memory");
}
__device__ inline void wait(uint64_t* b, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra "
      "L;\nD:\n}" ::"r"(smem(b)),
      "r"(parity)
      : "memory");
}
__device__ inline void copy(void* to, const void* from, int bytes, uint64_t* b, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(smem(to)),
      "l"(from), "r"(bytes), "r"(smem(b)), "l"(policy)
      : "memory");
}
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline uint32_t times(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
template <int kLut>
__device__ inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(kLut));
  return r;
}

// The left operand of one instruction from 4 bytes (int4), or 8.
__device__ inline void decode4(uint32_t w, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = lop3<0xea>(w >> (4 * i), 0x000f000fu, 0x43004300u);  // (a & b) | c
}
template <bool kMul>
__device__ inline void decode8(uint32_t w, uint32_t& low, uint32_t& high) {
  low = lop3<0xf8>((w << 8) & 0x80008000u, w << 4, 0x07f007f0u);  // a | (b & c)
  high = lop3<0xf8>(w & 0x80008000u, w >> 4, 0x07f007f0u);
  if (kMul) {
    low = times(low, 0x7b807b80u);
    high = times(high, 0x7b807b80u);
  }
}

template <int F, int T, int G>  // G: row groups of a pass
__global__ void __launch_bounds__(kThreads, 2) linear(const __grid_constant__ Params p) {
  using S = Stage<F, T>;
  extern __shared__ __align__(128) unsigned char shared[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared + p.stages * S::bytes);
  uint64_t* const empty = full + p.stages;
  float* const partial =
      reinterpret_cast<float*>(empty + p.stages);  // [tile of a round][warp][token][18]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x < p.stages) {
    init(full + threadIdx.x, 1);
    init(empty + threadIdx.x, kWarps);
  }
  asm volatile("fence.mbarrier_init.release.cluster;");
  __syncthreads();
  const int each = p.groups / gridDim.x, extra = p.groups % gridDim.x, b = blockIdx.x;
  const int first = b * each + min(b, extra), count = each + (b < extra ? 1 : 0);
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  int fill_pass = 0, fill_chunk = 0,
      fill_group = 0;  // what is to be copied next; all warps count, one copies
  const auto fill = [&](int stage, int parity, int turn) {
    if (fill_pass >= count) return;
    if (turn == warp && lane == 0) {
      wait(empty + stage, parity);
      expect(full + stage, S::bytes);
      copy(shared + stage * S::bytes,
           p.weight +
               (static_cast<int64_t>(first + fill_pass + fill_group) * p.chunks + fill_chunk) *
                   S::bytes,
           S::bytes, full + stage, policy);
    }
    if (++fill_group == min(G, count - fill_pass)) {
      fill_group = 0;
      if (++fill_chunk == p.chunks) {
        fill_chunk = 0;
        fill_pass += G;
      }
    }
  };
  for (int i = 0; i < p.stages; ++i) fill(i, 1, i % kWarps);
  int use = 0;
  const __nv_bfloat16* const x = p.x + static_cast<int64_t>(g) * p.k + warp * 64 + t * 16;
  const bool active = g < p.tokens;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int stage = 0, parity = 0;
  for (int pass = 0; pass < count; pass += G) {
    float sums[G][T][4] = {};
    uint4 next[2] = {};
    auto load = [&](int c) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        next[h] = active && c < p.chunks ? *reinterpret_cast<const uint4*>(x + c * kChunk + h * 8)
                                         : make_uint4(0, 0, 0, 0);
    };
    load(0);
#pragma unroll 1
    for (int c = 0; c < p.chunks; ++c) {
      const uint32_t v[8] = {next[0].x, next[0].y, next[0].z, next[0].w,
                             next[1].x, next[1].y, next[1].z, next[1].w};
      load(c + 1);
      float of_x[4] = {};
      if (F == kInt4) {
        const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
        for (int j = 0; j < 4; ++j) mma(of_x, ones, v[2 * j], v[2 * j + 1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) of_x[j] *= -136.0f;
      }
#pragma unroll
      for (int i = 0; i < G; ++i) {
        if (pass + i >= count) break;
        wait(full + stage, parity);
        const unsigned char* const at = shared + stage * S::bytes;
        uint4 w[T][kLoads<F>];
        uint32_t scale[T];
#pragma unroll
        for (int m = 0; m < T; ++m) {
#pragma unroll
          for (int l = 0; l < kLoads<F>; ++l)
            w[m][l] = *reinterpret_cast<const uint4*>(at + ((warp * T + m) * kLoads<F> + l) * 512 +
                                                      lane * 16);
          scale[m] = *reinterpret_cast<const uint32_t*>(at + S::weights +
                                                        ((warp / 2) * T + m) * 32 + g * 4);
        }
        float acc[T][4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int m = 0; m < T; ++m) {
            uint32_t a[4];
            if constexpr (F == kInt4) {
              decode4(j == 0 ? w[m][0].x : j == 1 ? w[m][0].y : j == 2 ? w[m][0].z : w[m][0].w, a);
            } else {
              const uint4 u = w[m][j / 2];
              decode8<F == kFp8Mul>(j % 2 ? u.z : u.x, a[0], a[1]);
              decode8<F == kFp8Mul>(j % 2 ? u.w : u.y, a[2], a[3]);
            }
            mma(acc[m], a, v[2 * j], v[2 * j + 1]);
          }
        __syncwarp();
        if (lane == 0) arrive(empty + stage);
        if (use > 0)
          fill(stage > 0 ? stage - 1 : p.stages - 1, stage > 0 ? parity : parity ^ 1, use % kWarps);
        ++use;
#pragma unroll
        for (int m = 0; m < T; ++m) {
          const float low = __uint_as_float(scale[m] << 16),
                      high = __uint_as_float(scale[m] & 0xffff0000u);
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sums[i][m][j] = fmaf(j < 2 ? low : high, F == kInt4 ? acc[m][j] + of_x[j] : acc[m][j],
                                 sums[i][m][j]);
        }
        if (++stage == p.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    // sums of the warps; a round has T tiles
#pragma unroll
    for (int i = 0; i < G; ++i) {
      if (pass + i >= count) break;
      asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory");
#pragma unroll
      for (int m = 0; m < T; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int token = 2 * t + j % 2;
          if (token < p.tokens)
            partial[((m * kWarps + warp) * p.tokens + token) * 18 + g + (j / 2) * 8] =
                sums[i][m][j];
        }
      asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory");
      for (int e = threadIdx.x; e < T * 16 * p.tokens; e += kWarps * 32) {
        const int row = e % 16, token = e / 16 % p.tokens, m = e / 16 / p.tokens;
        float sum = 0;
#pragma unroll
        for (int q = 0; q < kWarps; ++q)
          sum += partial[((m * kWarps + q) * p.tokens + token) * 18 + row];
        if (F == kFp8) sum *= 0x1p120f;
        p.out[static_cast<int64_t>(token) * p.n + ((first + pass + i) * T + m) * 16 + row] =
            __float2bfloat16(sum);
      }
    }
  }
}

__global__ void __launch_bounds__(512) read(const uint4* from, int64_t count, uint4* out) {
  asm volatile("griddepcontrol.launch_dependents;");
  uint4 a = {};
  int64_t i = blockIdx.x * 512 + threadIdx.x;
  const int64_t step = gridDim.x * 512;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      a.x ^= v[j].x;
      a.y ^= v[j].y;
      a.z ^= v[j].z;
      a.w ^= v[j].w;
    }
  }
  for (; i < count; i += step) a.x ^= __ldcs(from + i).x;
  if ((a.x ^ a.y ^ a.z ^ a.w) == 0x12345678u) *out = a;
}

// --- host ---
static float e4m3(uint8_t b) {
  const int e = b >> 3 & 15, m = b & 7;
  const float v = e ? std::ldexp(1 + m / 8.0f, e - 7) : std::ldexp(m / 8.0f, -6);
  return b & 128 ? -v : v;
}
// Column of a 64-column slice that value v (0, 1: lower columns; 2, 3: upper) of lane thread t is,
// in instruction j.
static int column(int j, int t, int v) { return 16 * t + 4 * j + v; }

template <int F, int T>
std::vector<unsigned char> pack(const std::vector<uint8_t>& q, const std::vector<float>& scales,
                                int n, int k) {
  using S = Stage<F, T>;
  const int chunks = k / kChunk, groups = n / (16 * T);
  std::vector<unsigned char> out(static_cast<size_t>(groups) * chunks * S::bytes);
  for (int gr = 0; gr < groups; ++gr)
    for (int c = 0; c < chunks; ++c) {
      unsigned char* st = out.data() + (static_cast<size_t>(gr) * chunks + c) * S::bytes;
      for (int kb = 0; kb < 8; ++kb)
        for (int m = 0; m < T; ++m)
          for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4, t = lane % 4, row = (gr * T + m) * 16 + g,
                      col = c * kChunk + kb * 64;
            for (int j = 0; j < 4; ++j)
              for (int r = 0; r < 4;
                   ++r)  // register: rows g, g + 8, then the same of the upper columns
                for (int h = 0; h < 2; ++h) {  // half of it
                  const uint8_t v = q[static_cast<size_t>(row + (r % 2) * 8) * k + col +
                                      column(j, t, (r / 2) * 2 + h)];
                  if (F == kInt4) {
                    uint32_t& word =
                        reinterpret_cast<uint32_t*>(st + ((kb * T + m) * 32 + lane) * 16)[j];
                    word |= static_cast<uint32_t>(v) << (4 * r + 16 * h);
                  } else {
                    uint32_t* words = reinterpret_cast<uint32_t*>(
                                          st + ((kb * T + m) * 2 + j / 2) * 512 + lane * 16) +
                                      j % 2 * 2;
                    words[r / 2] |=
                        static_cast<uint32_t>(v)
                        << (8 * (r % 2) + 16 * h);  // low byte: rows g, high byte: g + 8
                  }
                }
          }
      for (int s = 0; s < 4; ++s)
        for (int m = 0; m < T; ++m)
          for (int r = 0; r < 16; ++r) {
            const __nv_bfloat16 v = __float2bfloat16(
                scales[static_cast<size_t>((gr * T + m) * 16 + r) * (k / 128) + c * 4 + s]);
            memcpy(st + S::weights + (s * T + m) * 32 + (r % 8) * 4 + (r / 8) * 2, &v, 2);
          }
    }
  return out;
}

int sms = 132;
template <int F, int T, int G>
int stages_for(int tokens) {
  const int rest = T * kWarps * tokens * 18 * 4;
  return std::min((112 * 1024 - rest - 512) / Stage<F, T>::bytes, 24);
}
template <int F, int T, int G>
void launch(Params p, cudaStream_t s) {
  p.stages = stages_for<F, T, G>(p.tokens);
  cudaLaunchConfig_t c = {};
  c.gridDim = sms;
  c.blockDim = kThreads;
  c.dynamicSmemBytes = 112 * 1024;
  c.stream = s;
  cudaLaunchAttribute a;
  a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a.val.programmaticStreamSerializationAllowed = 1;
  c.attrs = &a;
  c.numAttrs = 1;
  static bool once = [] {
    CHECK(cudaFuncSetAttribute(linear<F, T, G>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               112 * 1024));
    return true;
  }();
  (void)once;
  CHECK(cudaLaunchKernelEx(&c, linear<F, T, G>, p));
}

template <typename Run>
double per_launch(int launches, Run run) {  // us, graph of launches, median of 15
  cudaStream_t s;
  CHECK(cudaStreamCreate(&s));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; ++i) run(i, s);
  CHECK(cudaStreamEndCapture(s, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t e0, e1;
  cudaEventCreate(&e0);
  cudaEventCreate(&e1);
  std::vector<float> all;
  for (int r = 0; r < 18; ++r) {
    cudaEventRecord(e0, s);
    CHECK(cudaGraphLaunch(exec, s));
    cudaEventRecord(e1, s);
    CHECK(cudaStreamSynchronize(s));
    float ms;
    cudaEventElapsedTime(&ms, e0, e1);
    if (r >= 3) all.push_back(ms);
  }
  std::sort(all.begin(), all.end());
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(s);
  return 1e3 * all[all.size() / 2] / launches;
}

template <int F, int T, int G>
void check(int n, int k, int tokens) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> q(static_cast<size_t>(n) * k);
  std::vector<float> scales(static_cast<size_t>(n) * k / 128), x(static_cast<size_t>(tokens) * k);
  for (auto& v : q) {
    v = F == kInt4 ? rng() & 15 : rng() & 255;
    if (F != kInt4 && (v & 127) == 127) v = 0;
  }
  for (auto& v : scales)
    v = __bfloat162float(__float2bfloat16(0.01f + 0.02f * (rng() % 1000) / 1000));
  std::vector<__nv_bfloat16> xb(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    xb[i] = __float2bfloat16(normal(rng) * (i % 7 == 0 ? 1e-3f : 1.0f));
    x[i] = __bfloat162float(xb[i]);
  }
  const auto packed = pack<F, T>(q, scales, n, k);
  unsigned char* w;
  __nv_bfloat16 *dx, *out;
  CHECK(cudaMalloc(&w, packed.size()));
  CHECK(cudaMalloc(&dx, x.size() * 2));
  CHECK(cudaMalloc(&out, static_cast<size_t>(n) * tokens * 2));
  CHECK(cudaMemcpy(w, packed.data(), packed.size(), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(dx, xb.data(), x.size() * 2, cudaMemcpyHostToDevice));
  launch<F, T, G>({w, dx, out, n / (16 * T), k / kChunk, n, k, tokens, 0}, nullptr);
  CHECK(cudaDeviceSynchronize());
  std::vector<__nv_bfloat16> got(static_cast<size_t>(n) * tokens);
  CHECK(cudaMemcpy(got.data(), out, got.size() * 2, cudaMemcpyDeviceToHost));
  double worst = 0, size = 0;
  for (int t = 0; t < tokens; ++t)
    for (int r = 0; r < n; ++r) {
      double sum = 0, all = 0;
      for (int c = 0; c < k; ++c) {
        const double v = (F == kInt4 ? q[static_cast<size_t>(r) * k + c] - 8.0
                                     : e4m3(q[static_cast<size_t>(r) * k + c])) *
                         scales[static_cast<size_t>(r) * (k / 128) + c / 128] *
                         x[static_cast<size_t>(t) * k + c];
        sum += v;
        all += v * v;
      }
      worst =
          std::max(worst, std::abs(sum - __bfloat162float(got[static_cast<size_t>(t) * n + r])) /
                              std::sqrt(all));
      size = std::max(size, std::abs(sum));
    }
  printf(
      "check format %d tile %d pass %d, %d x %d, %d tokens: worst error %.2e of the products' norm "
      "%s\n",
      F, T, G, n, k, tokens, worst, worst < 1.5e-2 ? "ok" : "WRONG");
  cudaFree(w);
  cudaFree(dx);
  cudaFree(out);
}

unsigned char* pool;
constexpr int64_t kPool = 6ll << 30;
__nv_bfloat16 *px, *pout;
template <int F, int T, int G>
void time_one(const char* what, int n, int k, int tokens) {
  const int64_t bytes = static_cast<int64_t>(n / (16 * T)) * (k / kChunk) * Stage<F, T>::bytes;
  const int copies = static_cast<int>(std::min<int64_t>(kPool / bytes, 40));
  const auto at = [&](int i) {
    return pool + static_cast<int64_t>(i % copies) * (bytes / 128 * 128);
  };
  const double us = per_launch(40, [&](int i, cudaStream_t s) {
    launch<F, T, G>({at(i), px, pout, n / (16 * T), k / kChunk, n, k, tokens, 0}, s);
  });
  const double floor = per_launch(40, [&](int i, cudaStream_t s) {
    cudaLaunchConfig_t c = {};
    c.gridDim = sms * 2;
    c.blockDim = 512;
    c.stream = s;
    cudaLaunchAttribute a;
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
    c.attrs = &a;
    c.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&c, read, reinterpret_cast<const uint4*>(at(i)), bytes / 16,
                             reinterpret_cast<uint4*>(pout)));
  });
  printf(
      "%-8s format %d tile %2d rows, pass %d, stages %2d, tokens %d: %7.2f us, %5.2f TB/s = %.0f "
      "%% of 4.53; read alone %.2f us\n",
      what, F, 16 * T, G, stages_for<F, T, G>(tokens), tokens, us, bytes / us / 1e6,
      100 * bytes / us / 1e6 / 4.53, floor);
  fflush(stdout);
}
template <int F>
void both(int tokens) {
  time_one<F, 4, 3>("gate/up", 24576, 4096, tokens);
  time_one<F, 2, 3>("gate/up", 24576, 4096, tokens);
  time_one<F, 2, 6>("gate/up", 24576, 4096, tokens);
  time_one<F, 4, 3>("head", 151936 / 64 * 64, 4096, tokens);
  time_one<F, 4, 2>("head", 151936 / 64 * 64, 4096, tokens);
  time_one<F, 1, 3>("qkv", 6144, 4096, tokens);
  time_one<F, 1, 2>("o", 4096, 4096, tokens);
  time_one<F, 1, 2>("down", 4096, 12288, tokens);
}
int main() {
  cudaDeviceProp d;
  CHECK(cudaGetDeviceProperties(&d, 0));
  sms = d.multiProcessorCount;
  printf("%s %d SMs\n", d.name, sms);
  for (int tokens : {1, 3, 8}) {
    check<kInt4, 4, 3>(64 * 140, 1024, tokens);
    check<kInt4, 1, 3>(16 * 300, 512, tokens);
    check<kInt4, 2, 6>(32 * 1000, 512, tokens);
    check<kFp8, 4, 3>(64 * 140, 1024, tokens);
    check<kFp8Mul, 4, 3>(64 * 140, 1024, tokens);
    check<kFp8Mul, 1, 2>(16 * 300, 1536, tokens);
  }
  CHECK(cudaMalloc(&pool, kPool));
  CHECK(cudaMalloc(&px, 8 * 16384 * 2));
  CHECK(cudaMalloc(&pout, 8 * 200000 * 2));
  CHECK(cudaMemset(pool, 0x3c, kPool));
  CHECK(cudaMemset(px, 0, 8 * 16384 * 2));
  for (int tokens : {1, 8}) {
    both<kInt4>(tokens);
    both<kFp8Mul>(tokens);
    both<kFp8>(tokens);
  }
}
