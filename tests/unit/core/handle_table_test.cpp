// SPDX-License-Identifier: Apache-2.0
#include "core/handle_table.h"

#include <gtest/gtest.h>

#include <set>

namespace metrale::detail {
namespace {

struct Thing {
  int value = 0;
};

std::uint64_t insert(HandleTable<Thing>& table, int value) {
  return table.insert([&](Thing& thing, std::uint64_t) { thing.value = value; });
}

TEST(HandleTable, FindsWhatItIssued) {
  HandleTable<Thing> table(1);
  std::vector<std::uint64_t> handles;
  for (int i = 0; i < 1000; ++i) handles.push_back(insert(table, i));
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(table.find(handles[static_cast<std::size_t>(i)])->value, i);
  EXPECT_EQ(std::set<std::uint64_t>(handles.begin(), handles.end()).size(), 1000u);
}

TEST(HandleTable, RefusesStaleForeignAndNullHandles) {
  HandleTable<Thing> table(1);
  HandleTable<Thing> other(2);
  const std::uint64_t first = insert(table, 1);
  EXPECT_EQ(other.find(first), nullptr);
  insert(other, 5);
  EXPECT_EQ(other.find(first), nullptr);
  EXPECT_TRUE(table.erase(first));
  EXPECT_FALSE(table.erase(first));
  const std::uint64_t second = insert(table, 2);
  EXPECT_NE(first, second) << "a slot that is reused must issue another handle";
  EXPECT_EQ(table.find(first), nullptr);
  EXPECT_EQ(table.find(0), nullptr);
  EXPECT_EQ(table.find(~std::uint64_t{0}), nullptr);
  EXPECT_EQ(table.find(0xFFFFFF), nullptr);
}

TEST(HandleTable, ListsLiveHandles) {
  HandleTable<Thing> table(1);
  const std::uint64_t a = insert(table, 1);
  const std::uint64_t b = insert(table, 2);
  table.erase(a);
  EXPECT_EQ(table.handles(), std::vector<std::uint64_t>{b});
}

}  // namespace
}  // namespace metrale::detail
