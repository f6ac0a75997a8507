// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "backends/host/device.h"
#include "backends/mock/mock_backend.h"

namespace metrale::mock {

std::size_t MockControl::State::shard() noexcept {
  static std::atomic<std::size_t> num_threads{0};
  thread_local const std::size_t index = num_threads.fetch_add(1, std::memory_order_relaxed) % kNumShards;
  return index;
}

std::uint64_t MockControl::State::sum(std::size_t counter) const noexcept {
  std::uint64_t total = 0;
  for (const Shard& s : shards) total += s.calls[counter].load(std::memory_order_relaxed);
  return total;
}

void MockControl::State::add(const CallRecord& call) noexcept {
  try {
    std::lock_guard lock(mutex);
    calls.push_back(call);
  } catch (const std::bad_alloc&) {
  }
}

void MockControl::State::add(const SyncRecord& sync) noexcept {
  try {
    std::lock_guard lock(mutex);
    syncs.push_back(sync);
  } catch (const std::bad_alloc&) {
  }
}

Result<> MockControl::State::fail_if_due(std::size_t counter) {
  std::lock_guard lock(mutex);
  if (lost) return Error(Errc::device_lost, fmt::format("the device is lost: {}", *lost));
  std::optional<Errc> due;
  std::erase_if(failures, [&](Failure& failure) {
    if (failure.op && static_cast<std::size_t>(*failure.op) != counter) return false;
    if (--failure.left != 0) return false;
    if (!due) due = failure.code;
    return true;
  });
  is_armed.store(!failures.empty(), std::memory_order_relaxed);
  if (!due) return {};
  const std::string_view what = counter == kStep ? "a step of a call" : to_string(static_cast<Op>(counter));
  return Error(*due, fmt::format("{} failed because the mock was told to", what));
}

MockControl::MockControl(const Options& options) : state_(std::make_unique<State>(options)) {}
MockControl::~MockControl() = default;

void MockControl::set_recording(bool on) { state_->is_recording.store(on, std::memory_order_relaxed); }

std::vector<LaunchRecord> MockControl::launches() const {
  std::lock_guard lock(state_->mutex);
  return state_->launches;
}

std::vector<LookupRecord> MockControl::lookups() const {
  std::lock_guard lock(state_->mutex);
  return state_->lookups;
}

std::vector<SyncRecord> MockControl::syncs() const {
  std::lock_guard lock(state_->mutex);
  return state_->syncs;
}

std::vector<CallRecord> MockControl::calls() const {
  std::lock_guard lock(state_->mutex);
  return state_->calls;
}

std::vector<NativeStream> MockControl::streams_of(Op op) const {
  std::lock_guard lock(state_->mutex);
  std::vector<NativeStream> streams;
  for (const CallRecord& call : state_->calls) {
    if (call.op == op) streams.push_back(call.stream);
  }
  return streams;
}

Counts MockControl::counts() const {
  Counts counts;
  counts.syncs = num_calls(Op::synchronize) + num_calls(Op::synchronize_for) + num_calls(Op::synchronize_device);
  counts.d2h_blocking = num_calls(Op::copy_d2h) + num_calls(Op::copy_d2h_on_stream);
  counts.d2h_async = num_calls(Op::copy_d2h_async);
  counts.d2d = num_calls(Op::copy_d2d) + num_calls(Op::copy_d2d_async);
  counts.copies_2d = num_calls(Op::copy_d2d_2d_async);
  counts.h2d = num_calls(Op::copy_h2d) + num_calls(Op::copy_h2d_async) + num_calls(Op::copy_h2d_async_retained);
  counts.pinned_allocs = num_calls(Op::alloc_host_pinned);
  counts.launches = num_calls(Op::launch) + num_calls(Op::launch_raw);
  for (const State::Shard& shard : state_->shards) counts.h2d_bytes += shard.h2d_bytes.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i <= State::kStep; ++i) counts.hook_calls += state_->sum(i);
  return counts;
}

std::uint64_t MockControl::num_calls(Op op) const { return state_->sum(op); }

void MockControl::reset() {
  std::lock_guard lock(state_->mutex);
  state_->launches.clear();
  state_->lookups.clear();
  state_->syncs.clear();
  state_->calls.clear();
  for (State::Shard& shard : state_->shards) {
    for (auto& count : shard.calls) count.store(0, std::memory_order_relaxed);
    shard.h2d_bytes.store(0, std::memory_order_relaxed);
  }
}

void MockControl::mark_module_absent(std::string_view module) {
  std::lock_guard lock(state_->mutex);
  state_->absent_modules.emplace(module);
}

void MockControl::deny_kernel(std::string_view module, std::string_view function) {
  std::lock_guard lock(state_->mutex);
  state_->denied.emplace(module, function);
}

void MockControl::set_kernel_facts(std::string_view module, std::string_view function, KernelFacts facts) {
  std::lock_guard lock(state_->mutex);
  state_->facts.insert_or_assign({std::string(module), std::string(function)}, std::move(facts));
}

void MockControl::set_max_allocation_bytes(std::optional<std::uint64_t> bytes) {
  std::lock_guard lock(state_->mutex);
  state_->max_allocation_bytes = bytes;
}

void MockControl::set_memory(std::uint64_t total_bytes, std::uint64_t free_bytes) {
  std::lock_guard lock(state_->mutex);
  state_->total_bytes = total_bytes;
  state_->free_bytes = free_bytes;
}

void MockControl::set_integrated(std::optional<std::uint64_t> host_available_bytes) {
  std::lock_guard lock(state_->mutex);
  state_->host_available = host_available_bytes;
}

void MockControl::fail_nth(Op op, std::uint64_t n, Errc code) {
  if (n == 0) return;
  std::lock_guard lock(state_->mutex);
  state_->failures.push_back({op, n, code});
  state_->is_armed.store(true, std::memory_order_relaxed);
}

void MockControl::fail_any_nth(std::uint64_t n, Errc code) {
  if (n == 0) return;
  std::lock_guard lock(state_->mutex);
  state_->failures.push_back({std::nullopt, n, code});
  state_->is_armed.store(true, std::memory_order_relaxed);
}

void MockControl::clear_failures() {
  std::lock_guard lock(state_->mutex);
  state_->failures.clear();
  state_->is_armed.store(state_->lost.has_value(), std::memory_order_relaxed);
}

void MockControl::lose_device(std::string_view reason) {
  state_->device->lose(reason);
  std::lock_guard lock(state_->mutex);
  if (!state_->lost) state_->lost = reason;
  state_->is_armed.store(true, std::memory_order_relaxed);
}

void MockControl::defer_copies(bool on) { state_->device->set_holding_back(on); }

std::byte* MockControl::host_view(DevicePtr ptr) const {
  if (ptr.address < kBaseAddress) return nullptr;
  const Result<std::byte*> memory = state_->memory.resolve(ptr, 0);
  return memory ? *memory : nullptr;
}

MockControl& control(GpuBackend& backend) noexcept { return static_cast<MockBackend&>(backend).control(); }

}  // namespace metrale::mock
