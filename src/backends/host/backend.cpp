// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "backends/host/host_backend.h"
#include "metrale/log.h"
#include "metrale/switches.h"

namespace metrale::host {

namespace {

// Every backend is a device of its own, so that a kernel that faults loses its own device only.
std::string next_device_key() {
  static std::atomic<unsigned> count{0};
  return fmt::format("host:{}", count.fetch_add(1, std::memory_order_relaxed));
}

// Threads beyond the cores help where cores are shared unevenly; many more only take turns.
constexpr std::uint32_t kMostThreadsPerCore = 4;

std::uint32_t threads_or_cores(std::uint32_t num_threads) {
  if (num_threads != 0) return num_threads;
  const std::uint32_t num_cores = std::max(1u, std::thread::hardware_concurrency());
  const std::uint32_t wanted = switches().host_threads;
  if (wanted == 0) return num_cores;
  const std::uint32_t most = kMostThreadsPerCore * num_cores;
  if (wanted <= most) return wanted;
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true)) {
    log(LogLevel::warning, fmt::format("METRALE_HOST_THREADS={} is more than {} for each of {} cores: {} are used", wanted,
                                       kMostThreadsPerCore, num_cores, most));
  }
  return most;
}

}  // namespace

HostBackend::HostBackend(Options options, std::uint64_t run_now_bytes)
    : GpuBackend(options.face),
      device_key_(next_device_key()),
      memory_limit_(options.memory_limit_bytes),
      modules_(options.kernels, options.symbols),
      device_(std::make_unique<Device>(threads_or_cores(options.num_threads), run_now_bytes)) {}

HostBackend::~HostBackend() {
  if (in_forked_child()) {
    // The threads are the parent's, and their locks may have been taken at the fork: leave everything as it is.
    (void)device_.release();
    return;
  }
  shutdown_from_destructor();
  device_->shut_down();
  for (const auto& [base, block] : blocks_) unmap(base, block);
}

Result<> HostBackend::start() {
  if (const HostKernel* kernel = modules_.first_broken()) {
    return Error(Errc::invalid_argument, fmt::format("host kernel {}.{} has no function", kernel->module, kernel->function));
  }
  return initialize();
}

Capabilities HostBackend::do_capabilities() const {
  Capabilities all;
  for (std::size_t i = 0; i < kNumCapabilities; ++i) all.add(static_cast<Capability>(i));
  all.lacks(Capability::stream_priorities, "the host's streams are threads of one priority");
  all.lacks(Capability::cooperative_launch, "blocks of a host grid run a few at a time, never all at once");
  all.lacks(Capability::cluster_launch, "host blocks share no memory with each other");
  all.lacks(Capability::native_work, "no library enqueues on the host's streams");
  all.lacks(Capability::tensor_maps, "the host copies without descriptors");
  return all;
}

Result<std::uint32_t> HostBackend::do_sm_count() {
  METRALE_TRY(device().alive());
  return device().num_threads();
}

void HostBackend::do_shutdown() noexcept { device().shut_down(); }

Result<std::unique_ptr<GpuBackend>> create(Options options) { return HostBackend::make<HostBackend>(std::move(options)); }

}  // namespace metrale::host
