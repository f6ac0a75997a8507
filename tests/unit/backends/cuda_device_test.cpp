// SPDX-License-Identifier: Apache-2.0
//
// Devices that lack something, and what the backend asks of the driver for its streams.
#include <atomic>
#include <climits>

#include "cuda_fixture.h"
#include "metrale/backends/host.h"

namespace metrale::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- devices ----

class CudaOldDevice : public CudaCase {
 protected:
  CudaOldDevice() : CudaCase({.devices = {{.compute_capability = 80, .managed_memory = false}}}) {}
};

TEST_F(CudaOldDevice, SaysWhatItLacksBeforehandAndAsksNothingOfTheDriver) {
  const StreamHandle s = stream();
  const KernelHandle store = take(on().kernel("test", "store"));
  const std::array args{KernelArg::buffer(block(64)), KernelArg::value(std::uint32_t{5})};
  for (const Capability c : {Capability::cluster_launch, Capability::dependent_launch, Capability::tensor_maps}) {
    EXPECT_FALSE(on().capabilities().has(c)) << to_string(c);
    EXPECT_THAT(std::string(on().capabilities().why_not(c)), HasSubstr("8.0")) << to_string(c);
  }
  EXPECT_EQ(calls([&] {
              EXPECT_ERRC(on().launch_typed(store, {2, 1, 1}, {}, 0, s, args, {.cluster = {2, 1, 1}}), Errc::unsupported);
              EXPECT_ERRC(on().launch_typed(store, {}, {}, 0, s, args, {.dependent_launch = true}), Errc::unsupported);
              EXPECT_ERRC(on().tensor_map({}), Errc::unsupported);
            }),
            0U);
  EXPECT_OK(on().launch_typed(store, {}, {}, 0, s, args));
}

TEST_F(CudaOldDevice, WithoutManagedMemoryGivesOrdinaryMemoryAndMarksIt) {
  EXPECT_FALSE(on().capabilities().has(Capability::managed_memory));
  DevicePtr ptr;
  EXPECT_EQ(calls("cuMemAllocManaged", [&] { ptr = take(on().alloc_managed(64)); }), 0U);
  EXPECT_EQ(on().live_allocations().at(0).kind, MemoryKind::managed);
  take(on().free(ptr));
}

class CudaIntegrated : public CudaCase {
 protected:
  CudaIntegrated() : CudaCase({.devices = {{.total_bytes = 32 << 20, .integrated = true}}}) {}
};

TEST_F(CudaIntegrated, FreeMemoryIsTheHostsWhereThatIsMore) {
  EXPECT_TRUE(on().shares_host_memory());
  const std::uint64_t device_free = take(on().device_free_memory());
  EXPECT_LE(device_free, std::uint64_t{32} << 20) << "the driver's figure alone";
  EXPECT_GT(take(on().free_memory()), device_free) << "a machine that runs this has more than 32 MiB available";
}

class CudaDiscrete : public CudaCase {
 protected:
  CudaDiscrete() : CudaCase({.devices = {{.total_bytes = 32 << 20}}}) {}
};

TEST_F(CudaDiscrete, FreeMemoryNeverCountsTheHosts) {
  EXPECT_FALSE(on().shares_host_memory());
  EXPECT_EQ(take(on().free_memory()), take(on().device_free_memory()));
  EXPECT_LE(take(on().free_memory()), std::uint64_t{32} << 20);
}

class CudaDevicesApart : public CudaCase {
 protected:
  CudaDevicesApart() : CudaCase({.devices = std::vector<fake_cuda::DeviceOptions>(2, {.reaches_peers = false})}) {}
};

TEST_F(CudaDevicesApart, CopyThroughTheDriversStaging) {
  auto peer = make(1);
  const DevicePtr src = take(peer->alloc(64));
  take(peer->memset(src, 0x5A, 64));
  const StreamHandle s = stream();
  const DevicePtr dst = block(64);
  EXPECT_EQ(calls("cuCtxEnablePeerAccess", [&] { take(on().copy_peer_async(dst, *peer, src, 64, s)); }), 0U);
  EXPECT_THAT(read_words(on(), dst, 16, s), ::testing::Each(0x5A5A5A5AU));
  take(peer->free(src));
}

class CudaDevice : public CudaCase {};

TEST_F(CudaDevice, CopiesFromAnotherKindOfDeviceThroughTheHost) {
  const auto host = take(host::create());
  const DevicePtr src = take(host->alloc(64));
  take(host->memset(src, 0x5A, 64));
  const StreamHandle s = stream();
  const DevicePtr dst = block(64);
  take(on().copy_peer_async(dst, *host, src, 64, s));
  take(host->free(src));
  EXPECT_THAT(read_words(on(), dst, 16, s), ::testing::Each(0x5A5A5A5AU));
}

// ---- streams ----

TEST_F(CudaDevice, OurStreamsAndTheLegacyStreamDoNotHoldEachOther) {
  constexpr std::chrono::seconds kPatience{20};
  const cuda::Driver& driver = fake.driver();
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  std::atomic<bool> open{false};
  const auto hold = [](void* flag) {
    while (!static_cast<std::atomic<bool>*>(flag)->load()) std::this_thread::yield();
  };
  ASSERT_EQ(driver.cuLaunchHostFunc_(nullptr, hold, &open), CUDA_SUCCESS);
  for (const StreamHandle ours : {s, on().default_stream()}) {
    take(on().memset_async(ptr, 1, 64, ours));
    EXPECT_OK(on().synchronize_for(ours, kPatience));
  }
  open = true;
  ASSERT_EQ(driver.cuStreamSynchronize_(nullptr), CUDA_SUCCESS);
  const Gate gate(on(), s);
  ASSERT_EQ(driver.cuMemsetD8Async_(ptr.address, 2, 64, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(driver.cuStreamSynchronize_(nullptr), CUDA_SUCCESS);  // a wait for the gate would never end
}

TEST_F(CudaDevice, AHigherPriorityIsALowerNumberOfTheDriver) {
  static_cast<void>(on());  // with its default stream
  for (const int priority : {0, 2, 99, -3, INT_MIN, INT_MAX}) take(on().create_stream(priority));
  EXPECT_THAT(fake.stream_priorities(), ElementsAre(0, 0, -2, -5, 0, 0, -5));
}

TEST_F(CudaDevicesApart, StreamsOfAnotherContextAndTheDriversDefaultOnesAreNotWrapped) {
  const auto other = make(1);
  const StreamHandle theirs = take(other->create_stream());
  EXPECT_ERRC(on().wrap_stream(take(other->native_stream(theirs))), Errc::invalid_argument);
  for (const CUstream by_default : {CU_STREAM_LEGACY, CU_STREAM_PER_THREAD})
    EXPECT_ERRC(on().wrap_stream(reinterpret_cast<std::uintptr_t>(by_default)), Errc::invalid_argument);
}

}  // namespace
}  // namespace metrale::test
