// SPDX-License-Identifier: Apache-2.0
//
// Every call that loading and generating make, failed once, on a mock: the error names what failed, nothing is left behind, and
// where the fault was a passing one the next attempt succeeds.
#include "metrale/models/generator.h"
#include "mock_kernels.h"

namespace metrale::test {
namespace {

class Faults : public ::testing::TestWithParam<const char*> {
 protected:
  /// The mock computes nothing, so the "token" it finds is what fresh memory is filled with; the steps around it are real.
  Result<> load_and_step() {
    // With a sweep at the end, since a release may be what fails.
    const auto model = METRALE_TRY(Generator::load(folder, *backend, {.extent = TeardownExtent::backend}));
    METRALE_TRY(model->decoder()->reserve(64));
    Sequence sequence = METRALE_TRY(model->decoder()->start());
    const std::vector<TokenId> prompt{1, 2, 3};
    METRALE_TRY(model->decoder()->append_all_logits(sequence, prompt));
    METRALE_TRY(model->decoder()->append_scores(sequence, prompt, prompt));
    return {};
  }

  const std::filesystem::path folder = model_folder(GetParam());
  const std::unique_ptr<GpuBackend> backend = mock_backend_with_kernels();
  mock::MockControl& mock_ = mock::control(*backend);
};

TEST_P(Faults, WithoutAnyItWorks) {
  ok(load_and_step());
  EXPECT_TRUE(backend->live_allocations().empty()) << backend->alloc_report();
}

TEST_P(Faults, EveryCallFailedOnce) {
  mock_.reset();
  ok(load_and_step());
  const std::uint64_t calls = mock_.counts().hook_calls;
  ASSERT_GT(calls, 100U);
  std::uint64_t failed = 0;
  // A prime stride meets calls of every kind; all of them take a plain build ten seconds.
  const std::uint64_t stride = METRALE_SANITIZED ? 13 : 1;
  for (std::uint64_t n = 1; n <= calls; n += stride) {
    SCOPED_TRACE("call " + std::to_string(n));
    mock_.fail_any_nth(n);
    const Result<> result = load_and_step();
    mock_.clear_failures();
    if (!result) {
      ++failed;
      const std::string text = result.error().to_string();
      EXPECT_NE(text.find("mock"), std::string::npos) << text;
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    }
    ASSERT_TRUE(backend->live_allocations().empty()) << backend->alloc_report();
    ASSERT_EQ(backend->live_graph_count(), 0U);
  }
  // Failures inside releases are logged instead of returned.
  EXPECT_GT(failed, calls / stride / 2);
  ok(load_and_step());
}

TEST_P(Faults, AFailedLookUpNamesTheKernel) {
  mock_.deny_kernel("decoder", "attend");
  expect_error(Generator::load(folder, *backend), Errc::not_found, {"decoder", "attend"});
  EXPECT_TRUE(backend->live_allocations().empty()) << backend->alloc_report();
}

TEST_P(Faults, ADeviceLostWhileGeneratingAbandonsNothingSilently) {
  const auto model = ok(Generator::load(folder, *backend));
  ok(model->decoder()->reserve(64));
  {
    Sequence sequence = ok(model->decoder()->start());
    mock_.lose_device("pulled out");
    const std::vector<TokenId> prompt{1, 2, 3};
    expect_error(model->decoder()->append(sequence, prompt), Errc::device_lost, {"pulled out"});
    expect_error(model->decoder()->append(sequence, prompt), Errc::invalid_argument, {"failed half-way"});
  }
  const Receipt receipt = model->unload();
  EXPECT_EQ(receipt.balance_bytes, 0) << receipt.to_string();
  EXPECT_GT(receipt.abandoned_bytes, 0U) << receipt.to_string();
}

TEST_P(Faults, AMockThatWasToldOfNoKernelsRefusesModels) {
  const std::unique_ptr<GpuBackend> bare = ok(mock::create());
  expect_error(Generator::load(folder, *bare), Errc::unsupported, {"the mock backend computes nothing", "attend_n_tile"});
  EXPECT_TRUE(bare->live_allocations().empty()) << bare->alloc_report();
}

INSTANTIATE_TEST_SUITE_P(Models, Faults, ::testing::ValuesIn(kModels), model_name);

}  // namespace
}  // namespace metrale::test
