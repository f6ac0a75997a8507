// SPDX-License-Identifier: Apache-2.0
//
// How the cuBLASLt bridge makes and keeps plans, over an imitation of the library on the mock backend: each algorithm is a number,
// and it refuses what the test says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "bridges/cublaslt/bridge.h"
#include "metrale/backends/mock.h"
#include "metrale/device_buffer.h"
#include "metrale/graph.h"
#include "metrale/log.h"
#include "metrale/op_cache.h"
#include "metrale/stream.h"

namespace metrale::cublaslt {
namespace {

using ::testing::HasSubstr;

// Of the imitation: what it was asked, and what it refuses. Reset by the fixture.
struct Imitation {
  std::atomic<int> handles{0};
  std::atomic<int> heuristics{0};
  std::atomic<int> products{0};
  std::atomic<int> num_algorithms{2};
  std::atomic<std::uint64_t> workspace{0};
  std::atomic<std::uint64_t> refused_rows{0};  ///< The first algorithm does not run with these.
  std::atomic<std::uint64_t> last_algorithm{99};
  std::atomic<std::uint64_t> last_rows{0};
};
Imitation imitation;

// A layout keeps its count of columns first.
cublasStatus_t init_layout(cublasLtMatrixLayout_t layout, std::size_t, cudaDataType, std::uint64_t, std::uint64_t columns,
                           std::int64_t) {
  *layout = {};
  layout->data[0] = columns;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t set_layout(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                          std::size_t) {
  if (attribute == CUBLASLT_MATRIX_LAYOUT_COLS) std::memcpy(&layout->data[0], value, 8);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t run_check(const cublasLtMatmulAlgo_t& algorithm, std::uint64_t rows) {
  return algorithm.data[0] == 0 && rows == imitation.refused_rows ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

Api imitate() {
  Api api;
  api.get_version = []() -> std::size_t { return CUBLAS_VERSION; };
  api.status_name = [](cublasStatus_t) { return "A_NAME"; };
  api.status_string = [](cublasStatus_t) { return "some words"; };
  api.create = [](cublasLtHandle_t* handle) {
    ++imitation.handles;
    *handle = reinterpret_cast<cublasLtHandle_t>(&imitation);
    return CUBLAS_STATUS_SUCCESS;
  };
  api.destroy = [](cublasLtHandle_t) {
    --imitation.handles;
    return CUBLAS_STATUS_SUCCESS;
  };
  api.init_operation = [](cublasLtMatmulDesc_t, std::size_t, cublasComputeType_t, cudaDataType_t) { return CUBLAS_STATUS_SUCCESS; };
  api.set_operation = [](cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*, std::size_t) {
    return CUBLAS_STATUS_SUCCESS;
  };
  api.init_layout = &init_layout;
  api.set_layout = &set_layout;
  api.init_preference = [](cublasLtMatmulPreference_t, std::size_t) { return CUBLAS_STATUS_SUCCESS; };
  api.set_preference = [](cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*, std::size_t) {
    return CUBLAS_STATUS_SUCCESS;
  };
  api.heuristic = [](cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                     cublasLtMatrixLayout_t layout, cublasLtMatmulPreference_t, int most, cublasLtMatmulHeuristicResult_t found[],
                     int* count) {
    ++imitation.heuristics;
    *count = 0;
    for (int i = 0; i < imitation.num_algorithms && *count < most; ++i) {
      cublasLtMatmulHeuristicResult_t r{};
      r.algo.data[0] = static_cast<std::uint64_t>(i);
      r.state = run_check(r.algo, layout->data[0]);
      if (r.state == CUBLAS_STATUS_SUCCESS) found[(*count)++] = r;
    }
    return CUBLAS_STATUS_SUCCESS;
  };
  api.get_config = [](const cublasLtMatmulAlgo_t*, cublasLtMatmulAlgoConfigAttributes_t, void* value, std::size_t bytes,
                      std::size_t*) {
    std::memset(value, 0, bytes);
    return CUBLAS_STATUS_SUCCESS;
  };
  api.check_algorithm = [](cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                           cublasLtMatrixLayout_t, cublasLtMatrixLayout_t out, const cublasLtMatmulAlgo_t* algorithm,
                           cublasLtMatmulHeuristicResult_t* result) {
    result->state = CUBLAS_STATUS_SUCCESS;
    result->workspaceSize = imitation.workspace;
    return run_check(*algorithm, out->data[0]);
  };
  api.matmul = [](cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t, const void*,
                  cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t out,
                  const cublasLtMatmulAlgo_t* algorithm, void* workspace, std::size_t bytes, cudaStream_t) {
    if (bytes != 0 && workspace == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    const cublasStatus_t status = run_check(*algorithm, out->data[0]);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    ++imitation.products;
    imitation.last_algorithm = algorithm->data[0];
    imitation.last_rows = out->data[0];
    return CUBLAS_STATUS_SUCCESS;
  };
  return api;
}

class CublasLtPlans : public ::testing::Test {
 protected:
  void SetUp() override {
    imitation.heuristics = imitation.products = 0;
    imitation.num_algorithms = 2;
    imitation.workspace = imitation.refused_rows = 0;
    backend = std::move(*mock::create());
    memory = std::move(*DeviceBuffer::create(*backend, 4 << 20));
    stream = std::move(*Stream::create(*backend));
    set_log_sink([this](LogLevel level, std::string_view line) {
      const std::lock_guard lock(mutex);
      if (level == LogLevel::warning) warnings.emplace_back(line);
    });
  }
  void TearDown() override {
    set_log_sink({});
    EXPECT_EQ(imitation.handles, 0) << "handles are given back";
  }

  std::unique_ptr<CublasLt> make(Options options, const std::string& identity = "a device") {
    if (!options.cache_folder) options.cache_folder = std::string();
    auto bridge = make_bridge(*backend, api, "imitation", identity, options);
    EXPECT_TRUE(bridge) << bridge.error().to_string();
    return std::move(*bridge);
  }
  Call call(std::uint32_t m) const {
    Call c;
    c.m = m;
    c.n = c.k = 64;
    c.act = memory.ptr();
    c.weight = memory.ptr().offset(1 << 20);
    c.out = memory.ptr().offset(2 << 20);
    return c;
  }

  const Api api = imitate();
  std::unique_ptr<GpuBackend> backend;
  DeviceBuffer memory;
  Stream stream;
  std::mutex mutex;
  std::vector<std::string> warnings;
};

TEST_F(CublasLtPlans, OneForAClassOfRowsAndTheLibraryIsToldTheTrueNumber) {
  const auto bridge = make({.measure = false});
  for (const std::uint32_t m : {33U, 40U, 37U, 33U}) {
    ASSERT_TRUE(bridge->matmul(call(m), stream.handle()));
    EXPECT_EQ(imitation.last_rows, m);
  }
  EXPECT_EQ(bridge->counts().plans, 1U);
  EXPECT_EQ(imitation.heuristics, 1);
  ASSERT_TRUE(bridge->matmul(call(41), stream.handle()));
  EXPECT_EQ(bridge->counts().plans, 2U);
}

TEST_F(CublasLtPlans, RowsThatTheAlgorithmRefusesGetAPlanOfTheirOwnAndOneWarning) {
  const auto bridge = make({.measure = false, .row_invariant = true});
  ASSERT_TRUE(bridge->matmul(call(40), stream.handle()));
  EXPECT_EQ(imitation.last_algorithm, 0U);
  imitation.refused_rows = 37;
  for (int i = 0; i < 3; ++i) {
    const Result<> done = bridge->matmul(call(37), stream.handle());
    ASSERT_TRUE(done) << done.error().to_string();
    EXPECT_EQ(imitation.last_algorithm, 1U);
  }
  ASSERT_TRUE(bridge->matmul(call(1'000), stream.handle()));
  EXPECT_EQ(imitation.last_algorithm, 0U) << "the others stay with theirs";
  EXPECT_EQ(bridge->counts().exceptions, 1U);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], HasSubstr("[37, 64]"));
}

TEST_F(CublasLtPlans, NoAlgorithmIsAnErrorThatNamesTheShape) {
  imitation.num_algorithms = 0;
  const auto bridge = make({});
  const Result<> done = bridge->matmul(call(5), stream.handle());
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code(), Errc::unsupported);
  EXPECT_THAT(done.error().message(), HasSubstr("[5, 64] · [64, 64]"));
  EXPECT_EQ(imitation.products, 0);
}

TEST_F(CublasLtPlans, EachStreamHasAWorkspaceOfItsOwn) {
  imitation.workspace = 1'000;
  const auto bridge = make({.workspace_bytes = 1 << 16, .measure = false});
  const Stream other = std::move(*Stream::create(*backend));
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(bridge->matmul(call(8), stream.handle()));
    ASSERT_TRUE(bridge->matmul(call(8), other.handle()));
  }
  EXPECT_EQ(backend->op_cache().scratch_bytes(), 2U << 16);
}

TEST_F(CublasLtPlans, ACaptureThatFindsNoWorkspaceIsUnsafeAndOnePreparedIsNot) {
  imitation.workspace = 1'000;
  const auto bridge = make({.measure = false});
  {
    CaptureScope capture = std::move(*CaptureScope::begin(*backend, stream.handle()));
    const Result<> done = bridge->matmul(call(8), stream.handle());
    ASSERT_FALSE(done);
    EXPECT_EQ(done.error().code(), Errc::capture_unsafe);
  }
  ASSERT_TRUE(bridge->prepare(call(8), stream.handle()));
  CaptureScope capture = std::move(*CaptureScope::begin(*backend, stream.handle()));
  EXPECT_TRUE(bridge->matmul(call(8), stream.handle()));
}

TEST_F(CublasLtPlans, APlanMadeInACaptureIsMeasuredAtTheFirstCallOutside) {
  const auto bridge = make({});
  {
    CaptureScope capture = std::move(*CaptureScope::begin(*backend, stream.handle()));
    ASSERT_TRUE(bridge->matmul(call(8), stream.handle()));
    EXPECT_EQ(bridge->counts().measured, 0U);
  }
  ASSERT_TRUE(bridge->matmul(call(8), stream.handle()));
  EXPECT_EQ(bridge->counts().measured, 1U);
  const std::uint64_t live = backend->live_bytes();
  ASSERT_TRUE(bridge->matmul(call(8), stream.handle()));
  EXPECT_EQ(backend->live_bytes(), live) << "a call with a plan allocates nothing";
  EXPECT_EQ(bridge->counts().measured, 1U);
}

TEST_F(CublasLtPlans, ThreadsShareThem) {
  const auto bridge = make({.measure = false});
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const Stream own = std::move(*Stream::create(*backend));
      for (std::uint32_t m = 1; m <= 400; ++m) EXPECT_TRUE(bridge->matmul(call((m * 7 + t) % 400 + 1), own.handle()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<std::uint32_t> classes;
  for (std::uint32_t m = 1; m <= 400; ++m) classes.insert(m_class(m));
  EXPECT_EQ(bridge->counts().plans, classes.size());
}

TEST_F(CublasLtPlans, FilesServeTheSameDeviceAloneAndDamagedOnesAreIgnored) {
  const auto folder = std::filesystem::temp_directory_path() / ("metrale-cublaslt-plans-" + std::to_string(::getpid()));
  std::filesystem::remove_all(folder);
  const auto run = [&](const std::string& identity) {
    const auto bridge = make({.cache_folder = folder.string()}, identity);
    EXPECT_TRUE(bridge->matmul(call(8), stream.handle()));
    EXPECT_TRUE(bridge->matmul(call(100), stream.handle()));
    return bridge->counts();
  };
  EXPECT_EQ(run("one device").measured, 2U);
  EXPECT_EQ(run("one device").from_file, 2U);
  EXPECT_EQ(run("another device").measured, 2U);
  EXPECT_TRUE(warnings.empty()) << warnings[0];
  std::vector<std::filesystem::path> files;
  for (const auto& file : std::filesystem::directory_iterator(folder)) files.push_back(file.path());
  ASSERT_EQ(files.size(), 2U);
  std::filesystem::copy_file(files[0], files[1], std::filesystem::copy_options::overwrite_existing);
  const std::uint64_t measured = run("one device").measured + run("another device").measured;
  EXPECT_EQ(measured, 2U) << "the one that holds what was made for the other";
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], HasSubstr("made for"));
  for (const auto& file : files) std::filesystem::resize_file(file, std::filesystem::file_size(file) - 2);
  EXPECT_EQ(run("one device").measured, 2U);
  EXPECT_THAT(warnings.back(), HasSubstr("is damaged"));
  std::filesystem::remove_all(folder);
}

TEST_F(CublasLtPlans, OptionsThatMakeNoSenseAreRefused) {
  EXPECT_EQ(make_bridge(*backend, api, "", "", {.candidates = 0}).error().code(), Errc::invalid_argument);
  EXPECT_EQ(make_bridge(*backend, api, "", "", {.workspace_bytes = std::uint64_t{1} << 40}).error().code(), Errc::invalid_argument);
}

}  // namespace
}  // namespace metrale::cublaslt
