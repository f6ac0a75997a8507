// SPDX-License-Identifier: Apache-2.0
//
// The CUDA matrix kernels against sums in double precision, for cuda_matmul_bench.cu: every kernel, type and way on shapes that
// are no multiple of any tile. Also what both halves of that program need: launches, buffers, random weights.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../kernels/cuda/common/matmul.cu"

namespace {

using metrale::DType;
using metrale::LinearMatrix;
using metrale::Precision;
using Bytes = std::vector<std::uint8_t>;

void check(cudaError_t status, const char* what, int line) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s: %s\n", line, what, cudaGetErrorString(status));
  std::exit(2);
}
#define CHECK(call) check(call, #call, __LINE__)

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

const char* name_of(DType type) {
  switch (type) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::q4_0: return "q4_0";
    case DType::q4_1: return "q4_1";
    case DType::q8_0: return "q8_0";
    case DType::q4_k: return "q4_k";
    default: return "q6_k";
  }
}

// ---- launches ----

cudaStream_t stream;
std::uint32_t sms;

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::uint32_t shared, bool dependent, Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute, config.numAttrs = dependent ? 1 : 0;
  CHECK(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const mm::Plan& plan, bool dependent, Args... args) {
  launch(kernel, {plan.grid.x, plan.grid.y, plan.grid.z}, {plan.block.x, plan.block.y, 1}, plan.shared_bytes, dependent, args...);
}

/// The kernels of one set of arguments, and that which a plan names.
template <class Kernel>
struct Entries {
  Kernel general;
  Kernel special[17];  ///< In the order of mm::kEntries.
  Kernel operator()(const mm::Plan& plan) const { return plan.entry < 0 ? general : special[plan.entry / 3]; }
};
#define ENTRIES(name)                                                                                                       \
  const Entries<decltype(&name)> name##_entries {                                                                           \
    name, {                                                                                                                 \
      name##_f32_1, name##_f16_1, name##_bf16_1, name##_q4_0_1, name##_q4_1_1, name##_q8_0_1, name##_q4_k_1, name##_q6_k_1, \
          name##_f32_1_few, name##_f16_1_few, name##_bf16_1_few, name##_q4_0_1_few, name##_q4_1_1_few, name##_q8_0_1_few,   \
          name##_q4_k_1_few, name##_q6_k_1_few, name##_bf16_n                                                               \
    }                                                                                                                       \
  }
ENTRIES(linear);
ENTRIES(linear4);
ENTRIES(swiglu);

template <class Kernel, class... Args>
void launch(const Entries<Kernel>& entries, const metrale::LinearParams& p, std::string_view function, bool dependent,
            Args... args) {
  const mm::Plan plan = mm::plan_linear(function, p, sms);
  launch(entries(plan), plan, dependent, args...);
}
template <class Kernel>
void allow_shared_memory(const Entries<Kernel>& entries) {
  CHECK(cudaFuncSetAttribute(entries.general, cudaFuncAttributeMaxDynamicSharedMemorySize, mm::kSharedMost));
  for (Kernel kernel : entries.special)
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, mm::kSharedMost));
}

template <class T>
struct Device {
  T* at = nullptr;
  std::size_t count = 0;
  explicit Device(std::size_t n) : count(n) { CHECK(cudaMalloc(&at, std::max<std::size_t>(n, 1) * sizeof(T))); }
  Device(const Device&) = delete;
  ~Device() { cudaFree(at); }
  void put(const void* from) { CHECK(cudaMemcpy(at, from, count * sizeof(T), cudaMemcpyHostToDevice)); }
  std::vector<T> get() const {
    std::vector<T> v(count);
    CHECK(cudaMemcpy(v.data(), at, count * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
  // Waits: `stream` does not wait for fills of the other one.
  void poison() {
    CHECK(cudaMemset(at, 0xFF, count * sizeof(T)));
    CHECK(cudaDeviceSynchronize());
  }
};

// ---- weights, and what they mean ----

std::mt19937 random_source(7);
float uniform() { return std::uniform_real_distribution<float>(-1, 1)(random_source); }

void put_half(std::uint8_t* at, float value) {
  const __half h = __float2half(value);
  std::memcpy(at, &h, 2);
}
float get_half(const std::uint8_t* at) {
  __half h;
  std::memcpy(&h, at, 2);
  return __half2float(h);
}

Bytes random_rows(DType type, std::uint32_t n, std::uint32_t k) {
  Bytes rows(n * mm::row_bytes(type, k));
  const std::size_t count = std::size_t{n} * k;
  if (type == DType::f32) {
    for (std::size_t i = 0; i < count; ++i) {
      const float v = uniform();
      std::memcpy(&rows[4 * i], &v, 4);
    }
  } else if (type == DType::f16) {
    for (std::size_t i = 0; i < count; ++i) put_half(&rows[2 * i], uniform());
  } else if (type == DType::bf16) {
    for (std::size_t i = 0; i < count; ++i) {
      const __nv_bfloat16 v = __float2bfloat16(uniform());
      std::memcpy(&rows[2 * i], &v, 2);
    }
  } else {
    for (auto& byte : rows) byte = static_cast<std::uint8_t>(random_source());
    const std::size_t block = mm::row_bytes(type, mm::block_elements(type));
    for (std::size_t b = 0; b < rows.size(); b += block) {
      const std::size_t scale = type == DType::q6_k ? 208 : 0;
      put_half(&rows[b + scale], 0.05F + 0.05F * uniform());
      if (type == DType::q4_1 || type == DType::q4_k) put_half(&rows[b + 2], 0.3F * uniform());
    }
  }
  return rows;
}

// Written from the format's description, apart from the kernels.
float meaning(DType type, const std::uint8_t* row, std::uint32_t e) {
  switch (type) {
    case DType::f32: {
      float v;
      std::memcpy(&v, row + 4 * std::size_t{e}, 4);
      return v;
    }
    case DType::f16: return get_half(row + 2 * std::size_t{e});
    case DType::bf16: {
      std::uint16_t bits;
      std::memcpy(&bits, row + 2 * std::size_t{e}, 2);
      const std::uint32_t wide = std::uint32_t{bits} << 16;
      float v;
      std::memcpy(&v, &wide, 4);
      return v;
    }
    case DType::q4_0: {
      const auto* b = row + e / 32 * 18;
      const int j = e % 32, q = j < 16 ? b[2 + j] & 15 : b[2 + j - 16] >> 4;
      return (q - 8) * get_half(b);
    }
    case DType::q4_1: {
      const auto* b = row + e / 32 * 20;
      const int j = e % 32, q = j < 16 ? b[4 + j] & 15 : b[4 + j - 16] >> 4;
      return q * get_half(b) + get_half(b + 2);
    }
    case DType::q8_0: {
      const auto* b = row + e / 32 * 34;
      return static_cast<std::int8_t>(b[2 + e % 32]) * get_half(b);
    }
    case DType::q4_k: {
      const auto* b = row + e / 256 * 144;
      const int j = e % 256 / 32, i = e % 32;
      const auto* s = b + 4;
      const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
      const int minimum = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4;
      const int both = b[16 + 32 * (j / 2) + i], q = j % 2 ? both >> 4 : both & 15;
      return get_half(b) * scale * q - get_half(b + 2) * minimum;
    }
    default: {
      const auto* b = row + e / 256 * 210;
      const int half = e % 256 / 128, run = e % 128 / 32, i = e % 32;
      const int low = b[64 * half + 32 * (run % 2) + i], top = b[128 + 32 * half + i] >> (2 * run) & 3;
      const int q = ((run < 2 ? low & 15 : low >> 4) | top << 4) - 32;
      return get_half(b + 208) * static_cast<std::int8_t>(b[192 + 8 * half + 2 * run + i / 16]) * q;
    }
  }
}

struct Weights {
  DType type;
  std::uint32_t n, k;
  bool packed;
  Device<std::byte> bytes;
  Device<float> floats;
  Weights(DType t, std::uint32_t rows, std::uint32_t columns, bool pack)
      : type(t),
        n(rows),
        k(columns),
        packed(pack && mm::can_repack(t, columns)),
        bytes(rows * mm::row_bytes(t, columns)),
        floats(std::size_t{rows} * columns) {
    const Bytes raw = random_rows(t, n, k);
    std::vector<float> wide(floats.count);
    for (std::uint32_t r = 0; r < n; ++r) {
      for (std::uint32_t e = 0; e < k; ++e) wide[std::size_t{r} * k + e] = meaning(t, &raw[r * mm::row_bytes(t, k)], e);
    }
    bytes.put(raw.data());
    floats.put(wide.data());
    if (packed) launch(repack, mm::plan_repack(t, n, k), false, bytes.at, metrale::RepackParams{n, k, static_cast<mm::u32>(t)});
    CHECK(cudaDeviceSynchronize());
  }
  LinearMatrix matrix(std::uint32_t ld) const { return {n, static_cast<mm::u32>(type), packed, ld}; }
};

// ---- checks ----

__global__ void reference(const float* x, mm::u32 ld_x, const float* norm, float eps, float add, const float* w, mm::u32 m,
                          mm::u32 n, mm::u32 k, double* out) {
  const mm::u32 column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (column >= n || row >= m) return;
  double squares = 0, sum = 0;
  for (mm::u32 e = 0; e < k; ++e) {
    const double v = x[std::size_t{row} * ld_x + e];
    squares += v * v;
    sum += v * (norm ? double{add} + norm[e] : 1.0) * w[std::size_t{column} * k + e];
  }
  out[std::size_t{row} * n + column] = norm ? sum / sqrt(squares / k + eps) : sum;
}

std::vector<double> product(const Device<float>& x, mm::u32 ld, const float* norm, float add, const Weights& w, mm::u32 m) {
  Device<double> out(std::size_t{m} * w.n);
  reference<<<dim3((w.n + 127) / 128, m), 128>>>(x.at, ld, norm, 1e-5F, add, w.floats.at, m, w.n, w.k, out.at);
  CHECK(cudaDeviceSynchronize());
  return out.get();
}

int cases = 0, failures = 0;
double worst_exact = 0, worst_fast = 0;

// Relative L2 error (of values that are not all small, for a single one may be), and that nothing beside the n columns was written.
void compare(const std::string& what, const std::vector<float>& y, mm::u32 ld, mm::u32 m, mm::u32 n,
             const std::vector<double>& want, bool bf16) {
  double difference = 0, norm = 0, got = 0;
  bool stray = false;
  for (mm::u32 r = 0; r < m; ++r) {
    for (mm::u32 c = 0; c < n; ++c) {
      const double v = y[std::size_t{r} * ld + c], w = want[std::size_t{r} * n + c];
      difference += (v - w) * (v - w), norm += w * w, got += v * v;
    }
    for (mm::u32 c = n; c < ld; ++c) {
      std::uint32_t bits;
      std::memcpy(&bits, &y[std::size_t{r} * ld + c], 4);
      stray |= bits != 0xFFFFFFFFU;
    }
  }
  const double error = std::sqrt(difference / std::max(norm, 0.25 * m * n)), ratio = std::sqrt(got / norm),
               limit = !bf16                        ? 2e-5
                       : what.starts_with("swiglu") ? 1e-2
                                                    : 5e-3;
  double& worst = bf16 ? worst_fast : worst_exact;
  if (error > worst) worst = error;
  ++cases;
  if (error <= limit && !stray) return;
  if (++failures <= 40)
    std::printf("WRONG %s: error %.3g, norm ratio %.4f%s\n", what.c_str(), error, ratio, stray ? ", stray writes" : "");
}

struct Rows {
  mm::u32 m, k, ld;
  Device<float> x, norm, residual;
  Device<std::byte> prepared;
  Rows(mm::u32 rows, mm::u32 columns, mm::u32 widest)
      : m(rows),
        k(columns),
        ld(columns + (columns % 3 == 0 ? 4 : 0)),
        x(std::size_t{rows} * ld),
        norm(columns),
        residual(std::size_t{rows} * (widest + 3)),
        prepared(mm::prepared_bytes(rows, columns)) {
    for (Device<float>* d : {&x, &norm, &residual}) {
      std::vector<float> v(d->count);
      for (float& f : v) f = uniform();
      d->put(v.data());
    }
  }
};

void check_products(DType type, mm::u32 n, mm::u32 k, bool pack) {
  const Weights w(type, n, k, pack), gate(type, n, k, pack);
  // A second type of the same class, as files have it.
  const DType other = type == DType::q4_k ? DType::q6_k : type == DType::bf16 ? DType::f16 : type;
  const Weights small(other, n / 3 + 1, k, pack);
  for (const mm::u32 m : {1U, 2U, 3U, 5U, 17U, 130U, 512U}) {
    if (m == 512 && (n < 200 || k > 2048)) continue;
    Rows rows(m, k, n);
    for (const Precision precision : {Precision::fast, Precision::exact}) {
      const bool many = m > mm::kFusedRows;
      if (!many && precision == Precision::exact) continue;  // the same code
      const bool normed = (m + n) % 2 == 1;
      metrale::LinearParams p;
      p.m = m, p.k = k, p.ld_x = rows.ld, p.precision = static_cast<mm::u32>(precision), p.norm_eps = 1e-5F, p.norm_add = 1;
      p.w[0] = w.matrix(n + 3);
      const bool bf16 = many && mm::activation_class(type, precision) == mm::ActivationClass::bf16;
      const void* x = rows.x.at;
      const void* norm = normed ? rows.norm.at : nullptr;
      const std::string what = std::string(name_of(type)) + (w.packed ? " packed " : " rows ") + std::to_string(m) + " x " +
                               std::to_string(n) + " x " + std::to_string(k) + (bf16 ? " fast" : "");
      if (many) {
        rows.prepared.poison();
        launch(prepare, mm::plan_prepare(m, k), false, x, norm, rows.prepared.at, p);
        p.prepared = 1, x = rows.prepared.at, norm = nullptr;
      }
      const float* reference_norm = normed ? rows.norm.at : nullptr;
      std::vector<double> want = product(rows.x, rows.ld, reference_norm, 1, w, m);
      const std::vector<double> want_gate = product(rows.x, rows.ld, reference_norm, 1, gate, m);
      const std::vector<double> want_small = product(rows.x, rows.ld, reference_norm, 1, small, m);

      Device<float> y(std::size_t{m} * (n + 3)), y1(std::size_t{m} * (small.n + 3)), y2(std::size_t{m} * (n + 3));
      // swiglu: silu(gate) * w
      y.poison();
      p.w[0] = gate.matrix(n + 3), p.w[1] = w.matrix(n + 3);
      launch(swiglu_entries, p, "swiglu", false, x, norm, gate.bytes.at, w.bytes.at, y.at, p);
      CHECK(cudaDeviceSynchronize());
      std::vector<double> gated(want.size());
      for (std::size_t i = 0; i < want.size(); ++i) gated[i] = want_gate[i] / (1 + std::exp(-want_gate[i])) * want[i];
      // A single value may be the tail of a silu, which rounded activations move by any factor.
      if (!bf16 || n >= 16) compare("swiglu " + what, y.get(), n + 3, m, n, gated, bf16);
      // linear4: w, small, gate
      y.poison(), y1.poison(), y2.poison();
      p.w[0] = w.matrix(n + 3), p.w[1] = small.matrix(small.n + 3), p.w[2] = gate.matrix(n + 3), p.w[3] = {};
      const float* none = nullptr;
      launch(linear4_entries, p, "linear4", false, x, norm, w.bytes.at, small.bytes.at, gate.bytes.at, nullptr, none, none, none,
             none, y.at, y1.at, y2.at, nullptr, p);
      CHECK(cudaDeviceSynchronize());
      compare("linear4[0] " + what, y.get(), n + 3, m, n, want, bf16);
      compare("linear4[1] " + what, y1.get(), small.n + 3, m, small.n, want_small, bf16);
      compare("linear4[2] " + what, y2.get(), n + 3, m, n, want_gate, bf16);
      // linear with bias, onto its own residual
      p.w[1] = p.w[2] = {};
      y.poison();
      std::vector<float> before = rows.residual.get(), start = y.get();
      for (mm::u32 r = 0; r < m; ++r) std::memcpy(&start[std::size_t{r} * (n + 3)], &before[std::size_t{r} * (n + 3)], n * 4);
      y.put(start.data());
      std::vector<float> bias(n);
      for (float& f : bias) f = uniform();
      Device<float> device_bias(n);
      device_bias.put(bias.data());
      launch(linear_entries, p, "linear", false, x, norm, w.bytes.at, device_bias.at, y.at, y.at, p);
      CHECK(cudaDeviceSynchronize());
      for (mm::u32 r = 0; r < m; ++r) {
        for (mm::u32 c = 0; c < n; ++c) want[std::size_t{r} * n + c] += double{bias[c]} + before[std::size_t{r} * (n + 3) + c];
      }
      compare("linear " + what, y.get(), n + 3, m, n, want, bf16);
    }
  }
  // gather
  const std::vector<std::int32_t> ids{0, static_cast<std::int32_t>(n - 1), static_cast<std::int32_t>(n / 2)};
  Device<std::int32_t> device_ids(3);
  device_ids.put(ids.data());
  Device<float> y(3 * std::size_t{k + 3});
  y.poison();
  launch(gather, mm::plan_gather(3), false, device_ids.at, w.bytes.at, y.at,
         metrale::GatherParams{3, n, k, static_cast<mm::u32>(type), w.packed, k + 3});
  CHECK(cudaDeviceSynchronize());
  const std::vector<float> wide = w.floats.get();
  std::vector<double> want(3 * std::size_t{k});
  for (int i = 0; i < 3; ++i) {
    for (mm::u32 e = 0; e < k; ++e) want[std::size_t(i) * k + e] = wide[std::size_t(ids[i]) * k + e];
  }
  compare(std::string("gather ") + name_of(type), y.get(), k + 3, 3, k, want, false);
}

void check_all() {
  struct Shape {
    mm::u32 n, k;
  };
  for (const DType type : {DType::bf16, DType::f32, DType::f16, DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k}) {
    const bool quantised = mm::block_elements(type) > 1, large = mm::block_elements(type) == 256;
    std::vector<Shape> shapes;
    if (large) {
      shapes = {{1, 256}, {37, 512}, {301, 768}, {130, 4096}, {23, 14336}};
    } else if (quantised) {
      shapes = {{1, 32}, {37, 96}, {301, 576}, {130, 4096}, {23, 14336}};
    } else {
      shapes = {{1, 8}, {37, 100}, {301, 576}, {45, 577}, {600, 1536}, {450, 2560}, {130, 4096}, {30, 5120}, {23, 14336}};
    }
    for (const Shape& s : shapes) {
      for (const bool pack : {true, false}) {
        if (!pack && (!quantised || s.k > 2048)) continue;
        check_products(type, s.n, s.k, pack);
      }
    }
  }
  std::printf("%d results checked, %d wrong; worst relative error %.2g in f32 (limit 2e-5), %.2g with bf16 activations (5e-3)\n",
              cases, failures, worst_exact, worst_fast);
}

}  // namespace
