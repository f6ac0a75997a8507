// SPDX-License-Identifier: Apache-2.0
//
// The FlashInfer bridge on a device, and how answers are judged.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "gpu/attention_case.h"
#include "gpu/gpu_fixture.h"
#include "metrale/stream.h"

namespace metrale::test {

// Of bf16 outputs: rounding them costs 0.0017, and tensor cores round the weights of values too.
inline constexpr double kTolerance = 0.005;
inline constexpr double kNormTolerance = 0.002;
inline constexpr double kLseTolerance = 0.01;

class FlashInferDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    METRALE_NEEDS_DEVICE();
    if (device_name() != "cuda") GTEST_SKIP() << "FlashInfer runs on CUDA alone";
    if (!flashinfer::status().is_available) GTEST_SKIP() << flashinfer::status().text;
    backend_ = must(open_device());
    bridge_ = must(flashinfer::Bridge::create(*backend_));
    stream_ = must(Stream::create(*backend_));
  }

  void expect_answer(const AttentionCase& data, const Filled& out, const Filled& lse, StreamHandle stream,
                     const std::string& what) {
    std::vector<double> wanted, wanted_lse;
    data.reference(wanted, wanted_lse);
    std::vector<float> got = out.read_bf16(stream);
    std::vector<float> got_lse = lse.read<float>(stream);
    got.resize(std::min(got.size(), wanted.size()));
    got_lse.resize(std::min(got_lse.size(), wanted_lse.size()));
    const Distance values = distance(got, wanted);
    EXPECT_LE(values.relative, kTolerance) << what;
    EXPECT_NEAR(values.norms, 1, kNormTolerance) << what;
    double worst = 0;
    for (std::size_t i = 0; i < wanted_lse.size(); ++i) {
      const double off = std::abs(got_lse[i] - wanted_lse[i]);
      worst = off <= worst ? worst : off;  // keeps NaN
    }
    EXPECT_LE(worst, kLseTolerance) << what;
    fmt::print("{}: {:.5f} off, norms {:.5f}, lse {:.5f}\n", what, values.relative, values.norms, worst);
  }

  /// A plan made in a capture would be lost with it.
  void expect_refused_in_capture(flashinfer::AttentionPlan& plan, std::vector<flashinfer::Sequence> sequences) {
    const Result<> answer = plan.plan(sequences, stream_.handle());
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code(), Errc::capture_unsafe);
  }

  /// Plans and runs over pages, and compares.
  void run_paged(const flashinfer::AttentionShape& shape, const std::vector<Lengths>& lengths, flashinfer::Kernel kernel,
                 std::uint32_t page_size, const std::string& what) {
    const AttentionCase data(shape, lengths, page_size + shape.head_dim);
    FilledCache cache(*backend_, shape, data, page_size);
    if (shape.window > 0) cache.forget_before_window(shape);
    const auto plan = must(bridge_->make_plan(shape, {.page_size = page_size, .kernel = kernel}));
    must(plan->plan(cache.sequences, stream_.handle()));
    EXPECT_EQ(plan->kernel(), kernel);
    // Rows of queries with something between them, as in one matrix of all three projections.
    const std::uint32_t stride = data.q_row() + 64;
    std::vector<std::uint16_t> spread(std::size_t{data.q_rows()} * stride, 0xFFFF);
    for (std::uint32_t r = 0; r < data.q_rows(); ++r) {
      std::copy_n(&data.q()[std::size_t{r} * data.q_row()], data.q_row(), &spread[std::size_t{r} * stride]);
    }
    const Filled q(*backend_, spread);
    const Filled out(*backend_, data.q().size() * 2);
    const Filled lse(*backend_, std::size_t{data.q_rows()} * shape.num_q_heads * 4);
    must(plan->run(flashinfer::PagedCall{.q = q.ptr(), .q_stride = stride, .kv = cache.pages(), .out = out.ptr(), .lse = lse.ptr()},
                   stream_.handle()));
    expect_answer(data, out, lse, stream_.handle(), what);
    must(plan->release(*backend_));
  }

  void run_packed(const flashinfer::AttentionShape& shape, const std::vector<Lengths>& lengths, flashinfer::Kernel kernel,
                  const std::string& what) {
    const AttentionCase data(shape, lengths, shape.head_dim);
    const std::uint32_t stride = data.kv_row() + 8;
    const auto spread = [&](const std::vector<std::uint16_t>& rows) {
      std::vector<std::uint16_t> wide(std::size_t{data.kv_rows()} * stride, 0xFFFF);
      for (std::uint32_t r = 0; r < data.kv_rows(); ++r) {
        std::copy_n(&rows[std::size_t{r} * data.kv_row()], data.kv_row(), &wide[std::size_t{r} * stride]);
      }
      return wide;
    };
    const auto plan = must(bridge_->make_plan(shape, {.page_size = 0, .kernel = kernel}));
    std::vector<flashinfer::Sequence> sequences;
    for (const Lengths& length : lengths) sequences.push_back({.pages = {}, .kv_tokens = length.kv, .q_tokens = length.q});
    must(plan->plan(sequences, stream_.handle()));
    EXPECT_EQ(plan->kernel(), kernel);
    const Filled q(*backend_, data.q());
    const Filled k(*backend_, spread(data.k()));
    const Filled v(*backend_, spread(data.v()));
    const Filled out(*backend_, data.q().size() * 2);
    const Filled lse(*backend_, std::size_t{data.q_rows()} * shape.num_q_heads * 4);
    must(plan->run(
        flashinfer::PackedCall{.q = q.ptr(), .k = k.ptr(), .v = v.ptr(), .kv_stride = stride, .out = out.ptr(), .lse = lse.ptr()},
        stream_.handle()));
    expect_answer(data, out, lse, stream_.handle(), what);
  }

  std::unique_ptr<GpuBackend> backend_;
  std::unique_ptr<flashinfer::Bridge> bridge_;
  Stream stream_;
};

}  // namespace metrale::test
