// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "backends/host/host_backend.h"
#include "host_kernels.h"
#include "support.h"

namespace metrale::test {
namespace {

class HostLaunch : public testing::Test {
 protected:
  KernelHandle kernel(std::string_view name) { return take(b_->kernel("test", name)); }
  std::unique_ptr<GpuBackend> b_ = take(host::create(host_options(3)));
  StreamHandle s_ = take(b_->create_stream());
};

TEST_F(HostLaunch, RunsEveryBlockOnceWithItsIndex) {
  const KernelHandle mark = kernel("mark_block");
  for (const Dim3 grid : {Dim3{1, 1, 1}, Dim3{7, 5, 3}, Dim3{1, 1, 65}, Dim3{4099, 1, 1}, Dim3{2, 900, 2}}) {
    const std::size_t n = grid.count();
    const DevicePtr out = take(b_->alloc(4 * n));
    take(b_->memset_async(out, 0, 4 * n, s_));
    const KernelArg args[] = {KernelArg::buffer(out)};
    take(b_->launch_typed(mark, grid, {32}, 0, s_, args));
    EXPECT_EQ(read_words(*b_, out, n, s_), std::vector<std::uint32_t>(n, 1));
    take(b_->free(out));
  }
}

TEST_F(HostLaunch, SharesAGridOverThreads) {
  const DevicePtr arrived = take(b_->alloc(4));
  take(b_->memset(arrived, 0, 4));
  const KernelArg args[] = {KernelArg::buffer(arrived)};
  take(b_->launch_typed(kernel("meet"), {2}, {}, 0, s_, args));
  EXPECT_OK(b_->synchronize(s_));  // a single thread would run the second block never
}

TEST_F(HostLaunch, AGridThatFindsTheTeamTakenRunsAlone) {
  const DevicePtr flag = take(b_->alloc(4));
  const DevicePtr counter = take(b_->alloc(4));
  take(b_->memset(flag, 0, 4));
  take(b_->memset(counter, 0, 4));
  const StreamHandle other = take(b_->create_stream());
  const KernelArg hold_args[] = {KernelArg::buffer(flag)};
  take(b_->launch_typed(kernel("hold"), {3}, {}, 0, s_, hold_args));
  const KernelArg count_args[] = {KernelArg::buffer(counter)};
  for (int i = 0; i < 100; ++i) take(b_->launch_typed(kernel("count_blocks"), {50}, {}, 0, other, count_args));
  EXPECT_EQ(read_words(*b_, counter, 1, other)[0], 5000u);
  EXPECT_FALSE(take(b_->query(s_)));
  std::atomic_ref(*reinterpret_cast<std::uint32_t*>(flag.address)).store(1);
  EXPECT_OK(b_->synchronize(s_));
}

TEST_F(HostLaunch, ManyGridsInARowLoseNoBlock) {
  const DevicePtr counter = take(b_->alloc(4));
  take(b_->memset(counter, 0, 4));
  const KernelArg args[] = {KernelArg::buffer(counter)};
  std::uint32_t want = 0;
  for (std::uint32_t i = 1; i <= 2000; ++i) {
    take(b_->launch_typed(kernel("count_blocks"), {i % 40 + 1}, {}, 0, s_, args));
    want += i % 40 + 1;
  }
  EXPECT_EQ(read_words(*b_, counter, 1, s_)[0], want);
}

TEST_F(HostLaunch, ArgumentsAreCopiedAtTheCall) {
  const DevicePtr out = take(b_->alloc(18 * 8));
  Gate gate(*b_, s_);
  {
    Wide wide{};
    for (int i = 0; i < 16; ++i) wide.words[i] = 100 + i;
    const KernelArg args[] = {KernelArg::buffer(out), KernelArg::bytes(std::as_bytes(std::span(&wide, 1))),
                              KernelArg::value(std::uint8_t{7}), KernelArg::value(std::uint64_t{1} << 40)};
    take(b_->launch_typed(kernel("echo"), {}, {}, 0, s_, args));
    wide = {};
  }
  gate.open();
  std::array<std::uint64_t, 18> got{};
  take(b_->copy_d2h_on_stream(std::as_writable_bytes(std::span(got)), out, s_));
  for (int i = 0; i < 16; ++i) EXPECT_EQ(got[i], 100u + i);
  EXPECT_EQ(got[16], 7u);
  EXPECT_EQ(got[17], std::uint64_t{1} << 40);
}

TEST_F(HostLaunch, RawParametersAreCopiedAtTheCall) {
  const DevicePtr out = take(b_->alloc(4));
  Gate gate(*b_, s_);
  std::uint64_t address = out.address;
  std::uint32_t value = 9;
  void* params[] = {&address, &value};
  take(b_->launch(kernel("store"), {}, {}, 0, s_, params));
  value = 0;
  gate.open();
  EXPECT_EQ(read_words(*b_, out, 1, s_)[0], 9u);
}

TEST_F(HostLaunch, SharedMemoryHasItsSizeAndAlignment) {
  constexpr std::uint32_t kBlocks = 16;
  const DevicePtr out = take(b_->alloc(kBlocks * 16));
  const KernelArg args[] = {KernelArg::buffer(out)};
  for (const std::uint32_t bytes : {1u, 100'000u, 48u}) {
    take(b_->launch_typed(kernel("shared"), {kBlocks}, {}, bytes, s_, args));
    std::array<std::uint64_t, 2 * kBlocks> got{};
    take(b_->copy_d2h_on_stream(std::as_writable_bytes(std::span(got)), out, s_));
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      EXPECT_EQ(got[2 * i], bytes);
      EXPECT_EQ(got[2 * i + 1], 0u);
    }
  }
}

TEST_F(HostLaunch, AFaultLosesThisDeviceOnly) {
  auto other = take(host::create(host_options()));
  bool ran = false;
  take(b_->launch_typed(kernel("fault"), {8}, {}, 0, s_, {}));
  (void)b_->enqueue_host(s_, [&] { ran = true; }).has_value();  // refused, or dropped
  const auto lost = b_->synchronize(s_);
  ASSERT_FALSE(lost.has_value());
  EXPECT_EQ(lost.error().code(), Errc::device_lost);
  EXPECT_NE(lost.error().message().find("test.fault"), std::string::npos) << lost.error().message();
  EXPECT_NE(lost.error().message().find("told to"), std::string::npos);
  EXPECT_FALSE(ran);
  EXPECT_ERRC(b_->alloc(16), Errc::device_lost);
  EXPECT_OK(other->alloc(16));
}

TEST_F(HostLaunch, AFaultShowsAtALaterCallWithoutASynchronisation) {
  take(b_->launch_typed(kernel("fault"), {}, {}, 0, s_, {}));
  Errc code{};
  for (int i = 0; i < 10'000 && code != Errc::device_lost; ++i) {
    const auto idle = b_->query(s_);
    if (!idle) code = idle.error().code();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  EXPECT_EQ(code, Errc::device_lost);
}

TEST_F(HostLaunch, AKernelThatThrowsLosesTheDevice) {
  take(b_->launch_typed(kernel("throw_up"), {64}, {}, 0, s_, {}));
  EXPECT_ERRC(b_->synchronize(s_), Errc::device_lost);
}

TEST_F(HostLaunch, ALostDeviceReleasesEverythingAtItsEnd) {
  // Sanitizers find what this leaves behind.
  take(b_->alloc(1 << 20));
  take(b_->begin_capture(s_));
  take(b_->enqueue_host(s_, [kept = std::make_shared<int>(1)] {}));
  take(b_->end_capture(s_));
  take(b_->launch_typed(kernel("fault"), {}, {}, 0, s_, {}));
  (void)b_->synchronize(s_).has_value();
  EXPECT_OK(b_->shutdown());
}

TEST_F(HostLaunch, KernelsPublishTheirFacts) {
  const KernelFacts* facts = take(b_->kernel_facts(kernel("throw_up")));
  EXPECT_EQ(facts->n_tile, 64u);
  EXPECT_TRUE(facts->casts_a_to_e4m3);
  EXPECT_TRUE(facts->waits_for_dependency);
  EXPECT_EQ(take(b_->kernel_facts(kernel("store")))->param_bytes, (std::vector<std::uint32_t>{8, 4}));
  const auto entries = take(b_->kernel_registry()->entries());
  ASSERT_EQ(entries.size(), std::size(kKernels));
  EXPECT_EQ(entries.front().function, "count_blocks");
}

TEST_F(HostLaunch, AMissNamesWhatTheModuleHas) {
  const auto miss = b_->kernel("test", "stroe");
  ASSERT_FALSE(miss.has_value());
  EXPECT_EQ(miss.error().code(), Errc::not_found);
  EXPECT_NE(miss.error().message().find("store"), std::string::npos) << miss.error().message();
  EXPECT_ERRC(b_->kernel("tset", "store"), Errc::not_found);
  EXPECT_TRUE(take(b_->has_module("test")));
  EXPECT_FALSE(take(b_->has_module("tset")));
}

TEST(HostModules, ALaterTableReplacesAKernelAndBrokenOnesAreRefused) {
  static constexpr host::HostKernel kReplacement[] = {{"test", "store", fault, {}}};
  host::Options options = host_options();
  options.kernels.push_back(kReplacement);
  auto b = take(host::create(options));
  take(b->launch_typed(take(b->kernel("test", "store")), {}, {}, 0, b->default_stream(), {}));
  EXPECT_ERRC(b->synchronize(b->default_stream()), Errc::device_lost);

  static constexpr host::HostKernel kBroken[] = {{"test", "broken", nullptr, {}}};
  options.kernels.push_back(kBroken);
  EXPECT_ERRC(host::create(options), Errc::invalid_argument);
}

TEST(HostModules, GlobalsAreFoundAndKnownToCopies) {
  static std::uint32_t table[4] = {1, 2, 3, 4};
  static const host::HostSymbol symbols[] = {{"test", "table", table, sizeof(table)}};
  host::Options options = host_options();
  options.symbols = {symbols};
  auto b = take(host::create(options));
  const DeviceSymbol symbol = take(b->kernel_registry()->device_symbol("test", "table"));
  EXPECT_EQ(symbol.bytes, 16u);
  EXPECT_EQ(read_words(*b, symbol.ptr, 4, b->default_stream()), (std::vector<std::uint32_t>{1, 2, 3, 4}));
  EXPECT_ERRC(b->kernel_registry()->device_symbol("test", "tabel"), Errc::not_found);
}

TEST(HostProcess, AForkedChildDestroysABackendWhoseThreadsItDoesNotHave) {
  auto b = take(host::create(host_options()));
  take(b->enqueue_host(b->default_stream(), [] {}));  // starts a worker
  take(b->synchronize(b->default_stream()));
  const pid_t child = ::fork();
  if (child == 0) {
    const bool is_refused = !b->alloc(16).has_value();
    b.reset();
    ::_exit(is_refused ? 42 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 42);
  EXPECT_OK(b->alloc(16));
}

// A backend that derives from the host's and changes one hook.
class Deaf : public host::HostBackend {
 public:
  using HostBackend::HostBackend;
  ~Deaf() override { shutdown_from_destructor(); }

 protected:
  Result<> do_record_event(NativeEvent, NativeStream) override { return {}; }
};

TEST(HostSubclass, ChangesOneHookAndKeepsTheOthers) {
  auto b = take(host::HostBackend::make<Deaf>(host_options()));
  const StreamHandle s = take(b->create_stream());
  const EventHandle event = take(b->create_event());
  Gate gate(*b, s);
  take(b->record_event(event, s));
  EXPECT_TRUE(take(b->event_query(event)));
  EXPECT_FALSE(take(b->query(s)));
}

}  // namespace
}  // namespace metrale::test
