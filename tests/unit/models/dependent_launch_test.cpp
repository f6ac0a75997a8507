// SPDX-License-Identifier: Apache-2.0
//
// Which kernels of a step may start before their predecessor ends: those that wait for it themselves, behind another kernel.
#include "mock_kernels.h"

namespace metrale::test {
namespace {

class DependentLaunch : public ::testing::TestWithParam<const char*> {
 protected:
  /// Launches of a prompt of three tokens (`one_by_one` false), or of one token, which is a graph's replay.
  std::vector<mock::LaunchRecord> launches(GpuBackend& backend, bool one_by_one, DecoderOptions options = {}) {
    LoadedModel model(backend, model_folder(GetParam()), options);
    Sequence sequence = ok(model.decoder->start());
    const std::vector<TokenId> prompt{1, 2, 3};
    mock::control(backend).reset();
    // Whether what the mock's memory holds is a token does not matter here.
    static_cast<void>(model.decoder->append(sequence, std::span(prompt).first(one_by_one ? 1 : 3)));
    return mock::control(backend).launches();
  }
  static std::vector<std::string> plain(const std::vector<mock::LaunchRecord>& records) {
    std::vector<std::string> names;
    for (const mock::LaunchRecord& record : records) {
      if (!record.attributes.dependent_launch) names.push_back(record.function);
    }
    return names;
  }
};

TEST_P(DependentLaunch, EveryKernelButTheFirstAfterACopy) {
  const auto backend = mock_backend_with_kernels({}, true);
  for (const bool one_by_one : {false, true}) {
    const auto records = launches(*backend, one_by_one);
    EXPECT_GT(records.size(), 20U);
    EXPECT_THAT(plain(records), ::testing::ElementsAre("rotary"));
    EXPECT_EQ(records.front().function, "rotary");
  }
}

TEST_P(DependentLaunch, TheFirstKernelOfEachStepOfAReplayWaitsForAllBefore) {
  const auto backend = mock_backend_with_kernels({}, true);
  LoadedModel model(*backend, model_folder(GetParam()), {.tokens_per_replay = 3});
  Sequence sequence = ok(model.decoder->start());
  mock::control(*backend).reset();
  static_cast<void>(model.decoder->append_greedy(sequence, 1, 3));
  EXPECT_THAT(plain(mock::control(*backend).launches()), ::testing::ElementsAre("rotary", "rotary", "rotary"));
}

TEST_P(DependentLaunch, NoneWhereNoKernelWaits) {
  const auto backend = mock_backend_with_kernels();
  const auto records = launches(*backend, false);
  EXPECT_EQ(plain(records).size(), records.size());
}

TEST_P(DependentLaunch, NoneWhereTheBackendLacksIt) {
  mock::Options without;
  without.without = {Capability::dependent_launch};
  const auto backend = mock_backend_with_kernels(without, true);
  const auto records = launches(*backend, false);
  EXPECT_EQ(plain(records).size(), records.size());
}

TEST_P(DependentLaunch, NoneWhenSwitchedOff) {
  const auto backend = mock_backend_with_kernels({}, true);
  const auto records = launches(*backend, true, {.dependent_launch = false});
  EXPECT_EQ(plain(records).size(), records.size());
}

INSTANTIATE_TEST_SUITE_P(Models, DependentLaunch, ::testing::ValuesIn(kModels), model_name);

}  // namespace
}  // namespace metrale::test
