// SPDX-License-Identifier: Apache-2.0
#include "metrale/weight_file.h"

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "support/gguf_writer.h"
#include "support/safetensors_writer.h"
#include "unit/weights/error_matchers.h"

namespace metrale {
namespace {

using test::expect_error;
using test::GgufWriter;
using test::pattern_bytes;
using test::SafetensorsWriter;
using test::TempFolder;
using test::value_of;
using test::write_file;
using testing::ElementsAre;

std::vector<std::string> names_of(const WeightFile& file) {
  std::vector<std::string> names;
  for (const TensorInfo& tensor : file.tensors().tensors()) names.push_back(tensor.name);
  return names;
}

// A folder with two shards; `index` maps names to them.
void write_shards(const TempFolder& folder, std::string_view index) {
  write_file(folder / "s1.safetensors", SafetensorsWriter()
                                            .metadata("format", "pt")
                                            .tensor("b", "U8", {3}, pattern_bytes(3, 1))
                                            .tensor("c", "U8", {2}, pattern_bytes(2, 2))
                                            .bytes());
  write_file(folder / "s2.safetensors", SafetensorsWriter().tensor("a", "U8", {4}, pattern_bytes(4, 3)).bytes());
  write_file(folder / "model.safetensors.index.json", index);
}
constexpr std::string_view kGoodIndex =
    R"({"metadata":{"total_size":9},"weight_map":{"a":"s2.safetensors","b":"s1.safetensors","c":"s1.safetensors"}})";

TEST(WeightFile, OpensAGgufFile) {
  TempFolder folder;
  GgufWriter w;
  w.key("general.architecture", "llama").tensor("t", GgufWriter::F32, {4, 2}, pattern_bytes(32));
  write_file(folder / "m.gguf", w.bytes());
  const auto file = WeightFile::open(folder / "m.gguf");
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_EQ((*file)->format(), WeightFile::Format::gguf);
  ASSERT_NE((*file)->gguf_header(), nullptr);
  EXPECT_EQ(value_of((*file)->gguf_header()->metadata.get<std::string>("general.architecture")), "llama");
  EXPECT_EQ((*file)->num_files(), 1U);
  EXPECT_EQ((*file)->file_bytes(), w.bytes().size());
  const auto t = (*file)->get("t");
  ASSERT_TRUE(t);
  EXPECT_THAT((*t)->shape, ElementsAre(2, 4));
  EXPECT_EQ(value_of((*file)->read(**t)), pattern_bytes(32));
}

TEST(WeightFile, OpensASafetensorsFileAndAFolderWithOne) {
  TempFolder folder;
  const std::vector<std::byte> bytes =
      SafetensorsWriter().metadata("format", "pt").tensor("t", "U8", {8}, pattern_bytes(8)).bytes();
  write_file(folder / "model.safetensors", bytes);
  for (const auto& path : {folder / "model.safetensors", folder.path()}) {
    const auto file = WeightFile::open(path);
    ASSERT_TRUE(file) << file.error().to_string();
    EXPECT_EQ((*file)->format(), WeightFile::Format::safetensors);
    EXPECT_EQ((*file)->gguf_header(), nullptr);
    EXPECT_EQ((*file)->safetensors_metadata().at("format"), "pt");
    EXPECT_EQ((*file)->path(), path);
    EXPECT_EQ(value_of((*file)->read(**(*file)->get("t"))), pattern_bytes(8));
  }
}

TEST(WeightFile, OpensAShardedFolder) {
  TempFolder folder;
  write_shards(folder, kGoodIndex);
  const auto file = WeightFile::open(folder.path());
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_EQ((*file)->num_files(), 2U);
  EXPECT_THAT(names_of(**file), ElementsAre("b", "c", "a"));  // shard by shard
  EXPECT_EQ(value_of((*file)->read(**(*file)->get("a"))), pattern_bytes(4, 3));
  EXPECT_EQ(value_of((*file)->read(**(*file)->get("c"))), pattern_bytes(2, 2));
  EXPECT_EQ((*file)->file_label((*file)->find("a")->file), (folder / "s2.safetensors").native());
}

TEST(WeightFile, PrefersTheSingleFileOverAnIndex) {
  TempFolder folder;
  write_shards(folder, kGoodIndex);
  write_file(folder / "model.safetensors", SafetensorsWriter().tensor("only", "U8", {1}, pattern_bytes(1)).bytes());
  const auto file = WeightFile::open(folder.path());
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_THAT(names_of(**file), ElementsAre("only"));
}

TEST(WeightFile, ReadsPartsOfATensorAndRefusesToLeaveIt) {
  const std::vector<std::byte> bytes =
      SafetensorsWriter().tensor("t", "U8", {8}, pattern_bytes(8)).tensor("next", "U8", {8}, pattern_bytes(8, 9)).bytes();
  const auto file = WeightFile::open(std::make_unique<MemorySource>(bytes, "block"));
  ASSERT_TRUE(file) << file.error().to_string();
  const TensorInfo& t = *(*file)->find("t");
  std::vector<std::byte> part(3);
  ASSERT_TRUE((*file)->read(t, 5, part));
  EXPECT_TRUE(std::equal(part.begin(), part.end(), pattern_bytes(8).begin() + 5));
  expect_error((*file)->read(t, 6, part), Errc::out_of_range, {"block", "\"t\"", "8 bytes"});
  expect_error((*file)->read(t, UINT64_MAX, part), Errc::out_of_range, {"\"t\""});
  TensorInfo foreign = t;
  foreign.file = 3;
  expect_error((*file)->read(foreign, 0, part), Errc::invalid_argument, {"\"t\""});
}

TEST(WeightFile, MissingTensorSuggestsItsNeighbours) {
  const std::vector<std::byte> bytes = SafetensorsWriter()
                                           .tensor("model.norm.weight", "U8", {1}, pattern_bytes(1))
                                           .tensor("lm_head.weight", "U8", {1}, pattern_bytes(1))
                                           .bytes();
  const auto file = WeightFile::open(std::make_unique<MemorySource>(bytes, "block"));
  ASSERT_TRUE(file);
  expect_error((*file)->get("norm.weight"), Errc::not_found, {"block", "\"norm.weight\"", "nearest: \"model.norm.weight\""});
}

TEST(WeightFile, NamesWhatIsNotThere) {
  TempFolder folder;
  expect_error(WeightFile::open(folder / "none.gguf"), Errc::not_found, {"none.gguf", "no such file"});
  expect_error(WeightFile::open(folder.path()), Errc::not_found, {"model.safetensors", "index.json"});
  write_file(folder / "some.gguf", GgufWriter().bytes());
  expect_error(WeightFile::open(folder.path()), Errc::not_found, {"\"some.gguf\"", "name the file"});
  expect_error(WeightFile::open(std::unique_ptr<ByteSource>()), Errc::invalid_argument, {"no source"});
}

TEST(WeightFile, NamesWhatIsNoWeightFile) {
  TempFolder folder;
  write_file(folder / "notes.txt", "hello");
  expect_error(WeightFile::open(folder / "notes.txt"), Errc::bad_format, {"notes.txt", "neither"});
  write_file(folder / "m.gguf", "GGML something else");
  expect_error(WeightFile::open(folder / "m.gguf"), Errc::bad_format, {"m.gguf", "letters GGUF"});
  write_file(folder / "empty.gguf", "");
  expect_error(WeightFile::open(folder / "empty.gguf"), Errc::bad_format, {"empty.gguf", "truncated"});
  write_file(folder / "empty.safetensors", "");
  expect_error(WeightFile::open(folder / "empty.safetensors"), Errc::bad_format, {"empty.safetensors", "0 bytes"});
}

TEST(WeightFile, MissingShardIsNamed) {
  TempFolder folder;
  write_shards(folder, R"({"weight_map":{"a":"s2.safetensors","b":"s1.safetensors","x":"s3.safetensors"}})");
  expect_error(WeightFile::open(folder.path()), Errc::not_found, {"index.json", "\"s3.safetensors\""});
}

TEST(WeightFile, TensorInIndexButNotInItsShardIsNamed) {
  TempFolder folder;
  write_shards(folder, R"({"weight_map":{"a":"s2.safetensors","x":"s1.safetensors"}})");
  expect_error(WeightFile::open(folder.path()), Errc::bad_format, {"index.json", "\"x\"", "\"s1.safetensors\"", "lacks"});
  write_shards(folder, R"({"weight_map":{"a":"s1.safetensors","b":"s1.safetensors","c":"s2.safetensors"}})");
  expect_error(WeightFile::open(folder.path()), Errc::bad_format, {"\"a\"", "\"s1.safetensors\""});
}

TEST(WeightFile, NameInTwoShardsIsNamed) {
  TempFolder folder;
  write_shards(folder, kGoodIndex);
  write_file(folder / "s2.safetensors",
             SafetensorsWriter().tensor("a", "U8", {1}, pattern_bytes(1)).tensor("b", "U8", {1}, pattern_bytes(1)).bytes());
  expect_error(WeightFile::open(folder.path()), Errc::bad_format, {"\"b\"", "s1.safetensors", "s2.safetensors"});
}

TEST(WeightFile, BadShardsAreNamed) {
  TempFolder folder;
  write_shards(folder, kGoodIndex);
  write_file(folder / "s2.safetensors", "short");
  expect_error(WeightFile::open(folder.path()), Errc::bad_format, {"s2.safetensors", "5 bytes"});
  write_file(folder / "s2.safetensors", GgufWriter().bytes());
  expect_error(WeightFile::open(folder.path()), Errc::bad_format, {"s2.safetensors", "GGUF"});
  std::filesystem::remove(folder / "s2.safetensors");
  std::filesystem::create_directory(folder / "s2.safetensors");
  expect_error(WeightFile::open(folder.path()), Errc::invalid_argument, {"s2.safetensors", "a folder"});
}

// ---- the bundled checkpoints ----

TEST(WeightFile, OpensTheTinyLlama) {
  const auto file = WeightFile::open(METRALE_TEST_DATA "/kjv-llama-2m");
  ASSERT_TRUE(file) << file.error().to_string();
  const auto embed = (*file)->get("model.embed_tokens.weight");
  ASSERT_TRUE(embed) << embed.error().to_string();
  EXPECT_THAT((*embed)->shape, ElementsAre(1024, 192));
  EXPECT_EQ((*embed)->dtype, DType::bf16);
  const auto query = (*file)->get("model.layers.3.self_attn.q_proj.weight");
  ASSERT_TRUE(query) << query.error().to_string();
  EXPECT_THAT((*query)->shape, ElementsAre(384, 192));
  EXPECT_EQ((*file)->find("lm_head.weight"), nullptr);  // tied
  std::uint64_t elements = 0;
  for (const TensorInfo& tensor : (*file)->tensors().tensors()) elements += tensor.num_elements();
  EXPECT_EQ(elements * 2, (*file)->tensors().total_bytes());
  EXPECT_LT((*file)->file_bytes() - (*file)->tensors().total_bytes(), 10000U);
}

TEST(WeightFile, OpensTheTinyHybrid) {
  const auto file = WeightFile::open(METRALE_TEST_DATA "/kjv-hybrid-4m");
  ASSERT_TRUE(file) << file.error().to_string();
  for (const TensorInfo& tensor : (*file)->tensors().tensors()) EXPECT_TRUE(tensor.dtype.has_value()) << tensor.name;
  bool linear = false;
  for (const std::string& name : names_of(**file)) linear = linear || name.find("linear_attn.conv1d") != std::string::npos;
  EXPECT_TRUE(linear);
}

}  // namespace
}  // namespace metrale
