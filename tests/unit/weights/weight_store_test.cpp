// SPDX-License-Identifier: Apache-2.0
#include "metrale/weight_store.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "metrale/backends/host.h"
#include "metrale/backends/mock.h"
#include "metrale/dequantise.h"
#include "metrale/teardown.h"
#include "support/gguf_writer.h"
#include "support/safetensors_writer.h"
#include "unit/weights/error_matchers.h"

namespace metrale {
namespace {

using test::expect_error;
using test::GgufWriter;
using test::pattern_bytes;
using test::SafetensorsWriter;
using test::value_of;
using testing::ElementsAre;
using testing::UnorderedElementsAre;

// Counts what is asked of it.
class CountingSource final : public ByteSource {
 public:
  CountingSource(std::span<const std::byte> bytes, std::uint64_t& total)
      : ByteSource("counted", bytes.size()), bytes_(bytes), total_(total) {}

 private:
  Result<> do_read(std::uint64_t offset, std::span<std::byte> dst) const override {
    total_ += dst.size();
    std::memcpy(dst.data(), bytes_.data() + offset, dst.size());
    return {};
  }
  std::span<const std::byte> bytes_;
  std::uint64_t& total_;
};

// Fails from a given offset on, like a bad disk.
class FailingSource final : public ByteSource {
 public:
  FailingSource(std::span<const std::byte> bytes, std::uint64_t good)
      : ByteSource("failing", bytes.size()), bytes_(bytes), good_(good) {}

 private:
  Result<> do_read(std::uint64_t offset, std::span<std::byte> dst) const override {
    if (offset + dst.size() > good_) return Error(Errc::io, "failing: no such luck");
    std::memcpy(dst.data(), bytes_.data() + offset, dst.size());
    return {};
  }
  std::span<const std::byte> bytes_;
  std::uint64_t good_;
};

std::vector<std::byte> sample_file() {
  return SafetensorsWriter()
      .tensor("layers.0.w", "F16", {40, 16}, pattern_bytes(1280, 1))
      .tensor("layers.1.w", "BF16", {40, 16}, pattern_bytes(1280, 2))
      .tensor("none", "F32", {0, 4}, {})
      .tensor("norm", "F32", {33}, pattern_bytes(132, 3))
      .tensor("scalar", "F32", {}, pattern_bytes(4, 4))
      .bytes();
}

std::unique_ptr<WeightFile> open(const std::vector<std::byte>& bytes) {
  return value_of(WeightFile::open(std::make_unique<MemorySource>(bytes, "m")));
}

std::vector<std::byte> device_bytes(GpuBackend& backend, const Weight& weight) {
  std::vector<std::byte> out(weight.size_bytes);
  if (!out.empty()) {
    const Result<> copied = backend.copy_d2h(out, weight.ptr);
    EXPECT_TRUE(copied) << copied.error().to_string();
  }
  return out;
}

std::uint64_t held(GpuBackend& backend) {
  std::uint64_t bytes = 0;
  for (const Allocation& block : backend.live_allocations()) bytes += block.bytes;
  return bytes;
}

using MakeBackend = std::unique_ptr<GpuBackend> (*)();
class WeightStoreOn : public testing::TestWithParam<std::pair<const char*, MakeBackend>> {
 protected:
  std::unique_ptr<GpuBackend> backend_ = GetParam().second();
};

TEST_P(WeightStoreOn, LoadsEveryByteWhateverTheStagingSize) {
  const std::vector<std::byte> bytes = sample_file();
  for (const std::uint64_t staging : {1U, 7U, 64U, 1000U, 1U << 20}) {
    const auto file = open(bytes);
    const auto plan = value_of(WeightPlan::create(*file));
    WeightLoadOptions options;
    options.staging_bytes = staging;
    auto store = value_of(WeightStore::load(*backend_, *file, plan, options));
    EXPECT_EQ(store->weights().size(), 5U);
    for (const TensorInfo& tensor : file->tensors().tensors()) {
      const Weight weight = value_of(store->get(tensor.name));
      EXPECT_EQ(weight.dtype, tensor.dtype);
      EXPECT_EQ(weight.shape, tensor.shape);
      EXPECT_EQ(weight.ptr.address % kDeviceAlignment, 0U);
      EXPECT_EQ(device_bytes(*backend_, weight), value_of(file->read(tensor))) << tensor.name << " staging " << staging;
    }
    EXPECT_FALSE(value_of(store->get("none")).ptr);
    EXPECT_EQ(store->size_bytes(), plan.device_bytes());
    EXPECT_EQ(backend_->live_bytes(), 0U);  // arenas are off the count
    EXPECT_EQ(held(*backend_), plan.device_bytes());
    ASSERT_TRUE(store->release(*backend_));
    EXPECT_EQ(held(*backend_), 0U);
  }
}

TEST_P(WeightStoreOn, ConvertsOnTheWay) {
  const std::vector<std::byte> bytes = sample_file();
  const auto file = open(bytes);
  for (const DType to : {DType::f32, DType::bf16}) {
    for (const std::uint64_t staging : {33U, 500U, 1U << 20}) {
      const auto plan = value_of(WeightPlan::create(*file, [&](const TensorInfo& tensor) {
        TensorChoice choice;
        if (tensor.dtype == DType::f16) choice.transform = convert_to(to);
        return choice;
      }));
      WeightLoadOptions options;
      options.staging_bytes = staging;
      auto store = value_of(WeightStore::load(*backend_, *file, plan, options));
      const Weight weight = value_of(store->get("layers.0.w"));
      EXPECT_EQ(weight.dtype, to);
      std::vector<float> wanted(640), got(640);
      ASSERT_TRUE(dequantise(DType::f16, value_of(file->read(*file->find("layers.0.w"))), wanted));
      ASSERT_TRUE(dequantise(to, device_bytes(*backend_, weight), got));
      for (std::size_t i = 0; i < 640; ++i) {
        const float rounded = to == DType::f32 ? wanted[i] : bf16_to_f32(f32_to_bf16(wanted[i]));
        EXPECT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(rounded)) << i;
      }
      EXPECT_EQ(device_bytes(*backend_, value_of(store->get("layers.1.w"))), pattern_bytes(1280, 2));
    }
  }
}

TEST_P(WeightStoreOn, SlicesHoldTheirPartOfRowsAndColumns) {
  const std::vector<std::byte> in = pattern_bytes(11 * 6 * 2);
  const std::vector<std::byte> vector = pattern_bytes(8 * 4, 3);
  const std::vector<std::byte> bytes = SafetensorsWriter()
                                           .tensor("m", "F16", {11, 6}, in)
                                           .tensor("other", "U8", {5}, pattern_bytes(5))
                                           .tensor("v", "F32", {8}, vector)
                                           .bytes();
  const auto file = open(bytes);
  for (const TensorSlice& slice :
       {TensorSlice{3, 5, 0, 6}, TensorSlice{0, 11, 2, 3}, TensorSlice{4, 7, 5, 1}, TensorSlice{0, 11, 0, 6}}) {
    const auto plan = value_of(WeightPlan::create(*file, [&](const TensorInfo& tensor) {
      TensorChoice choice;
      if (tensor.name == "m") choice.slice = slice;
      if (tensor.name == "v") choice.slice = TensorSlice{0, 1, 2, 4};
      return choice;
    }));
    for (const std::uint64_t staging : {1U, 13U, 40U, 4096U}) {
      WeightLoadOptions options;
      options.staging_bytes = staging;
      const auto store = value_of(WeightStore::load(*backend_, *file, plan, options));
      const Weight m = value_of(store->get("m"));
      EXPECT_THAT(m.shape, testing::ElementsAre(slice.num_rows, slice.num_cols));
      std::vector<std::byte> want;
      for (std::size_t row = slice.first_row; row < slice.first_row + slice.num_rows; ++row) {
        const auto begin = in.begin() + static_cast<std::ptrdiff_t>((row * 6 + slice.first_col) * 2);
        want.insert(want.end(), begin, begin + static_cast<std::ptrdiff_t>(slice.num_cols * 2));
      }
      EXPECT_EQ(device_bytes(*backend_, m), want) << slice.first_row << ',' << slice.first_col << " staging " << staging;
      EXPECT_EQ(device_bytes(*backend_, value_of(store->get("v"))),
                std::vector<std::byte>(vector.begin() + 8, vector.begin() + 24));
      EXPECT_EQ(device_bytes(*backend_, value_of(store->get("other"))), pattern_bytes(5));
    }
  }
}

TEST_P(WeightStoreOn, TransformsRearrangeWholeGranules) {
  const std::vector<std::byte> bytes = SafetensorsWriter().tensor("m", "U8", {10, 3}, pattern_bytes(30)).bytes();
  const auto file = open(bytes);
  // Turns every four rows upside down.
  TensorTransform flip{
      DType::u8, 4,
      [](const TensorInfo&, std::uint64_t first, std::span<const std::byte> src, std::span<std::byte> dst) -> Result<> {
        EXPECT_EQ(first % 4, 0U);
        EXPECT_EQ(src.size(), dst.size());
        for (std::size_t group = 0; group < src.size(); group += 12) {
          const std::size_t rows = std::min<std::size_t>(12, src.size() - group) / 3;
          for (std::size_t r = 0; r < rows; ++r) std::memcpy(&dst[group + 3 * (rows - 1 - r)], &src[group + 3 * r], 3);
        }
        return {};
      }};
  const auto plan = value_of(WeightPlan::create(*file, [&](const TensorInfo&) { return TensorChoice{TensorUse::load, 0, flip}; }));
  for (const std::uint64_t staging : {1U, 12U, 25U, 1000U}) {
    WeightLoadOptions options;
    options.staging_bytes = staging;
    auto store = value_of(WeightStore::load(*backend_, *file, plan, options));
    const std::vector<std::byte> got = device_bytes(*backend_, value_of(store->get("m")));
    const std::vector<std::byte> in = pattern_bytes(30);
    for (const std::size_t row : {0U, 1U, 2U, 3U, 4U, 5U, 6U, 7U, 8U, 9U}) {
      const std::size_t from = row < 8 ? row / 4 * 4 + 3 - row % 4 : 17 - row;
      EXPECT_TRUE(std::equal(&in[3 * from], &in[3 * from] + 3, &got[3 * row])) << row << " staging " << staging;
    }
  }
}

TEST_P(WeightStoreOn, ReadsEachByteOfTheFileOnce) {
  GgufWriter w;
  w.key_array("tokens", std::vector<std::string>(20000, "token"));
  for (int i = 0; i < 20; ++i) w.tensor(fmt::format("t{}", i), GgufWriter::Q8_0, {32, 1000}, pattern_bytes(34000));
  const std::vector<std::byte> bytes = w.bytes();
  std::uint64_t asked = 0;
  const auto file = value_of(WeightFile::open(std::make_unique<CountingSource>(bytes, asked)));
  const auto plan = value_of(WeightPlan::create(*file));
  WeightLoadOptions options;
  options.staging_bytes = 100000;
  std::vector<std::uint64_t> progress;
  options.progress = [&](std::uint64_t done, std::uint64_t total) {
    EXPECT_GE(total, plan.read_bytes());
    progress.push_back(done);
  };
  const auto store = value_of(WeightStore::load(*backend_, *file, plan, options));
  EXPECT_LE(asked, bytes.size() + (64U << 10) + 8);  // the header's window may reach into the data
  EXPECT_LE(store->load_stats().staging_bytes, 200000U);
  EXPECT_TRUE(std::is_sorted(progress.begin(), progress.end()));
  ASSERT_FALSE(progress.empty());
  EXPECT_EQ(progress.back(), store->load_stats().read_bytes);
  EXPECT_GT(store->load_stats().seconds, 0.0);
}

TEST_P(WeightStoreOn, LoadsByNameAndExplainsWhatIsMissing) {
  const std::vector<std::byte> bytes = sample_file();
  const auto file = open(bytes);
  const std::vector<std::string> names{"norm", "layers.1.w"};
  const auto store = value_of(WeightStore::load(*backend_, *file, names));
  EXPECT_EQ(store->weights().size(), 2U);
  EXPECT_EQ(device_bytes(*backend_, value_of(store->get("norm"))), pattern_bytes(132, 3));
  expect_error(store->get("layers.0.w"), Errc::not_found, {"m", "\"layers.0.w\"", "2 loaded", "nearest: \"layers.1.w\""});
  EXPECT_EQ(store->find("layers.0.w"), nullptr);
  const std::vector<std::string> wrong{"norm", "nirm"};
  expect_error(WeightStore::load(*backend_, *file, wrong), Errc::not_found, {"\"nirm\"", "\"norm\""});
}

TEST_P(WeightStoreOn, KeepsDeferredTensorsOnDisk) {
  const std::vector<std::byte> bytes = sample_file();
  const auto file = open(bytes);
  const auto plan = value_of(WeightPlan::create(*file, [](const TensorInfo& tensor) {
    return TensorChoice{tensor.name.starts_with("layers") ? TensorUse::defer : TensorUse::load, 0, std::nullopt};
  }));
  const auto store = value_of(WeightStore::load(*backend_, *file, plan));
  ASSERT_EQ(store->deferred().size(), 2U);
  const DeferredWeight& first = store->deferred()[0];
  EXPECT_EQ(first.info.name, "layers.0.w");
  EXPECT_EQ(first.path, "m");
  EXPECT_EQ(value_of(file->read(first.info)), pattern_bytes(1280, 1));
  expect_error(store->get("layers.0.w"), Errc::not_found, {"\"layers.0.w\"", "deferred"});
}

TEST_P(WeightStoreOn, FreesWholeSegmentsOnly) {
  const std::vector<std::byte> bytes = sample_file();
  const auto file = open(bytes);
  const auto plan = value_of(WeightPlan::create(*file, [](const TensorInfo& tensor) {
    return TensorChoice{TensorUse::load, tensor.name.starts_with("layers") ? 1U : 0U, std::nullopt};
  }));
  const auto store = value_of(WeightStore::load(*backend_, *file, plan));
  const std::uint64_t before = held(*backend_);

  const auto nothing =
      value_of(store->free_matching([](std::string_view name, const Weight&) { return name == "layers.0.w" || name == "norm"; }));
  EXPECT_EQ(nothing.bytes, 0U);
  EXPECT_TRUE(nothing.names.empty());
  EXPECT_THAT(nothing.held_back, UnorderedElementsAre("layers.0.w", "norm"));
  EXPECT_EQ(held(*backend_), before);
  EXPECT_TRUE(store->get("layers.0.w"));

  const auto freed =
      value_of(store->free_matching([](std::string_view name, const Weight&) { return name.starts_with("layers"); }));
  EXPECT_EQ(freed.bytes, 2560U);
  EXPECT_THAT(freed.names, UnorderedElementsAre("layers.0.w", "layers.1.w"));
  EXPECT_TRUE(freed.held_back.empty());
  EXPECT_EQ(held(*backend_), before - 2560U);
  EXPECT_EQ(store->size_bytes(), before - 2560U);
  expect_error(store->get("layers.0.w"), Errc::not_found, {"\"layers.0.w\"", "was freed"});
  EXPECT_EQ(device_bytes(*backend_, value_of(store->get("norm"))), pattern_bytes(132, 3));
  ASSERT_TRUE(store->release(*backend_));
  EXPECT_EQ(held(*backend_), 0U);
}

TEST_P(WeightStoreOn, ReleasesOnceAndTearsDownCleanly) {
  const std::vector<std::byte> bytes = sample_file();
  const auto file = open(bytes);
  Teardown teardown(*backend_, TeardownExtent::model);
  teardown.add(value_of(WeightStore::load(*backend_, *file, value_of(WeightPlan::create(*file)))));
  const Receipt receipt = teardown.run();
  EXPECT_TRUE(receipt.clean()) << receipt.to_string();
  ASSERT_EQ(receipt.lines.size(), 1U);
  EXPECT_EQ(receipt.lines[0].label, "weight store");
  EXPECT_EQ(receipt.lines[0].blocks, 1U);

  auto store = value_of(WeightStore::load(*backend_, *file, value_of(WeightPlan::create(*file))));
  ASSERT_TRUE(store->release(*backend_));
  ASSERT_TRUE(store->release(*backend_));
  EXPECT_EQ(store->size_bytes(), 0U);
  EXPECT_TRUE(store->weights().empty());
  store = value_of(WeightStore::load(*backend_, *file, value_of(WeightPlan::create(*file))));
  store.reset();
  EXPECT_EQ(held(*backend_), 0U);
}

TEST_P(WeightStoreOn, GivesBackEverythingWhenReadingFails) {
  const std::vector<std::byte> bytes = sample_file();
  const auto file = value_of(WeightFile::open(std::make_unique<FailingSource>(bytes, bytes.size() - 10)));
  WeightLoadOptions options;
  options.staging_bytes = 100;
  expect_error(WeightStore::load(*backend_, *file, value_of(WeightPlan::create(*file)), options), Errc::io, {"no such luck"});
  EXPECT_EQ(held(*backend_), 0U);
}

TEST_P(WeightStoreOn, GivesBackEverythingWhenATransformFails) {
  const std::vector<std::byte> bytes = sample_file();
  const auto file = open(bytes);
  int calls = 0;
  TensorTransform failing{DType::bf16, 1,
                          [&](const TensorInfo&, std::uint64_t, std::span<const std::byte>, std::span<std::byte>) -> Result<> {
                            if (++calls < 3) return {};
                            return Error(Errc::internal, "third time unlucky");
                          }};
  const auto plan = value_of(WeightPlan::create(*file, [&](const TensorInfo& tensor) {
    return TensorChoice{TensorUse::load, 0, tensor.dtype == DType::f16 ? std::optional(failing) : std::nullopt};
  }));
  WeightLoadOptions options;
  options.staging_bytes = 100;
  expect_error(WeightStore::load(*backend_, *file, plan, options), Errc::internal, {"third time unlucky"});
  EXPECT_EQ(held(*backend_), 0U);
}

std::unique_ptr<GpuBackend> make_host() { return value_of(host::create()); }
std::unique_ptr<GpuBackend> make_mock() { return value_of(mock::create()); }
// One that makes the loader copy with blocking calls from plain memory.
std::unique_ptr<GpuBackend> make_plain_mock() {
  mock::Options options;
  options.without = {Capability::events, Capability::pinned_memory};
  return value_of(mock::create(options));
}
INSTANTIATE_TEST_SUITE_P(Backends, WeightStoreOn,
                         testing::Values(std::pair("host", &make_host), std::pair("mock", &make_mock),
                                         std::pair("plain_mock", &make_plain_mock)),
                         [](const auto& param) { return std::string(param.param.first); });

// ---- what only the mock can show ----

TEST(WeightStore, KeepsStagingUntilDeferredCopiesHaveRun) {
  const auto backend = value_of(mock::create());
  mock::control(*backend).defer_copies(true);
  const std::vector<std::byte> bytes = sample_file();
  const auto file = open(bytes);
  WeightLoadOptions options;
  options.staging_bytes = 64;
  const auto store = value_of(WeightStore::load(*backend, *file, value_of(WeightPlan::create(*file)), options));
  for (const TensorInfo& tensor : file->tensors().tensors()) {
    EXPECT_EQ(device_bytes(*backend, value_of(store->get(tensor.name))), value_of(file->read(tensor))) << tensor.name;
  }
}

TEST(WeightStore, GivesBackEverythingWhicheverDeviceCallFails) {
  const std::vector<std::byte> bytes = sample_file();
  const auto file = open(bytes);
  const auto plan = value_of(WeightPlan::create(*file));
  WeightLoadOptions options;
  options.staging_bytes = 700;
  bool loaded = false;
  for (std::uint64_t n = 1; !loaded; ++n) {
    ASSERT_LT(n, 500U);
    const auto backend = value_of(mock::create());
    mock::control(*backend).fail_any_nth(n);
    auto store = WeightStore::load(*backend, *file, plan, options);
    mock::control(*backend).clear_failures();
    loaded = store.has_value() && n > 10;
    if (store) {
      EXPECT_TRUE((*store)->release(*backend));
    }
    // A free that the driver refused is off the ledger all the same; nothing may be left on it.
    EXPECT_EQ(held(*backend), 0U) << "call " << n;
  }
}

TEST(WeightStore, AnotherBackendIsRefusedAndKeepsItsMemory) {
  const std::vector<std::byte> bytes = sample_file();
  const auto file = open(bytes);
  const auto plan = value_of(WeightPlan::create(*file));
  // Two mocks hand out the same addresses.
  const auto first = value_of(mock::create());
  const auto second = value_of(mock::create());
  const auto mine = value_of(WeightStore::load(*first, *file, plan));
  const auto other = value_of(WeightStore::load(*second, *file, plan));
  ASSERT_EQ(value_of(mine->get("norm")).ptr, value_of(other->get("norm")).ptr);

  expect_error(mine->release(*second), Errc::invalid_argument, {"weight store", "another backend"});
  EXPECT_EQ(held(*first), held(*second)) << "nothing was freed on either";
  EXPECT_EQ(device_bytes(*second, value_of(other->get("norm"))), pattern_bytes(132, 3));
  EXPECT_EQ(device_bytes(*first, value_of(mine->get("norm"))), pattern_bytes(132, 3));
  EXPECT_TRUE(mine->release(*first));
  EXPECT_TRUE(other->release(*second));
  EXPECT_EQ(held(*first) + held(*second), 0U);
}

TEST(WeightStore, SaysWhatIsMissingBeforeItAllocates) {
  mock::Options options;
  options.free_memory_bytes = 2000;
  const auto backend = value_of(mock::create(options));
  const std::vector<std::byte> bytes = sample_file();
  const auto file = open(bytes);
  expect_error(WeightStore::load(*backend, *file, value_of(WeightPlan::create(*file))), Errc::out_of_memory, {"3072", "2000"});
  EXPECT_EQ(mock::control(*backend).num_calls(Op::alloc_arena), 0U);
}

TEST(WeightStore, EstimateAndLoadAgree) {
  const auto backend = value_of(mock::create());
  const auto file = value_of(WeightFile::open(METRALE_TEST_DATA "/kjv-hybrid-4m"));
  const auto plan = value_of(WeightPlan::create(*file, [](const TensorInfo& tensor) {
    TensorChoice choice;
    if (tensor.name.find("layers.7.") != std::string::npos) choice.use = TensorUse::skip;
    if (tensor.shape.size() == 1) choice.transform = convert_to(DType::f32);
    return choice;
  }));
  const auto store = value_of(WeightStore::load(*backend, *file, plan));
  EXPECT_EQ(held(*backend), plan.device_bytes());
  EXPECT_EQ(store->size_bytes(), plan.device_bytes());
}

TEST(WeightStore, LoadsTheTinyCheckpointsByteForByte) {
  const auto backend = value_of(host::create());
  for (const char* folder : {METRALE_TEST_DATA "/kjv-llama-2m", METRALE_TEST_DATA "/kjv-hybrid-4m"}) {
    const auto file = value_of(WeightFile::open(folder));
    WeightLoadOptions options;
    options.staging_bytes = 256 << 10;
    options.drop_page_cache = true;
    const auto store = value_of(WeightStore::load(*backend, *file, value_of(WeightPlan::create(*file)), options));
    EXPECT_EQ(store->weights().size(), file->tensors().size());
    for (const TensorInfo& tensor : file->tensors().tensors()) {
      ASSERT_EQ(device_bytes(*backend, value_of(store->get(tensor.name))), value_of(file->read(tensor))) << tensor.name;
    }
  }
}

}  // namespace
}  // namespace metrale
