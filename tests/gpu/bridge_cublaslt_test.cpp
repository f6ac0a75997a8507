// SPDX-License-Identifier: Apache-2.0
//
// The cuBLASLt bridge on a device, against float64.
#include <filesystem>
#include <fstream>
#include <thread>

#include "gpu/cublaslt_case.h"
#include "metrale/graph.h"
#include "metrale/log.h"
#include "metrale/op_cache.h"
#include "metrale/stream.h"
#include "metrale/teardown.h"

namespace metrale::test {
namespace {

using cublaslt::Call;
using cublaslt::CublasLt;
using cublaslt::Epilogue;
using cublaslt::Options;
using cublaslt::Precision;

Options without_file() { return {.cache_folder = std::string()}; }

class CublasLtDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    METRALE_NEEDS_DEVICE();
    if (device_name() != "cuda") GTEST_SKIP() << "cuBLASLt works on the CUDA backend alone";
    if (const BridgeStatus status = cublaslt::status(); !status.is_available) GTEST_SKIP() << status.text;
    backend = must(open_device());
    stream = must(Stream::create(*backend));
    blas = must(CublasLt::create(*backend, without_file()));
  }

  Difference run(CublasLtCase& product) {
    must(blas->matmul(product.call, stream.handle()));
    return product.compare(stream.handle());
  }
  void expect_right(CublasLtCase& product, const std::string& what) {
    const Difference d = run(product);
    // The library's tanh is an approximation.
    const bool exact = product.call.out_type == DType::f32 && product.call.epilogue != Epilogue::gelu;
    const double tolerance = exact ? 1e-5 : 3e-3;
    EXPECT_LT(d.relative_l2, tolerance) << what;
    EXPECT_NEAR(d.norm_ratio, 1, 2e-3) << what;
  }

  std::unique_ptr<GpuBackend> backend;
  Stream stream;
  std::unique_ptr<CublasLt> blas;
};

struct Size {
  std::uint32_t m, n, k;
};

TEST_F(CublasLtDevice, Bf16InEveryForm) {
  unsigned seed = 1;
  for (const Size s : {Size{1, 264, 72}, {7, 80, 96}, {100, 512, 264}, {333, 136, 1'024}}) {
    for (const DType type : {DType::bf16, DType::f32}) {
      for (const Epilogue epilogue : {Epilogue::none, Epilogue::relu, Epilogue::gelu}) {
        for (const int form : {0, 1, 2, 3}) {
          const Call shape{.out_type = type, .epilogue = epilogue, .m = s.m, .n = s.n, .k = s.k, .alpha = 0.75F, .beta = -1.5F};
          CublasLtCase product(*backend, shape, ++seed, (form & 1) != 0, (form & 2) != 0);
          expect_right(product, fmt::format("{}x{}x{} {} {} form {}", s.m, s.n, s.k, to_string(type), to_string(epilogue), form));
        }
      }
    }
  }
}

TEST_F(CublasLtDevice, AnyNumberOfColumnsIsRightOrUnsupported) {
  CublasLtCase plain(*backend, {.m = 7, .n = 77, .k = 96}, 200);
  expect_right(plain, "77 columns");
  for (const DType type : {DType::bf16, DType::f32}) {
    for (const int form : {0, 1, 2, 3}) {
      CublasLtCase product(*backend, {.out_type = type, .m = 7, .n = 77, .k = 96}, 201, (form & 1) != 0, (form & 2) != 0);
      if (const Result<> done = blas->matmul(product.call, stream.handle()); !done) {
        EXPECT_EQ(done.error().code(), Errc::unsupported) << done.error().to_string();
        continue;
      }
      product.poison();
      expect_right(product, fmt::format("77 columns, {}, form {}", to_string(type), form));
    }
  }
}

TEST_F(CublasLtDevice, PaddedRowsKeepWhatLiesBetween) {
  for (const DType type : {DType::bf16, DType::f32}) {
    Call shape{.out_type = type, .m = 37, .n = 200, .k = 136};
    shape.act_stride = 160;
    shape.out_stride = 208;
    shape.residual_stride = 216;
    CublasLtCase product(*backend, shape, 5, true, true);
    expect_right(product, "padded");
  }
}

TEST_F(CublasLtDevice, TheResidualMayBeTheOutput) {
  CublasLtCase product(*backend, {.m = 50, .n = 256, .k = 128}, 6, false, true);
  const DevicePtr residual = product.call.residual;
  must(backend->copy_d2d(product.call.out, residual, 50 * 256 * 2));
  product.call.residual = product.call.out;
  expect_right(product, "in place");
}

TEST_F(CublasLtDevice, BatchesAtADistance) {
  Call shape{.m = 33, .n = 72, .k = 64, .batch = 5};
  shape.act_batch_stride = 40 * 64;
  shape.weight_batch_stride = 72 * 64;
  shape.out_batch_stride = 33 * 72 + 48;
  shape.residual_batch_stride = 33 * 72;
  CublasLtCase all(*backend, shape, 7, true, true);
  expect_right(all, "own weights");
  shape.weight_batch_stride = 0;
  CublasLtCase shared(*backend, shape, 8);
  expect_right(shared, "shared weights");
}

TEST_F(CublasLtDevice, Fp8WithAScaleForEachRow) {
  unsigned seed = 10;
  for (const Size s : {Size{1, 256, 512}, {3, 136, 528}, {17, 264, 64}, {100, 200, 1'024}}) {
    for (const bool bias : {false, true}) {
      Call shape{.precision = Precision::fp8_row, .m = s.m, .n = s.n, .k = s.k, .alpha = 1.25F};
      CublasLtCase packed(*backend, shape, ++seed, bias);
      expect_right(packed, fmt::format("{}x{}x{}", s.m, s.n, s.k));
      shape.act_stride = s.k + 32;
      shape.out_stride = s.n + 8;
      CublasLtCase strided(*backend, shape, ++seed, bias);
      expect_right(strided, fmt::format("{}x{}x{} strided", s.m, s.n, s.k));
    }
  }
}

TEST_F(CublasLtDevice, Fp8WithBlockScales) {
  unsigned seed = 30;
  for (const Size s : {Size{1, 256, 512}, {3, 136, 448}, {4, 128, 512}, {17, 264, 1'024}, {100, 200, 400}, {333, 384, 512}}) {
    for (const bool transposed : {false, true}) {
      Call shape{.precision = Precision::fp8_block, .m = s.m, .n = s.n, .k = s.k};
      shape.scales_transposed = transposed;
      CublasLtCase packed(*backend, shape, ++seed, transposed);
      expect_right(packed, fmt::format("{}x{}x{} transposed {}", s.m, s.n, s.k, transposed));
      shape.act_stride = s.k + 16;
      shape.out_stride = s.n + 24;
      CublasLtCase strided(*backend, shape, ++seed);
      expect_right(strided, fmt::format("{}x{}x{} transposed {}, strided", s.m, s.n, s.k, transposed));
      shape.rows_padded = true;
      CublasLtCase padded(*backend, shape, ++seed);
      expect_right(padded, fmt::format("{}x{}x{} transposed {}, padded rows", s.m, s.n, s.k, transposed));
    }
  }
}

TEST_F(CublasLtDevice, AnUntransposedScaleIsWrong) {
  CublasLtCase product(*backend, {.precision = Precision::fp8_block, .m = 64, .n = 256, .k = 512}, 60);
  expect_right(product, "transposed by the bridge");
  product.call.scales_transposed = true;  // a lie
  product.poison();
  EXPECT_GT(run(product).relative_l2, 0.05);
}

TEST_F(CublasLtDevice, AZeroOutputIsWrong) {
  CublasLtCase product(*backend, {.m = 64, .n = 64, .k = 64, .alpha = 0}, 61);
  must(blas->matmul(product.call, stream.handle()));
  product.call.alpha = 1;
  const Difference d = product.compare(stream.handle());
  EXPECT_NEAR(d.relative_l2, 1, 1e-6);
  EXPECT_EQ(d.norm_ratio, 0);
}

// ---- captures, streams, threads ----

TEST_F(CublasLtDevice, InACapturedGraph) {
  CublasLtCase plain(*backend, {.m = 96, .n = 512, .k = 256}, 70, true, true);
  CublasLtCase block(*backend, {.precision = Precision::fp8_block, .m = 18, .n = 256, .k = 512}, 71);
  must(blas->prepare(plain.call, stream.handle()));
  must(blas->prepare(block.call, stream.handle()));
  CaptureScope capture = must(CaptureScope::begin(*backend, stream.handle()));
  must(blas->matmul(plain.call, stream.handle()));
  must(blas->matmul(block.call, stream.handle()));
  const Graph graph = must(capture.end());
  for (int replay = 0; replay < 3; ++replay) {
    plain.poison();
    block.poison();
    must(graph.launch(stream.handle()));
    EXPECT_LT(plain.compare(stream.handle()).relative_l2, 3e-3);
    EXPECT_LT(block.compare(stream.handle()).relative_l2, 3e-3);
  }
}

TEST_F(CublasLtDevice, ACaptureWithoutPreparationTakesTheFirstChoice) {
  CublasLtCase product(*backend, {.m = 96, .n = 520, .k = 256}, 72);
  CaptureScope capture = must(CaptureScope::begin(*backend, stream.handle()));
  const Result<> enqueued = blas->matmul(product.call, stream.handle());
  if (!enqueued) {
    EXPECT_EQ(enqueued.error().code(), Errc::capture_unsafe) << enqueued.error().to_string();
    must(capture.abort());
  } else {
    const Graph graph = must(capture.end());
    EXPECT_EQ(blas->counts().measured, 0U);
    must(graph.launch(stream.handle()));
    EXPECT_LT(product.compare(stream.handle()).relative_l2, 3e-3);
  }
  product.poison();
  expect_right(product, "outside");
  EXPECT_EQ(blas->counts().measured, 1U) << "the first call outside measures";
}

TEST_F(CublasLtDevice, TwoStreamsAndTwoThreadsAtOnce) {
  // A small m and a long k take split algorithms, which write their workspace.
  std::vector<std::thread> threads;
  std::vector<Difference> worst(4);
  for (unsigned t = 0; t < worst.size(); ++t) {
    threads.emplace_back([&, t] {
      const Stream own = must(Stream::create(*backend));
      CublasLtCase deep(*backend, {.m = 8 + t % 2, .n = 256, .k = 8'192}, 80 + t);
      CublasLtCase block(*backend, {.precision = Precision::fp8_block, .m = 20 + t, .n = 128, .k = 1'024}, 90 + t);
      for (int i = 0; i < 20; ++i) {
        must(blas->matmul(deep.call, own.handle()));
        must(blas->matmul(block.call, own.handle()));
      }
      for (const Difference& d : {deep.compare(own.handle()), block.compare(own.handle())}) {
        worst[t].relative_l2 = std::max(worst[t].relative_l2, d.relative_l2);
      }
      must(backend->op_cache().retire_stream(own.handle()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Difference& d : worst) EXPECT_LT(d.relative_l2, 3e-3);
}

// ---- one algorithm for all rows ----

TEST_F(CublasLtDevice, RowsHaveTheSameBitsWhateverTheirNumber) {
  Options options = without_file();
  options.row_invariant = true;
  const auto pinned = must(CublasLt::create(*backend, options));
  for (const Precision precision : {Precision::bf16, Precision::fp8_row, Precision::fp8_block}) {
    for (const Size s : {Size{1'500, 1'024, 2'048}, {1'500, 264, 512}}) {
      CublasLtCase product(*backend, {.precision = precision, .m = s.m, .n = s.n, .k = s.k}, 100);
      must(pinned->matmul(product.call, stream.handle()));
      const auto all = product.output(stream.handle());
      for (const std::uint32_t m : {1U, 2U, 3U, 8U, 17U, 64U, 100U, 255U, 256U, 1'000U, 1'499U}) {
        product.poison();
        product.call.m = m;
        must(pinned->matmul(product.call, stream.handle()));
        const auto some = product.output(stream.handle());
        std::uint32_t different = 0;
        for (std::uint32_t row = 0; row < m; ++row) different += !std::ranges::equal(product.row(all, row), product.row(some, row));
        EXPECT_EQ(different, 0U) << to_string(precision) << ", " << m << " of " << s.m << " rows, n " << s.n;
      }
      product.call.m = s.m;
    }
  }
  EXPECT_EQ(pinned->counts().exceptions, 0U);
  EXPECT_EQ(pinned->counts().plans, 6U) << "one for each shape";
}

// ---- plans, memory, files ----

TEST_F(CublasLtDevice, RowsOfAClassShareAPlan) {
  for (const std::uint32_t m : {33U, 36U, 40U}) {
    CublasLtCase product(*backend, {.m = m, .n = 256, .k = 256}, m);
    expect_right(product, fmt::format("{} rows", m));
  }
  EXPECT_EQ(blas->counts().plans, 1U);
  EXPECT_EQ(blas->counts().exceptions, 0U);
}

TEST_F(CublasLtDevice, AnOperandThatLeavesItsMemoryIsRefused) {
  CublasLtCase product(*backend, {.m = 64, .n = 64, .k = 64}, 110);
  must(blas->matmul(product.call, stream.handle()));
  product.poison();
  Call call = product.call;
  call.m = 65;
  const Result<> answer = blas->matmul(call, stream.handle());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::out_of_range) << answer.error().to_string();
  const auto bytes = product.output(stream.handle());
  EXPECT_EQ(std::ranges::count(bytes, std::byte{0xFF}), static_cast<std::ptrdiff_t>(bytes.size()));
}

TEST_F(CublasLtDevice, UnloadingGivesBackEveryByte) {
  const std::uint64_t before = backend->live_bytes();
  Teardown teardown(*backend, TeardownExtent::backend);
  teardown.add(must(CublasLt::create(*backend, without_file())));
  {
    EXPECT_TRUE(blas->prewarm(stream.handle()));
    CublasLtCase deep(*backend, {.m = 1, .n = 256, .k = 8'192}, 120);
    CublasLtCase block(*backend, {.precision = Precision::fp8_block, .m = 21, .n = 128, .k = 512}, 121);
    must(blas->matmul(deep.call, stream.handle()));
    must(blas->matmul(block.call, stream.handle()));
    must(stream.synchronize());
  }
  EXPECT_GT(backend->live_bytes(), before) << "workspace and scales";
  must(blas->release(*backend));
  const Receipt receipt = teardown.run();
  EXPECT_TRUE(receipt.clean()) << receipt.to_string();
  EXPECT_EQ(backend->live_bytes(), before);
}

TEST_F(CublasLtDevice, MeasuredAlgorithmsAreKeptInAFile) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("metrale-cublaslt-{}", ::getpid());
  std::filesystem::remove_all(folder);
  Options options;
  options.cache_folder = folder.string();
  CublasLtCase product(*backend, {.m = 100, .n = 512, .k = 512}, 130);
  const auto multiply = [&] {
    blas.reset();
    blas = must(CublasLt::create(*backend, options));
    product.poison();
    expect_right(product, "with a file");
    return blas->counts();
  };
  EXPECT_EQ(multiply().measured, 1U);
  EXPECT_EQ(multiply().from_file, 1U);
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    std::filesystem::resize_file(file.path(), std::filesystem::file_size(file.path()) - 3);
  }
  EXPECT_EQ(multiply().measured, 1U) << "a damaged file is no file";
  EXPECT_EQ(multiply().from_file, 1U) << "and is written anew";
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace metrale::test
