// SPDX-License-Identifier: Apache-2.0
//
// Files that are truncated, lie, or were made to hurt. Each must end in one line that names the file and the thing.
#include <string>
#include <vector>

#include "metrale/gguf.h"
#include "support/gguf_writer.h"
#include "unit/weights/error_matchers.h"

namespace metrale {
namespace {

using test::ByteWriter;
using test::expect_error;
using test::GgufWriter;
using test::pattern_bytes;

Result<GgufHeader> parse_bytes(const std::vector<std::byte>& bytes) { return parse_gguf(MemorySource(bytes, "m.gguf")); }

void expect_bad(const GgufWriter& writer, std::vector<std::string> parts) {
  parts.emplace_back("m.gguf");
  expect_error(parse_bytes(writer.bytes()), Errc::bad_format, parts);
}

GgufWriter small_file() {
  GgufWriter w;
  w.key("general.architecture", "llama").key("general.alignment", std::uint32_t{32}).key("flag", true);
  w.key_array("tokens", std::vector<std::string>{"a", "bc", ""}).key_array("scores", std::vector<float>{1.0F, 2.0F});
  w.tensor("a.weight", GgufWriter::Q8_0, {32, 2}, pattern_bytes(68)).tensor("b.bias", GgufWriter::F32, {5}, pattern_bytes(20));
  return w;
}

TEST(GgufHostile, TruncatedAtEveryByte) {
  const std::vector<std::byte> whole = small_file().bytes();
  ASSERT_TRUE(parse_bytes(whole));
  for (std::size_t length = 0; length < whole.size(); ++length) {
    SCOPED_TRACE(length);
    expect_error(parse_bytes({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)}), Errc::bad_format, {"m.gguf"});
  }
}

// Whatever a flipped byte does, an accepted file has every tensor inside the file and apart from the others.
TEST(GgufHostile, EveryByteFlippedIsRefusedOrConsistent) {
  const std::vector<std::byte> whole = small_file().bytes();
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const int flip : {0x01, 0x80, 0xFF, 0x7F}) {
      std::vector<std::byte> bytes = whole;
      bytes[at] ^= static_cast<std::byte>(flip);
      const auto header = parse_bytes(bytes);
      if (!header) {
        EXPECT_NE(header.error().message().find("m.gguf"), std::string::npos);
        continue;
      }
      std::uint64_t end = header->data_offset;
      for (const TensorInfo& tensor : header->tensors.tensors()) {
        ASSERT_GE(tensor.offset, end);
        end = tensor.offset + tensor.size_bytes;
        ASSERT_LE(end, bytes.size());
      }
    }
  }
}

TEST(GgufHostile, WrongMagicVersionAndEndianness) {
  GgufWriter w;
  w.magic = "GGML";
  expect_bad(w, {"GGUF"});
  w = GgufWriter();
  w.version = 1;
  expect_error(parse_bytes(w.bytes()), Errc::unsupported, {"m.gguf", "version 1"});
  w.version = 4;
  expect_error(parse_bytes(w.bytes()), Errc::unsupported, {"version 4"});
  w.version = 0x03000000;
  expect_error(parse_bytes(w.bytes()), Errc::unsupported, {"big-endian"});
}

TEST(GgufHostile, CountsBeyondTheFile) {
  for (const std::uint64_t count : {std::uint64_t{1000}, std::uint64_t{1} << 40, UINT64_MAX}) {
    GgufWriter w = small_file();
    w.num_tensors = count;
    expect_bad(w, {"tensors", std::to_string(count)});
    w = small_file();
    w.num_keys = count;
    expect_bad(w, {"keys", std::to_string(count)});
  }
}

TEST(GgufHostile, CountsSlightlyTooHighOrTooLow) {
  GgufWriter w = small_file();
  w.num_tensors = 3;
  expect_bad(w, {"tensor 3 of 3"});
  w = small_file();
  w.num_keys = 6;  // takes the first tensor for a key
  expect_bad(w, {"tensor 1 of 2"});
}

TEST(GgufHostile, MoreKeysThanAnyModelHas) {
  GgufWriter w;
  for (int i = 0; i < 65537; ++i) w.key(std::to_string(i), std::uint8_t{0});
  expect_bad(w, {"65537 metadata keys", "65536"});
}

TEST(GgufHostile, StringsBeyondTheFile) {
  for (const std::uint64_t length : {std::uint64_t{100}, UINT64_MAX, std::uint64_t{1} << 63}) {
    GgufWriter w;
    w.key_raw("general.name", ByteWriter().put(std::uint32_t{GgufWriter::string}).put(length).put_text("short").take());
    expect_bad(w, {"general.name", std::to_string(length)});
  }
}

TEST(GgufHostile, ArraysBeyondTheFile) {
  for (const std::uint32_t type : {GgufWriter::u8, GgufWriter::u64, GgufWriter::boolean, GgufWriter::string, GgufWriter::f64}) {
    for (const std::uint64_t count : {std::uint64_t{50}, std::uint64_t{1} << 61, UINT64_MAX}) {
      GgufWriter w;
      w.key_raw("list", ByteWriter().put(std::uint32_t{GgufWriter::array}).put(type).put(count).put(std::uint64_t{0}).take());
      expect_bad(w, {"list", std::to_string(count)});
    }
  }
}

TEST(GgufHostile, ArraysOfArrays) {
  ByteWriter nested;
  nested.put(std::uint32_t{GgufWriter::array});
  for (int depth = 0; depth < 1000; ++depth) nested.put(std::uint32_t{GgufWriter::array}).put(std::uint64_t{1});
  GgufWriter w;
  w.key_raw("deep", nested.take());
  expect_bad(w, {"deep", "array of arrays"});
}

TEST(GgufHostile, UnknownValueTypesAndImpossibleBooleans) {
  GgufWriter w;
  w.key_raw("odd", ByteWriter().put(std::uint32_t{13}).put(std::uint64_t{0}).take());
  expect_bad(w, {"odd", "13"});
  w = GgufWriter();
  w.key_raw("odd", ByteWriter().put(std::uint32_t{GgufWriter::array}).put(std::uint32_t{99}).put(std::uint64_t{0}).take());
  expect_bad(w, {"odd", "99"});
  w = GgufWriter();
  w.key_raw("flag", ByteWriter().put(std::uint32_t{GgufWriter::boolean}).put(std::uint8_t{2}).take());
  expect_bad(w, {"flag", "2"});
}

TEST(GgufHostile, BadKeys) {
  GgufWriter w;
  w.key("twice", std::uint32_t{1}).key("twice", std::uint32_t{2});
  expect_bad(w, {"\"twice\"", "occurs twice", "2 of 2"});
  w = GgufWriter();
  w.key("\xFF\xFEkey", std::uint32_t{1});
  expect_bad(w, {"\\xff\\xfekey", "UTF-8"});
  w = GgufWriter();
  w.key("", std::uint32_t{1});
  expect_bad(w, {"empty name"});
  w = GgufWriter();
  w.key(std::string(70000, 'k'), std::uint32_t{1});
  expect_bad(w, {"70000"});
}

TEST(GgufHostile, BadAlignment) {
  for (const std::uint32_t alignment : {0U, 3U, 24U, 0xFFFFFFFFU}) {
    GgufWriter w;
    w.key("general.alignment", alignment).tensor("t", GgufWriter::F32, {1}, pattern_bytes(4));
    expect_bad(w, {"general.alignment", std::to_string(alignment), "power of two"});
  }
  GgufWriter w;
  w.key("general.alignment", std::uint64_t{32});
  expect_bad(w, {"general.alignment", "u64"});
}

TEST(GgufHostile, AlignmentBeyondTheFile) {
  GgufWriter w;
  w.key("general.alignment", std::uint32_t{1} << 31).tensor("t", GgufWriter::F32, {1}, pattern_bytes(4));
  expect_bad(w, {"\"t\""});
}

// Found by fuzzing: the size of an unknown type is what the file has left, which was 0 even beyond the end.
TEST(GgufHostile, UnknownTypeBehindTheEndOfTheFile) {
  GgufWriter w;
  w.tensor("t", 777, {5}, {});
  std::vector<std::byte> bytes = w.bytes();
  bytes.resize(57);  // without the padding after the header
  expect_error(parse_bytes(bytes), Errc::bad_format, {"m.gguf", "\"t\"", "ends at 57"});
}

TEST(GgufHostile, BadTensorNames) {
  GgufWriter w;
  w.tensor("same", GgufWriter::F32, {8}, pattern_bytes(32)).tensor("same", GgufWriter::F32, {8}, pattern_bytes(32));
  expect_bad(w, {"\"same\"", "twice"});
  w = GgufWriter();
  w.tensor("a\xC0\xAF", GgufWriter::F32, {8}, pattern_bytes(32));
  expect_bad(w, {"UTF-8"});
  w = GgufWriter();
  w.tensor("line\nbreak", GgufWriter::F32, {8}, pattern_bytes(32), 1);
  expect_bad(w, {"line\\x0abreak"});
}

TEST(GgufHostile, BadShapes) {
  GgufWriter w;
  w.tensor("flat", GgufWriter::F32, {8, 0}, {});
  expect_bad(w, {"\"flat\"", "dimension of 0"});
  w = GgufWriter();
  w.tensor("deep", GgufWriter::F32, {1, 1, 1, 1, 1}, pattern_bytes(4));
  expect_bad(w, {"\"deep\"", "5 dimensions"});
  w = GgufWriter();
  w.tensor("ragged", GgufWriter::Q4_0, {31, 2}, pattern_bytes(36));
  expect_bad(w, {"\"ragged\"", "31", "Q4_0"});
  w = GgufWriter();
  w.tensor("k", GgufWriter::Q4_K, {288}, pattern_bytes(162));
  expect_bad(w, {"\"k\"", "288", "Q4_K"});
}

TEST(GgufHostile, ShapesThatOverflow) {
  const std::uint64_t big = std::uint64_t{1} << 32;
  for (const auto& dims : std::vector<std::vector<std::uint64_t>>{
           {big, big}, {UINT64_MAX, 2}, {std::uint64_t{1} << 61, 2}, {std::uint64_t{1} << 62}, {big, std::uint64_t{1} << 31, 2}}) {
    GgufWriter w;
    w.tensor("huge", GgufWriter::F32, dims, pattern_bytes(32));
    expect_bad(w, {"\"huge\""});
  }
}

TEST(GgufHostile, TensorsOutsideTheFile) {
  GgufWriter w;
  w.tensor("far", GgufWriter::F32, {8}, pattern_bytes(32), std::uint64_t{1} << 40);
  expect_bad(w, {"\"far\"", "32 bytes"});
  w = GgufWriter();
  w.tensor("wrap", GgufWriter::F32, {8}, pattern_bytes(32), UINT64_MAX - 31);
  expect_bad(w, {"\"wrap\""});
  w = GgufWriter();
  w.tensor("long", GgufWriter::F32, {9}, pattern_bytes(32));
  expect_bad(w, {"\"long\"", "36 bytes"});
  w = GgufWriter();
  w.tensor("unknown type", 777, {8}, pattern_bytes(32), 4096);
  expect_bad(w, {"unknown type"});
}

TEST(GgufHostile, OverlappingAndMisalignedTensors) {
  GgufWriter w;
  w.tensor("one", GgufWriter::F32, {16}, pattern_bytes(64), 0).tensor("two", GgufWriter::F32, {8}, pattern_bytes(32), 32);
  expect_bad(w, {"\"one\"", "\"two\"", "overlap"});
  w = GgufWriter();
  w.tensor("one", GgufWriter::F32, {8}, pattern_bytes(32), 32).tensor("two", GgufWriter::F32, {8}, pattern_bytes(32), 32);
  expect_bad(w, {"overlap"});
  w = GgufWriter();
  w.tensor("odd", GgufWriter::F32, {8}, pattern_bytes(64), 8);
  expect_bad(w, {"\"odd\"", "8", "alignment 32"});
}

// The header of such a file is longer than the limit, though every single string fits the file.
TEST(GgufHostile, HeaderBeyondTheLimit) {
  GgufWriter w;
  const std::string text(std::size_t{65} << 20, 'x');
  w.key("first", text.c_str()).key("second", text.c_str()).key("third", std::uint32_t{1});
  expect_bad(w, {"second"});
}

}  // namespace
}  // namespace metrale
