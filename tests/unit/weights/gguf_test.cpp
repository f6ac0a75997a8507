// SPDX-License-Identifier: Apache-2.0
#include "metrale/gguf.h"

#include <gmock/gmock.h>

#include <limits>
#include <string>
#include <vector>

#include "support/gguf_writer.h"
#include "unit/weights/error_matchers.h"

namespace metrale {
namespace {

using test::expect_error;
using test::GgufWriter;
using test::pattern_bytes;
using test::value_of;
using testing::ElementsAre;

Result<GgufHeader> parse(const GgufWriter& writer) {
  const std::vector<std::byte> bytes = writer.bytes();
  return parse_gguf(MemorySource(bytes, "m.gguf"));
}

TEST(Gguf, ReadsEveryScalarTypeWithItsOwnWidth) {
  GgufWriter w;
  w.key("u8", std::uint8_t{200}).key("i8", std::int8_t{-100}).key("u16", std::uint16_t{60000}).key("i16", std::int16_t{-30000});
  w.key("u32", std::uint32_t{4000000000}).key("i32", std::int32_t{-2000000000}).key("f32", 1.5F).key("yes", true).key("no", false);
  w.key("text", "größe").key("u64", std::uint64_t{1} << 63).key("i64", std::numeric_limits<std::int64_t>::min()).key("f64", 1e300);
  const auto header = parse(w);
  ASSERT_TRUE(header) << header.error().to_string();
  const GgufMetadata& m = header->metadata;
  EXPECT_EQ(m.values().size(), 13U);
  EXPECT_EQ(*m.find("u8"), GgufValue(std::uint8_t{200}));
  EXPECT_EQ(*m.find("i8"), GgufValue(std::int8_t{-100}));
  EXPECT_EQ(*m.find("u16"), GgufValue(std::uint16_t{60000}));
  EXPECT_EQ(*m.find("i16"), GgufValue(std::int16_t{-30000}));
  EXPECT_EQ(*m.find("u32"), GgufValue(std::uint32_t{4000000000}));
  EXPECT_EQ(*m.find("i32"), GgufValue(std::int32_t{-2000000000}));
  EXPECT_EQ(*m.find("f32"), GgufValue(1.5F));
  EXPECT_EQ(*m.find("yes"), GgufValue(true));
  EXPECT_EQ(*m.find("no"), GgufValue(false));
  EXPECT_EQ(*m.find("text"), GgufValue(std::string("größe")));
  EXPECT_EQ(*m.find("u64"), GgufValue(std::uint64_t{1} << 63));
  EXPECT_EQ(*m.find("i64"), GgufValue(std::numeric_limits<std::int64_t>::min()));
  EXPECT_EQ(*m.find("f64"), GgufValue(1e300));
  EXPECT_EQ(m.find("other"), nullptr);
  EXPECT_EQ(gguf_type_name(*m.find("text")), "string");
  EXPECT_EQ(gguf_type_name(*m.find("f64")), "f64");
}

TEST(Gguf, ReadsArraysOfEveryType) {
  GgufWriter w;
  w.key_array("u8", std::vector<std::uint8_t>{1, 255}).key_array("i8", std::vector<std::int8_t>{-1, 1});
  w.key_array("u16", std::vector<std::uint16_t>{65535}).key_array("i16", std::vector<std::int16_t>{-32768});
  w.key_array("u32", std::vector<std::uint32_t>{7, 8}).key_array("i32", std::vector<std::int32_t>{-7, 8});
  w.key_array("f32", std::vector<float>{0.5F, -2.0F}).key_array("bool", std::vector<bool>{true, false, true});
  w.key_array("text", std::vector<std::string>{"a", "", "long enough to live on the heap"});
  w.key_array("u64", std::vector<std::uint64_t>{UINT64_MAX}).key_array("i64", std::vector<std::int64_t>{-9, 9});
  w.key_array("f64", std::vector<double>{0.25}).key_array("empty", std::vector<float>{});
  const auto header = parse(w);
  ASSERT_TRUE(header) << header.error().to_string();
  const GgufMetadata& m = header->metadata;
  EXPECT_THAT(value_of(m.ints("u8")), ElementsAre(1, 255));
  EXPECT_THAT(value_of(m.ints("i8")), ElementsAre(-1, 1));
  EXPECT_THAT(value_of(m.ints("u16")), ElementsAre(65535));
  EXPECT_THAT(value_of(m.ints("i16")), ElementsAre(-32768));
  EXPECT_THAT(value_of(m.ints("u32")), ElementsAre(7, 8));
  EXPECT_THAT(value_of(m.ints("i32")), ElementsAre(-7, 8));
  EXPECT_THAT(value_of(m.ints("i64")), ElementsAre(-9, 9));
  EXPECT_THAT(value_of(m.floats("f32")), ElementsAre(0.5F, -2.0F));
  EXPECT_THAT(value_of(m.floats("f64")), ElementsAre(0.25F));
  EXPECT_THAT(value_of(m.floats("i32")), ElementsAre(-7.0F, 8.0F));
  EXPECT_THAT(value_of(m.strings("text")), ElementsAre("a", "", "long enough to live on the heap"));
  EXPECT_THAT(std::get<std::vector<bool>>(*m.find("bool")), ElementsAre(true, false, true));
  EXPECT_TRUE(value_of(m.floats("empty")).empty());
  EXPECT_EQ(gguf_type_name(*m.find("bool")), "array of bool");
  expect_error(m.ints("u64"), Errc::bad_format, {"m.gguf", "u64", "18446744073709551615"});
  expect_error(m.ints("f32"), Errc::bad_format, {"f32", "array of f32", "integers"});
  expect_error(m.ints("bool"), Errc::bad_format, {"bool"});
  expect_error(m.floats("text"), Errc::bad_format, {"text", "array of string", "numbers"});
  expect_error(m.strings("u8"), Errc::bad_format, {"u8", "strings"});
  expect_error(m.strings("none"), Errc::not_found, {"m.gguf", "\"none\"", "missing"});
}

TEST(Gguf, TypedLookupConvertsBetweenNumbersThatFit) {
  GgufWriter w;
  w.key("layers", std::uint32_t{30}).key("big", std::uint64_t{1} << 40).key("negative", std::int32_t{-1}).key("eps", 1e-5F);
  w.key("flag", true).key("name", "llama").key_array("list", std::vector<std::int32_t>{1});
  const auto header = parse(w);
  ASSERT_TRUE(header) << header.error().to_string();
  const GgufMetadata& m = header->metadata;
  EXPECT_EQ(value_of(m.get<std::uint64_t>("layers")), 30U);
  EXPECT_EQ(value_of(m.get<std::int32_t>("layers")), 30);
  EXPECT_EQ(value_of(m.get<float>("layers")), 30.0F);
  EXPECT_EQ(value_of(m.get<double>("eps")), static_cast<double>(1e-5F));
  EXPECT_EQ(value_of(m.get<std::int64_t>("negative")), -1);
  EXPECT_EQ(value_of(m.get<std::string>("name")), "llama");
  EXPECT_TRUE(value_of(m.get<bool>("flag")));
  EXPECT_EQ(value_of(m.get_or<std::uint32_t>("absent", 7)), 7U);
  EXPECT_EQ(value_of(m.get_or<std::uint32_t>("layers", 7)), 30U);
  expect_error(m.get<std::uint32_t>("big"), Errc::bad_format, {"m.gguf", "big", "1099511627776", "32"});
  expect_error(m.get<std::uint32_t>("negative"), Errc::bad_format, {"negative", "-1"});
  expect_error(m.get<std::uint32_t>("eps"), Errc::bad_format, {"eps", "f32", "an integer"});
  expect_error(m.get<std::uint32_t>("flag"), Errc::bad_format, {"flag", "bool"});
  expect_error(m.get<bool>("layers"), Errc::bad_format, {"layers", "a boolean"});
  expect_error(m.get<std::string>("layers"), Errc::bad_format, {"layers", "a string"});
  expect_error(m.get<std::uint32_t>("list"), Errc::bad_format, {"list", "array of i32"});
  expect_error(m.get<float>("absent"), Errc::not_found, {"m.gguf", "absent"});
  expect_error(m.get_or<std::uint32_t>("name", 7), Errc::bad_format, {"name"});
}

TEST(Gguf, ReversesDimensionsAndPlacesTensors) {
  GgufWriter w;
  w.key("general.alignment", std::uint32_t{64});
  w.alignment = 64;
  w.tensor("token_embd.weight", GgufWriter::Q4_1, {64, 10}, pattern_bytes(2 * 20 * 10));
  w.tensor("norm", GgufWriter::F32, {64}, pattern_bytes(256));
  w.tensor("conv", GgufWriter::F16, {4, 3, 2}, pattern_bytes(48));
  const std::vector<std::byte> bytes = w.bytes();
  const auto header = parse_gguf(MemorySource(bytes, "m.gguf"));
  ASSERT_TRUE(header) << header.error().to_string();
  EXPECT_EQ(header->version, 3U);
  EXPECT_EQ(header->alignment, 64U);
  EXPECT_EQ(header->data_offset % 64, 0U);
  ASSERT_EQ(header->tensors.size(), 3U);

  const TensorInfo* embed = header->tensors.find("token_embd.weight");
  ASSERT_NE(embed, nullptr);
  EXPECT_THAT(embed->shape, ElementsAre(10, 64));
  EXPECT_EQ(embed->num_rows(), 10U);
  EXPECT_EQ(embed->num_cols(), 64U);
  EXPECT_EQ(embed->dtype, DType::q4_1);
  EXPECT_EQ(embed->type_name, "Q4_1");
  EXPECT_EQ(embed->size_bytes, 400U);
  EXPECT_EQ(embed->offset, header->data_offset);

  const TensorInfo* conv = header->tensors.find("conv");
  ASSERT_NE(conv, nullptr);
  EXPECT_THAT(conv->shape, ElementsAre(2, 3, 4));
  EXPECT_EQ(conv->num_rows(), 6U);
  EXPECT_EQ(conv->offset, header->data_offset + 448 + 256);
  for (std::size_t i = 0; i < 48; ++i) ASSERT_EQ(bytes[conv->offset + i], pattern_bytes(48)[i]);
  EXPECT_EQ(header->tensors.find("missing"), nullptr);
  EXPECT_EQ(header->tensors.total_bytes(), 400U + 256U + 48U);
}

TEST(Gguf, ListsTensorsInFileOrder) {
  GgufWriter w;
  w.tensor("second", GgufWriter::F32, {8}, pattern_bytes(32), 32).tensor("first", GgufWriter::F32, {8}, pattern_bytes(32), 0);
  const auto header = parse(w);
  ASSERT_TRUE(header) << header.error().to_string();
  EXPECT_EQ(header->tensors.tensors()[0].name, "first");
  EXPECT_EQ(header->tensors.tensors()[1].name, "second");
}

TEST(Gguf, ReadsVersionTwoAndDefaultAlignment) {
  GgufWriter w;
  w.version = 2;
  w.tensor("t", GgufWriter::F32, {1}, pattern_bytes(4));
  const auto header = parse(w);
  ASSERT_TRUE(header) << header.error().to_string();
  EXPECT_EQ(header->version, 2U);
  EXPECT_EQ(header->alignment, kGgufDefaultAlignment);
}

TEST(Gguf, ReadsAFileWithoutTensors) {
  GgufWriter w;
  w.key("general.architecture", "llama");
  const auto header = parse(w);
  ASSERT_TRUE(header) << header.error().to_string();
  EXPECT_EQ(header->tensors.size(), 0U);
}

TEST(Gguf, ListsTypesItCannotLoad) {
  GgufWriter w;
  w.tensor("a", GgufWriter::Q5_0, {32}, pattern_bytes(22));
  w.tensor("b", 777, {5}, pattern_bytes(40));
  w.tensor("c", GgufWriter::F32, {8}, pattern_bytes(32));
  const auto header = parse(w);
  ASSERT_TRUE(header) << header.error().to_string();
  const TensorInfo* known = header->tensors.find("a");
  ASSERT_NE(known, nullptr);
  EXPECT_EQ(known->dtype, std::nullopt);
  EXPECT_EQ(known->type_name, "Q5_0");
  EXPECT_EQ(known->size_bytes, 22U);
  const TensorInfo* unknown = header->tensors.find("b");
  ASSERT_NE(unknown, nullptr);
  EXPECT_EQ(unknown->dtype, std::nullopt);
  EXPECT_EQ(unknown->type_name, "type 777");
  EXPECT_EQ(unknown->size_bytes, 64U);  // up to its neighbour
}

TEST(Gguf, KeepsLongHeadersAcrossWindowBoundaries) {
  std::vector<std::string> tokens;
  for (int i = 0; i < 40000; ++i) tokens.push_back("token-" + std::to_string(i));
  GgufWriter w;
  w.key_array("tokens", tokens).key_array("scores", std::vector<float>(40000, 0.5F)).key("last", std::uint64_t{99});
  w.tensor("t", GgufWriter::F32, {8}, pattern_bytes(32));
  const auto header = parse(w);
  ASSERT_TRUE(header) << header.error().to_string();
  const auto got = header->metadata.strings("tokens");
  ASSERT_TRUE(got);
  EXPECT_TRUE(std::equal(got->begin(), got->end(), tokens.begin(), tokens.end()));
  EXPECT_EQ(value_of(header->metadata.get<std::uint32_t>("last")), 99U);
}

TEST(Gguf, RecognisesItsOwnFiles) {
  const std::vector<std::byte> bytes = GgufWriter().bytes();
  EXPECT_TRUE(is_gguf(MemorySource(bytes)));
  EXPECT_FALSE(is_gguf(MemorySource(std::span(bytes).first(3))));
  EXPECT_FALSE(is_gguf(MemorySource(std::span(bytes).subspan(1))));
}

}  // namespace
}  // namespace metrale
