// SPDX-License-Identifier: Apache-2.0
//
// What the tests of decoders share: a backend with kernels, a model loaded on it, and the golden answers beside the model.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "metrale/backends/host.h"
#include "metrale/backends/host_kernels.h"
#include "metrale/models/decoder.h"

// Whether this build runs many times slower and keeps freed memory.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define METRALE_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define METRALE_SANITIZED 1
#endif
#endif
#ifndef METRALE_SANITIZED
#define METRALE_SANITIZED 0
#endif

namespace metrale::test {

/// The value, or a failed test with the error's text.
template <class T>
T ok(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().to_string());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

/// Expects a failure with `code` whose message is one line that holds every one of `parts`.
template <class T>
void expect_error(const Result<T>& result, Errc code, const std::vector<std::string>& parts) {
  ASSERT_FALSE(result) << "expected " << to_string(code);
  EXPECT_EQ(result.error().code(), code) << result.error().to_string();
  const std::string text = result.error().to_string();
  for (const std::string& part : parts) EXPECT_THAT(text, ::testing::HasSubstr(part));
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

/// Where the test data is: as the environment says, else where it is in the checkout.
inline std::filesystem::path test_data() {
  const char* set = std::getenv("METRALE_TEST_DATA");
  return set != nullptr && *set != '\0' ? set : METRALE_TEST_DATA;
}
inline std::filesystem::path model_folder(std::string_view model) { return test_data() / model; }

inline std::unique_ptr<GpuBackend> host_backend(std::vector<std::span<const host::HostKernel>> kernels = host::kernel_tables()) {
  host::Options options;
  options.num_threads = 2;
  options.kernels = std::move(kernels);
  return ok(host::create(options));
}

/// A model's files, weights and decoder, in the order in which they are made.
struct LoadedModel {
  LoadedModel(GpuBackend& backend, const std::filesystem::path& path, const ModelConfig& model_config, DecoderOptions options = {})
      : config(model_config), file(ok(WeightFile::open(path))) {
    const auto names = ok(Decoder::tensors(backend, config, *file));
    weights = ok(WeightStore::load(backend, *file, names));
    if (options.context_tokens == 0) options.context_tokens = 320;
    decoder = ok(Decoder::create(backend, config, *file, *weights, options));
  }
  LoadedModel(GpuBackend& backend, const std::filesystem::path& folder, DecoderOptions options = {})
      : LoadedModel(backend, folder, ok(load_model_config(folder)), options) {}

  ModelConfig config;
  std::unique_ptr<WeightFile> file;
  std::unique_ptr<WeightStore> weights;
  std::unique_ptr<Decoder> decoder;
};

/// The tensors of golden.safetensors.
class Golden {
 public:
  explicit Golden(const std::filesystem::path& folder) : file_(ok(WeightFile::open(folder / "golden.safetensors"))) {}

  template <class T>
  std::vector<T> get(const std::string& name) const {
    const std::vector<std::byte> bytes = ok(file_->read(*ok(file_->get(name))));
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  static constexpr int kPrompts = 4;
  std::vector<TokenId> prompt(int n) const { return get<TokenId>("prompt" + std::to_string(n)); }
  std::vector<TokenId> greedy(int n) const { return get<TokenId>("greedy" + std::to_string(n)); }
  std::vector<float> logits(int n) const { return get<float>("logits" + std::to_string(n)); }

 private:
  std::unique_ptr<WeightFile> file_;
};

/// ‖got − want‖ / ‖want‖
inline double relative_l2(std::span<const float> got, std::span<const float> want) {
  if (got.size() != want.size()) return HUGE_VAL;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - want[i], 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(difference / norm);
}
/// The worst of all rows.
inline double worst_row(std::span<const float> got, std::span<const float> want, std::size_t width) {
  if (got.size() != want.size() || got.empty()) return HUGE_VAL;
  double worst = 0;
  for (std::size_t at = 0; at < got.size(); at += width)
    worst = std::max(worst, relative_l2(got.subspan(at, width), want.subspan(at, width)));
  return worst;
}

inline const char* const kModels[] = {"kjv-llama-2m", "kjv-hybrid-4m"};
inline std::string model_name(const ::testing::TestParamInfo<const char*>& info) {
  return std::string_view(info.param).find("hybrid") != std::string_view::npos ? "Hybrid" : "Llama";
}

}  // namespace metrale::test
