// SPDX-License-Identifier: Apache-2.0
#include "backends/mock/mock_backend.h"

namespace metrale::mock {

namespace {

host::Options host_options(const Options& options) {
  host::Options host;
  host.face = options.face;
  host.num_threads = 1;  // nothing computes
  return host;
}

}  // namespace

// Work on an idle stream is done during the call, whatever its size, so that a mock starts threads only for what may block.
MockBackend::MockBackend(const Options& options) : HostBackend(host_options(options), UINT64_MAX), control_(options) {
  state().device = &device();
}

MockBackend::~MockBackend() {
  // Replays in flight record into the control, which goes before the streams do.
  if (!in_forked_child()) {
    shutdown_from_destructor();
    device().shut_down();
  }
}

Capabilities MockBackend::do_capabilities() const {
  Capabilities all;
  for (std::size_t i = 0; i < kNumCapabilities; ++i) all.add(static_cast<Capability>(i));
  all.lacks(Capability::computes, "the mock records launches and computes nothing");
  all.lacks(Capability::device_symbols, "the mock has no modules");
  all.lacks(Capability::managed_memory, "the mock's addresses are none of the host's");
  all.lacks(Capability::tensor_maps, "the mock's kernels read nothing");
  all.lacks(Capability::stream_priorities, "the mock's streams have one priority");
  for (const Capability capability : state().without) all.lacks(capability, "the mock was created without it");
  return all;
}

Result<std::uint32_t> MockBackend::do_sm_count() {
  METRALE_TRY(enter(Op::sm_count));
  return state().sm_count;
}

Result<std::unique_ptr<GpuBackend>> create(Options options) { return host::HostBackend::make<MockBackend>(options); }

}  // namespace metrale::mock
