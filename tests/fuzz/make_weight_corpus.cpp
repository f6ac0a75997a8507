// SPDX-License-Identifier: Apache-2.0
//
// Writes small valid weight files, and some that are wrong in one way, as seeds for the fuzzers.
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "support/gguf_writer.h"
#include "support/safetensors_writer.h"

namespace {

using namespace metrale::test;

GgufWriter every_value() {
  GgufWriter w;
  w.key("general.architecture", "llama").key("a.u8", std::uint8_t{1}).key("a.i8", std::int8_t{-1}).key("a.u16", std::uint16_t{2});
  w.key("a.i16", std::int16_t{-2})
      .key("a.u32", std::uint32_t{3})
      .key("a.i32", std::int32_t{-3})
      .key("a.f32", 0.5F)
      .key("a.yes", true);
  w.key("a.u64", std::uint64_t{4}).key("a.i64", std::int64_t{-4}).key("a.f64", 0.25);
  return w;
}

GgufWriter every_array() {
  GgufWriter w;
  w.key_array("b.u8", std::vector<std::uint8_t>{1, 2}).key_array("b.i16", std::vector<std::int16_t>{-1});
  w.key_array("b.i32", std::vector<std::int32_t>{5, 6}).key_array("b.f32", std::vector<float>{1.0F, 2.0F});
  w.key_array("b.bool", std::vector<bool>{true, false}).key_array("b.text", std::vector<std::string>{"a", "", "xyz"});
  w.key_array("b.u64", std::vector<std::uint64_t>{9}).key_array("b.f64", std::vector<double>{1.0});
  return w;
}

GgufWriter every_type() {
  GgufWriter w;
  w.key("general.alignment", std::uint32_t{32});
  w.tensor("f32", GgufWriter::F32, {3, 2}, pattern_bytes(24)).tensor("f16", GgufWriter::F16, {4}, pattern_bytes(8));
  w.tensor("bf16", GgufWriter::BF16, {2, 2, 2}, pattern_bytes(16)).tensor("q4_0", GgufWriter::Q4_0, {32, 2}, pattern_bytes(36));
  w.tensor("q4_1", GgufWriter::Q4_1, {32}, pattern_bytes(20)).tensor("q8_0", GgufWriter::Q8_0, {32}, pattern_bytes(34));
  w.tensor("q4_k", GgufWriter::Q4_K, {256}, pattern_bytes(144)).tensor("q6_k", GgufWriter::Q6_K, {256}, pattern_bytes(210));
  w.tensor("q5_0", GgufWriter::Q5_0, {32}, pattern_bytes(22)).tensor("i32", GgufWriter::I32, {2}, pattern_bytes(8));
  w.tensor("unknown", 777, {3}, pattern_bytes(9));
  return w;
}

GgufWriter version_two() {
  GgufWriter w;
  w.version = 2;
  w.alignment = 8;
  w.key("general.alignment", std::uint32_t{8}).tensor("t", GgufWriter::F32, {1}, pattern_bytes(4));
  return w;
}

GgufWriter nested() {
  ByteWriter value;
  value.put(std::uint32_t{9}).put(std::uint32_t{9}).put(std::uint64_t{1}).put(std::uint32_t{0}).put(std::uint64_t{0});
  return GgufWriter().key_raw("deep", value.take());
}

GgufWriter overlap() {
  return GgufWriter()
      .tensor("a", GgufWriter::F32, {16}, pattern_bytes(64), 0)
      .tensor("b", GgufWriter::F32, {8}, pattern_bytes(32), 32);
}

SafetensorsWriter shapes() {
  return SafetensorsWriter()
      .metadata("format", "pt")
      .tensor("model.norm.weight", "BF16", {2, 3}, pattern_bytes(12))
      .tensor("scalar", "F32", {}, pattern_bytes(4))
      .tensor("empty", "F16", {0, 7}, {})
      .tensor("i64", "I64", {1}, pattern_bytes(8))
      .tensor("f4", "F4", {4}, pattern_bytes(2))
      .tensor("bool", "BOOL", {2}, pattern_bytes(2));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_weight_corpus FOLDER\n");
    return 2;
  }
  const std::filesystem::path gguf = std::filesystem::path(argv[1]) / "gguf";
  const std::filesystem::path safetensors = std::filesystem::path(argv[1]) / "safetensors";
  std::filesystem::create_directories(gguf);
  std::filesystem::create_directories(safetensors);

  write_file(gguf / "values", every_value().bytes());
  write_file(gguf / "arrays", every_array().bytes());
  write_file(gguf / "types", every_type().bytes());
  write_file(gguf / "version_two", version_two().bytes());
  write_file(gguf / "nested", nested().bytes());
  write_file(gguf / "overlap", overlap().bytes());
  write_file(gguf / "bare", GgufWriter().bytes());

  write_file(safetensors / "shapes", shapes().bytes());
  write_file(safetensors / "none", safetensors_file("{}"));
  write_file(safetensors / "gap", safetensors_file(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})", pattern_bytes(4)));
  write_file(safetensors / "twice",
             safetensors_file(
                 R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"));
  write_file(safetensors / "escapes",
             safetensors_file(R"({"\u00e9\ud834\udd1e\n":{"shape":[],"dtype":"U8","data_offsets":[0,1]}})", pattern_bytes(1)));
  write_file(
      safetensors / "index",
      R"({"metadata":{"total_size":4},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}})");
  return 0;
}
