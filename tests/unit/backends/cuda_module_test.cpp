// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <thread>

#include "support/byte_writer.h"
#include "support/fake_cuda/fake_gpu.h"

namespace metrale::cuda {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

void nothing(const host::BlockContext&) {}

constexpr std::array<std::uint32_t, 3> kMixed{8, 4, 8};
constexpr std::array<std::uint32_t, 1> kOne{8};
const std::array<host::HostKernel, 4> kFirst{{
    {"first", "plain", nothing, kMixed, {}, false, false},
    {"first", "tiled", nothing, kOne, 64u, false, false},
    {"first", "casts", nothing, kOne, {}, true, false},
    {"first", "waits", nothing, kOne, {}, false, true},
}};
const std::array<host::HostKernel, 1> kSecond{{{"second", "plain", nothing, kOne, {}, false, false}}};
const std::array<host::HostKernel, 1> kOtherFirst{{{"first", "plain", nothing, kOne, {}, false, false}}};

/// A fake device whose primary context is current, as backends have it when they make their modules.
class CudaModuleTest : public testing::Test {
 protected:
  CudaModuleTest() {
    EXPECT_EQ(driver().cuInit_(0), CUDA_SUCCESS);
    EXPECT_EQ(driver().cuDeviceGet_(&device_, 0), CUDA_SUCCESS);
    EXPECT_EQ(driver().cuDevicePrimaryCtxRetain_(&context_, device_), CUDA_SUCCESS);
    EXPECT_EQ(driver().cuCtxSetCurrent_(context_), CUDA_SUCCESS);
  }
  ~CudaModuleTest() override {
    modules_.reset();
    if (!gave_back_in_vain_) {
      EXPECT_EQ(fake_.live().modules, 0u);
      EXPECT_EQ(fake_.live().streams, 0u);
      EXPECT_EQ(fake_.live().blocks, 0u);
    }
    EXPECT_THAT(fake_.misuses(), testing::IsEmpty());
    EXPECT_EQ(driver().cuCtxSetCurrent_(nullptr), CUDA_SUCCESS);
    EXPECT_EQ(driver().cuDevicePrimaryCtxRelease_(device_), CUDA_SUCCESS);
  }

  const Driver& driver() const { return fake_.driver(); }
  Modules& fresh(std::string kernel_path = "") {
    modules_.reset();
    modules_ = std::make_unique<Modules>(driver(), device_, std::move(kernel_path));
    return *modules_;
  }
  Modules& loaded(bool warm = true, std::string kernel_path = "") {
    Modules& made = fresh(std::move(kernel_path));
    const Result<> result = made.load(both_, warm);
    EXPECT_TRUE(result.has_value()) << result.error().to_string();
    return made;
  }
  static const Kernel& found(Modules& modules, std::string_view module, std::string_view function) {
    const auto kernel = modules.find(module, function);
    if (!kernel) throw std::runtime_error(kernel.error().to_string());
    return **kernel;
  }

  fake_cuda::FakeGpu fake_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  const std::array<fake_cuda::Global, 1> globals_{{{"table", 96, 7}}};
  const ModuleImage first_ = fake_.add_module("first", kFirst, globals_);
  const ModuleImage second_ = fake_.add_module("second", kSecond);
  const std::array<ModuleImage, 2> both_{second_, first_};
  std::unique_ptr<Modules> modules_;
  /// A call that gives something back was made to fail: nothing says whether the driver did it.
  bool gave_back_in_vain_ = false;
};

TEST_F(CudaModuleTest, KernelsHaveTheirSignatureAndWhatTheyPublish) {
  Modules& modules = loaded();
  const Kernel& plain = found(modules, "first", "plain");
  EXPECT_EQ(plain.name, "first.plain");
  EXPECT_EQ(plain.module(), "first");
  EXPECT_EQ(plain.entry(), "plain");
  EXPECT_THAT(plain.facts.param_bytes, ElementsAre(8, 4, 8));
  EXPECT_THAT(plain.param_offsets, ElementsAre(0, 8, 16));
  EXPECT_GT(plain.max_threads, 0u);
  EXPECT_EQ(plain.max_dynamic_shared_bytes + plain.static_shared_bytes, 227u << 10);
  EXPECT_FALSE(plain.facts.n_tile.has_value());
  EXPECT_FALSE(plain.facts.casts_a_to_e4m3 || plain.facts.waits_for_dependency);
  EXPECT_EQ(found(modules, "first", "tiled").facts.n_tile, 64u);
  EXPECT_TRUE(found(modules, "first", "casts").facts.casts_a_to_e4m3);
  EXPECT_TRUE(found(modules, "first", "waits").facts.waits_for_dependency);
  EXPECT_EQ(&found(modules, "first", "plain"), &plain) << "the same each time";
}

TEST_F(CudaModuleTest, MissesSayWhatThereIs) {
  Modules& modules = loaded();
  const auto function = modules.find("first", "absent");
  ASSERT_FALSE(function.has_value());
  EXPECT_EQ(function.error().code(), Errc::not_found);
  EXPECT_THAT(function.error().message(), HasSubstr("casts, plain, tiled, waits"));
  const auto module = modules.find("third", "plain");
  ASSERT_FALSE(module.has_value());
  EXPECT_EQ(module.error().code(), Errc::not_found);
  EXPECT_THAT(module.error().message(), HasSubstr("first, second"));
  EXPECT_TRUE(modules.has_module("second"));
  EXPECT_FALSE(modules.has_module("third"));
}

TEST_F(CudaModuleTest, EntriesAreSorted) {
  const auto entries = loaded().entries();
  ASSERT_TRUE(entries.has_value());
  std::vector<std::string> names;
  for (const auto& entry : *entries) names.push_back(entry.module + "." + entry.function);
  EXPECT_THAT(names, ElementsAre("first.casts", "first.plain", "first.tiled", "first.waits", "second.plain"));
}

TEST_F(CudaModuleTest, WarmLookUpsCallNoDriver) {
  Modules& modules = loaded();
  fake_.reset_counts();
  found(modules, "first", "plain");
  EXPECT_FALSE(modules.find("first", "absent").has_value());
  ASSERT_TRUE(modules.entries().has_value());
  EXPECT_EQ(fake_.num_calls(), 0u);
  EXPECT_EQ(modules.load_report().num_lazy_loads, 0u);
}

TEST_F(CudaModuleTest, ColdKernelsAreLoadedOnceByTheirFirstLookUpAndCounted) {
  Modules& modules = loaded(false);
  EXPECT_EQ(fake_.num_calls("cuFuncLoad"), 0u);
  found(modules, "first", "plain");
  found(modules, "first", "plain");
  EXPECT_EQ(fake_.num_calls("cuFuncLoad"), 1u);
  EXPECT_EQ(modules.load_report().num_lazy_loads, 1u);
  EXPECT_GT(found(modules, "first", "plain").max_threads, 0u);
}

TEST_F(CudaModuleTest, ReportHasAModuleEachWithItsTimes) {
  const LoadReport report = loaded().load_report();
  ASSERT_EQ(report.modules.size(), 2u);
  EXPECT_EQ(report.modules[0].name, "first");
  EXPECT_EQ(report.modules[0].source, "built in");
  EXPECT_EQ(report.modules[0].num_kernels, 4u);
  EXPECT_EQ(report.modules[0].size_bytes, first_.image.size());
  EXPECT_GT(report.modules[0].load_ns, 0u);
  EXPECT_GT(report.modules[0].warm_ns, 0u);
  EXPECT_EQ(loaded(false).load_report().modules[0].warm_ns, 0u);
}

TEST_F(CudaModuleTest, UnloadedModulesLoadAgainAtTheNextLookUp) {
  Modules& modules = loaded();
  ASSERT_TRUE(modules.unload().has_value());
  EXPECT_EQ(fake_.live().modules, 0u);
  EXPECT_TRUE(modules.load_report().modules.empty());
  EXPECT_TRUE(modules.has_module("first"));
  EXPECT_EQ(found(modules, "first", "tiled").facts.n_tile, 64u);
  EXPECT_EQ(fake_.live().modules, 2u);
  EXPECT_EQ(modules.load_report().num_lazy_loads, 2u);
  ASSERT_TRUE(modules.unload().has_value());
  ASSERT_TRUE(modules.unload().has_value()) << "idempotent";
  EXPECT_EQ(modules.entries()->size(), 5u);
}

TEST_F(CudaModuleTest, SymbolsHaveAddressAndSizeOnAnyThread) {
  Modules& modules = loaded();
  std::thread([&] {  // no context is current there, nor afterwards
    const auto symbol = modules.device_symbol("first", "table", std::source_location::current());
    ASSERT_TRUE(symbol.has_value()) << symbol.error().to_string();
    EXPECT_EQ(symbol->bytes, 96u);
    CUcontext current = context_;
    EXPECT_EQ(driver().cuCtxGetCurrent_(&current), CUDA_SUCCESS);
    EXPECT_EQ(current, nullptr);
  })
      .join();
  EXPECT_EQ(modules.device_symbol("first", "absent", std::source_location::current()).error().code(), Errc::not_found);
  EXPECT_EQ(modules.device_symbol("third", "table", std::source_location::current()).error().code(), Errc::not_found);
}

TEST_F(CudaModuleTest, ALaterImageReplacesAnEarlierOneOfItsName) {
  const std::array<ModuleImage, 2> images{first_, fake_.add_module("first", kOtherFirst)};
  Modules& modules = fresh();
  ASSERT_TRUE(modules.load(images, true).has_value());
  EXPECT_THAT(found(modules, "first", "plain").facts.param_bytes, ElementsAre(8));
  EXPECT_FALSE(modules.find("first", "tiled").has_value());
}

TEST_F(CudaModuleTest, AModuleForALaterDeviceIsRefusedBeforeAnyIsLoaded) {
  const std::array<ModuleImage, 2> images{first_, fake_.add_module("second", kSecond, {}, 100)};
  Modules& modules = fresh();
  const Result<> result = modules.load(images, true);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code(), Errc::bad_format);
  EXPECT_THAT(result.error().message(), HasSubstr("second"));
  EXPECT_THAT(result.error().message(), HasSubstr("sm_100"));
  EXPECT_THAT(result.error().message(), HasSubstr("sm_90"));
  EXPECT_EQ(fake_.num_calls("cuModuleLoadDataEx"), 0u);
}

TEST_F(CudaModuleTest, AnImageOfNoKnownFormatIsTheDriversToRefuse) {
  constexpr std::string_view kText = "no module at all";
  const std::array<ModuleImage, 1> images{{{"broken", std::as_bytes(std::span(kText))}}};
  Modules& modules = fresh();
  const Result<> result = modules.load(images, true);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code(), Errc::bad_format);
  EXPECT_EQ(result.error().native_code(), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_THAT(result.error().message(), HasSubstr("broken"));
}

TEST_F(CudaModuleTest, TheKernelPathReplacesAndAdds) {
  const test::TempFolder temporary;
  const std::filesystem::path folder = temporary.path();
  constexpr std::array<std::uint32_t, 1> kWord{4};
  const std::array<host::HostKernel, 1> third{{{"third", "new", nothing, kWord, {}, false, false}}};
  test::write_file(folder / "first.ptx", fake_.add_module("first", kOtherFirst).image);
  test::write_file(folder / "third.ptx", fake_.add_module("third", third).image);
  Modules& modules = loaded(true, folder.string());
  EXPECT_THAT(found(modules, "first", "plain").facts.param_bytes, ElementsAre(8));
  EXPECT_THAT(found(modules, "third", "new").facts.param_bytes, ElementsAre(4));
  EXPECT_EQ(modules.load_report().modules[0].source, (folder / "first.ptx").string());
  EXPECT_EQ(modules.load_report().modules[1].source, "built in");
  EXPECT_EQ(fresh((folder / "absent").string()).load(both_, true).error().code(), Errc::not_found);
}

TEST_F(CudaModuleTest, AnyFailedCallLeavesNothingLoaded) {
  fake_.reset_counts();
  loaded();
  const std::uint64_t num_calls = fake_.num_calls();
  std::uint64_t failed = 0;
  for (std::uint64_t nth = 1; nth <= num_calls; ++nth) {
    Modules& modules = fresh();
    fake_.fail_call(nth, CUDA_ERROR_UNKNOWN);
    const Result<> result = modules.load(both_, true);
    const std::string function = fake_.failed_function();
    fake_.clear_failures();
    if (function == "cuStreamDestroy") {
      gave_back_in_vain_ = true;
    } else if (!gave_back_in_vain_) {
      EXPECT_EQ(fake_.live().streams, 0u) << nth;
    }
    if (result) continue;
    ++failed;
    EXPECT_NE(result.error().native_code(), 0) << result.error().to_string();
    EXPECT_EQ(fake_.live().modules, 0u) << nth << ": " << result.error().to_string();
    fake_.forget_faults();
  }
  EXPECT_EQ(failed, num_calls);
}

TEST_F(CudaModuleTest, UnloadingGoesOnAfterAFailureAndReportsIt) {
  Modules& modules = loaded();
  // The first module, and once more.
  fake_.fail_call("cuModuleUnload", 1, CUDA_ERROR_UNKNOWN);
  fake_.fail_call("cuModuleUnload", 2, CUDA_ERROR_UNKNOWN);
  const Result<> result = modules.unload();
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().native_code(), CUDA_ERROR_UNKNOWN);
  EXPECT_LE(fake_.live().modules, 1u);
  EXPECT_EQ(fake_.num_calls("cuModuleUnload"), 3u);
  gave_back_in_vain_ = true;
}

TEST_F(CudaModuleTest, UnloadingTriesOnceMoreWhatTheDriverRefused) {
  Modules& modules = loaded();
  fake_.fail_call("cuModuleUnload", 1, CUDA_ERROR_UNKNOWN);
  EXPECT_TRUE(modules.unload().has_value());
  EXPECT_EQ(fake_.live().modules, 0u);
  EXPECT_EQ(fake_.num_calls("cuModuleUnload"), 3u);
}

}  // namespace
}  // namespace metrale::cuda
