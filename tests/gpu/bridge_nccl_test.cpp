// SPDX-License-Identifier: Apache-2.0
//
// NCCL on the GPUs of this machine: what every communicator has to do, in a world of one and, where there are two devices, of two;
// ranks that do not come; and the model of the golden files over as many ranks.
#include "metrale/bridges/nccl.h"

#include <cstdlib>

#include "gpu_fixture.h"
#include "metrale/models/tensor_parallel.h"
#include "support/communicator_suite.h"
#include "unit/models/golden_checks.h"

namespace metrale::test {
namespace {

using ::testing::HasSubstr;

std::string why_no_nccl() {
  if (device_name() != "cuda") return "NCCL works on CUDA devices alone";
  if (!why_no_device().empty()) return why_no_device();
  const BridgeStatus status = nccl::status();
  return status.is_available ? std::string() : status.text;
}

/// A backend for each of `size` devices; fewer where there are fewer.
std::vector<std::unique_ptr<GpuBackend>> devices(std::uint32_t size, std::string& why_not) {
  std::vector<std::unique_ptr<GpuBackend>> backends;
  for (std::uint32_t i = 0; i < size; ++i) {
    BackendOptions options;
    options.cuda_device = static_cast<int>(i);
    auto opened = open_device(options);
    if (!opened) {
      why_not = fmt::format("{} devices wanted: {}", size, opened.error().message());
      return {};
    }
    backends.push_back(std::move(*opened));
  }
  return backends;
}

CommunicatorWorld nccl_world(std::uint32_t size, std::string& why_not) {
  CommunicatorWorld world;
  why_not = why_no_nccl();
  if (!why_not.empty()) return world;
  world.backends = devices(size, why_not);
  if (world.backends.empty()) return world;
  std::vector<GpuBackend*> on;
  for (const auto& backend : world.backends) on.push_back(backend.get());
  world.ranks = good(nccl::create_all(on));
  return world;
}

CommunicatorCase nccl_case(std::uint32_t size) {
  return {fmt::format("Gpus{}", size), size, [size](std::string& why_not) { return nccl_world(size, why_not); }};
}

INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorSuite, ::testing::Values(nccl_case(1), nccl_case(2)), communicator_case_name);

class BridgeNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why_not = why_no_nccl(); !why_not.empty()) {
      if (device_is_required() && device_name() == "cuda" && !why_no_device().empty()) FAIL() << why_not;
      GTEST_SKIP() << why_not;
    }
  }
};

TEST_F(BridgeNccl, ARankThatDoesNotComeIsATimeoutAndNoHang) {
  std::string why_not;
  const auto backends = devices(1, why_not);
  ASSERT_EQ(backends.size(), 1U) << why_not;
  const auto start = std::chrono::steady_clock::now();
  const auto made = nccl::create(*backends[0], good(nccl::make_unique_id()), 0, 2, {.meeting_timeout = std::chrono::seconds(3)});
  const auto took = std::chrono::steady_clock::now() - start;
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), Errc::timeout) << made.error().to_string();
  EXPECT_LT(took, std::chrono::seconds(15));
  EXPECT_TRUE(backends[0]->health());
}

TEST_F(BridgeNccl, WhatItTookComesBack) {
  std::string why_not;
  const auto backends = devices(1, why_not);
  ASSERT_EQ(backends.size(), 1U) << why_not;
  GpuBackend& backend = *backends[0];
  GpuBackend* const on[] = {&backend};
  good(nccl::create_all(on)).clear();  // what the library keeps for the process
  const std::uint64_t before = good(backend.device_free_memory());
  std::uint64_t residual = 0;
  for (int round = 0; round < 5; ++round) {
    auto ranks = good(nccl::create_all(on));
    residual = nccl::residual_bytes(*ranks[0]);
    RankMemory memory(backend, 1 << 20);
    memory.put(rank_values<float>(0, 1 << 18));
    good(ranks[0]->all_reduce(memory.ptr(), memory.ptr(), 1 << 18, DType::f32, backend.default_stream()));
    good(ranks[0]->synchronize(backend.default_stream()));
  }
  // The library gives back from a thread of its own.
  std::uint64_t after = 0;
  for (int i = 0; i < 100 && after + (std::uint64_t{4} << 20) < before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    after = good(backend.device_free_memory());
  }
  std::printf("nccl %s: %llu bytes taken by a world of one; %lld lost in 5 rounds\n", nccl::status().text.c_str(),
              static_cast<unsigned long long>(residual), static_cast<long long>(before) - static_cast<long long>(after));
  EXPECT_GE(after + (std::uint64_t{4} << 20), before);
}

TEST_F(BridgeNccl, AnAbortedRankAnswersTheFirstReason) {
  std::string why_not;
  CommunicatorWorld world = nccl_world(1, why_not);
  ASSERT_EQ(world.ranks.size(), 1U) << why_not;
  Communicator& comm = *world.ranks[0];
  const StreamHandle stream = comm.backend().default_stream();
  RankMemory memory(comm.backend(), 4096);
  good(comm.all_reduce(memory.ptr(), memory.ptr(), 1024, DType::f32, stream));
  comm.abort("a test");
  comm.abort("again");
  const Result<> later = comm.all_reduce(memory.ptr(), memory.ptr(), 1024, DType::f32, stream);
  ASSERT_FALSE(later);
  EXPECT_THAT(later.error().to_string(), HasSubstr("aborted on rank 0: a test"));
  good(comm.backend().synchronize(stream));
}

TEST_F(BridgeNccl, ProcessesJoinByTheirPlace) {
  std::string why_not;
  const auto backends = devices(1, why_not);
  ASSERT_EQ(backends.size(), 1U) << why_not;
  const auto rank = good(nccl::join(*backends[0], {.rank = 0, .size = 1}));
  EXPECT_EQ(rank->size(), 1U);
  EXPECT_THAT(std::string(rank->name()), HasSubstr("nccl 2."));
}

TEST_F(BridgeNccl, TwoDevicesGiveTheTokensOfOne) {
  std::string why_not;
  CommunicatorWorld world = nccl_world(2, why_not);
  if (world.ranks.empty()) GTEST_SKIP() << why_not;
  const auto folder = model_folder("kjv-llama-2m");
  const Golden golden(folder);
  std::vector<Communicator*> ranks;
  for (const auto& rank : world.ranks) ranks.push_back(rank.get());
  const auto model = good(TensorParallelGenerator::load(folder, ranks));
  const std::size_t vocab = model->rank(0).config().vocab_size;
  int clear = 0;
  for (int n = 0; n < Golden::kPrompts; ++n) {
    const auto ids = golden.greedy(n);
    BackendOptions options;
    options.cuda_device = 0;
    const auto one = good(open_device(options));
    LoadedModel whole(*one, folder);
    const auto want = step_logits(*whole.decoder, ids);
    on_each_rank(world, [&](Communicator& comm) {
      Decoder& decoder = *model->rank(comm.rank()).decoder();
      good(decoder.reserve(320));
      const auto got = step_logits(decoder, ids);
      if (comm.rank() == 0) clear += expect_same_choice(got, want, vocab, 0.2F);
    });
  }
  EXPECT_GT(clear, 50);
  for (const Receipt& receipt : model->unload()) EXPECT_TRUE(receipt.clean()) << receipt.to_string();
}

}  // namespace
}  // namespace metrale::test
