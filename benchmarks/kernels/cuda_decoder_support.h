// SPDX-License-Identifier: Apache-2.0
//
// What cuda_decoder_bench.cu and the headers of cuda_decoder_cases.h share: device buffers, launches, random data, comparison with
// a reference.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "common/decoder.cu"

namespace bench {

using metrale::AttendParams;
using metrale::CacheLayout;
using metrale::ConvParams;
using metrale::DeltaParams;
using metrale::RotaryParams;
using metrale::RotateAttendParams;
using metrale::RotateStoreParams;
using metrale::RowScore;
using metrale::RowsParams;
using metrale::StepHeader;
using metrale::WidenOp;
using metrale::WidenParams;
using metrale::cuda::decoder::Chip;
using metrale::cuda::decoder::Plan;

#define CHECK_CUDA(call)                                                                      \
  do {                                                                                        \
    const cudaError_t status_ = (call);                                                       \
    if (status_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
      std::fflush(stdout);                                                                    \
      std::_Exit(2);                                                                          \
    }                                                                                         \
  } while (0)

/// Device memory that starts poisoned (NaN as f32 and as bf16).
template <class T>
class Dev {
 public:
  explicit Dev(std::size_t count) : count_(count) {
    CHECK_CUDA(cudaMalloc(&data_, bytes() + 256));
    CHECK_CUDA(cudaMemset(data_, 0xff, bytes()));
  }
  explicit Dev(const std::vector<T>& from) : Dev(from.size()) { set(from); }
  Dev(const Dev&) = delete;
  Dev& operator=(const Dev&) = delete;
  Dev(Dev&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr; }
  ~Dev() { cudaFree(data_); }
  void set(const std::vector<T>& from) {
    if (!from.empty()) CHECK_CUDA(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void zero() { CHECK_CUDA(cudaMemset(data_, 0, bytes())); }
  std::vector<T> get() const {
    std::vector<T> to(count_);
    CHECK_CUDA(cudaDeviceSynchronize());
    if (count_ != 0) CHECK_CUDA(cudaMemcpy(to.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return to;
  }
  T* ptr() const { return data_; }
  std::size_t bytes() const { return count_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

struct Launcher {
  Chip chip;
  cudaStream_t stream = nullptr;
  bool dependent = false;

  template <class... P, class... A>
  void operator()(void (*kernel)(P...), const Plan& plan, A... args) const {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(plan.grid_x, plan.grid_y, 1);
    config.blockDim = dim3(plan.threads, 1, 1);
    config.dynamicSmemBytes = plan.shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = dependent ? 1 : 0;
    if (plan.shared_bytes > 48 * 1024) {
      CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(plan.shared_bytes)));
    }
    CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
  }
};

// ---- data ----
inline std::vector<StepHeader> step_of(std::uint32_t position, std::uint32_t slot) {
  StepHeader header;
  header.position = static_cast<std::int32_t>(position);
  header.slot = static_cast<std::int32_t>(slot);
  return {header};
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL + 1) {}
  std::uint32_t bits() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    const auto x = static_cast<std::uint32_t>((state_ >> 18 ^ state_) >> 27);
    const auto turn = static_cast<std::uint32_t>(state_ >> 59);
    return x >> turn | x << (-turn & 31U);
  }
  /// In [-1, 1).
  float next() { return static_cast<float>(static_cast<std::int32_t>(bits())) * 0x1p-31F; }
  std::vector<float> vector(std::size_t n, float scale = 1, float offset = 0) {
    std::vector<float> v(n);
    for (float& x : v) x = next() * scale + offset;
    return v;
  }
  std::vector<std::int32_t> permutation(std::uint32_t n) {
    std::vector<std::int32_t> v(n);
    for (std::uint32_t i = 0; i < n; ++i) v[i] = static_cast<std::int32_t>(i);
    for (std::uint32_t i = n; i > 1; --i) std::swap(v[i - 1], v[bits() % i]);
    return v;
  }

 private:
  std::uint64_t state_;
};

inline std::uint16_t bf16_of(float x) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, 4);
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}
inline float float_of(std::uint16_t bf16) {
  const std::uint32_t bits = static_cast<std::uint32_t>(bf16) << 16;
  float x = 0;
  std::memcpy(&x, &bits, 4);
  return x;
}

template <class F>
void parallel(std::size_t count, F each) {
  const std::size_t n = std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::thread> team;
  for (std::size_t w = 0; w < n; ++w) {
    team.emplace_back([=] {
      for (std::size_t i = w; i < count; i += n) each(i);
    });
  }
  for (std::thread& t : team) t.join();
}

// ---- results ----
inline std::string text(std::initializer_list<std::pair<const char*, double>> facts) {
  std::string s;
  for (const auto& [name, value] : facts) {
    char part[64];
    std::snprintf(part, sizeof part, "%s%s=%g", s.empty() ? "" : " ", name, value);
    s += part;
  }
  return s;
}

struct Tally {
  int cases = 0;
  int failed = 0;
  double worst = 0;    ///< Relative L2.
  double allowed = 0;  ///< Of the worst one.
};
inline std::map<std::string, Tally>& tallies() {
  static std::map<std::string, Tally> all;
  return all;
}
inline int& failures() {
  static int count = 0;
  return count;
}
inline void expect(const std::string& kernel, bool good, const std::string& what, double error = 0, double allowed = 0) {
  Tally& tally = tallies()[kernel];
  ++tally.cases;
  if (error > tally.worst || std::isnan(error)) tally.worst = error, tally.allowed = allowed;
  if (good) return;
  ++tally.failed;
  if (++failures() <= 40) std::printf("FAILED %s: %s (error %.3g, allowed %.3g)\n", kernel.c_str(), what.c_str(), error, allowed);
  std::fflush(stdout);
}
/// Relative L2 within `allowed`, and the ratio of the norms within the same of 1.
template <class T>
void compare(const std::string& kernel, const std::string& what, const std::vector<float>& got, const std::vector<T>& want,
             double allowed) {
  double difference = 0;
  double got_square = 0;
  double want_square = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double g = static_cast<double>(got[i]);
    const double w = static_cast<double>(want[i]);
    difference += (g - w) * (g - w);
    got_square += g * g;
    want_square += w * w;
  }
  const double error = std::sqrt(difference / std::max(want_square, 1e-300));
  // Of nothing, or of zeros, there must be nothing.
  const double ratio = want_square > 0 || got_square > 0 ? std::sqrt(got_square / std::max(want_square, 1e-300)) : 1;
  expect(kernel, got.size() == want.size() && error <= allowed && std::abs(ratio - 1) <= allowed, what, error, allowed);
}

}  // namespace bench
