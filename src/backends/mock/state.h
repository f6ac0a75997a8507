// SPDX-License-Identifier: Apache-2.0
//
// What a mock knows: counters, records, armed failures, kernels and its memory. Counting is a relaxed add on the thread's own line,
// and nothing else happens on a mock that neither records nor fails.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backends/mock/address_space.h"
#include "metrale/backends/mock.h"

namespace metrale::host {
class Device;
}

namespace metrale::mock {

/// A kernel that was looked up. Lives as long as the mock.
struct MockKernel {
  std::string module;
  std::string function;
};

struct MockControl::State {
  using Name = std::pair<std::string, std::string>;
  struct Failure {
    std::optional<Op> op;  ///< nullopt: any hook.
    std::uint64_t left = 0;
    Errc code{};
  };
  // The last counter is that of hooks without an operation of their own.
  static constexpr std::size_t kStep = kNumOps;
  static constexpr std::size_t kNumShards = 16;
  struct alignas(64) Shard {
    std::array<std::atomic<std::uint64_t>, kNumOps + 1> calls{};
    std::atomic<std::uint64_t> h2d_bytes{0};
  };

  explicit State(const Options& options)
      : is_recording(options.recording),
        sm_count(options.sm_count),
        without(options.without),
        total_bytes(options.total_memory_bytes),
        free_bytes(options.free_memory_bytes) {}

  static std::size_t shard() noexcept;
  /// Counts a call and answers ok, or the failure it was told to make.
  Result<> enter(Op op) { return enter_counter(static_cast<std::size_t>(op)); }
  Result<> enter_step() { return enter_counter(kStep); }
  Result<> enter_counter(std::size_t counter) {
    shards[shard()].calls[counter].fetch_add(1, std::memory_order_relaxed);
    if (is_armed.load(std::memory_order_relaxed)) [[unlikely]]
      return fail_if_due(counter);
    return {};
  }
  Result<> fail_if_due(std::size_t counter);
  std::uint64_t sum(std::size_t counter) const noexcept;
  std::uint64_t sum(Op op) const noexcept { return sum(static_cast<std::size_t>(op)); }
  void add(const CallRecord& call) noexcept;
  void add(const SyncRecord& sync) noexcept;

  std::array<Shard, kNumShards> shards;
  std::atomic<bool> is_recording;
  std::atomic<bool> is_armed{false};  ///< A failure waits, or the device is lost.
  const std::uint32_t sm_count;
  const std::vector<Capability> without;
  AddressSpace memory;
  host::Device* device = nullptr;  ///< The backend's; set once.

  mutable std::mutex mutex;  // of the rest
  std::vector<LaunchRecord> launches;
  std::vector<LookupRecord> lookups;
  std::vector<SyncRecord> syncs;
  std::vector<CallRecord> calls;
  std::vector<Failure> failures;
  std::optional<std::string> lost;
  std::set<std::string, std::less<>> absent_modules;
  std::set<Name> denied;
  std::map<Name, KernelFacts> facts;
  std::map<Name, std::unique_ptr<MockKernel>> kernels;
  std::map<void*, std::uint64_t> host_regions;  ///< Pinned and registered memory.
  std::optional<std::uint64_t> max_allocation_bytes;
  std::uint64_t total_bytes;
  std::uint64_t free_bytes;
  std::optional<std::uint64_t> host_available;
};

}  // namespace metrale::mock
