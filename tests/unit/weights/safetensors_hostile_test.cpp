// SPDX-License-Identifier: Apache-2.0
//
// Files that are truncated, lie, or were made to hurt. Each must end in one line that names the file and the thing.
#include <string>
#include <vector>

#include "metrale/safetensors.h"
#include "support/safetensors_writer.h"
#include "unit/weights/error_matchers.h"

namespace metrale {
namespace {

using test::expect_error;
using test::pattern_bytes;
using test::safetensors_file;
using test::SafetensorsWriter;

Result<SafetensorsHeader> parse_bytes(const std::vector<std::byte>& bytes) {
  return parse_safetensors(MemorySource(bytes, "m.st"));
}

void expect_bad(std::string_view header, std::size_t data_bytes, std::vector<std::string> parts) {
  parts.emplace_back("m.st");
  expect_error(parse_bytes(safetensors_file(header, pattern_bytes(data_bytes))), Errc::bad_format, parts);
}

std::string tensor(const std::string& fields) { return "{\"w\":{" + fields + "}}"; }

std::vector<std::byte> small_file() {
  return SafetensorsWriter()
      .metadata("format", "pt")
      .tensor("a", "BF16", {2, 3}, pattern_bytes(12))
      .tensor("none", "F32", {0}, {})
      .tensor("b", "F32", {5}, pattern_bytes(20))
      .bytes();
}

TEST(SafetensorsHostile, TruncatedAtEveryByte) {
  const std::vector<std::byte> whole = small_file();
  ASSERT_TRUE(parse_bytes(whole));
  for (std::size_t length = 0; length < whole.size(); ++length) {
    SCOPED_TRACE(length);
    expect_error(parse_bytes({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)}), Errc::bad_format, {"m.st"});
  }
}

TEST(SafetensorsHostile, EveryByteFlippedIsRefusedOrConsistent) {
  const std::vector<std::byte> whole = small_file();
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const int flip : {0x01, 0x04, 0x80, 0xFF}) {
      std::vector<std::byte> bytes = whole;
      bytes[at] ^= static_cast<std::byte>(flip);
      const auto header = parse_bytes(bytes);
      if (!header) {
        EXPECT_NE(header.error().message().find("m.st"), std::string::npos);
        continue;
      }
      std::uint64_t end = header->data_offset;
      for (const TensorInfo& t : header->tensors.tensors()) {
        ASSERT_GE(t.offset, end);
        end = t.offset + t.size_bytes;
        ASSERT_LE(end, bytes.size());
      }
    }
  }
}

TEST(SafetensorsHostile, HeaderLongerThanTheFileOrTheLimit) {
  for (const std::uint64_t length : {std::uint64_t{3}, std::uint64_t{100'000'001}, std::uint64_t{1} << 63, UINT64_MAX}) {
    const auto bytes = test::ByteWriter().put(length).put_text("{}").take();
    expect_error(parse_bytes(bytes), Errc::bad_format, {"m.st", std::to_string(length)});
  }
  const std::string padded = "{}" + std::string(100'000'001, ' ');
  expect_error(parse_bytes(safetensors_file(padded)), Errc::bad_format, {"m.st", "100000003", "limit"});
}

TEST(SafetensorsHostile, NoJson) {
  expect_bad("", 0, {"{"});
  expect_bad("[]", 0, {"{"});
  expect_bad(" {}", 0, {"{"});
  expect_bad("{\"a\":", 0, {"JSON"});
  expect_bad("{} {}", 0, {"JSON"});
  expect_bad("{\"a\":1}", 0, {"\"a\"", "number"});
  expect_bad("{\"a\":null}", 0, {"\"a\"", "null"});
  expect_bad("{\"a\":[]}", 0, {"\"a\"", "array"});
  expect_bad("{\"a\":\"b\"}", 0, {"\"a\"", "string"});
}

// The JSON library takes a zero byte for the end of the input.
TEST(SafetensorsHostile, ZeroByteDoesNotHideTheRestOfTheHeader) {
  const std::string_view text("{}\0{\"a\":1}", 10);
  expect_bad(text, 0, {"zero byte at 2"});
}

TEST(SafetensorsHostile, NamesThatAreNotUtf8) {
  expect_bad("{\"\xFF\xFE\":{}}", 0, {"JSON"});
  expect_bad("{\"a\xC0\xAF\":{}}", 0, {"JSON"});
}

TEST(SafetensorsHostile, DeepJson) {
  const std::string opens(1'000'000, '[');
  expect_bad("{\"a\":" + opens, 0, {"\"a\""});
  std::string objects = "{";
  for (int i = 0; i < 100'000; ++i) objects += "\"a\":{";
  expect_bad(objects, 0, {"tensor \"a\""});
  expect_bad(tensor("\"shape\":[[[[[[]]]]]]"), 0, {"\"w\"", "array"});
}

TEST(SafetensorsHostile, NamesAndFieldsTwice) {
  const std::string one = "{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}";
  const std::string two = "{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}";
  expect_bad("{\"w\":" + one + ",\"w\":" + two + "}", 8, {"\"w\"", "twice"});
  expect_bad(tensor("\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]"), 4, {"dtype occurs twice"});
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[4],\"shape\":[4],\"data_offsets\":[0,4]"), 4, {"shape occurs twice"});
  expect_bad("{\"__metadata__\":{},\"__metadata__\":{}}", 0, {"__metadata__ occurs twice"});
  expect_bad("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, {"\"a\" occurs twice"});
}

TEST(SafetensorsHostile, MetadataThatIsNotText) {
  expect_bad("{\"__metadata__\":{\"a\":1}}", 0, {"__metadata__", "number"});
  expect_bad("{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}", 0, {"__metadata__", "object"});
  expect_bad("{\"__metadata__\":[]}", 0, {"__metadata__", "array"});
}

TEST(SafetensorsHostile, FieldsMissingUnknownOrOfTheWrongKind) {
  expect_bad("{\"w\":{}}", 0, {"\"w\"", "not all there"});
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[4]"), 4, {"\"w\"", "not all there"});
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"extra\":1"), 4, {"\"w\"", "\"extra\""});
  expect_bad(tensor("\"dtype\":8"), 0, {"\"w\"", "number"});
  expect_bad(tensor("\"shape\":4"), 0, {"\"w\"", "number"});
  expect_bad(tensor("\"shape\":\"4\""), 0, {"\"w\"", "string"});
  expect_bad(tensor("\"shape\":[-4]"), 0, {"\"w\"", "negative"});
  expect_bad(tensor("\"shape\":[4.0]"), 0, {"\"w\"", "64-bit integer"});
  expect_bad(tensor("\"shape\":[18446744073709551616]"), 0, {"\"w\"", "64-bit integer"});
  expect_bad(tensor("\"shape\":[\"4\"]"), 0, {"\"w\"", "string"});
  expect_bad(tensor("\"shape\":[true]"), 0, {"\"w\"", "boolean"});
  expect_bad(tensor("\"shape\":[1,1,1,1,1,1,1,1,1]"), 0, {"\"w\"", "8 dimensions"});
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0]"), 4, {"\"w\"", "two numbers"});
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,8]"), 4, {"\"w\"", "two numbers"});
}

TEST(SafetensorsHostile, ATypeNameThatIsNoName) {
  const auto with_type = [](const std::string& name) {
    return tensor("\"dtype\":\"" + name + "\",\"shape\":[4],\"data_offsets\":[0,4]");
  };
  expect_bad(with_type(std::string(3'000'000, 'x')), 4, {"\"w\"", "a dtype of 3000000 bytes"});
  EXPECT_TRUE(parse_bytes(safetensors_file(with_type(std::string(32, 'x')), pattern_bytes(4))))
      << "unknown, and left to who loads it";
}

TEST(SafetensorsHostile, RangesThatLie) {
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,0]"), 4, {"\"w\"", "backwards"});
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,4]"), 4, {"\"w\"", "5 bytes", "4"});
  expect_bad(tensor("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]"), 8, {"\"w\"", "4 bytes", "8"});
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]"), 4, {"\"w\"", "8 bytes", "4 bytes of data"});
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[18446744073709551614,18446744073709551615]"), 4, {"\"w\""});
  expect_bad(tensor("\"dtype\":\"XX\",\"shape\":[1],\"data_offsets\":[0,9]"), 4, {"\"w\""});
}

TEST(SafetensorsHostile, ShapesThatOverflow) {
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]"), 0, {"\"w\"", "overflow"});
  expect_bad(tensor("\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]"), 0, {"\"w\"", "overflow"});
  expect_bad(tensor("\"dtype\":\"U8\",\"shape\":[0,4294967296,4294967296],\"data_offsets\":[0,0]"), 0, {"\"w\"", "overflow"});
}

TEST(SafetensorsHostile, GapsOverlapsAndTrailingBytes) {
  const auto pair = [](const std::string& a, const std::string& b) {
    return "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" + a +
           "},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" + b + "}}";
  };
  expect_bad(pair("[0,4]", "[2,6]"), 6, {"\"a\"", "\"b\"", "overlap"});
  expect_bad(pair("[0,4]", "[0,4]"), 4, {"overlap"});
  expect_bad(pair("[0,4]", "[6,10]"), 10, {"2 bytes before tensor \"b\""});
  expect_bad(pair("[0,4]", "[4,8]"), 11, {"3 bytes after the last tensor"});
  expect_bad("{}", 5, {"5 bytes after"});
}

void expect_bad_index(std::string_view text, std::vector<std::string> parts) {
  parts.emplace_back("i.json");
  expect_error(parse_safetensors_index(MemorySource(std::as_bytes(std::span(text)), "i.json")), Errc::bad_format, parts);
}

TEST(SafetensorsIndexHostile, NoIndexOrAWrongOne) {
  expect_bad_index("", {"JSON"});
  expect_bad_index("[]", {"array"});
  expect_bad_index("3", {"number"});
  expect_bad_index("{}", {"no weight_map"});
  expect_bad_index("{\"weight_map\":{}}", {"empty"});
  expect_bad_index("{\"weight_map\":[]}", {"array"});
  expect_bad_index("{\"weight_map\":\"a\"}", {"string"});
  expect_bad_index("{\"weight_map\":{\"a\":1}}", {"\"a\"", "number"});
  expect_bad_index("{\"weight_map\":{\"a\":{}}}", {"\"a\"", "object"});
  expect_bad_index("{\"weight_map\":{\"a\":\"s\"},\"weight_map\":{\"b\":\"s\"}}", {"weight_map occurs twice"});
  expect_bad_index("{\"weight_map\":{\"a\":\"s\",\"a\":\"t\"}}", {"\"a\"", "twice"});
  expect_bad_index(std::string_view("{\"weight_map\":{\"a\":\"s\"}}\0x", 26), {"zero byte"});
  expect_bad_index("{\"metadata\":" + std::string(100'000, '['), {"nested deeper"});
}

TEST(SafetensorsIndexHostile, ShardsOutsideTheFolder) {
  for (const std::string shard : {"../other.safetensors", "/etc/passwd", "a/b", "a\\\\b", "..", ".", "", "a\\u0000b"}) {
    expect_bad_index("{\"weight_map\":{\"w\":\"" + shard + "\"}}", {"\"w\"", "plain file name"});
  }
}

}  // namespace
}  // namespace metrale
