// SPDX-License-Identifier: Apache-2.0
//
// Work that other libraries enqueue: what the face promises around the library's own call.
#include <array>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class NativeWorkCase : public CaseNeeding<memory, streams> {
 protected:
  /// Enqueues nothing; counts how often it was asked to.
  Result<> enqueue(StreamHandle s, std::span<const NativeUse> uses, Result<> answer = {}) {
    return gpu().enqueue_native("library_call", s, uses, [&](std::uint64_t native) {
      ++num_calls_;
      native_ = native;
      return answer;
    });
  }

  int num_calls_ = 0;
  std::uint64_t native_ = 0;
};

TEST_F(NativeWorkCase, IsCalledOnceWithTheStreamsOwnHandle) {
  need({native_work});
  const StreamHandle s = stream();
  const std::array uses{NativeUse{"input", block(1024), 1024}};
  must(enqueue(s, uses));
  EXPECT_EQ(num_calls_, 1);
  EXPECT_EQ(native_, must(gpu().native_stream(s)));
}

TEST_F(NativeWorkCase, MemoryThatIsNotKnownIsRefusedBeforeTheLibraryIsCalled) {
  need({native_work});
  const StreamHandle s = stream();
  const DevicePtr known = block(1024);
  for (const NativeUse& bad : {NativeUse{"past the end", known, 1025}, NativeUse{"interior, past the end", known.offset(1000), 25},
                               NativeUse{"null", {}, 4}, NativeUse{"wraps", known, UINT64_MAX}}) {
    const std::array uses{NativeUse{"sound", known, 1024}, bad};
    EXPECT_TRUE(refused(enqueue(s, uses), Errc::out_of_range, {bad.what})) << bad.what;
    EXPECT_TRUE(refused(gpu().check_memory(bad.what, bad.ptr, bad.bytes), Errc::out_of_range, {bad.what})) << bad.what;
  }
  EXPECT_EQ(num_calls_, 0);
  EXPECT_TRUE(refused(enqueue({}, {}), Errc::invalid_argument));
  EXPECT_EQ(num_calls_, 0);
}

TEST_F(NativeWorkCase, WhatTheLibraryAnswersComesBackWithTheCallsName) {
  need({native_work});
  const StreamHandle s = stream();
  const Result<> answer = enqueue(s, {}, Error(Errc::internal, "the library is unwell"));
  EXPECT_TRUE(refused(answer, Errc::internal, {"the library is unwell", "library_call"}));
  must(gpu().health());
  must(enqueue(s, {}));
}

TEST_F(NativeWorkCase, ACaptureNamesItsMemory) {
  need({native_work, graphs});
  const StreamHandle s = stream();
  const DevicePtr named = must(gpu().alloc(1024));
  must(gpu().begin_capture(s));
  const std::array uses{NativeUse{"input", named.offset(512), 16}};
  must(enqueue(s, uses));
  const GraphHandle graph = must(gpu().end_capture(s));
  EXPECT_TRUE(refused(gpu().free(named), Errc::in_use));
  must(gpu().destroy_graph(graph));
  must(gpu().free(named));
}

TEST_F(NativeWorkCase, CheckMemoryTakesAnyPartOfAKnownBlock) {
  const DevicePtr known = block(1024);
  must(gpu().check_memory("all", known, 1024));
  must(gpu().check_memory("the end", known.offset(1023), 1));
}

}  // namespace
}  // namespace metrale::conformance
