// SPDX-License-Identifier: Apache-2.0
//
// Streams that several use: backends of one device that wrap the same one, libraries that capture it themselves. Work of each of
// them keeps what it uses.
#include <atomic>
#include <thread>

#include "cuda_fixture.h"

namespace metrale::test {
namespace {

class CudaSharedStream : public CudaCase {
 protected:
  void SetUp() override {
    on();
    ASSERT_EQ(fake.driver().cuStreamCreateWithPriority_(&foreign, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
  }
  void TearDown() override {
    ASSERT_EQ(fake.driver().cuStreamDestroy_(foreign), CUDA_SUCCESS);
    other.reset();
    CudaCase::TearDown();
  }
  GpuBackend& second() {
    if (other == nullptr) other = make();
    return *other;
  }
  StreamHandle wrapped(GpuBackend& backend) { return take(backend.wrap_stream(reinterpret_cast<std::uintptr_t>(foreign))); }

  /// Destroys `s` where the driver has no event to mark its work with: a block that the work uses is not given out before that is
  /// done.
  void expect_block_waits_for_unmarked(StreamHandle s) {
    std::atomic<bool> ran = false;
    const DevicePtr ptr = block(4096);
    Gate gate(on(), s);
    take(on().memset_async(ptr, 1, 4096, s));
    take(on().enqueue_host(s, [&] { ran = true; }));
    std::thread opens([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      gate.open();
    });
    fake.fail_call("cuEventCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
    take(on().destroy_stream(s));
    EXPECT_EQ(fake.failed_function(), "cuEventCreate");
    const bool is_done = ran;
    take(on().free(ptr));
    const DevicePtr next = block(4096);
    EXPECT_TRUE(is_done || next != ptr);
    opens.join();
  }

  CUstream foreign = nullptr;
  std::unique_ptr<GpuBackend> other;
};

TEST_F(CudaSharedStream, AWrapOutlivesTheBackendThatWrappedTheStreamFirst) {
  const StreamHandle theirs = wrapped(second());
  const StreamHandle s = wrapped(on());
  take(other->shutdown());
  const DevicePtr ptr = block(64);
  const std::vector<std::uint32_t> words(16, 7);
  EXPECT_OK(on().copy_h2d_async(ptr, bytes_of(words), s));
  EXPECT_THAT(read_words(on(), ptr, 16, s), ::testing::Each(7U));
  static_cast<void>(theirs);
  take(on().destroy_stream(s));
}

TEST_F(CudaSharedStream, ASmallBlockIsNotGivenOutWhileAWrapOfAStreamUsesItWhoseFirstWrapWent) {
  const StreamHandle theirs = wrapped(second());
  const StreamHandle s = wrapped(on());
  const DevicePtr ptr = block(4096);
  take(on().synchronize_device());
  take(other->shutdown());
  {
    Gate gate(on(), s);
    take(on().memset_async(ptr, 1, 4096, s));
    take(on().free(ptr));
    EXPECT_NE(block(4096), ptr);
  }
  static_cast<void>(theirs);
  take(on().synchronize(s));
  take(on().destroy_stream(s));
}

TEST_F(CudaSharedStream, PinnedMemoryIsNotGivenOutWhileAStreamUsesItThatAnotherBackendWrappedFirst) {
  const StreamHandle theirs = wrapped(second());
  const StreamHandle s = wrapped(on());
  const DevicePtr ptr = block(4096);
  const auto pinned = take(on().alloc_host_pinned(4096));
  {
    Gate gate(on(), s);
    take(on().copy_d2h_async(pinned, ptr, s));
    take(on().free_host_pinned(pinned.data(), 4096));
    EXPECT_NE(take(on().alloc_host_pinned(4096)).data(), pinned.data());
  }
  take(on().synchronize(s));
  take(on().destroy_stream(s));
  take(other->destroy_stream(theirs));
}

TEST_F(CudaSharedStream, SynchronizeDeviceWaitsForAStreamThatAnotherBackendWrappedFirst) {
  const StreamHandle theirs = wrapped(second());
  const StreamHandle s = wrapped(on());
  std::atomic<bool> ran = false;
  take(on().enqueue_host(s, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ran = true;
  }));
  take(on().synchronize_device());
  EXPECT_TRUE(ran);
  take(on().synchronize(s));
  take(on().destroy_stream(s));
  take(other->destroy_stream(theirs));
}

// Stamps of threads that enqueue at once may be written in either order.
TEST_F(CudaSharedStream, BlocksThatManyThreadsFreeBehindTheirWorkAreNotGivenOutBeforeItIsDone) {
  const StreamHandle common = stream();
  const auto uses_blocks = [&](std::uint8_t thread) {
    const StreamHandle mine = stream();
    const auto read = take(on().alloc_host_pinned(512));
    for (std::uint8_t round = 0; round < 60; ++round) {
      const StreamHandle s = (round + thread) % 2 == 0 ? common : mine;
      const auto value = static_cast<std::uint8_t>(4 * round + thread);
      const DevicePtr ptr = block(512);
      take(on().memset_async(ptr, value, 512, s));
      take(on().copy_d2h_async(read, ptr, s));
      take(on().free(ptr));
      if (round % 3 == 0) static_cast<void>(take(on().query(common)));
      take(on().synchronize(s));
      EXPECT_THAT(read, ::testing::Each(std::byte{value}));
    }
    take(on().free_host_pinned(read.data(), 512));
    take(on().destroy_stream(mine));
  };
  std::vector<std::thread> threads;
  for (std::uint8_t i = 0; i < 4; ++i) threads.emplace_back(uses_blocks, i);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CudaSharedStream, ABlockIsNotGivenOutWhileADestroyedStreamUsesItThatCouldNotBeMarked) {
  expect_block_waits_for_unmarked(stream());
}

TEST_F(CudaSharedStream, ABlockIsNotGivenOutWhileAWrappedStreamUsesItThatCouldNotBeMarked) {
  expect_block_waits_for_unmarked(wrapped(on()));
}

// ---- captures that a library begins ----

class CudaLibraryCapture : public CudaSharedStream {
 protected:
  void begin(CUstream native) {
    ASSERT_EQ(fake.driver().cuStreamBeginCapture_(native, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  }
  void end(CUstream native) {
    CUgraph graph = nullptr;
    ASSERT_EQ(fake.driver().cuStreamEndCapture_(native, &graph), CUDA_SUCCESS);
    ASSERT_EQ(fake.driver().cuGraphDestroy_(graph), CUDA_SUCCESS);
  }
};

TEST_F(CudaLibraryCapture, ASmallBlockIsNotGivenOutWhileWorkFromBeforeTheCaptureUsesIt) {
  const StreamHandle s = stream();
  const auto native = reinterpret_cast<CUstream>(take(on().native_stream(s)));
  const DevicePtr ptr = block(4096);
  Gate gate(on(), s);
  take(on().memset_async(ptr, 1, 4096, s));
  begin(native);
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    gate.open();
  });
  // The driver waits for that work before it takes the block.
  EXPECT_EQ(calls("cuMemFree", [&] { take(on().free(ptr)); }), 1U);
  opens.join();
  end(native);
}

TEST_F(CudaLibraryCapture, PinnedMemoryIsNotGivenOutWhileWorkFromBeforeTheCaptureUsesIt) {
  const StreamHandle s = stream();
  const auto native = reinterpret_cast<CUstream>(take(on().native_stream(s)));
  const DevicePtr ptr = block(4096);
  const auto pinned = take(on().alloc_host_pinned(4096));
  Gate gate(on(), s);
  take(on().copy_d2h_async(pinned, ptr, s));
  begin(native);
  take(on().free_host_pinned(pinned.data(), 4096));
  EXPECT_NE(take(on().alloc_host_pinned(4096)).data(), pinned.data());
  gate.open();
  end(native);
  take(on().synchronize(s));
  // It is marked now, and comes round again.
  EXPECT_EQ(take(on().alloc_host_pinned(4096)).data(), pinned.data());
}

TEST_F(CudaLibraryCapture, ACaptureOfAnotherBackendIsKnownToThoseWhoWrapItsStream) {
  const StreamHandle theirs = take(second().create_stream());
  const StreamHandle s = take(on().wrap_stream(take(second().native_stream(theirs))));
  const auto pinned = take(on().alloc_host_pinned(4096));
  take(second().begin_capture(theirs));
  take(on().free_host_pinned(pinned.data(), 4096));
  EXPECT_EQ(take(on().alloc_host_pinned(4096)).data(), pinned.data()) << "nothing ran before that capture";
  EXPECT_OK(on().synchronize_device());
  take(second().abort_capture_if_active(theirs));
  take(on().destroy_stream(s));
  take(second().destroy_stream(theirs));
}

TEST_F(CudaSharedStream, AWrapOfAStreamThatItsMakerDestroyedIsGivenBack) {
  const StreamHandle theirs = take(second().create_stream());
  const StreamHandle s = take(on().wrap_stream(take(second().native_stream(theirs))));
  const DevicePtr ptr = block(4096);
  Gate gate(on(), s);
  take(on().memset_async(ptr, 1, 4096, s));
  take(second().destroy_stream(theirs));
  take(on().free(ptr));
  EXPECT_NE(block(4096), ptr) << "what ran on it goes on";
  gate.open();
  EXPECT_OK(on().synchronize_device());
  EXPECT_OK(on().destroy_stream(s));
}

TEST_F(CudaLibraryCapture, ASmallBlockIsNotGivenOutWhileALibrarysWorkFromBeforeItsCaptureUsesIt) {
  const StreamHandle s = wrapped(on());
  const DevicePtr ptr = block(4096);
  std::promise<void> opened;
  const auto wait = [](void* promise) { static_cast<std::promise<void>*>(promise)->get_future().wait(); };
  ASSERT_EQ(fake.driver().cuLaunchHostFunc_(foreign, wait, &opened), CUDA_SUCCESS);
  begin(foreign);
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    opened.set_value();
  });
  // The driver waits for that work before it takes the block.
  EXPECT_EQ(calls("cuMemFree", [&] { take(on().free(ptr)); }), 1U);
  opens.join();
  end(foreign);
  take(on().destroy_stream(s));
}

}  // namespace
}  // namespace metrale::test
