// SPDX-License-Identifier: Apache-2.0
//
// Which calls of the driver copies become.
#include "cuda_fixture.h"

namespace metrale::test {
namespace {

class CudaCopy : public CudaCase {
 protected:
  /// Copies of 64 bytes each into one block, from pinned memory.
  std::vector<CopyDesc> batch(std::size_t count) {
    const auto source = take(on().alloc_host_pinned(64 * count));
    const DevicePtr ptr = block(64 * count);
    std::vector<CopyDesc> copies;
    for (std::size_t i = 0; i < count; ++i) {
      copies.push_back({.dst = ptr.offset(64 * i), .src = {}, .host_src = source.data() + 64 * i, .bytes = 64});
    }
    return copies;
  }
};

TEST_F(CudaCopy, APageableSourceNeverReachesTheDriver) {
  const StreamHandle s = stream();
  for (const std::size_t bytes : {std::size_t{100}, std::size_t{1} << 20, (std::size_t{9} << 20) + 1}) {
    std::vector<std::byte> source(bytes, std::byte{7});
    const DevicePtr ptr = block(bytes);
    Gate gate(on(), s);
    take(on().copy_h2d_async(ptr, source, s));  // the driver would wait for the gate to read a large pageable source
    std::fill(source.begin(), source.end(), std::byte{9});
    gate.open();
    std::vector<std::byte> seen(bytes);
    take(on().copy_d2h_on_stream(seen, ptr, s));
    EXPECT_EQ(std::count(seen.begin(), seen.end(), std::byte{7}), static_cast<std::ptrdiff_t>(bytes));
  }
}

TEST_F(CudaCopy, SmallSourcesShareAStagingBlock) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  const std::vector<std::byte> source(64);
  take(on().copy_h2d_async(ptr, source, s));
  EXPECT_EQ(calls("cuMemHostAlloc",
                  [&] {
                    for (int i = 0; i < 1000; ++i) take(on().copy_h2d_async(ptr, source, s));
                  }),
            0U);
  take(on().synchronize(s));
}

TEST_F(CudaCopy, ABatchIsOneCall) {
  const StreamHandle s = stream();
  const auto copies = batch(50);
  EXPECT_EQ(calls("cuMemcpyBatchAsync", [&] { take(on().copy_batch_async(copies, s)); }), 1U);
  EXPECT_EQ(calls("cuMemcpyHtoDAsync", [&] { take(on().copy_batch_async(copies, s)); }), 0U);
  take(on().synchronize(s));
}

TEST_F(CudaCopy, ABatchIsSingleCopiesInACapture) {
  const StreamHandle s = stream();
  const auto copies = batch(5);
  take(on().begin_capture(s));
  EXPECT_EQ(calls("cuMemcpyBatchAsync", [&] { take(on().copy_batch_async(copies, s)); }), 0U);
  take(on().destroy_graph(take(on().end_capture(s))));
}

TEST_F(CudaCopy, ABatchWithPageableMemoryIsSingleCopies) {
  const StreamHandle s = stream();
  auto copies = batch(5);
  std::vector<std::byte> pageable(64);
  copies[2].host_src = pageable.data();
  EXPECT_EQ(calls("cuMemcpyBatchAsync", [&] { take(on().copy_batch_async(copies, s)); }), 0U);
  take(on().synchronize(s));
}

TEST_F(CudaCopy, ABatchIsSingleCopiesOnADriverWithoutIt) {
  const cuda::Driver older = fake.driver_without({"cuMemcpyBatchAsync"});
  gpu = take(create(older));
  const StreamHandle s = stream();
  const auto copies = batch(5);
  EXPECT_EQ(calls("cuMemcpyHtoDAsync", [&] { take(on().copy_batch_async(copies, s)); }), 5U);
  take(on().synchronize(s));
  gpu.reset();
}

TEST_F(CudaCopy, ARectangleIsOneCall) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64 * 64);
  const DevicePtr to = block(64 * 64);
  EXPECT_EQ(calls("cuMemcpy2DAsync", [&] { take(on().copy_d2d_2d_async({to, ptr, 64, 64, 32, 64}, s)); }), 1U);
  take(on().synchronize(s));
}

TEST_F(CudaCopy, FrozenBytesGoWithTheirGraph) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  std::vector<std::byte> source(64, std::byte{3});
  take(on().begin_capture(s));
  take(on().copy_h2d_async(ptr, source, s));
  std::fill(source.begin(), source.end(), std::byte{4});
  const GraphHandle graph = take(on().end_capture(s));
  EXPECT_EQ(fake.live().user_objects, 0U) << "the graph alone owns them";
  take(on().memset(ptr, 0, 64));
  take(on().launch_graph(graph, s));
  std::vector<std::byte> seen(64);
  take(on().copy_d2h_on_stream(seen, ptr, s));
  EXPECT_EQ(seen, std::vector<std::byte>(64, std::byte{3}));
  take(on().destroy_graph(graph));
}

}  // namespace
}  // namespace metrale::test
