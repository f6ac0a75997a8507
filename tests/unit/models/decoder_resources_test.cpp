// SPDX-License-Identifier: Apache-2.0
//
// What a decoder holds, as resources: each is released in full whatever fails, on its own backend only, and says when it cannot be.
#include "metrale/log.h"
#include "mock_kernels.h"
#include "models/decoder/decoder_impl.h"

namespace metrale::test {
namespace {

class DecoderResources : public ::testing::Test {
 protected:
  DecoderResources() {
    set_log_sink([this](LogLevel, std::string_view line) { log_.emplace_back(line); });
  }
  ~DecoderResources() override { set_log_sink({}); }

  Graph capture(const Stream& stream) {
    CaptureScope scope = ok(CaptureScope::begin(*backend_, stream.handle()));
    return ok(scope.end());
  }
  std::uint64_t held(GpuBackend& backend) {
    std::uint64_t bytes = 0;
    for (const Allocation& block : backend.live_allocations()) bytes += block.bytes;
    return bytes;
  }

  std::unique_ptr<GpuBackend> backend_ = mock_backend_with_kernels();
  std::unique_ptr<GpuBackend> other_ = mock_backend_with_kernels();
  mock::MockControl& mock_ = mock::control(*backend_);
  std::vector<std::string> log_;
};

TEST_F(DecoderResources, BothGraphsAreReleasedWhenTheFirstFails) {
  const Stream stream = ok(Stream::create(*backend_));
  DecoderGraphs graphs(*backend_);
  graphs.token = capture(stream);
  graphs.logits = capture(stream);
  mock_.fail_nth(Op::destroy_graph, 1);
  expect_error(graphs.release(*backend_), Errc::internal, {"destroy_graph"});
  EXPECT_EQ(mock_.num_calls(Op::destroy_graph), 2U);
  EXPECT_EQ(backend_->live_graph_count(), 0U);
  ok(graphs.release(*backend_));
}

TEST_F(DecoderResources, BothStagingBuffersAreReleasedWhenTheFirstFails) {
  DecoderStaging staging(*backend_);
  staging.inputs = ok(PinnedBuffer::create(*backend_, 100));
  staging.outputs = ok(PinnedBuffer::create(*backend_, 200));
  mock_.fail_nth(Op::free_host_pinned, 1);
  expect_error(staging.release(*backend_), Errc::internal, {"free_host_pinned"});
  EXPECT_EQ(mock_.num_calls(Op::free_host_pinned), 2U);
  EXPECT_EQ(held(*backend_), 0U);
  ok(staging.release(*backend_));
}

TEST_F(DecoderResources, TheFirstOfTwoFailuresIsReported) {
  DecoderStaging staging(*backend_);
  staging.inputs = ok(PinnedBuffer::create(*backend_, 100));
  staging.outputs = ok(PinnedBuffer::create(*backend_, 200));
  mock_.fail_nth(Op::free_host_pinned, 1, Errc::io);
  mock_.fail_nth(Op::free_host_pinned, 2, Errc::internal);
  expect_error(staging.release(*backend_), Errc::io, {});
}

TEST_F(DecoderResources, GraphsAndStagingRefuseAnotherBackend) {
  const Stream stream = ok(Stream::create(*backend_));
  DecoderGraphs graphs(*backend_);
  graphs.token = capture(stream);
  expect_error(graphs.release(*other_), Errc::invalid_argument, {"decode graphs", "another backend"});
  EXPECT_EQ(backend_->live_graph_count(), 1U);
  DecoderStaging staging(*backend_);
  staging.inputs = ok(PinnedBuffer::create(*backend_, 100));
  expect_error(staging.release(*other_), Errc::invalid_argument, {"step staging", "another backend"});
  EXPECT_EQ(held(*backend_), 100U);
}

TEST_F(DecoderResources, RegionsRefuseAnotherBackend) {
  DevicePtr mine, theirs;
  models::Regions regions(*backend_, "activations");
  regions.add("x", 1000, mine);
  ok(regions.allocate());
  models::Regions stranger(*other_, "activations");
  stranger.add("x", 1000, theirs);
  ok(stranger.allocate());
  ASSERT_EQ(mine, theirs) << "two mocks hand out the same addresses";
  expect_error(regions.release(*other_), Errc::invalid_argument, {"activations", "another backend"});
  EXPECT_TRUE(mine);
  EXPECT_GT(held(*other_), 0U);
  ok(regions.release(*backend_));
  EXPECT_FALSE(mine);
  EXPECT_EQ(held(*backend_), 0U);
}

class WidenedWeights : public DecoderResources {
 protected:
  std::unique_ptr<models::ModelWeights> bind(GpuBackend& backend, models::Ops& ops) {
    auto weights = ok(models::ModelWeights::create(backend, config_, *file_, ops.plans()));
    const std::vector<std::string> names = weights->names();
    store_ = ok(WeightStore::load(backend, *file_, names));
    ok(weights->bind(*store_, *file_, ops));
    return weights;
  }

  ModelConfig config_ = ok(load_model_config(model_folder(kModels[0])));
  std::unique_ptr<WeightFile> file_ = ok(WeightFile::open(model_folder(kModels[0])));
  std::unique_ptr<WeightStore> store_;
};

TEST_F(WidenedWeights, ADestructorThatCannotReleaseSaysSo) {
  const Stream stream = ok(Stream::create(*backend_));
  auto ops = ok(models::Ops::create(*backend_, stream.handle(), {}));
  auto weights = bind(*backend_, ops);
  mock_.fail_nth(Op::free_arena, 1);
  weights.reset();
  ASSERT_EQ(log_.size(), 1U);
  EXPECT_THAT(log_[0], ::testing::HasSubstr("widened weights not given back"));
}

TEST_F(WidenedWeights, AnotherBackendIsRefused) {
  const Stream stream = ok(Stream::create(*backend_));
  auto ops = ok(models::Ops::create(*backend_, stream.handle(), {}));
  const auto weights = bind(*backend_, ops);
  const std::uint64_t before = held(*backend_);
  expect_error(weights->release(*other_), Errc::invalid_argument, {"widened weights", "another backend"});
  EXPECT_EQ(held(*backend_), before);
  ok(weights->release(*backend_));
  EXPECT_LT(held(*backend_), before);
}

}  // namespace
}  // namespace metrale::test
