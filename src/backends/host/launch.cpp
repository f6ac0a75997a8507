// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "backends/host/host_backend.h"

namespace metrale::host {

namespace {

/// Where an argument of `bytes` begins when the one before ended at `offset`.
constexpr std::size_t aligned(std::size_t offset, std::size_t bytes) { return round_up(offset, bytes <= 8 ? 8 : 16); }

/// Appends a launch whose record holds a copy of the arguments; `size(i)` and `data(i)` are argument i's.
template <class Size, class Data>
void append_launch(WorkBuffer& work, const LaunchDesc& desc, const HostKernel& kernel, std::size_t num_args, Size&& size,
                   Data&& data) {
  const std::size_t table_bytes = num_args * sizeof(void*);
  std::size_t end = table_bytes;
  for (std::size_t i = 0; i < num_args; ++i) end = aligned(end, size(i)) + size(i);
  auto& launch = work.append<LaunchWork>(end);
  launch.kernel = &kernel;
  launch.grid = desc.grid;
  launch.block = desc.block;
  launch.shared_bytes = desc.shared_bytes;
  std::byte* payload = WorkBuffer::payload(launch);
  auto* table = reinterpret_cast<const void**>(payload);
  std::size_t offset = table_bytes;
  for (std::size_t i = 0; i < num_args; ++i) {
    offset = aligned(offset, size(i));
    table[i] = payload + offset;
    std::memcpy(payload + offset, data(i), size(i));
    offset += size(i);
  }
  launch.params = table;
}

}  // namespace

Result<> HostBackend::do_launch(const LaunchDesc& desc) {
  METRALE_TRY(device().alive());
  const HostKernel& kernel = kernel_of(desc.kernel);
  METRALE_TRY(stream_of(desc.stream).submit([&](WorkBuffer& work) {
    if (desc.raw_params == nullptr) {
      append_launch(
          work, desc, kernel, desc.args.size(), [&](std::size_t i) { return std::size_t{desc.args[i].size_bytes()}; },
          [&](std::size_t i) { return desc.args[i].data(); });
    } else {
      append_launch(
          work, desc, kernel, kernel.param_bytes.size(), [&](std::size_t i) { return std::size_t{kernel.param_bytes[i]}; },
          [&](std::size_t i) { return static_cast<const void*>(desc.raw_params[i]); });
    }
  }));
  return {};
}

}  // namespace metrale::host
