// SPDX-License-Identifier: Apache-2.0
//
// The FlashInfer bridge on a device, against float64. Outputs are NaN beforehand, and so is what of the cache belongs to nobody.
#include <optional>

#include "gpu/flashinfer_fixture.h"
#include "metrale/graph.h"
#include "metrale/op_cache.h"

namespace metrale::test {
namespace {

using namespace flashinfer;

struct Look {
  const char* name;
  bool causal;
  std::uint32_t window;
  float soft_cap;
};
constexpr Look kLooks[] = {
    {"plain", true, 0, 0}, {"window 40", true, 40, 0}, {"cap 8", true, 0, 8}, {"window 100, cap 4", true, 100, 4}};

TEST_F(FlashInferDevice, DecodeIsAttentionOfOneQuery) {
  const std::vector<Lengths> lengths{{1}, {16}, {17}, {333}, {1'000}, {31}, {64}, {129}, {2'048}};
  for (const std::uint32_t dim : {64U, 128U}) {
    for (const Look& look : kLooks) {
      for (const std::uint32_t group : {1U, 4U, 8U}) {
        const AttentionShape shape{.num_q_heads = 2 * group,
                                   .num_kv_heads = 2,
                                   .head_dim = dim,
                                   .causal = true,
                                   .window = look.window,
                                   .soft_cap = look.soft_cap};
        run_paged(shape, lengths, Kernel::cuda_cores, 16, fmt::format("cuda cores, {} x {}, {}", group, dim, look.name));
      }
      const AttentionShape shape{
          .num_q_heads = 15, .num_kv_heads = 3, .head_dim = dim, .window = look.window, .soft_cap = look.soft_cap};
      run_paged(shape, lengths, Kernel::tensor_cores, 8, fmt::format("tensor cores, 5 x {}, {}", dim, look.name));
    }
  }
}

TEST_F(FlashInferDevice, PrefillOverPages) {
  const std::vector<Lengths> lengths{
      {.kv = 300, .q = 300}, {.kv = 7, .q = 2}, {.kv = 500, .q = 129}, {.kv = 1, .q = 1}, {.kv = 211, .q = 64}};
  for (const std::uint32_t dim : {64U, 128U}) {
    for (const bool causal : {true, false}) {
      for (const Look& look : kLooks) {
        if (!causal && look.window > 0) continue;
        const AttentionShape shape{.num_q_heads = 6,
                                   .num_kv_heads = 2,
                                   .head_dim = dim,
                                   .causal = causal,
                                   .window = look.window,
                                   .soft_cap = look.soft_cap};
        const std::string what = fmt::format("{} {}, {}", dim, causal ? "causal" : "full", look.name);
        run_paged(shape, lengths, Kernel::tensor_cores, 16, "tensor cores, pages, " + what);
        run_paged(shape, {{.kv = 77, .q = 5}, {.kv = 40, .q = 1}}, Kernel::tensor_cores, 16, "few queries, pages, " + what);
        if (look.window == 0 && look.soft_cap == 0) {
          run_paged(shape, lengths, Kernel::hopper, 16, "hopper, pages, " + what);
          run_paged(shape, lengths, Kernel::hopper, 1, "hopper, pages of one, " + what);
        }
      }
    }
  }
}

TEST_F(FlashInferDevice, PrefillOverPackedRows) {
  const std::vector<Lengths> lengths{{.kv = 129, .q = 129}, {.kv = 3, .q = 1}, {.kv = 700, .q = 400}, {.kv = 64, .q = 64}};
  for (const std::uint32_t dim : {64U, 128U}) {
    for (const bool causal : {true, false}) {
      AttentionShape shape{.num_q_heads = 8, .num_kv_heads = 4, .head_dim = dim, .causal = causal};
      const std::string what = fmt::format("{} {}", dim, causal ? "causal" : "full");
      run_packed(shape, lengths, Kernel::hopper, "hopper, packed, " + what);
      run_packed(shape, lengths, Kernel::tensor_cores, "tensor cores, packed, " + what);
      shape.scale = 0.05F;
      run_packed(shape, lengths, Kernel::hopper, "hopper, packed, another scale, " + what);
      if (!causal) continue;
      shape.window = 50;
      run_packed(shape, lengths, Kernel::tensor_cores, "tensor cores, packed, window, " + what);
    }
  }
}

TEST_F(FlashInferDevice, AppendWritesTheNewTokensAndNothingElse) {
  const AttentionShape shape{.num_q_heads = 6, .num_kv_heads = 3, .head_dim = 64};
  const AttentionCase data(shape, {{.kv = 16, .q = 1}, {.kv = 40, .q = 20}, {.kv = 5, .q = 5}, {.kv = 17, .q = 2}}, 3);
  const FilledCache full(*backend_, shape, data, 16);
  const FilledCache partly(*backend_, shape, data, 16, /*without_queries=*/true);
  std::vector<std::uint16_t> k, v;
  std::size_t at = 0;
  for (const Lengths& length : data.lengths()) {
    at += length.kv - length.q;
    k.insert(k.end(), &data.k()[at * data.kv_row()], &data.k()[at * data.kv_row()] + std::size_t{length.q} * data.kv_row());
    v.insert(v.end(), &data.v()[at * data.kv_row()], &data.v()[at * data.kv_row()] + std::size_t{length.q} * data.kv_row());
    at += length.q;
  }
  const auto plan = must(bridge_->make_plan(shape, {.page_size = 16}));
  must(plan->plan(partly.sequences, stream_.handle()));
  const Filled new_k(*backend_, k);
  const Filled new_v(*backend_, v);
  must(plan->append(AppendCall{.k = new_k.ptr(), .v = new_v.ptr(), .kv = partly.pages()}, stream_.handle()));
  std::vector<std::uint16_t> pool(full.k().size());
  must(backend_->copy_d2h_on_stream(std::as_writable_bytes(std::span(pool)), partly.cache->k_pool(1), stream_.handle()));
  EXPECT_EQ(pool, full.k());
  must(backend_->copy_d2h_on_stream(std::as_writable_bytes(std::span(pool)), partly.cache->v_pool(1), stream_.handle()));
  EXPECT_EQ(pool, full.v());
}

TEST_F(FlashInferDevice, AGraphReplaysWhatWasPlannedLast) {
  const AttentionShape shape{.num_q_heads = 8, .num_kv_heads = 2, .head_dim = 128};
  struct Way {
    Kernel kernel;
    std::vector<std::vector<Lengths>> batches;
    std::uint32_t max_rows;
  };
  const std::vector<Way> ways{
      {Kernel::cuda_cores, {{{100}, {1}, {700}, {16}}, {{101}, {2}}, {{3'000}, {17}, {701}}, {{5}}}, 4},
      {Kernel::tensor_cores, {{{100}, {1}, {700}, {16}}, {{101}, {2}}, {{3'000}, {17}, {701}}}, 4},
      {Kernel::tensor_cores,
       {{{.kv = 400, .q = 300}, {.kv = 9, .q = 9}}, {{.kv = 30, .q = 3}}, {{.kv = 60, .q = 60}, {.kv = 80, .q = 1}}},
       310},
      {Kernel::hopper,
       {{{.kv = 400, .q = 300}, {.kv = 9, .q = 9}}, {{.kv = 30, .q = 3}}, {{.kv = 60, .q = 60}, {.kv = 80, .q = 1}}},
       310}};
  for (const Way& way : ways) {
    SCOPED_TRACE(to_string(way.kernel));
    std::vector<AttentionCase> data;
    std::vector<Lengths> all;
    for (const auto& lengths : way.batches) {
      data.emplace_back(shape, lengths, static_cast<std::uint32_t>(data.size()) + 40);
      all.insert(all.end(), lengths.begin(), lengths.end());
    }
    // One cache for all batches, so that the graph's addresses hold; it has unused blocks, one of which is the spare one.
    const AttentionCase widest(shape, all, 1);
    FilledCache home(*backend_, shape, widest, 16);
    const auto spare = static_cast<std::int32_t>(must(home.cache->alloc_block()));
    const auto plan = must(bridge_->make_plan(
        shape,
        {.page_size = 16, .kernel = way.kernel, .max_batch = 4, .max_rows = way.max_rows, .max_pages = 400, .spare_page = spare}));
    Filled q(*backend_, std::uint64_t{way.max_rows} * 8 * 128 * 2);
    Filled out(*backend_, std::uint64_t{way.max_rows} * 8 * 128 * 2);
    Filled lse(*backend_, std::uint64_t{way.max_rows} * 8 * 4);
    std::optional<Graph> graph;
    std::size_t first_table = 0;
    std::uint64_t held = 0;
    for (std::size_t b = 0; b < data.size(); ++b) {
      // The batch's data goes into the tables that were made for it.
      std::vector<std::uint16_t> k(home.k().size(), 0xFFFF), v = k;
      std::vector<Sequence> sequences;
      std::size_t at = 0;
      const std::uint32_t row = data[b].kv_row();
      for (std::size_t s = 0; s < data[b].lengths().size(); ++s) {
        const Lengths& length = data[b].lengths()[s];
        const BlockTable& table = home.tables[first_table + s];
        for (std::uint32_t t = 0; t < length.kv; ++t, ++at) {
          std::copy_n(&data[b].k()[at * row], row, &k[static_cast<std::size_t>(table.slot(t)) * row]);
          std::copy_n(&data[b].v()[at * row], row, &v[static_cast<std::size_t>(table.slot(t)) * row]);
        }
        sequences.push_back({.pages = table.blocks(), .kv_tokens = length.kv, .q_tokens = length.q});
      }
      first_table += data[b].lengths().size();
      must(backend_->copy_h2d(home.cache->k_pool(1), std::as_bytes(std::span(k))));
      must(backend_->copy_h2d(home.cache->v_pool(1), std::as_bytes(std::span(v))));
      must(backend_->copy_h2d(q.ptr(), std::as_bytes(std::span(data[b].q()))));
      must(plan->plan(sequences, stream_.handle()));
      if (!graph) {
        held = plan->size_bytes();
        CaptureScope capture = must(CaptureScope::begin(*backend_, stream_.handle()));
        must(plan->run(PagedCall{.q = q.ptr(), .q_stride = 0, .kv = home.pages(), .out = out.ptr(), .lse = lse.ptr()},
                       stream_.handle()));
        expect_refused_in_capture(*plan, sequences);
        graph = must(capture.end());
      }
      out.poison();
      lse.poison();
      must(graph->launch(stream_.handle()));
      must(stream_.synchronize());
      expect_answer(data[b], out, lse, stream_.handle(), fmt::format("{} in a graph, batch {}", to_string(way.kernel), b));
    }
    EXPECT_EQ(plan->size_bytes(), held) << "memory that a graph names has grown";
    EXPECT_EQ(plan->num_uploads(), data.size());
    const Result<> in_use = plan->release(*backend_);
    ASSERT_FALSE(in_use) << "the graph names the plan's memory";
    EXPECT_EQ(in_use.error().code(), Errc::in_use);
    must(graph->release());
    must(plan->release(*backend_));
  }
}

TEST_F(FlashInferDevice, AppendsInAGraphLeaveOtherSequencesAlone) {
  const AttentionShape shape{.num_q_heads = 4, .num_kv_heads = 2, .head_dim = 64};
  const AttentionCase data(shape, {{33}, {16}, {50}}, 8);
  FilledCache home(*backend_, shape, data, 16);
  const auto spare = must(home.cache->alloc_block());
  const auto plan = must(bridge_->make_plan(
      shape, {.page_size = 16, .max_batch = 5, .max_pages = 40, .spare_page = static_cast<std::int32_t>(spare)}));
  const std::vector<std::uint16_t> rows(std::size_t{5} * data.kv_row(), to_bf16(3));
  const Filled k(*backend_, rows);
  const Filled v(*backend_, rows);
  must(plan->plan(home.sequences, stream_.handle()));
  CaptureScope capture = must(CaptureScope::begin(*backend_, stream_.handle()));
  must(plan->append(AppendCall{.k = k.ptr(), .v = v.ptr(), .kv = home.pages()}, stream_.handle()));
  const Graph graph = must(capture.end());
  // Fewer sequences: only theirs are written, and the spare page.
  const std::vector<Sequence> fewer{home.sequences[1]};
  must(plan->plan(fewer, stream_.handle()));
  must(graph.launch(stream_.handle()));
  std::vector<std::uint16_t> wanted = home.k();
  const std::size_t row = data.kv_row();
  std::fill_n(&wanted[static_cast<std::size_t>(home.tables[1].slot(15)) * row], row, to_bf16(3));
  std::fill_n(&wanted[std::size_t{spare} * 16 * row], row, to_bf16(3));
  std::vector<std::uint16_t> pool(wanted.size());
  must(backend_->copy_d2h_on_stream(std::as_writable_bytes(std::span(pool)), home.cache->k_pool(1), stream_.handle()));
  EXPECT_EQ(pool, wanted);
}

TEST_F(FlashInferDevice, OnlyPlansForGraphsAreCaptured) {
  const AttentionShape shape{.num_q_heads = 4, .num_kv_heads = 2, .head_dim = 64};
  const AttentionCase data(shape, {{33}, {16}}, 8);
  FilledCache home(*backend_, shape, data, 16);
  const auto plan = must(bridge_->make_plan(shape));
  const Filled q(*backend_, data.q());
  const Filled out(*backend_, data.q().size() * 2);
  const PagedCall call{.q = q.ptr(), .q_stride = 0, .kv = home.pages(), .out = out.ptr(), .lse = {}};
  EXPECT_EQ(plan->run(call, stream_.handle()).error().code(), Errc::invalid_argument) << "nothing is planned";
  must(plan->plan(home.sequences, stream_.handle()));
  CaptureScope capture = must(CaptureScope::begin(*backend_, stream_.handle()));
  const Result<> answer = plan->run(call, stream_.handle());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::capture_unsafe);
  must(capture.end());
  must(plan->run(call, stream_.handle()));
  must(stream_.synchronize());
}

TEST_F(FlashInferDevice, MemoryOfOthersIsRefused) {
  const AttentionShape shape{.num_q_heads = 4, .num_kv_heads = 2, .head_dim = 64};
  const AttentionCase data(shape, {{33}, {16}}, 8);
  FilledCache home(*backend_, shape, data, 16);
  const auto plan = must(bridge_->make_plan(shape));
  must(plan->plan(home.sequences, stream_.handle()));
  const DeviceBuffer q = must(DeviceBuffer::create(*backend_, data.q().size() * 2));
  const DeviceBuffer out = must(DeviceBuffer::create(*backend_, data.q().size() * 2));
  const PagedCall sound{.q = q.ptr(), .q_stride = 0, .kv = home.pages(), .out = out.ptr(), .lse = {}};
  PagedCall call = sound;
  call.q_stride = 512;  // the last row ends behind the block
  EXPECT_EQ(plan->run(call, stream_.handle()).error().code(), Errc::out_of_range);
  call = sound;
  call.out = {kDeviceAlignment};
  EXPECT_EQ(plan->run(call, stream_.handle()).error().code(), Errc::out_of_range);
  call = sound;
  call.kv.num_pages += 1;
  EXPECT_EQ(plan->run(call, stream_.handle()).error().code(), Errc::out_of_range);
  must(plan->run(sound, stream_.handle()));
  must(stream_.synchronize());
}

TEST_F(FlashInferDevice, SchedulesStandWhileLengthsInPagesDo) {
  const AttentionShape shape{.num_q_heads = 4, .num_kv_heads = 2, .head_dim = 64};
  const AttentionCase data(shape, {{40}, {20}}, 8);
  FilledCache home(*backend_, shape, data, 16);
  const auto plan = must(bridge_->make_plan(shape));
  std::vector<Sequence> sequences = home.sequences;
  must(plan->plan(sequences, stream_.handle()));
  EXPECT_EQ(plan->num_schedules(), 1U);
  EXPECT_EQ(plan->num_uploads(), 1U);
  must(plan->plan(sequences, stream_.handle()));
  EXPECT_EQ(plan->num_uploads(), 1U) << "nothing has changed";
  sequences[0].kv_tokens = 41;
  must(plan->plan(sequences, stream_.handle()));
  EXPECT_EQ(plan->num_schedules(), 1U) << "a token more in the same page";
  EXPECT_EQ(plan->num_uploads(), 2U);
  sequences[0].kv_tokens = 31;
  must(plan->plan(sequences, stream_.handle()));
  EXPECT_EQ(plan->num_schedules(), 2U) << "a page less";
  must(stream_.synchronize());
}

TEST_F(FlashInferDevice, TwoStreamsAtOnce) {
  const AttentionShape shape{.num_q_heads = 8, .num_kv_heads = 2, .head_dim = 128};
  struct Lane {
    AttentionCase data;
    FilledCache cache;
    std::unique_ptr<AttentionPlan> plan;
    Stream stream;
    Filled q, out, lse;
    Lane(GpuBackend& backend, Bridge& bridge, const AttentionShape& shape, const std::vector<Lengths>& lengths, std::uint32_t seed)
        : data(shape, lengths, seed),
          cache(backend, shape, data, 16),
          plan(must(bridge.make_plan(shape))),
          stream(must(Stream::create(backend))),
          q(backend, data.q()),
          out(backend, data.q().size() * 2),
          lse(backend, std::uint64_t{data.q_rows()} * shape.num_q_heads * 4) {}
  };
  // Long sequences, so that both need partial results; each stream has its own.
  Lane a(*backend_, *bridge_, shape, {{5'000}, {300}}, 5);
  Lane b(*backend_, *bridge_, shape, {{2'500}, {4'000}, {1}}, 6);
  for (int round = 0; round < 50; ++round) {
    for (Lane* lane : {&a, &b}) {
      must(lane->plan->plan(lane->cache.sequences, lane->stream.handle()));
      must(lane->plan->run(
          PagedCall{.q = lane->q.ptr(), .q_stride = 0, .kv = lane->cache.pages(), .out = lane->out.ptr(), .lse = lane->lse.ptr()},
          lane->stream.handle()));
    }
  }
  for (Lane* lane : {&a, &b}) expect_answer(lane->data, lane->out, lane->lse, lane->stream.handle(), "one of two streams");
}

TEST_F(FlashInferDevice, TheNextPlanDoesNotDisturbRunsUnderWay) {
  const AttentionShape shape{.num_q_heads = 8, .num_kv_heads = 2, .head_dim = 128};
  const AttentionCase data(shape, {{4'000}, {3'000}, {700}}, 12);
  FilledCache home(*backend_, shape, data, 16);
  const auto plan = must(bridge_->make_plan(shape));
  const Filled q(*backend_, data.q());
  const Filled lse(*backend_, std::uint64_t{3} * 8 * 4);
  const Filled out(*backend_, data.q().size() * 2);
  const Filled other(*backend_, data.q().size() * 2);
  const std::vector<Sequence> one{home.sequences[2]};
  for (int round = 0; round < 20; ++round) {
    must(plan->plan(home.sequences, stream_.handle()));
    must(plan->run(PagedCall{.q = q.ptr(), .q_stride = 0, .kv = home.pages(), .out = out.ptr(), .lse = lse.ptr()},
                   stream_.handle()));
    must(plan->plan(one, stream_.handle()));
    must(plan->run(PagedCall{.q = q.ptr(), .q_stride = 0, .kv = home.pages(), .out = other.ptr(), .lse = {}}, stream_.handle()));
  }
  expect_answer(data, out, lse, stream_.handle(), "between other plans");
}

TEST_F(FlashInferDevice, UnloadGivesEveryByteBack) {
  const std::uint64_t before = backend_->live_bytes();
  const std::size_t blocks = backend_->live_allocations().size();
  const AttentionShape shape{.num_q_heads = 8, .num_kv_heads = 2, .head_dim = 128};
  {
    const AttentionCase data(shape, {{5'000}, {300}}, 5);
    FilledCache home(*backend_, shape, data, 16);
    auto plan = must(bridge_->make_plan(shape));
    const Filled q(*backend_, data.q());
    const Filled out(*backend_, data.q().size() * 2);
    must(plan->plan(std::span(home.sequences).first(1), stream_.handle()));
    must(plan->plan(home.sequences, stream_.handle()));
    must(plan->run(PagedCall{.q = q.ptr(), .q_stride = 0, .kv = home.pages(), .out = out.ptr(), .lse = {}}, stream_.handle()));
    must(bridge_->prepare_sample(4, 1'000, stream_.handle()));
    EXPECT_GT(plan->size_bytes(), 0U);
    EXPECT_GT(backend_->op_cache().scratch_bytes(), 0U);
    must(stream_.synchronize());
    must(plan->release(*backend_));
    EXPECT_EQ(plan->size_bytes(), 0U);
    must(backend_->op_cache().release(*backend_));
    EXPECT_EQ(backend_->op_cache().scratch_bytes(), 0U);
  }
  EXPECT_EQ(backend_->live_bytes(), before);
  EXPECT_EQ(backend_->live_allocations().size(), blocks);
}

}  // namespace
}  // namespace metrale::test
