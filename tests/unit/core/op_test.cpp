// SPDX-License-Identifier: Apache-2.0
#include "metrale/op.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>

#include "metrale/capabilities.h"

namespace metrale {
namespace {

TEST(OpTest, EveryOpHasItsOwnName) {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < kNumOps; ++i) names.insert(to_string(static_cast<Op>(i)));
  EXPECT_EQ(names.size(), kNumOps);
  EXPECT_FALSE(names.contains("unknown"));
}

TEST(OpTest, NamesFollowTheEnumeration) {
  EXPECT_EQ(to_string(Op::alloc), "alloc");
  EXPECT_EQ(to_string(Op::trim), "trim");
  EXPECT_EQ(to_string(Op::disown), "disown");
  EXPECT_EQ(to_string(Op::memory_info), "memory_info");
  EXPECT_EQ(to_string(Op::copy_d2h_async), "copy_d2h_async");
  EXPECT_EQ(to_string(Op::copy_peer_async), "copy_peer_async");
  EXPECT_EQ(to_string(Op::enqueue_host), "enqueue_host");
  EXPECT_EQ(to_string(Op::event_elapsed_ns), "event_elapsed_ns");
  EXPECT_EQ(to_string(Op::capture_uses), "capture_uses");
  EXPECT_EQ(to_string(Op::has_module), "has_module");
  EXPECT_EQ(to_string(Op::sm_count), "sm_count");
  EXPECT_EQ(to_string(static_cast<Op>(kNumOps)), "unknown");
}

TEST(CapabilitiesTest, EveryCapabilityHasItsOwnName) {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < kNumCapabilities; ++i) names.insert(to_string(static_cast<Capability>(i)));
  EXPECT_EQ(names.size(), kNumCapabilities);
  EXPECT_EQ(to_string(Capability::memory), "memory");
  EXPECT_EQ(to_string(Capability::copies), "copies");
  EXPECT_EQ(to_string(Capability::timed_events), "timed_events");
  EXPECT_EQ(to_string(Capability::cluster_launch), "cluster_launch");
  EXPECT_EQ(to_string(Capability::computes), "computes");
}

TEST(CapabilitiesTest, NoneGivesItsReasonForEachCapability) {
  const Capabilities none = Capabilities::none("no device");
  for (std::size_t i = 0; i < kNumCapabilities; ++i) {
    EXPECT_FALSE(none.has(static_cast<Capability>(i)));
    EXPECT_EQ(none.why_not(static_cast<Capability>(i)), "no device");
  }
}

TEST(CapabilitiesTest, AddClearsTheReasonAndLacksTakesItBack) {
  Capabilities c = Capabilities::none("no device");
  c.add(Capability::graphs).add(Capability::events);
  EXPECT_TRUE(c.has(Capability::graphs));
  EXPECT_TRUE(c.has(Capability::events));
  EXPECT_FALSE(c.has(Capability::kernels));
  EXPECT_EQ(c.why_not(Capability::graphs), "");
  c.lacks(Capability::graphs, "driver too old");
  EXPECT_FALSE(c.has(Capability::graphs));
  EXPECT_EQ(c.why_not(Capability::graphs), "driver too old");
}

}  // namespace
}  // namespace metrale
