// SPDX-License-Identifier: Apache-2.0
//
// A model loaded, used and unloaded again and again: nothing may stay behind, neither on the ledger nor in the process.
#include <fstream>

#include "lifecycle_checks.h"

namespace metrale::test {
namespace {

std::uint64_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key;) {
    std::uint64_t kib = 0;
    if (key == "VmRSS:" && status >> kib) return kib * 1024;
    status.ignore(1 << 16, '\n');
  }
  return 0;
}

class Lifecycle : public ::testing::TestWithParam<const char*> {};

TEST_P(Lifecycle, FiftyCyclesLeaveNothingBehind) {
  const auto backend = host_backend();
  const ModelLife life(model_folder(GetParam()));
  std::uint64_t resident = 0;
  for (int cycle = 1; cycle <= 50; ++cycle) {
    SCOPED_TRACE(cycle);
    ASSERT_NO_FATAL_FAILURE(life.once(*backend));
    if (cycle == 3) resident = resident_bytes();
  }
  // Sanitizers keep freed memory in quarantine, so residence says nothing there.
  if (METRALE_SANITIZED || resident == 0) return;
  const std::uint64_t after = resident_bytes();
  EXPECT_LE(after, resident + (2U << 20)) << "resident after cycle 3: " << resident << ", after 50: " << after;
}

TEST_P(Lifecycle, ABackendForEachModelLeavesNothingBehind) {
  const std::filesystem::path folder = model_folder(GetParam());
  for (int cycle = 1; cycle <= 10; ++cycle) {
    const auto backend = host_backend();
    const auto model = ok(Generator::load(folder, *backend, {.extent = TeardownExtent::backend}));
    ok(model->generate({.prompt = "In", .max_tokens = 3}));
    const Receipt receipt = model->unload();
    ASSERT_TRUE(receipt.clean()) << "cycle " << cycle << '\n' << receipt.to_string();
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Lifecycle, ::testing::ValuesIn(kModels), model_name);

}  // namespace
}  // namespace metrale::test
