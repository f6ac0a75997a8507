// SPDX-License-Identifier: Apache-2.0
//
// Kernel launches: geometry, arguments, attributes, the raw form; sm_count.
#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Launch : public CaseNeeding<memory, copies, streams, kernels> {
 protected:
  Result<> try_launch(KernelHandle k, std::vector<KernelArg> args, Dim3 grid = {}, Dim3 threads = {},
                      LaunchAttributes attributes = {}) {
    return gpu().launch_typed(k, grid, threads, 0, gpu().default_stream(), args, attributes);
  }
};

TEST_F(Launch, RunsEveryThreadOfEveryBlockOnce) {
  need({computes});
  const StreamHandle s = stream();
  const KernelHandle k = kernel(kGeometry);
  for (const auto& [grid, threads] : std::vector<std::pair<Dim3, Dim3>>{{{1, 1, 1}, {1, 1, 1}},
                                                                        {{7, 1, 1}, {32, 1, 1}},
                                                                        {{3, 5, 2}, {4, 2, 3}},
                                                                        {{1000, 1, 1}, {1, 1, 1}},
                                                                        {{1, 300, 2}, {8, 1, 1}}}) {
    const std::size_t count = grid.count() * threads.count();
    const DevicePtr out = block(count * 4);
    fill(out, 0, count * 4);
    launch(k, s, {KernelArg::buffer(out)}, grid, threads);
    settle(s);
    const auto seen = read<std::uint32_t>(out, count);
    EXPECT_EQ(static_cast<std::size_t>(std::count(seen.begin(), seen.end(), 1u)), count)
        << "grid " << grid.x << " x " << grid.y << " x " << grid.z;
  }
}

TEST_F(Launch, ComputesWhatTheKernelSays) {
  need({computes});
  const StreamHandle s = stream();
  constexpr std::uint32_t kCount = 10'001;
  std::vector<float> x(kCount), y(kCount);
  std::iota(x.begin(), x.end(), 0.0f);
  std::iota(y.begin(), y.end(), 5.0f);
  const DevicePtr dx = block(kCount * 4);
  const DevicePtr dy = block(kCount * 4);
  write(dx, x);
  write(dy, y);
  launch(kernel(kAxpy), s, {KernelArg::buffer(dy), KernelArg::buffer(dx), KernelArg::value(2.0f), KernelArg::value(kCount)},
         {16, 1, 1});
  settle(s);
  const auto seen = read<float>(dy, kCount);
  for (std::uint32_t i = 0; i < kCount; ++i) ASSERT_EQ(seen[i], y[i] + 2.0f * x[i]) << i;
}

TEST_F(Launch, ByValueStructsArriveInFull) {
  need({computes});
  const StreamHandle s = stream();
  const DevicePtr out = block(17 * 8);
  Wide value;
  for (std::size_t i = 0; i < value.words.size(); ++i) value.words[i] = 0x0101010101010101u * (i + 1);
  launch(
      kernel(kEcho), s,
      {KernelArg::buffer(out), KernelArg::bytes(std::as_bytes(std::span(&value, 1))), KernelArg::value(std::uint32_t{0xC0FFEE})});
  settle(s);
  const auto seen = read<std::uint64_t>(out, 17);
  EXPECT_TRUE(std::equal(value.words.begin(), value.words.end(), seen.begin()));
  EXPECT_EQ(seen[16], 0xC0FFEEu);
}

TEST_F(Launch, ScalarsKeepTheirWidths) {
  need({computes});
  const StreamHandle s = stream();
  const DevicePtr out = block(5 * 8);
  launch(
      kernel(kEchoWidths), s,
      {KernelArg::buffer(out), KernelArg::value(std::uint8_t{0xF1}), KernelArg::value(std::uint16_t{0xF1F2}),
       KernelArg::value(std::uint32_t{0xF1F2F3F4}), KernelArg::value(std::uint64_t{0xF1F2F3F4F5F6F7F8}), KernelArg::value(-1.5f)});
  settle(s);
  const auto seen = read<std::uint64_t>(out, 5);
  EXPECT_EQ(seen, (std::vector<std::uint64_t>{0xF1, 0xF1F2, 0xF1F2F3F4, 0xF1F2F3F4F5F6F7F8, std::bit_cast<std::uint32_t>(-1.5f)}));
}

TEST_F(Launch, CarriesFourKiBOfArgumentsAndNoMore) {
  Largest value;
  std::iota(value.words.begin(), value.words.end(), std::uint64_t{1} << 40);
  const DevicePtr out = block(sizeof(value));
  ASSERT_TRUE(
      ok(try_launch(kernel(kEchoLargest), {KernelArg::buffer(out), KernelArg::bytes(std::as_bytes(std::span(&value, 1)))})));
  settle(gpu().default_stream());
  if (gpu().capabilities().has(computes)) {
    const auto seen = read<std::uint64_t>(out, value.words.size());
    EXPECT_TRUE(std::equal(value.words.begin(), value.words.end(), seen.begin()));
  }
  static const TooLarge too_large{};
  EXPECT_TRUE(
      refused(try_launch(kernel(kTooLarge), {KernelArg::buffer(out), KernelArg::bytes(std::as_bytes(std::span(&too_large, 1)))}),
              Errc::invalid_argument, {"4096"}));
}

TEST_F(Launch, ArgumentsAreReadDuringTheCall) {
  need({computes, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr out = block(17 * 8);
  {
    Gate gate(gpu(), s);
    Wide value;
    value.words.fill(0x1111);
    std::uint32_t tag = 7;
    std::array<KernelArg, 3> args{KernelArg::buffer(out), KernelArg::bytes(std::as_bytes(std::span(&value, 1))),
                                  KernelArg::value(tag)};
    must(gpu().launch_typed(kernel(kEcho), {}, {}, 0, s, args));
    value.words.fill(0xDDDD);
    args.fill(KernelArg::buffer({0xDDDD}));
  }
  settle(s);
  const auto seen = read<std::uint64_t>(out, 17);
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 0x1111u), 16);
  EXPECT_EQ(seen[16], 7u);
}

TEST_F(Launch, TakesInteriorAddresses) {
  need({computes});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(256);
  fill(ptr, 0, 256);
  launch(kernel(kFill), s,
         {KernelArg::buffer(ptr.offset(128)), KernelArg::value(std::uint32_t{0xFFFFFFFF}), KernelArg::value(std::uint64_t{2})});
  settle(s);
  EXPECT_TRUE(holds(ptr, 128, 0));
  EXPECT_TRUE(holds(ptr.offset(128), 8, 0xFF));
  EXPECT_TRUE(holds(ptr.offset(136), 120, 0));
}

TEST_F(Launch, IsOrderedOnItsStream) {
  need({computes, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr log = make_log(4);
  {
    Gate gate(gpu(), s);
    append(log, 1, s);  // running in the caller, or waiting, would last until the gate gives up, which fails the case
    append(log, 2, s);
    EXPECT_TRUE(is_held(s));
    EXPECT_TRUE(read_log(log, 4).empty()) << "ran ahead of its stream";
  }
  settle(s);
  EXPECT_EQ(read_log(log, 4), (std::vector<std::uint32_t>{1, 2}));
}

TEST_F(Launch, DoesNotWaitForTheKernel) {
  need({computes, pinned_memory, host_alias});
  const StreamHandle s = stream();
  const auto flag = must(gpu().alloc_host_pinned(4));
  const DevicePtr alias = must(gpu().host_ptr_to_device(flag.data()));
  launch(kernel(kHold), s, {KernelArg::buffer(alias)});
  EXPECT_FALSE(must(gpu().query(s)));
  std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(flag.data())).store(1);
  settle(s);
}

TEST_F(Launch, GivesEachBlockItsSharedMemory) {
  need({computes});
  const StreamHandle s = stream();
  const KernelHandle k = kernel(kShared);
  // The largest is above the 48 KiB that a GPU gives without being asked.
  for (const std::uint32_t words : {1u, 64u, 12'000u, 16'384u}) {
    const DevicePtr out = block(32 * 4);
    const std::array<KernelArg, 2> args{KernelArg::buffer(out), KernelArg::value(words)};
    for (int round = 0; round < 2; ++round) must(gpu().launch_typed(k, {32, 1, 1}, {1, 1, 1}, words * 4, s, args));
    settle(s);
    const auto seen = read<std::uint32_t>(out, 32);
    for (std::uint32_t b = 0; b < 32; ++b) ASSERT_EQ(seen[b], words * (b + 1)) << words << " words, block " << b;
  }
}

// ---- refusals ----

TEST_F(Launch, EveryLaunchIsComparedWithTheSignature) {
  const DevicePtr ptr = block(64);
  const KernelHandle k = kernel(kFill);
  const KernelArg buffer = KernelArg::buffer(ptr);
  const KernelArg u32 = KernelArg::value(std::uint32_t{1});
  const KernelArg u64 = KernelArg::value(std::uint64_t{1});
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(ok(try_launch(k, {buffer, u32, u64})));
    EXPECT_TRUE(refused(try_launch(k, {buffer, u32}), Errc::invalid_argument, {"fill", "3", "2"}));
    EXPECT_TRUE(refused(try_launch(k, {buffer, u32, u64, u32}), Errc::invalid_argument, {"fill", "3", "4"}));
    EXPECT_TRUE(refused(try_launch(k, {}), Errc::invalid_argument, {"fill"}));
    EXPECT_TRUE(refused(try_launch(k, {buffer, u64, u64}), Errc::invalid_argument, {"fill", "argument 1", "8", "4"}));
    EXPECT_TRUE(refused(try_launch(k, {u32, u32, u64}), Errc::invalid_argument, {"fill", "argument 0", "4", "8"}));
  }
  settle(gpu().default_stream());
}

TEST_F(Launch, TruncatedStructsAreRefused) {
  const DevicePtr out = block(17 * 8);
  const std::array<std::byte, 120> truncated{};
  EXPECT_TRUE(
      refused(try_launch(kernel(kEcho), {KernelArg::buffer(out), KernelArg::bytes(truncated), KernelArg::value(std::uint32_t{0})}),
              Errc::invalid_argument, {"echo", "120", "128"}));
}

TEST_F(Launch, ZeroDimensionsAreRefused) {
  const DevicePtr out = block(64);
  const KernelHandle k = kernel(kTiled);
  for (const Dim3 zero : {Dim3{0, 1, 1}, Dim3{1, 0, 1}, Dim3{1, 1, 0}}) {
    EXPECT_TRUE(refused(try_launch(k, {KernelArg::buffer(out)}, zero, {}), Errc::invalid_argument));
    EXPECT_TRUE(refused(try_launch(k, {KernelArg::buffer(out)}, {}, zero), Errc::invalid_argument));
  }
}

TEST_F(Launch, GridsThatOverflowAreRefused) {
  const DevicePtr out = block(64);
  const KernelHandle k = kernel(kTiled);
  for (const Dim3 huge :
       {Dim3{1u << 22, 1u << 22, 1u << 22}, Dim3{1u << 31, 1u << 31, 4}, Dim3{UINT32_MAX, UINT32_MAX, UINT32_MAX}}) {
    EXPECT_TRUE(refused(try_launch(k, {KernelArg::buffer(out)}, huge, {}), Errc::invalid_argument, {"tiled"}));
    EXPECT_TRUE(refused(try_launch(k, {KernelArg::buffer(out)}, {}, huge), Errc::invalid_argument, {"tiled"}));
    // Each fits, and the threads of all blocks together do not.
    EXPECT_TRUE(
        refused(try_launch(k, {KernelArg::buffer(out)}, {1u << 31, 1u << 15, 1}, {1u << 18, 1, 1}), Errc::invalid_argument));
    if (!gpu().capabilities().has(raw_launch)) continue;
    DevicePtr value = out;
    void* param = &value;
    EXPECT_TRUE(refused(gpu().launch(k, huge, {}, 0, gpu().default_stream(), &param), Errc::invalid_argument));
  }
}

TEST_F(Launch, NullAndForeignHandlesAreRefused) {
  const DevicePtr out = block(64);
  const std::array<KernelArg, 1> args{KernelArg::buffer(out)};
  const KernelHandle k = kernel(kTiled);
  auto other = make();
  EXPECT_TRUE(refused(gpu().launch_typed({}, {}, {}, 0, gpu().default_stream(), args), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().launch_typed({12345}, {}, {}, 0, gpu().default_stream(), args), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().launch_typed(must(other->kernel(kModule, kTiled)), {}, {}, 0, gpu().default_stream(), args),
                      Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().launch_typed(k, {}, {}, 0, {}, args), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().launch_typed(k, {}, {}, 0, other->default_stream(), args), Errc::invalid_argument));
}

// ---- attributes ----

TEST_F(Launch, CooperativeBlocksAreResidentTogether) {
  need({cooperative_launch, computes});
  const StreamHandle s = stream();
  const std::uint32_t blocks = std::max(2u, must(gpu().sm_count()));
  const DevicePtr counter = block(4);
  const DevicePtr out = block(blocks * 4);
  fill(counter, 0, 4);
  const std::array<KernelArg, 2> args{KernelArg::buffer(counter), KernelArg::buffer(out)};
  LaunchAttributes attributes;
  attributes.cooperative = true;
  must(gpu().launch_typed(kernel(kMeet), {blocks, 1, 1}, {}, 0, s, args, attributes));
  settle(s);
  EXPECT_EQ(read<std::uint32_t>(out, blocks), std::vector<std::uint32_t>(blocks, blocks));
}

TEST_F(Launch, DependentLaunchNeedsAKernelThatWaits) {
  need({dependent_launch});
  const DevicePtr log = make_log(4);
  LaunchAttributes dependent;
  dependent.dependent_launch = true;
  EXPECT_TRUE(refused(try_launch(kernel(kAppend), {KernelArg::buffer(log), KernelArg::value(1u)}, {}, {}, dependent),
                      Errc::invalid_argument, {"append"}));
  EXPECT_TRUE(ok(try_launch(kernel(kWaiter), {KernelArg::buffer(log), KernelArg::value(2u)}, {}, {}, dependent)));
  EXPECT_TRUE(ok(try_launch(kernel(kWaiter), {KernelArg::buffer(log), KernelArg::value(3u)}, {}, {}, dependent)));
  settle(gpu().default_stream());
  if (gpu().capabilities().has(computes)) {
    EXPECT_EQ(read_log(log, 4), (std::vector<std::uint32_t>{2, 3}));
  }
}

TEST_F(Launch, ClustersWithAZeroDimensionAreRefused) {
  const DevicePtr out = block(64);
  const KernelHandle k = kernel(kTiled);
  const Errc code = gpu().capabilities().has(cluster_launch) ? Errc::invalid_argument : Errc::unsupported;
  for (const Dim3 shape : {Dim3{0, 2, 1}, Dim3{0, 0, 2}, Dim3{2, 0, 1}, Dim3{2, 1, 0}}) {
    LaunchAttributes attributes;
    attributes.cluster = shape;
    EXPECT_TRUE(refused(try_launch(k, {KernelArg::buffer(out)}, {2, 2, 2}, {}, attributes), code, {"tiled"}))
        << shape.x << " x " << shape.y << " x " << shape.z;
  }
}

// ---- raw ----

TEST_F(Launch, RawFormTakesOnePointerForEachParameter) {
  need({raw_launch});
  const StreamHandle s = stream();
  const DevicePtr out = block(17 * 8);
  {
    DevicePtr out_value = out;
    Wide wide;
    wide.words.fill(0xABCD);
    std::uint32_t tag = 9;
    std::array<void*, 3> params{&out_value, &wide, &tag};
    must(gpu().launch(kernel(kEcho), {}, {}, 0, s, params.data()));
  }
  settle(s);
  if (!gpu().capabilities().has(computes)) return;
  const auto seen = read<std::uint64_t>(out, 17);
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 0xABCDu), 16);
  EXPECT_EQ(seen[16], 9u);
}

TEST_F(Launch, RawFormReadsItsParametersDuringTheCall) {
  need({raw_launch, computes, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr out = block(17 * 8);
  {
    Gate gate(gpu(), s);
    DevicePtr out_value = out;
    Wide wide;
    wide.words.fill(0xABCD);
    std::uint32_t tag = 9;
    std::array<void*, 3> params{&out_value, &wide, &tag};
    must(gpu().launch(kernel(kEcho), {}, {}, 0, s, params.data()));
    out_value = {0};
    wide.words.fill(0);
    tag = 0;
    params.fill(nullptr);
  }
  settle(s);
  const auto seen = read<std::uint64_t>(out, 17);
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 0xABCDu), 16);
  EXPECT_EQ(seen[16], 9u);
}

TEST_F(Launch, RawFormRefusesBadHandlesAndGeometry) {
  need({raw_launch});
  std::array<void*, 1> params{nullptr};
  EXPECT_TRUE(refused(gpu().launch({}, {}, {}, 0, gpu().default_stream(), params.data()), Errc::invalid_argument));
  EXPECT_TRUE(
      refused(gpu().launch(kernel(kTiled), {0, 1, 1}, {}, 0, gpu().default_stream(), params.data()), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().launch(kernel(kTiled), {}, {}, 0, {}, params.data()), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().launch(kernel(kTiled), {}, {}, 0, gpu().default_stream(), nullptr), Errc::invalid_argument));
}

// ---- the device ----

TEST_F(Launch, SmCountIsPositiveAndStays) {
  need({processor_count});
  const std::uint32_t count = must(gpu().sm_count());
  EXPECT_GT(count, 0u);
  EXPECT_EQ(must(gpu().sm_count()), count);
}

TEST_F(Launch, DebugSyncWaitsAfterEachLaunch) {
  need({computes, host_callbacks});
  CreateOptions options;
  options.face.debug_sync_kernels = true;
  remake(options);
  const StreamHandle s = stream();
  const DevicePtr log = make_log(4);
  const KernelHandle k = kernel(kAppend);
  Gate gate(gpu(), s);
  EXPECT_FALSE(returns_before(gate, [&] { launch(k, s, {KernelArg::buffer(log), KernelArg::value(1u)}); }));
  EXPECT_TRUE(must(gpu().query(s)));
}

}  // namespace
}  // namespace metrale::conformance
