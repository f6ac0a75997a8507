// SPDX-License-Identifier: Apache-2.0
//
// Look-ups of kernels and modules, their audit, and what kernels publish.
#include <algorithm>
#include <bit>
#include <limits>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Kernels : public CaseNeeding<kernels> {
 protected:
  static std::uint16_t bf16(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); }
};

TEST_F(Kernels, AreFoundByModuleAndFunction) {
  for (const std::string_view function : {kFill, kAxpy, kAppend, kEcho, kTiled}) {
    const KernelHandle k = must(gpu().kernel(kModule, function));
    EXPECT_TRUE(k);
    EXPECT_EQ(gpu().kernel_name(k), std::string(kModule) + "." + std::string(function));
  }
}

TEST_F(Kernels, LookingUpAgainGivesTheSameHandle) {
  const KernelHandle k = must(gpu().kernel(kModule, kFill));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(must(gpu().kernel(kModule, kFill)), k);
  EXPECT_NE(must(gpu().kernel(kModule, kAxpy)), k);
  EXPECT_EQ(gpu().kernel_audit().num_hits, 5u);
  must(gpu().unload_modules());
  const KernelHandle next = must(gpu().kernel(kModule, kFill));
  EXPECT_NE(next, k);
  EXPECT_TRUE(ok(gpu().kernel_facts(next)));
  EXPECT_TRUE(refused(gpu().kernel_facts(k), Errc::invalid_argument));
}

TEST_F(Kernels, MissesAreNotFoundAndNamed) {
  EXPECT_TRUE(refused(gpu().kernel(kModule, "no_such_function"), Errc::not_found, {"no_such_function"}));
  EXPECT_TRUE(refused(gpu().kernel("no_such_module", kFill), Errc::not_found, {"no_such_module"}));
  EXPECT_TRUE(refused(gpu().kernel("", ""), Errc::not_found));
}

TEST_F(Kernels, AuditCountsHitsAndListsMissesWithTheirFirstCaller) {
  must(gpu().kernel(kModule, kFill));
  must(gpu().kernel(kModule, kAxpy));
  EXPECT_FALSE(gpu().kernel(kModule, "absent_a").has_value());
  const std::uint32_t line = __LINE__ - 1;
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(gpu().kernel(kModule, "absent_b").has_value());
  EXPECT_FALSE(gpu().kernel(kModule, "absent_a").has_value());
  const KernelAudit audit = gpu().kernel_audit();
  EXPECT_EQ(audit.num_hits, 2u);
  EXPECT_FALSE(audit.sealed);
  ASSERT_EQ(audit.misses.size(), 2u);
  EXPECT_EQ(audit.misses[0].module, kModule);
  EXPECT_EQ(audit.misses[0].function, "absent_a");
  EXPECT_EQ(audit.misses[0].count, 2u);
  EXPECT_EQ(audit.misses[0].site.line(), line);
  EXPECT_TRUE(std::string_view(audit.misses[0].site.file_name()).ends_with("kernel_registry_test.cpp"));
  EXPECT_EQ(audit.misses[1].function, "absent_b");
  EXPECT_EQ(audit.misses[1].count, 3u);
  EXPECT_EQ(audit.num_required_missing(), 2u);
}

TEST_F(Kernels, AuditSplitsDeclaredAbsentFromRequired) {
  gpu().declare_absent(kModule, "optional_early");
  EXPECT_TRUE(refused(gpu().kernel(kModule, "optional_early"), Errc::not_found));
  EXPECT_TRUE(refused(gpu().kernel(kModule, "optional_late"), Errc::not_found));
  EXPECT_TRUE(refused(gpu().kernel(kModule, "required"), Errc::not_found));
  gpu().declare_absent(kModule, "optional_late");
  const KernelAudit audit = gpu().kernel_audit();
  ASSERT_EQ(audit.misses.size(), 3u);
  EXPECT_TRUE(audit.misses[0].declared_absent);
  EXPECT_TRUE(audit.misses[1].declared_absent);
  EXPECT_FALSE(audit.misses[2].declared_absent);
  EXPECT_EQ(audit.num_required_missing(), 1u);
}

TEST_F(Kernels, SealMakesLaterMissesErrors) {
  gpu().declare_absent(kModule, "optional");
  EXPECT_TRUE(refused(gpu().kernel(kModule, "absent"), Errc::not_found));
  gpu().seal_audit();
  EXPECT_TRUE(gpu().kernel_audit().sealed);
  EXPECT_TRUE(refused(gpu().kernel(kModule, "absent"), Errc::internal, {"absent"}));
  EXPECT_TRUE(refused(gpu().kernel(kModule, "another"), Errc::internal, {"another"}));
  EXPECT_TRUE(refused(gpu().kernel(kModule, "optional"), Errc::not_found)) << "declared absent";
  EXPECT_TRUE(ok(gpu().kernel(kModule, kFill)));
}

TEST_F(Kernels, HasModuleNeverRecords) {
  EXPECT_TRUE(must(gpu().has_module(kModule)));
  EXPECT_FALSE(must(gpu().has_module("no_such_module")));
  EXPECT_EQ(gpu().kernel_audit().num_hits, 0u);
  EXPECT_TRUE(gpu().kernel_audit().misses.empty());
}

// ---- what they publish ----

TEST_F(Kernels, PublishTheirSignature) {
  const KernelFacts* facts = must(gpu().kernel_facts(must(gpu().kernel(kModule, kEcho))));
  EXPECT_EQ(facts->param_bytes, (std::vector<std::uint32_t>{8, 128, 4}));
  facts = must(gpu().kernel_facts(must(gpu().kernel(kModule, kEchoWidths))));
  EXPECT_EQ(facts->param_bytes, (std::vector<std::uint32_t>{8, 1, 2, 4, 8, 4}));
  EXPECT_TRUE(refused(gpu().kernel_facts({}), Errc::invalid_argument));
}

TEST_F(Kernels, PublishTheirTileWidth) {
  EXPECT_EQ(must(gpu().kernel_n_tile(must(gpu().kernel(kModule, kTiled)))), kTile);
  EXPECT_TRUE(refused(gpu().kernel_n_tile(must(gpu().kernel(kModule, kFill))), Errc::not_found, {"fill_n_tile"}));
  EXPECT_TRUE(refused(gpu().kernel_n_tile(must(gpu().kernel(kModule, kTiledZero))), Errc::not_found)) << "a tile of 0 is none";
  EXPECT_TRUE(refused(gpu().kernel_n_tile({}), Errc::invalid_argument));
}

TEST_F(Kernels, PublishWhetherTheyCastToE4m3) {
  EXPECT_TRUE(must(gpu().kernel_casts_a_to_e4m3(must(gpu().kernel(kModule, kCasts)))));
  EXPECT_FALSE(must(gpu().kernel_casts_a_to_e4m3(must(gpu().kernel(kModule, kFill)))));
  EXPECT_TRUE(refused(gpu().kernel_casts_a_to_e4m3({}), Errc::invalid_argument));
}

TEST_F(Kernels, PublishWhetherTheyWait) {
  EXPECT_TRUE(must(gpu().kernel_facts(must(gpu().kernel(kModule, kWaiter))))->waits_for_dependency);
  EXPECT_FALSE(must(gpu().kernel_facts(must(gpu().kernel(kModule, kAppend))))->waits_for_dependency);
}

TEST_F(Kernels, E4m3RangeCheckFindsWhatWouldSaturate) {
  need({memory, copies, streams});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(200'000 * 2);
  std::vector<std::uint16_t> values(200'000, bf16(1.0f));
  values[0] = bf16(448.0f);
  values[1] = bf16(-448.0f);
  write(ptr, values);
  EXPECT_TRUE(ok(gpu().check_e4m3_range(ptr, values.size(), s)));
  for (const float bad : {450.0f, -450.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::size_t place : {std::size_t{0}, std::size_t{65'536}, values.size() - 1}) {
      auto wrong = values;
      wrong[place] = bf16(bad);
      write(ptr, wrong);
      EXPECT_TRUE(refused(gpu().check_e4m3_range(ptr, values.size(), s), Errc::out_of_range, {std::to_string(place)})) << bad;
    }
  }
  EXPECT_TRUE(refused(gpu().check_e4m3_range(ptr, values.size() + 1, s), Errc::out_of_range)) << "leaves its block";
}

TEST_F(Kernels, E4m3RangeCheckComesAfterTheWorkOnItsStream) {
  need({memory, copies, streams, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  fill(ptr, 0, 64);
  Gate gate(gpu(), s);
  must(gpu().memset_async(ptr, 0xFF, 64, s));  // NaN
  returns_before(gate, [&] { EXPECT_TRUE(refused(gpu().check_e4m3_range(ptr, 32, s), Errc::out_of_range)); });
}

// ---- the module set ----

TEST_F(Kernels, RegistryListsEveryKernelSorted) {
  need({computes});
  KernelRegistry* registry = gpu().kernel_registry();
  ASSERT_NE(registry, nullptr);
  const auto entries = must(registry->entries());
  const auto key = [](const KernelRegistry::Entry& e) { return std::pair(e.module, e.function); };
  EXPECT_TRUE(std::is_sorted(entries.begin(), entries.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); }));
  for (const std::string_view function :
       {kFill, kAxpy, kAppend, kEcho, kEchoWidths, kEchoLargest, kGeometry, kShared, kTiled, kCasts, kWaiter}) {
    const auto entry =
        std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.module == kModule && e.function == function; });
    ASSERT_NE(entry, entries.end()) << function;
    EXPECT_EQ(entry->facts.param_bytes, must(gpu().kernel_facts(must(gpu().kernel(kModule, function))))->param_bytes) << function;
  }
  EXPECT_TRUE(gpu().kernel_audit().misses.empty());
}

TEST_F(Kernels, RegistryIsMissingOnTheMockOnly) {
  // What only records has kernels by name and no module set.
  EXPECT_EQ(gpu().kernel_registry() != nullptr, gpu().capabilities().has(computes));
}

TEST_F(Kernels, DeviceSymbolsHaveAddressAndSizeAndAreKnownToCopies) {
  need({device_symbols, memory, copies});
  KernelRegistry* registry = gpu().kernel_registry();
  ASSERT_NE(registry, nullptr);
  const DeviceSymbol symbol = must(registry->device_symbol(kModule, kSymbol));
  EXPECT_EQ(symbol.bytes, kSymbolBytes);
  const auto sent = pattern(kSymbolBytes, 3);
  write(symbol.ptr, sent);
  EXPECT_EQ(read(symbol.ptr, kSymbolBytes), sent);
  EXPECT_TRUE(refused(gpu().memset(symbol.ptr, 0, kSymbolBytes + 1), Errc::out_of_range));
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_TRUE(refused(gpu().free(symbol.ptr), Errc::invalid_argument)) << "a module's global is not ours to free";
  EXPECT_EQ(must(registry->device_symbol(kModule, kSymbol)).ptr, symbol.ptr);
}

TEST_F(Kernels, MissingDeviceSymbolsAreNotFound) {
  need({device_symbols});
  KernelRegistry* registry = gpu().kernel_registry();
  ASSERT_NE(registry, nullptr);
  EXPECT_TRUE(refused(registry->device_symbol(kModule, "no_such_symbol"), Errc::not_found, {"no_such_symbol"}));
  EXPECT_TRUE(refused(registry->device_symbol("no_such_module", kSymbol), Errc::not_found, {"no_such_module"}));
}

TEST_F(Kernels, AnswerDeviceLostAfterShutdown) {
  const KernelHandle k = must(gpu().kernel(kModule, kTiled));
  must(gpu().shutdown());
  EXPECT_TRUE(refused(gpu().kernel_facts(k), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().kernel_n_tile(k), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().kernel_casts_a_to_e4m3(k), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().has_module(kModule), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().check_e4m3_range({}, 0, gpu().default_stream()), Errc::device_lost));
}

TEST_F(Kernels, UnloadedModulesTakeTheirHandlesAlong) {
  need({memory, streams});
  const DevicePtr out = block(64);
  const KernelHandle k = must(gpu().kernel(kModule, kTiled));
  const KernelArg arg = KernelArg::buffer(out);
  must(gpu().launch_typed(k, {}, {}, 0, gpu().default_stream(), {&arg, 1}));
  settle(gpu().default_stream());
  must(gpu().unload_modules());
  EXPECT_TRUE(refused(gpu().launch_typed(k, {}, {}, 0, gpu().default_stream(), {&arg, 1}), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().kernel_facts(k), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().kernel_n_tile(k), Errc::invalid_argument));
}

}  // namespace
}  // namespace metrale::conformance
