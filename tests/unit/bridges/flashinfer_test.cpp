// SPDX-License-Identifier: Apache-2.0
//
// The FlashInfer bridge without a device: what is refused, and with which words; and how the paged cache is described to it.
#include "metrale/bridges/flashinfer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "metrale/backends/host.h"
#include "metrale/kv_cache.h"

namespace metrale::flashinfer {
namespace {

using ::testing::HasSubstr;

constexpr AttentionShape kShape{.num_q_heads = 8, .num_kv_heads = 2, .head_dim = 128};
constexpr PlanOptions kPaged{.page_size = 16};
constexpr PlanOptions kPacked{.page_size = 0};
const std::vector<std::int32_t> kTable{4, 9, 2, 7};

KvPages sound_pages() {
  return {.k = {0x10000},
          .v = {0x20000},
          .num_pages = 10,
          .page_size = 16,
          .num_heads = 2,
          .head_dim = 128,
          .dtype = DType::bf16,
          .page_stride = 16 * 256,
          .token_stride = 256,
          .head_stride = 128};
}

template <class Thing>
struct Bad {
  const char* words;
  std::function<void(Thing&)> spoil;
};

/// `judge` accepts the sound thing, and refuses each spoiled one with its words.
template <class Thing>
void expect_refused(const Thing& sound, const std::function<Result<>(const Thing&)>& judge, const std::vector<Bad<Thing>>& bads,
                    Errc code = Errc::invalid_argument) {
  ASSERT_TRUE(judge(sound)) << judge(sound).error().to_string();
  for (const Bad<Thing>& bad : bads) {
    Thing thing = sound;
    bad.spoil(thing);
    const Result<> answer = judge(thing);
    ASSERT_FALSE(answer) << bad.words;
    EXPECT_EQ(answer.error().code(), code) << bad.words;
    EXPECT_THAT(answer.error().message(), HasSubstr(bad.words));
  }
}

TEST(FlashInferBridge, ShapesThatNoKernelHasAreRefused) {
  const float nan = std::nanf("");
  expect_refused<AttentionShape>(kShape, [](const AttentionShape& s) { return check(s); },
                                 {{"0 query heads", [](auto& s) { s.num_q_heads = 0; }},
                                  {"8 query heads and 0 key heads", [](auto& s) { s.num_kv_heads = 0; }},
                                  {"multiple of the second", [](auto& s) { s.num_kv_heads = 3; }},
                                  {"up to 1024", [](auto& s) { s.num_q_heads = 2'048; }},
                                  {"heads of 96 elements", [](auto& s) { s.head_dim = 96; }},
                                  {"in f32; bf16", [](auto& s) { s.dtype = DType::f32; }},
                                  {"a cap of -1", [](auto& s) { s.soft_cap = -1; }},
                                  {"a cap of nan", [nan](auto& s) { s.soft_cap = nan; }},
                                  {"a scale of inf", [](auto& s) { s.scale = std::numeric_limits<float>::infinity(); }},
                                  {"a window of 4294967295", [](auto& s) { s.window = ~0U; }},
                                  {"a window needs a causal mask", [](auto& s) {
                                     s.window = 4;
                                     s.causal = false;
                                   }}});
}

TEST(FlashInferBridge, PlansForGraphsNeedTheirLimits) {
  expect_refused<PlanOptions>({.page_size = 16, .max_batch = 4, .max_rows = 9, .max_pages = 12},
                              [](const PlanOptions& o) { return check(kShape, o); },
                              {{"without max_batch", [](auto& o) { o.max_batch = 0; }},
                               {"max_batch 4 and max_rows 3", [](auto& o) { o.max_rows = 3; }},
                               {"max_rows 4294967295", [](auto& o) { o.max_rows = ~0U; }},
                               {"max_pages 3 of 16 tokens for 4 sequences", [](auto& o) { o.max_pages = 3; }},
                               {"max_pages 0", [](auto& o) { o.max_pages = 0; }},
                               {"2147483647 tokens in all", [](auto& o) { o.max_pages = 1U << 30; }},
                               {"pages of 4294967295 tokens", [](auto& o) { o.page_size = ~0U; }},
                               {"9 queries for 4 sequences", [](auto& o) { o.kernel = Kernel::cuda_cores; }}});
}

TEST(FlashInferBridge, BatchesThatCannotBeReadAreRefused) {
  using Batch = std::vector<Sequence>;
  const Batch sound{{.pages = kTable, .kv_tokens = 49, .q_tokens = 3}, {.pages = kTable, .kv_tokens = 1}};
  static const std::vector<std::int32_t> negative{4, -1, 2, 7};
  const std::function<Result<>(const Batch&)> judge = [](const Batch& b) { return check(kShape, kPaged, b); };
  expect_refused<Batch>(sound, judge,
                        {{"a batch of no sequences", [](auto& b) { b.clear(); }},
                         {"sequence 1 has 1 queries and 0 keys; leave empty ones out", [](auto& b) { b[1].kv_tokens = 0; }},
                         {"sequence 0 has 0 queries", [](auto& b) { b[0].q_tokens = 0; }},
                         {"sequence 1 has 2 queries and 1 keys", [](auto& b) { b[1].q_tokens = 2; }},
                         {"sequence 0 has 65 tokens and 4 pages of 16", [](auto& b) { b[0].kv_tokens = 65; }},
                         {"sequence 1 has 1 tokens and 0 pages", [](auto& b) { b[1].pages = {}; }},
                         {"page 1 of sequence 0 is -1", [](auto& b) { b[0].pages = negative; }},
                         {"4294967295 keys", [](auto& b) { b[0].kv_tokens = ~0U; }}});
  // Many rows, each of them sound.
  const Batch many(300'000, {.pages = {}, .kv_tokens = 10'000, .q_tokens = 10'000});
  const Result<> answer = check(kShape, kPacked, many);
  ASSERT_FALSE(answer);
  EXPECT_THAT(answer.error().message(), HasSubstr("3000000000 queries of 4 heads to a key head, and 3000000000 pages"));
}

TEST(FlashInferBridge, PackedPlansTakeNoPages) {
  const std::vector<Sequence> pages{{.pages = kTable, .kv_tokens = 49}};
  EXPECT_THAT(check(kShape, kPacked, pages).error().message(), HasSubstr("sequence 0 has pages"));
  const std::vector<Sequence> rows{{.kv_tokens = 49}};
  EXPECT_TRUE(check(kShape, kPacked, rows));
  EXPECT_FALSE(check(kShape, {.page_size = 0, .kernel = Kernel::cuda_cores}, rows));
}

TEST(FlashInferBridge, PagesBeforeAWindowMayBeAnything) {
  AttentionShape shape = kShape;
  shape.window = 20;
  const std::vector<std::int32_t> freed{-1, -1, 2, 7};
  // The last of 55 tokens sees those from 35 on, which is in page 2; the two before it see 33.
  EXPECT_TRUE(check(shape, kPaged, std::vector<Sequence>{{.pages = freed, .kv_tokens = 55}}));
  EXPECT_TRUE(check(shape, kPaged, std::vector<Sequence>{{.pages = freed, .kv_tokens = 55, .q_tokens = 3}}));
  EXPECT_FALSE(check(shape, kPaged, std::vector<Sequence>{{.pages = freed, .kv_tokens = 55, .q_tokens = 5}}));
  EXPECT_FALSE(check(shape, kPaged, std::vector<Sequence>{{.pages = freed, .kv_tokens = 50}}));
}

TEST(FlashInferBridge, BatchesHaveToFitPlansForGraphs) {
  const PlanOptions options{.page_size = 16, .max_batch = 2, .max_rows = 4, .max_pages = 6};
  using Batch = std::vector<Sequence>;
  const std::function<Result<>(const Batch&)> judge = [&](const Batch& b) { return check(kShape, options, b); };
  const Batch sound{{.pages = kTable, .kv_tokens = 49, .q_tokens = 3}, {.pages = kTable, .kv_tokens = 32}};
  expect_refused<Batch>(sound, judge,
                        {{"3 queries for a plan of 4", [](auto& b) { b.pop_back(); }},
                         {"3 sequences", [](auto& b) { b.push_back(b[1]); }},
                         {"5 queries", [](auto& b) { b[1].q_tokens = 2; }},
                         {"7 pages", [](auto& b) { b[1].kv_tokens = 33; }}});
  PlanOptions spare = options;
  spare.spare_page = 3;
  EXPECT_TRUE(check(kShape, spare, Batch{sound[0]}));
}

TEST(FlashInferBridge, CallsThatReadElsewhereAreRefused) {
  const Extent extent{.rows = 4, .num_pages = 10, .kv_rows = 0};
  const PagedCall sound{.q = {0x100000}, .kv = sound_pages(), .out = {0x200000}, .lse = {0x300004}};
  const std::function<Result<>(const PagedCall&)> judge = [&](const PagedCall& c) { return check(kShape, kPaged, extent, c); };
  expect_refused<PagedCall>(sound, judge,
                            {{"q is null", [](auto& c) { c.q = {}; }},
                             {"out is at 0x200008", [](auto& c) { c.out = {0x200008}; }},
                             {"lse is at 0x300002", [](auto& c) { c.lse = {0x300002}; }},
                             {"rows of 1024 elements and a stride of 1016", [](auto& c) { c.q_stride = 1'016; }},
                             {"a stride of 1028 elements", [](auto& c) { c.q_stride = 1'028; }},
                             {"a stride of 4294967296 elements", [](auto& c) { c.q_stride = std::uint64_t{1} << 32; }},
                             {"k of the pages is null", [](auto& c) { c.kv.k = {}; }},
                             {"v of the pages is at 0x20002", [](auto& c) { c.kv.v = {0x20002}; }},
                             {"3 heads of 128", [](auto& c) { c.kv.num_heads = 3; }},
                             {"2 heads of 64", [](auto& c) { c.kv.head_dim = 64; }},
                             {"in f32", [](auto& c) { c.kv.dtype = DType::f32; }},
                             {"pages of 32 tokens were given to a plan for pages of 16", [](auto& c) { c.kv.page_size = 32; }},
                             {"strides 0, 256 and 128", [](auto& c) { c.kv.page_stride = 0; }},
                             {"overlap with strides of 4088", [](auto& c) { c.kv.page_stride = 4'088; }},
                             {"each has to be a multiple of 8", [](auto& c) { c.kv.token_stride = 260; }}});
  expect_refused<PagedCall>(sound, judge, {{"the plan names page 9, and there are 9", [](auto& c) { c.kv.num_pages = 9; }}},
                            Errc::out_of_range);
  EXPECT_THAT(check(kShape, kPaged, Extent(), sound).error().message(), HasSubstr("nothing is planned"));
  EXPECT_THAT(check(kShape, kPacked, extent, sound).error().message(), HasSubstr("packed keys and values"));
}

TEST(FlashInferBridge, PagesWithTokensInsideHeadsAreTaken) {
  KvPages pages = sound_pages();
  pages.token_stride = 128;
  pages.head_stride = 16 * 128;
  const Extent extent{.rows = 4, .num_pages = 10, .kv_rows = 0};
  EXPECT_TRUE(check(kShape, kPaged, extent, PagedCall{.q = {0x100000}, .kv = pages, .out = {0x200000}}));
}

TEST(FlashInferBridge, PackedCallsThatReadElsewhereAreRefused) {
  const Extent extent{.rows = 4, .num_pages = 0, .kv_rows = 90};
  const PackedCall sound{.q = {0x100000}, .k = {0x400000}, .v = {0x500000}, .kv_stride = 1'536, .out = {0x200000}};
  const std::function<Result<>(const PackedCall&)> judge = [&](const PackedCall& c) { return check(kShape, kPacked, extent, c); };
  expect_refused<PackedCall>(sound, judge,
                             {{"k is null", [](auto& c) { c.k = {}; }},
                              {"v is at 0x500004", [](auto& c) { c.v = {0x500004}; }},
                              {"rows of 256 elements and a stride of 248", [](auto& c) { c.kv_stride = 248; }},
                              {"a stride of 1540", [](auto& c) { c.kv_stride = 1'540; }}});
  EXPECT_THAT(check(kShape, kPaged, extent, sound).error().message(), HasSubstr("were given to a plan for pages of 16"));
}

TEST(FlashInferBridge, AppendsThatWriteElsewhereAreRefused) {
  const Extent extent{.rows = 4, .num_pages = 10, .kv_rows = 0};
  const AppendCall sound{.k = {0x100000}, .v = {0x200000}, .kv = sound_pages()};
  const std::function<Result<>(const AppendCall&)> judge = [&](const AppendCall& c) { return check(kShape, kPaged, extent, c); };
  expect_refused<AppendCall>(sound, judge,
                             {{"k is null", [](auto& c) { c.k = {}; }},
                              {"v is at 0x200001", [](auto& c) { c.v = {0x200001}; }},
                              {"a stride of 128", [](auto& c) { c.row_stride = 128; }}});
  AttentionShape wide = kShape;
  wide.num_q_heads = wide.num_kv_heads = 128;
  EXPECT_THAT(check(wide, kPaged, extent, sound).error().message(), HasSubstr("appending rows of 16384 elements"));
  EXPECT_THAT(check(kShape, kPacked, extent, sound).error().message(), HasSubstr("no pages to append to"));
}

TEST(FlashInferBridge, NormsThatCannotBeMadeAreRefused) {
  const AddNormCall sound{.x = {0x1000}, .residual = {0x2000}, .weight = {0x3000}, .rows = 3, .columns = 576};
  expect_refused<AddNormCall>(sound, [](const AddNormCall& c) { return check(c); },
                              {{"norm of 0 rows", [](auto& c) { c.rows = 0; }},
                               {"3 rows of 577", [](auto& c) { c.columns = 577; }},
                               {"3 rows of 65536", [](auto& c) { c.columns = 65'536; }},
                               {"x is null", [](auto& c) { c.x = {}; }},
                               {"residual is at 0x2002", [](auto& c) { c.residual = {0x2002}; }},
                               {"weight is at 0x3008", [](auto& c) { c.weight = {0x3008}; }},
                               {"a stride of 568", [](auto& c) { c.x_stride = 568; }},
                               {"an eps of nan", [](auto& c) { c.eps = std::nanf(""); }},
                               {"4294967295 elements in all", [](auto& c) {
                                  c.rows = 1U << 30;
                                  c.residual_stride = 1'024;
                                }}});
}

TEST(FlashInferBridge, SamplingThatCannotBeMadeIsRefused) {
  const SampleCall sound{.logits = {0x1000}, .tokens = {0x2000}, .rows = 3, .vocabulary = 50'257, .top_k = 40, .top_p = 0.9F};
  expect_refused<SampleCall>(sound, [](const SampleCall& c) { return check(c); },
                             {{"0 rows", [](auto& c) { c.rows = 0; }},
                              {"3 rows of 0 logits", [](auto& c) { c.vocabulary = 0; }},
                              {"4294967295 in all", [](auto& c) { c.rows = 1U << 20; }},
                              {"logits is null", [](auto& c) { c.logits = {}; }},
                              {"tokens is at 0x2002", [](auto& c) { c.tokens = {0x2002}; }},
                              {"seed_device is at 0x3004", [](auto& c) { c.seed_device = {0x3004}; }},
                              {"a temperature of 0", [](auto& c) { c.temperature = 0; }},
                              {"a temperature of nan", [](auto& c) { c.temperature = std::nanf(""); }},
                              {"a top_k of -1", [](auto& c) { c.top_k = -1; }},
                              {"a top_p of 0", [](auto& c) { c.top_p = 0; }},
                              {"a top_p of 1.5", [](auto& c) { c.top_p = 1.5F; }}});
}

TEST(FlashInferBridge, TheCacheIsDescribedAsItLies) {
  auto backend = host::create();
  ASSERT_TRUE(backend) << backend.error().to_string();
  const KvLayout layout = KvLayout::uniform(2, 3, 64, DType::bf16, 8);
  auto cache = PagedKvCache::create(**backend, layout, 5);
  ASSERT_TRUE(cache) << cache.error().to_string();
  const Result<KvPages> pages = kv_pages(**cache, 1);
  ASSERT_TRUE(pages) << pages.error().to_string();
  EXPECT_EQ(pages->k, (*cache)->k_pool(1));
  EXPECT_EQ(pages->v, (*cache)->v_pool(1));
  EXPECT_EQ(pages->num_pages, 5U);
  EXPECT_EQ(pages->page_size, 8U);
  EXPECT_EQ(pages->head_stride, 64U);
  EXPECT_EQ(pages->token_stride, 192U);
  EXPECT_EQ(pages->page_stride, 8 * 192U);
  EXPECT_EQ(kv_pages(**cache, 2).error().code(), Errc::out_of_range);
  ASSERT_TRUE((*cache)->release(**backend));
  EXPECT_THAT(kv_pages(**cache, 0).error().message(), HasSubstr("released"));
}

TEST(FlashInferBridge, ACacheOfAnotherTypeIsUnsupported) {
  auto backend = host::create();
  ASSERT_TRUE(backend) << backend.error().to_string();
  KvLayout layout = KvLayout::uniform(1, 3, 64, DType::f8_e4m3);
  auto fp8 = PagedKvCache::create(**backend, layout, 2);
  ASSERT_TRUE(fp8) << fp8.error().to_string();
  EXPECT_EQ(kv_pages(**fp8, 0).error().code(), Errc::unsupported);
  layout = KvLayout::uniform(1, 3, 64, DType::bf16);
  layout.layers[0].v.head_dim = 128;
  auto uneven = PagedKvCache::create(**backend, layout, 2);
  ASSERT_TRUE(uneven) << uneven.error().to_string();
  EXPECT_THAT(kv_pages(**uneven, 0).error().message(), HasSubstr("3 heads of 64 in bf16 and values of 3 heads of 128"));
}

TEST(FlashInferBridge, WhereThereIsNoDeviceTheFactorySaysWhy) {
  auto backend = host::create();
  ASSERT_TRUE(backend) << backend.error().to_string();
  const auto bridge = Bridge::create(**backend);
  ASSERT_FALSE(bridge);
  EXPECT_EQ(bridge.error().code(), Errc::unsupported);
  EXPECT_EQ(status().library, "FlashInfer");
  EXPECT_FALSE(status().text.empty());
  EXPECT_THAT(bridge.error().message(), HasSubstr(status().is_available ? "no library enqueues" : "METRALE_FLASHINFER_ROOT"));
}

}  // namespace
}  // namespace metrale::flashinfer
