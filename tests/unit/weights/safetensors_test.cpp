// SPDX-License-Identifier: Apache-2.0
#include "metrale/safetensors.h"

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "support/safetensors_writer.h"
#include "unit/weights/error_matchers.h"

namespace metrale {
namespace {

using test::expect_error;
using test::pattern_bytes;
using test::SafetensorsWriter;
using testing::ElementsAre;
using testing::Pair;

TEST(Safetensors, ReadsShapesOffsetsAndMetadata) {
  SafetensorsWriter w;
  w.metadata("format", "pt").metadata("note", "größe");
  w.tensor("a", "BF16", {2, 3}, pattern_bytes(12)).tensor("b", "F32", {}, pattern_bytes(4)).tensor("none", "F16", {0, 7}, {});
  w.tensor("c", "I64", {3}, pattern_bytes(24));
  const std::vector<std::byte> bytes = w.bytes();
  const auto header = parse_safetensors(MemorySource(bytes, "m"));
  ASSERT_TRUE(header) << header.error().to_string();
  EXPECT_THAT(header->metadata, ElementsAre(Pair("format", "pt"), Pair("note", "größe")));
  ASSERT_EQ(header->tensors.size(), 4U);
  const TensorInfo* a = header->tensors.find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->dtype, DType::bf16);
  EXPECT_EQ(a->type_name, "BF16");
  EXPECT_THAT(a->shape, ElementsAre(2, 3));
  EXPECT_EQ(a->size_bytes, 12U);
  EXPECT_EQ(a->offset, header->data_offset);
  EXPECT_EQ(bytes[a->offset + 5], pattern_bytes(12)[5]);
  const TensorInfo* b = header->tensors.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_TRUE(b->shape.empty());
  EXPECT_EQ(b->num_elements(), 1U);
  EXPECT_EQ(b->num_rows(), 1U);
  EXPECT_EQ(b->num_cols(), 1U);
  const TensorInfo* none = header->tensors.find("none");
  ASSERT_NE(none, nullptr);
  EXPECT_EQ(none->size_bytes, 0U);
  EXPECT_EQ(none->num_elements(), 0U);
  EXPECT_EQ(header->tensors.find("c")->offset, header->data_offset + 16);
  EXPECT_EQ(shape_text(a->shape), "[2, 3]");
}

TEST(Safetensors, KnowsEveryTypeOfTheFormatThatDTypeHas) {
  const std::vector<std::pair<std::string, DType>> types{
      {"BOOL", DType::boolean}, {"U8", DType::u8},   {"I8", DType::i8},   {"F8_E5M2", DType::f8_e5m2}, {"F8_E4M3", DType::f8_e4m3},
      {"I16", DType::i16},      {"U16", DType::u16}, {"F16", DType::f16}, {"BF16", DType::bf16},       {"I32", DType::i32},
      {"U32", DType::u32},      {"F32", DType::f32}, {"F64", DType::f64}, {"I64", DType::i64},         {"U64", DType::u64}};
  for (const auto& [name, dtype] : types) {
    const std::vector<std::byte> bytes =
        SafetensorsWriter().tensor("t", name, {3}, pattern_bytes(3 * dtype_facts(dtype).block_bytes)).bytes();
    const auto header = parse_safetensors(MemorySource(bytes, "m"));
    ASSERT_TRUE(header) << header.error().to_string();
    EXPECT_EQ(header->tensors.find("t")->dtype, dtype) << name;
  }
}

TEST(Safetensors, ListsTypesItCannotLoad) {
  const std::vector<std::byte> bytes = SafetensorsWriter().tensor("t", "F4", {4}, pattern_bytes(2)).bytes();
  const auto header = parse_safetensors(MemorySource(bytes, "m"));
  ASSERT_TRUE(header) << header.error().to_string();
  EXPECT_EQ(header->tensors.find("t")->dtype, std::nullopt);
  EXPECT_EQ(header->tensors.find("t")->type_name, "F4");
  EXPECT_EQ(header->tensors.find("t")->size_bytes, 2U);
}

TEST(Safetensors, ReadsAnEmptySet) {
  const std::vector<std::byte> bytes = test::safetensors_file("{}");
  const auto header = parse_safetensors(MemorySource(bytes, "m"));
  ASSERT_TRUE(header) << header.error().to_string();
  EXPECT_EQ(header->tensors.size(), 0U);
}

TEST(SafetensorsIndex, ReadsTheWeightMapAndPassesOverTheRest) {
  const std::string text = R"({"metadata": {"total_size": 12.5, "x": [1, null, true, {"y": -2}]},
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}, "z": "weight_map"})";
  const auto index = parse_safetensors_index(MemorySource(std::as_bytes(std::span(text)), "i.json"));
  ASSERT_TRUE(index) << index.error().to_string();
  EXPECT_THAT(index->weight_map,
              ElementsAre(Pair("a", "model-00001-of-00002.safetensors"), Pair("b", "model-00002-of-00002.safetensors")));
}

}  // namespace
}  // namespace metrale
