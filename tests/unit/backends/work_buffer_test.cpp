// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <memory>

#include "backends/host/work.h"

namespace metrale::host {
namespace {

TEST(WorkBuffer, WalksRecordsOfAllSizesInOrder) {
  WorkBuffer buffer;
  const std::size_t payloads[] = {0, 1, 15'000, 5'000, 100'000, 0, 16'384, 3};
  for (std::size_t i = 0; i < std::size(payloads); ++i) {
    auto& work = buffer.append<LaunchWork>(payloads[i]);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(WorkBuffer::payload(work)) % 16, 0u);
    std::memset(WorkBuffer::payload(work), 0xEE, payloads[i]);
    work.shared_bytes = static_cast<std::uint32_t>(i);
  }
  EXPECT_EQ(buffer.num_records(), std::size(payloads));
  std::uint32_t next = 0;
  for (WorkBuffer::Cursor cursor(buffer); cursor.get() != nullptr; cursor.advance()) {
    ASSERT_EQ(cursor.get()->kind, WorkKind::launch);
    EXPECT_EQ(static_cast<LaunchWork*>(cursor.get())->shared_bytes, next++);
  }
  EXPECT_EQ(next, std::size(payloads));
}

TEST(WorkBuffer, DestroysEachRecordOnce) {
  auto alive = std::make_shared<int>(0);
  WorkBuffer buffer;
  for (int i = 0; i < 3; ++i) buffer.append<CallWork>().fn = [alive] {};
  EXPECT_EQ(alive.use_count(), 4);
  WorkBuffer::destroy(*WorkBuffer::Cursor(buffer).get());
  EXPECT_EQ(alive.use_count(), 3);
  buffer.clear();
  EXPECT_EQ(alive.use_count(), 1);
  buffer.append<CallWork>().fn = [alive] {};
  {
    const WorkBuffer moved = std::move(buffer);
  }
  EXPECT_EQ(alive.use_count(), 1);
}

TEST(WorkBuffer, IsReusableAfterClear) {
  WorkBuffer buffer;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 500; ++i) buffer.append<CopyWork>(200).owned = nullptr;
    int n = 0;
    for (WorkBuffer::Cursor cursor(buffer); cursor.get() != nullptr; cursor.advance()) ++n;
    EXPECT_EQ(n, 500);
    buffer.clear();
    EXPECT_TRUE(buffer.empty());
    EXPECT_EQ(WorkBuffer::Cursor(buffer).get(), nullptr);
  }
}

}  // namespace
}  // namespace metrale::host
