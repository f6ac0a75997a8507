// SPDX-License-Identifier: Apache-2.0
//
// The fixture of the cases about captures.
#pragma once

#include "conformance/case.h"

namespace metrale::conformance {

class CaptureCase : public CaseNeeding<memory, copies, streams, events, graphs> {
 protected:
  /// Replays a graph once and waits for it.
  void replay(GraphHandle graph, Site site = Site::current()) {
    const StreamHandle s = stream(site);
    must(gpu().launch_graph(graph, s), site);
    settle(s, site);
    must(gpu().destroy_stream(s), site);
  }
  /// Whether a stream takes and runs work like any other.
  ::testing::AssertionResult runs_work(StreamHandle s, Site site = Site::current()) {
    if (gpu().stream_is_capturing(s)) return ::testing::AssertionFailure() << "still capturing";
    const DevicePtr ptr = block(64, site);
    fill(ptr, 0, 64, site);
    must(gpu().memset_async(ptr, 0x7E, 64, s), site);
    settle(s, site);
    return holds(ptr, 64, 0x7E, site);
  }
};

}  // namespace metrale::conformance
