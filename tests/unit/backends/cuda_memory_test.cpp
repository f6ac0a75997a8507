// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA backend does with the driver's memory, beyond what every backend promises.
#include <future>
#include <thread>

#include "cuda_fixture.h"

namespace metrale::test {
namespace {

constexpr std::uint64_t kLarge = std::uint64_t{1} << 20;

class CudaMemory : public CudaCase {};

TEST_F(CudaMemory, FreeingAnIdleBlockIsOneCallOfTheDriver) {
  const DevicePtr ptr = block(kLarge);
  EXPECT_EQ(calls("cuMemFree", [&] { take(on().free(ptr)); }), 1U);
}

// ---- small blocks ----

TEST_F(CudaMemory, ASmallBlockServesTheNextOfItsSizeWithoutTheDriver) {
  const DevicePtr ptr = block(4096);
  EXPECT_EQ(calls("cuMemFree", [&] { take(on().free(ptr)); }), 0U);
  EXPECT_EQ(on().live_bytes(), 0U);
  EXPECT_EQ(calls([&] { EXPECT_EQ(block(4096), ptr); }), 0U);
  // Only one of exactly that size fits: the driver knows where a block ends.
  take(on().free(ptr));
  EXPECT_NE(block(4095), ptr);
}

TEST_F(CudaMemory, SmallBlocksAreBackBeforeFreeMemoryIsTold) {
  const std::uint64_t before = take(on().device_free_memory());
  for (const DevicePtr ptr : {block(4096), block(512), block(65536)}) take(on().free(ptr));
  EXPECT_EQ(fake.live().blocks, 3U);
  EXPECT_EQ(take(on().device_free_memory()), before);
  EXPECT_EQ(fake.live().blocks, 0U);
}

TEST_F(CudaMemory, SmallBlocksGoWhereMemoryIsShort) {
  fake.set_total_memory(8 << 20);
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(block(65536));
  for (const DevicePtr ptr : blocks) take(on().free(ptr));
  EXPECT_EQ(fake.live().blocks, 16U);
  take(on().free(block((8 << 20) - 65536)));
}

TEST_F(CudaMemory, SmallBlocksThatAnotherBackendFreedGoWhereMemoryIsShort) {
  fake.set_total_memory(8 << 20);
  auto other = make();
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(take(other->alloc(65536)));
  for (const DevicePtr ptr : blocks) take(other->free(ptr));
  EXPECT_EQ(fake.live().blocks, 16U);
  EXPECT_EQ(take(on().device_free_memory()), std::uint64_t{8} << 20);
  take(on().free(block((8 << 20) - 65536)));
}

TEST_F(CudaMemory, ClosingABackendDoesNotWaitForAnothersWorkToGiveSmallBlocksBack) {
  const StreamHandle s = stream();
  auto other = take(cuda::create_with_driver(fake.driver(), {}));  // unloading modules would wait
  take(other->free(take(other->alloc(4096))));
  Gate gate(on(), s);
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    gate.open();
  });
  EXPECT_EQ(calls("cuMemFree", [&] { take(other->shutdown()); }), 0U);
  opens.join();
  take(on().synchronize(s));
  gpu.reset();
  other.reset();
  EXPECT_EQ(fake.live().blocks, 0U);
}

TEST_F(CudaMemory, SmallBlocksThatAreKeptHoldAsMuchAsOneChunk) {
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(block(65536));
  for (const DevicePtr ptr : blocks) take(on().free(ptr));
  EXPECT_EQ(fake.live().blocks, 32U);
}

TEST_F(CudaMemory, ASmallBlockIsNotGivenOutWhileALibrarysWorkOnOurStreamUsesIt) {
  const StreamHandle s = stream();
  const auto native = reinterpret_cast<CUstream>(take(on().native_stream(s)));
  const DevicePtr ptr = block(4096);
  std::promise<void> opened;
  // Enqueued past the backend, which has not counted it.
  const auto wait = [](void* promise) { static_cast<std::promise<void>*>(promise)->get_future().wait(); };
  ASSERT_EQ(fake.driver().cuLaunchHostFunc_(native, wait, &opened), CUDA_SUCCESS);
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    opened.set_value();
  });
  // The driver waits for that work before it takes the block.
  EXPECT_EQ(calls("cuMemFree", [&] { take(on().free(ptr)); }), 1U);
  opens.join();
  take(on().synchronize(s));
  // With the stream idle it costs a question.
  const DevicePtr again = block(4096);
  EXPECT_EQ(calls("cuMemFree", [&] { EXPECT_EQ(calls("cuStreamQuery", [&] { take(on().free(again)); }), 1U); }), 0U);
}

// ---- work in flight ----

TEST_F(CudaMemory, ABlockIsNotGivenToTheDriverBehindAHeldStream) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  {
    Gate gate(on(), s);
    take(on().memset_async(ptr, 1, 64, s));
    // The driver's cuMemFree would wait for the gate.
    EXPECT_EQ(calls("cuMemFree", [&] { take(on().free(ptr)); }), 0U);
    EXPECT_EQ(fake.live().blocks, 1U);
  }
  take(on().synchronize(s));
  EXPECT_TRUE(eventually([&] {
    static_cast<void>(on().device_free_memory().has_value());  // a call that gives back what may go
    return fake.live().blocks == 0;
  }));
}

TEST_F(CudaMemory, ABlockThatWasPutOffIsNotGivenOutBeforeItsWorkIsDone) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  Gate gate(on(), s);
  take(on().memset_async(ptr, 1, 4096, s));
  take(on().free(ptr));
  EXPECT_NE(block(4096), ptr);
}

TEST_F(CudaMemory, WhatWasPutOffGoesBackAtShutdown) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  Gate gate(on(), s);
  take(on().memset_async(ptr, 1, 64, s));
  take(on().free(ptr));
  gate.open();
  take(on().shutdown());
  EXPECT_EQ(fake.live().blocks, 0U);
}

TEST_F(CudaMemory, BlocksThatWerePutOffServeWhenMemoryIsShort) {
  fake.set_total_memory(8 << 20);
  const StreamHandle s = stream();
  const DevicePtr ptr = block(6 << 20);
  {
    Gate gate(on(), s);
    take(on().memset_async(ptr, 1, 64, s));
    take(on().free(ptr));
  }
  take(on().free(block(5 << 20)));
}

TEST_F(CudaMemory, PinnedMemoryIsMadeOnceAndGoesRound) {
  take(on().free_host_pinned(take(on().alloc_host_pinned(1000)).data(), 1000));
  EXPECT_EQ(calls("cuMemHostAlloc",
                  [&] {
                    for (int i = 0; i < 100; ++i) {
                      const auto memory = take(on().alloc_host_pinned(1000));
                      take(on().free_host_pinned(memory.data(), 1000));
                    }
                  }),
            0U);
}

TEST_F(CudaMemory, ManagedMemoryIsNotPromisedTwice) {
  fake.set_total_memory(8 << 20);
  // The driver would give it: pages are taken when they are touched.
  const DevicePtr first = take(on().alloc_managed(5 << 20));
  EXPECT_ERRC(on().alloc_managed(5 << 20), Errc::out_of_memory);
  take(on().free(first));
  take(on().free(take(on().alloc_managed(5 << 20))));
}

TEST_F(CudaMemory, OutOfMemoryCarriesTheDriversCode) {
  const auto refused = on().alloc(std::uint64_t{1} << 50);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().native_code(), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(refused.error().native_text(), "CUDA_ERROR_OUT_OF_MEMORY");
}

TEST_F(CudaMemory, AFreeThatTheDriverRefusesOnceIsTriedAgain) {
  const DevicePtr ptr = block(kLarge);
  fake.fail_call("cuMemFree", 1, CUDA_ERROR_UNKNOWN);
  const Result<> freed = on().free(ptr);
  EXPECT_ERRC(freed, Errc::internal);
  EXPECT_NE(freed.error().to_string().find("cuMemFree"), std::string::npos) << freed.error().to_string();
  EXPECT_EQ(on().live_bytes(), 0U);
  take(on().shutdown());
  EXPECT_EQ(fake.live().blocks, 0U);
}

// ---- contexts ----

TEST_F(CudaMemory, BackendsOfADeviceShareItsContextAndTheLastGivesItBack) {
  EXPECT_EQ(on().name(), "cuda");
  auto other = make();
  EXPECT_EQ(fake.num_retains(), 1);
  other.reset();
  EXPECT_EQ(fake.num_retains(), 1);
  gpu.reset();
  EXPECT_EQ(fake.num_retains(), 0);
}

TEST_F(CudaMemory, TheThreadsOwnContextComesBackWhenABackendGoes) {
  const cuda::Driver& driver = fake.driver();
  CUcontext mine = nullptr;
  ASSERT_EQ(driver.cuDevicePrimaryCtxRetain_(&mine, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver.cuCtxSetCurrent_(mine), CUDA_SUCCESS);
  make().reset();
  CUdeviceptr ptr = 0;
  EXPECT_EQ(driver.cuMemAlloc_(&ptr, 64), CUDA_SUCCESS) << "the context of another library was taken away";
  EXPECT_EQ(driver.cuMemFree_(ptr), CUDA_SUCCESS);
  ASSERT_EQ(driver.cuDevicePrimaryCtxRelease_(0), CUDA_SUCCESS);
}

TEST_F(CudaMemory, ADeviceThatIsNotThereIsRefusedByNumber) {
  const auto refused = create(fake.driver(), 3);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::invalid_argument);
  EXPECT_NE(refused.error().message().find("3"), std::string::npos) << refused.error().to_string();
}

// ---- two devices ----

class CudaTwoDevices : public CudaCase {
 protected:
  CudaTwoDevices() : CudaCase({.devices = std::vector<fake_cuda::DeviceOptions>(2)}) {}
};

TEST_F(CudaTwoDevices, CopyBetweenThemAndEnablePeerAccessOnce) {
  auto peer = make(1);
  const DevicePtr src = take(peer->alloc(64));
  take(peer->memset(src, 0x5A, 64));
  const StreamHandle s = stream();
  const DevicePtr dst = block(64);
  EXPECT_EQ(calls("cuCtxEnablePeerAccess",
                  [&] {
                    for (int i = 0; i < 3; ++i) take(on().copy_peer_async(dst, *peer, src, 64, s));
                  }),
            1U);
  std::vector<std::uint32_t> words = read_words(on(), dst, 16, s);
  EXPECT_THAT(words, ::testing::Each(0x5A5A5A5AU));
  take(peer->free(src));
}

TEST_F(CudaTwoDevices, AFaultOnOneLeavesTheOtherAlone) {
  loses_device = true;
  auto peer = make(1);
  fake.lose(CUDA_ERROR_ILLEGAL_ADDRESS, 1);
  EXPECT_ERRC(peer->alloc(64), Errc::device_lost);
  EXPECT_OK(on().alloc(64));
  EXPECT_OK(on().health());
}

}  // namespace
}  // namespace metrale::test
