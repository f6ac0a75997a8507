// SPDX-License-Identifier: Apache-2.0
#include "backends/mock/mock_backend.h"

namespace metrale::mock {

namespace {

ArgRecord copy_of(const KernelArg& arg) {
  const auto* first = static_cast<const std::byte*>(arg.data());
  return {arg.is_buffer(), arg.is_buffer() ? arg.ptr() : DevicePtr{}, {first, first + arg.size_bytes()}};
}

}  // namespace

LaunchRecord MockBackend::record_of(const LaunchDesc& launch) const {
  const MockKernel& kernel = mock_kernel(launch.kernel);
  LaunchRecord record;
  record.module = kernel.module;
  record.function = kernel.function;
  record.grid = launch.grid;
  record.block = launch.block;
  record.shared_bytes = launch.shared_bytes;
  record.stream = launch.stream;
  if (launch.attributes != nullptr) record.attributes = *launch.attributes;
  record.raw = launch.raw_params != nullptr;
  for (const KernelArg& arg : launch.args) record.args.push_back(copy_of(arg));
  if (record.raw) {
    std::lock_guard lock(state().mutex);
    const auto it = state().facts.find({kernel.module, kernel.function});
    if (it != state().facts.end()) {
      for (std::size_t i = 0; i < it->second.param_bytes.size(); ++i) {
        const auto* first = static_cast<const std::byte*>(launch.raw_params[i]);
        record.args.push_back({false, {}, {first, first + it->second.param_bytes[i]}});
      }
    }
  }
  return record;
}

Result<> MockBackend::do_launch(const LaunchDesc& launch) {
  METRALE_TRY(enter(launch.raw_params != nullptr ? Op::launch_raw : Op::launch));
  if (!state().is_recording.load(std::memory_order_relaxed)) [[likely]]
    return {};
  return host::guarded("record a launch", [&]() -> Result<> {
    LaunchRecord launched = record_of(launch);
    record({.op = launched.raw ? Op::launch_raw : Op::launch, .stream = launch.stream, .dst = launch.kernel.value});
    if (!stream_of(launch.stream).is_capturing()) {
      std::lock_guard lock(state().mutex);
      state().launches.push_back(std::move(launched));
      return {};
    }
    launched.replayed = true;
    return HostBackend::do_enqueue_host(launch.stream, [this, launched = std::move(launched)] {
      if (!state().is_recording.load(std::memory_order_relaxed)) return;
      std::lock_guard lock(state().mutex);
      state().launches.push_back(launched);
    });
  });
}

}  // namespace metrale::mock
