// SPDX-License-Identifier: Apache-2.0
//
// A model of one layer from creating the backend to destroying it, with each call of the CUDA driver failed once: nothing is left,
// nothing is given back twice, the error or the log names the call, and the process can load again. A code that loses the device
// ends in device_lost instead, in every call, and the process stays so.
#include <fmt/format.h>

#include <chrono>
#include <fstream>
#include <map>
#include <mutex>
#include <set>

#include <nlohmann/json.hpp>

#include "backends/cuda/cuda_backend.h"
#include "cuda_kernels.h"
#include "metrale/log.h"
#include "metrale/models/generator.h"

namespace metrale::test {
namespace {

constexpr std::uint64_t kMostCalls = 3000;
/// The calls are dealt out to this many tests, which may run at once.
constexpr std::uint64_t kParts = 8;

/// The first layer of a test model, in a folder of its own.
class OneLayer {
 public:
  OneLayer() : folder_(std::filesystem::temp_directory_path() / fmt::format("metrale_one_layer_{}", ::getpid())) {
    const std::filesystem::path whole = std::filesystem::absolute(model_folder("kjv-llama-2m"));
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    for (const char* name : {"tokenizer.json", "model.safetensors"}) std::filesystem::create_symlink(whole / name, folder_ / name);
    std::ifstream in(whole / "config.json");
    nlohmann::json config = nlohmann::json::parse(in);
    config["num_hidden_layers"] = 1;
    std::ofstream(folder_ / "config.json") << config;
  }
  ~OneLayer() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::filesystem::path folder_;
};

/// What is logged while it lives.
class Logged {
 public:
  Logged() {
    set_log_sink([this](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_ += std::string(line) + '\n';
    });
  }
  ~Logged() { set_log_sink({}); }
  std::string take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(lines_, {});
  }

 private:
  std::mutex mutex_;
  std::string lines_;
};

struct Machine {
  Machine() { ok_code(fake.driver().cuInit_(0)); }
  static void ok_code(CUresult code) {
    if (code != CUDA_SUCCESS) throw std::runtime_error("the fake does not start");
  }
  fake_cuda::FakeGpu fake{{.runs_when_idle = true}};
  const std::vector<cuda::ModuleImage> modules = cuda_decoder_modules(fake);
};

class CudaFaults : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  /// Creates a backend, loads, generates, unloads and destroys the backend.
  Result<> whole_life(Machine& machine) {
    cuda::Options options;
    options.modules = machine.modules;
    const auto backend = METRALE_TRY(cuda::create_with_driver(machine.fake.driver(), options));
    const auto model = METRALE_TRY(Generator::load(one_layer.folder(), *backend, {.extent = TeardownExtent::backend}));
    GenerateRequest request;
    request.max_tokens = 4;
    const std::vector<TokenId> prompt{1, 2, 3};
    const Generation made = METRALE_TRY(model->generate(prompt, request));
    if (made.ids != std::vector<TokenId>(4, kAnswer)) return Error(Errc::internal, "the kernels' answer did not come through");
    receipt = model->unload();
    return {};
  }
  /// As above; the result and what was logged, in one text. Whether it succeeded is in `succeeded`.
  std::string told(Machine& machine) {
    logged.take();
    const Result<> result = whole_life(machine);
    succeeded = result.has_value();
    code = succeeded ? Errc{} : result.error().code();
    return (succeeded ? std::string() : result.error().to_string() + '\n') + logged.take();
  }
  static void expect_nothing_left(fake_cuda::FakeGpu& fake) {
    EXPECT_EQ(fake.live().total(), 0U) << fake.live().to_string();
    EXPECT_THAT(fake.misuses(), ::testing::IsEmpty());
    EXPECT_THAT(fake.dropped_with_context(), ::testing::IsEmpty());
  }

  OneLayer one_layer;
  Logged logged;
  Receipt receipt;
  bool succeeded = false;
  Errc code = {};
};

class CudaFaultsOnce : public CudaFaults {};

TEST_F(CudaFaultsOnce, WithoutAnyItWorks) {
  Machine machine;
  ok(whole_life(machine));
  EXPECT_TRUE(receipt.clean()) << receipt.to_string();
  expect_nothing_left(machine.fake);
  ok(whole_life(machine));
  expect_nothing_left(machine.fake);
}

TEST_P(CudaFaults, EveryCallFailedOnce) {
  const auto begin = std::chrono::steady_clock::now();
  Machine machine;
  ok(whole_life(machine));
  machine.fake.reset_counts();
  ok(whole_life(machine));
  const std::uint64_t calls = machine.fake.num_calls();
  ASSERT_GT(calls, 100U);
  // A plain build makes all of them, if they are not too many. A prime stride meets calls of every kind.
  const std::uint64_t stride = kParts * (METRALE_SANITIZED ? 7 : div_ceil(calls, kMostCalls));
  std::uint64_t num_failed = 0;
  std::map<std::string, std::uint64_t> absorbed;  // failures that the run did not end with: tried again, or done without
  std::uint64_t num_made = 0;
  for (std::uint64_t n = GetParam() + 1; n <= calls; n += stride) {
    ++num_made;
    machine.fake.fail_call(n, CUDA_ERROR_UNKNOWN);
    const std::string text = told(machine);
    const std::string function = machine.fake.failed_function();
    machine.fake.clear_failures();
    SCOPED_TRACE(fmt::format("call {} of {}, {}: {}", n, calls, function, succeeded ? "succeeded" : text));
    if (succeeded) {
      ++absorbed[function];
    } else {
      ++num_failed;
      EXPECT_NE(text.find(function), std::string::npos) << "the call is not named";
    }
    expect_nothing_left(machine.fake);
    EXPECT_NE(code, Errc::device_lost) << "a passing error lost the device";
  }
  ok(whole_life(machine));
  expect_nothing_left(machine.fake);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  fmt::print("one layer: {} of {} calls of the driver failed once, {} of them ended the run; {:.1f} s\n", num_made, calls,
             num_failed, seconds);
  for (const auto& [function, count] : absorbed) fmt::print("  went on without {}: {} times\n", function, count);
  EXPECT_GT(num_failed, num_made / 10);
}

INSTANTIATE_TEST_SUITE_P(Part, CudaFaults, ::testing::Range(std::uint64_t{0}, kParts));

TEST_F(CudaFaultsOnce, EveryCallLosingTheDevice) {
  const auto begin = std::chrono::steady_clock::now();
  std::uint64_t calls = 0;
  {
    Machine machine;
    ok(whole_life(machine));
    calls = machine.fake.num_calls();
  }
  const std::uint64_t stride = METRALE_SANITIZED ? 61 : 7;
  for (std::uint64_t n = 1; n <= calls; n += stride) {
    Machine machine;  // a lost process stays lost
    machine.fake.fail_call(n, CUDA_ERROR_LAUNCH_FAILED);
    const std::string text = told(machine);
    SCOPED_TRACE(fmt::format("call {} of {}, {}: {}", n, calls, machine.fake.failed_function(), text));
    EXPECT_THAT(machine.fake.misuses(), ::testing::IsEmpty());
    if (!succeeded) {
      EXPECT_EQ(code, Errc::device_lost);
    }
    const Result<> again = whole_life(machine);
    ASSERT_FALSE(again) << "a lost device came back by itself";
    EXPECT_EQ(again.error().code(), Errc::device_lost) << again.error().to_string();
  }
  fmt::print("one layer: {} calls of the driver, every {}th lost the device once; {:.1f} s\n", calls, stride,
             std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
}

}  // namespace
}  // namespace metrale::test
