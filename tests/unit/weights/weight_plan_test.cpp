// SPDX-License-Identifier: Apache-2.0
#include "metrale/weight_plan.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <vector>

#include "metrale/backends/mock.h"
#include "support/gguf_writer.h"
#include "support/safetensors_writer.h"
#include "unit/weights/error_matchers.h"
#include "weights/weight_loader.h"

namespace metrale {
namespace {

using test::expect_error;
using test::GgufWriter;
using test::pattern_bytes;
using test::SafetensorsWriter;
using test::value_of;
using testing::ElementsAre;
using testing::Pair;

struct OpenFile {
  explicit OpenFile(std::vector<std::byte> content) : bytes(std::move(content)) {
    file = value_of(WeightFile::open(std::make_unique<MemorySource>(bytes, "m")));
  }
  std::vector<std::byte> bytes;
  std::unique_ptr<WeightFile> file;
};

OpenFile three_tensors() {
  return OpenFile(SafetensorsWriter()
                      .tensor("a", "F16", {3, 10}, pattern_bytes(60))
                      .tensor("b", "F32", {64}, pattern_bytes(256))
                      .tensor("c", "U8", {1}, pattern_bytes(1))
                      .bytes());
}

std::vector<std::string> names_of(std::span<const WeightPlan::Entry> entries) {
  std::vector<std::string> names;
  for (const WeightPlan::Entry& entry : entries) names.push_back(entry.tensor->name);
  return names;
}

TEST(WeightPlan, LoadsEverythingIntoOneAlignedSegment) {
  const OpenFile open = three_tensors();
  const WeightPlan plan = value_of(WeightPlan::create(*open.file));
  EXPECT_THAT(names_of(plan.entries()), ElementsAre("a", "b", "c"));
  EXPECT_EQ(plan.entries()[0].offset, 0U);
  EXPECT_EQ(plan.entries()[1].offset, 256U);
  EXPECT_EQ(plan.entries()[2].offset, 512U);
  EXPECT_THAT(plan.segments(), ElementsAre(Pair(0U, 768U)));
  EXPECT_EQ(plan.device_bytes(), 768U);
  EXPECT_EQ(plan.read_bytes(), 60U + 256U + 1U);
  EXPECT_EQ(plan.num_skipped(), 0U);
  EXPECT_TRUE(plan.deferred().empty());
}

TEST(WeightPlan, FollowsThePolicy) {
  const OpenFile open = three_tensors();
  const WeightPlan plan = value_of(WeightPlan::create(*open.file, [](const TensorInfo& tensor) {
    TensorChoice choice;
    if (tensor.name == "b") choice.use = TensorUse::defer;
    if (tensor.name == "c") choice.segment = 7;
    if (tensor.name == "a") choice.transform = convert_to(DType::f32);
    return choice;
  }));
  EXPECT_THAT(names_of(plan.entries()), ElementsAre("a", "c"));
  EXPECT_EQ(plan.entries()[0].dtype, DType::f32);
  EXPECT_EQ(plan.entries()[0].size_bytes, 120U);
  EXPECT_THAT(plan.segments(), ElementsAre(Pair(0U, 256U), Pair(7U, 256U)));
  ASSERT_EQ(plan.deferred().size(), 1U);
  EXPECT_EQ(plan.deferred()[0]->name, "b");
}

TEST(WeightPlan, LoadsNamedTensorsOnly) {
  const OpenFile open = three_tensors();
  const std::vector<std::string> names{"c", "a"};
  const WeightPlan plan = value_of(WeightPlan::create(*open.file, names));
  EXPECT_THAT(names_of(plan.entries()), ElementsAre("a", "c"));
  EXPECT_EQ(plan.num_skipped(), 1U);
  const std::vector<std::string> wrong{"a", "d"};
  expect_error(WeightPlan::create(*open.file, wrong), Errc::not_found, {"\"d\"", "nearest"});
}

// Lexicographic order would put 10 before 2 and map tables to the wrong layers.
TEST(WeightPlan, SortsDeferredNamesByTheirNumbers) {
  SafetensorsWriter w;
  for (const char* name : {"table.10", "table.2", "table.1", "other", "table.02.b", "table.2.a"})
    w.tensor(name, "U8", {1}, pattern_bytes(1));
  const OpenFile open(w.bytes());
  const WeightPlan plan =
      value_of(WeightPlan::create(*open.file, [](const TensorInfo&) { return TensorChoice{TensorUse::defer, 0, std::nullopt}; }));
  std::vector<std::string> names;
  for (const TensorInfo* tensor : plan.deferred()) names.push_back(tensor->name);
  EXPECT_THAT(names, ElementsAre("other", "table.1", "table.2", "table.2.a", "table.02.b", "table.10"));
}

TEST(WeightPlan, UnknownTypeMattersOnlyWhenItIsLoaded) {
  GgufWriter w;
  w.tensor("good", GgufWriter::F32, {1}, pattern_bytes(4)).tensor("bad", GgufWriter::Q5_0, {32}, pattern_bytes(22));
  const OpenFile open(w.bytes());
  expect_error(WeightPlan::create(*open.file), Errc::unsupported, {"m", "\"bad\"", "Q5_0", "Q4_K"});
  const std::vector<std::string> names{"good"};
  EXPECT_TRUE(WeightPlan::create(*open.file, names));
}

TEST(WeightPlan, RefusesTransformsThatCannotApply) {
  const OpenFile open = three_tensors();
  const auto with = [&](TensorTransform transform) {
    return WeightPlan::create(*open.file, [&](const TensorInfo&) { return TensorChoice{TensorUse::load, 0, transform}; });
  };
  const auto nothing = [](const TensorInfo&, std::uint64_t, std::span<const std::byte>, std::span<std::byte>) {
    return Result<>();
  };
  expect_error(with({DType::f32, 1, {}}), Errc::invalid_argument, {"\"a\"", "no function"});
  expect_error(with({DType::f32, 0, nothing}), Errc::invalid_argument, {"granule_rows"});
  expect_error(with({DType::q8_0, 1, nothing}), Errc::invalid_argument, {"\"a\"", "q8_0", "blocks"});
}

TEST(WeightPlan, ChecksThatTheDeviceHasRoom) {
  const OpenFile open = three_tensors();
  const WeightPlan plan = value_of(WeightPlan::create(*open.file));
  mock::Options options;
  options.free_memory_bytes = 1000;
  const auto backend = value_of(mock::create(options));
  EXPECT_TRUE(plan.check_fits(*backend));
  EXPECT_TRUE(plan.check_fits(*backend, 232));
  expect_error(plan.check_fits(*backend, 233), Errc::out_of_memory, {"m", "768", "233", "1000"});
  expect_error(plan.check_fits(*backend, UINT64_MAX), Errc::out_of_memory, {"768"});
}

// ---- how a plan is read ----

// Checks that the reads cover each entry once, in rising file order, and returns the largest read.
std::uint64_t check_reads(const WeightPlan& plan, std::span<const weights::LoadRead> reads) {
  std::vector<std::uint64_t> source(plan.entries().size()), result(plan.entries().size());
  std::uint64_t largest = 0, end = 0;
  for (const weights::LoadRead& read : reads) {
    EXPECT_GE(read.offset, end);
    end = read.offset + read.bytes;
    largest = std::max(largest, read.bytes);
    EXPECT_FALSE(read.pieces.empty());
    for (const weights::LoadPiece& piece : read.pieces) {
      const WeightPlan::Entry& entry = plan.entries()[piece.entry];
      EXPECT_EQ(read.offset + piece.in_offset, entry.tensor->offset + source[piece.entry]);
      EXPECT_EQ(piece.dst_offset, result[piece.entry]);
      EXPECT_LE(piece.in_offset + piece.in_bytes, read.bytes);
      source[piece.entry] += piece.in_bytes;
      result[piece.entry] += piece.dst_bytes;
      if (entry.transform) {
        EXPECT_LE(piece.out_offset + piece.dst_bytes, read.out_bytes);
        EXPECT_EQ(piece.first_row % std::min(entry.transform->granule_rows, entry.tensor->num_rows()), 0U);
      }
    }
  }
  for (std::size_t i = 0; i < source.size(); ++i) {
    EXPECT_EQ(source[i], plan.entries()[i].tensor->size_bytes);
    EXPECT_EQ(result[i], plan.entries()[i].size_bytes);
  }
  return largest;
}

TEST(WeightReads, JoinNeighboursUpToTheStagingSize) {
  SafetensorsWriter w;
  for (int i = 0; i < 100; ++i) w.tensor(fmt::format("t{}", i), "U8", {100}, pattern_bytes(100));
  w.tensor("empty", "F32", {0}, {});
  const OpenFile open(w.bytes());
  const WeightPlan plan = value_of(WeightPlan::create(*open.file));
  const auto reads = weights::cut_into_reads(plan, 1000);
  EXPECT_EQ(reads.size(), 10U);
  EXPECT_EQ(check_reads(plan, reads), 1000U);
  EXPECT_EQ(weights::cut_into_reads(plan, 1 << 20).size(), 1U);
  const auto tiny = weights::cut_into_reads(plan, 1);
  EXPECT_EQ(check_reads(plan, tiny), 1U);
  EXPECT_EQ(weights::cut_into_reads(plan, 0).size(), tiny.size());
}

TEST(WeightReads, CutTransformedTensorsAtGranules) {
  const OpenFile open(SafetensorsWriter()
                          .tensor("odd", "U8", {5}, pattern_bytes(5))
                          .tensor("m", "F16", {37, 8}, pattern_bytes(37 * 16))
                          .tensor("v", "F16", {4}, pattern_bytes(8))
                          .bytes());
  for (const std::uint64_t granule : {1U, 4U, 37U, 1000U}) {
    const WeightPlan plan = value_of(WeightPlan::create(*open.file, [&](const TensorInfo& tensor) {
      TensorChoice choice;
      if (tensor.dtype == DType::f16) choice.transform = convert_to(DType::f32);
      if (choice.transform) choice.transform->granule_rows = granule;
      return choice;
    }));
    for (const std::uint64_t staging : {1U, 16U, 100U, 10000U}) {
      SCOPED_TRACE(testing::Message() << "granule " << granule << " staging " << staging);
      const auto reads = weights::cut_into_reads(plan, staging);
      EXPECT_LE(check_reads(plan, reads), std::max<std::uint64_t>(staging, std::min<std::uint64_t>(granule, 37) * 16));
    }
  }
}

TEST(WeightReads, PassOverSkippedTensors) {
  const OpenFile open(SafetensorsWriter()
                          .tensor("a", "U8", {10}, pattern_bytes(10))
                          .tensor("small", "U8", {20}, pattern_bytes(20))
                          .tensor("b", "U8", {10}, pattern_bytes(10))
                          .tensor("large", "U8", {100000}, pattern_bytes(100000))
                          .tensor("c", "U8", {10}, pattern_bytes(10))
                          .bytes());
  const std::vector<std::string> names{"a", "b", "c"};
  const WeightPlan plan = value_of(WeightPlan::create(*open.file, names));
  const auto reads = weights::cut_into_reads(plan, 1 << 20);
  check_reads(plan, reads);
  ASSERT_EQ(reads.size(), 2U);
  EXPECT_EQ(reads[0].bytes, 40U);
  EXPECT_EQ(reads[1].bytes, 10U);
}

TEST(WeightPlan, SlicesThatCannotBeAreRefused) {
  const OpenFile open(
      SafetensorsWriter().tensor("m", "F16", {3, 10}, pattern_bytes(60)).tensor("t", "U8", {2, 2, 2}, pattern_bytes(8)).bytes());
  const auto plan = [&](std::string_view name, const TensorSlice& slice, bool transform = false) {
    return WeightPlan::create(*open.file, [&](const TensorInfo& tensor) {
      TensorChoice choice;
      if (tensor.name != name) choice.use = TensorUse::skip;
      choice.slice = slice;
      if (transform) choice.transform = convert_to(DType::f32);
      return choice;
    });
  };
  const WeightPlan whole = value_of(plan("m", {0, 3, 0, 10}));
  EXPECT_EQ(whole.entries()[0].size_bytes, 60U);
  const WeightPlan part = value_of(plan("m", {1, 2, 4, 3}));
  EXPECT_EQ(part.entries()[0].size_bytes, 12U);
  EXPECT_EQ(part.read_bytes(), 40U) << "whole rows are read";
  const WeightPlan copy = part;  // holds its slices itself
  EXPECT_EQ(copy.entries()[0].tensor->name, "m");
  for (const TensorSlice& slice :
       {TensorSlice{0, 4, 0, 10}, TensorSlice{3, 1, 0, 10}, TensorSlice{0, 3, 1, 10}, TensorSlice{0, 0, 0, 10},
        TensorSlice{0, 3, 0, 0}, TensorSlice{~std::uint64_t{0}, 2, 0, 10}, TensorSlice{0, 3, ~std::uint64_t{0}, 2}})
    expect_error(plan("m", slice), Errc::invalid_argument, {"slice of", "leaves the tensor"});
  expect_error(plan("t", {0, 1, 0, 1}), Errc::invalid_argument, {"only vectors and matrices"});
  expect_error(plan("m", {0, 1, 0, 1}, true), Errc::invalid_argument, {"transform"});
}

TEST(WeightPlan, ASliceDoesNotCutABlock) {
  const OpenFile open(GgufWriter().tensor("q", GgufWriter::Q4_0, {64, 4}, pattern_bytes(4 * 36)).bytes());
  const auto plan = [&](const TensorSlice& slice) {
    return WeightPlan::create(*open.file, [&](const TensorInfo&) {
      TensorChoice choice;
      choice.slice = slice;
      return choice;
    });
  };
  EXPECT_EQ(value_of(plan({1, 2, 32, 32})).entries()[0].size_bytes, 2U * 18U);
  expect_error(plan({0, 4, 16, 32}), Errc::invalid_argument, {"blocks of 32 columns"});
}

}  // namespace
}  // namespace metrale
