// SPDX-License-Identifier: Apache-2.0
#include "metrale/teardown.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/release_log.h"
#include "metrale/op_cache.h"

namespace metrale {
namespace {

// Blocks that the backend handed out and frees itself.
bool is_ours(MemoryKind kind) noexcept { return counts_as_live(kind) || kind == MemoryKind::arena || kind == MemoryKind::pinned; }

struct Gone {
  std::uint64_t bytes = 0;
  std::uint64_t blocks = 0;
};

// What is in `before` and not in `after`. By address and generation: an address may have been handed out again in between.
Gone difference(const std::vector<Allocation>& before, const std::vector<Allocation>& after) {
  std::set<std::pair<DevicePtr, std::uint64_t>> alive;
  for (const Allocation& block : after) alive.emplace(block.base, block.generation);
  Gone gone;
  for (const Allocation& block : before) {
    if (alive.contains({block.base, block.generation})) continue;
    gone.bytes += block.bytes;
    ++gone.blocks;
  }
  return gone;
}

}  // namespace

std::uint64_t Receipt::released_bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const Line& line : lines) sum += line.bytes;
  return sum;
}

bool Receipt::clean() const noexcept {
  return balanced() && swept_blocks == 0 && abandoned_bytes == 0 &&
         std::all_of(lines.begin(), lines.end(), [](const Line& line) { return line.failure.empty(); });
}

std::string Receipt::to_string() const {
  std::string text;
  for (const Line& line : lines) {
    text += fmt::format("{}: {} bytes in {} blocks{}{}\n", line.label, line.bytes, line.blocks,
                        line.failure.empty() ? "" : "; failed: ", line.failure);
  }
  text += fmt::format("swept: {} bytes in {} blocks\n", swept_bytes, swept_blocks);
  if (abandoned_bytes != 0) text += fmt::format("abandoned on the lost device: {} bytes\n", abandoned_bytes);
  text += fmt::format("balance: {} bytes in {} blocks\n", balance_bytes, balance_blocks);
  return text;
}

Teardown::Teardown(GpuBackend& backend, TeardownExtent extent)
    : backend_(backend), extent_(extent), abandoned_before_(backend.abandoned_bytes()) {
  for (const Allocation& block : held_blocks()) {
    baseline_bytes_ += block.bytes;
    ++baseline_blocks_;
  }
}

Teardown::~Teardown() {
  if (ran_) return;
  try {
    if (const Receipt receipt = run(); !receipt.clean()) {
      log(LogLevel::warning, "a model was unloaded by a destructor:\n" + receipt.to_string());
    }
  } catch (...) {
    detail::log_warning_noexcept("a model was not unloaded: out of memory in its Teardown");
  }
}

void Teardown::add(std::unique_ptr<ModelResource> resource) {
  ModelResource* const borrowed = resource.get();
  entries_.push_back({borrowed, std::move(resource)});
}

void Teardown::add(ModelResource& resource) { entries_.push_back({&resource, nullptr}); }

std::vector<Allocation> Teardown::held_blocks() const {
  std::vector<Allocation> blocks = backend_.live_allocations();
  std::erase_if(blocks, [](const Allocation& block) { return !is_ours(block.kind); });
  return blocks;
}

Receipt Teardown::run() {
  ran_ = true;
  Receipt receipt;
  std::vector<Allocation> held = held_blocks();
  // Runs one step and books the blocks that went with it.
  const auto step = [&](std::string label, auto&& action) {
    const Result<> result = action();
    std::vector<Allocation> left = held_blocks();
    const Gone gone = difference(held, left);
    held = std::move(left);
    receipt.lines.push_back({std::move(label), gone.bytes, gone.blocks, result ? std::string() : result.error().to_string()});
  };

  // Graphs name their memory until the last replay is done. A device that cannot be waited for shows in the steps that follow.
  (void)backend_.synchronize_device();
  if (extent_ == TeardownExtent::backend) {
    // Leftover ones first: a resource that could not free what they name would keep addresses that the sweep gives to others.
    if (const Result<> destroyed = backend_.destroy_leftover_graphs(); !destroyed) {
      receipt.lines.push_back({"graphs", 0, 0, destroyed.error().to_string()});
    }
  }
  while (!entries_.empty()) {
    Entry entry = std::move(entries_.back());
    entries_.pop_back();
    step(std::string(entry.resource->label()), [&] {
      Result<> result = entry.resource->release(backend_);
      entry.owned.reset();
      return result;
    });
  }
  if (extent_ == TeardownExtent::backend) {
    OpCache& ops = backend_.op_cache();
    step(std::string(ops.label()), [&] { return ops.release(backend_); });

    const Result<std::uint64_t> swept = backend_.sweep_unreleased();
    const std::vector<Allocation> left = held_blocks();
    const Gone gone = difference(held, left);
    receipt.swept_bytes = gone.bytes;
    receipt.swept_blocks = gone.blocks;
    if (!swept) receipt.lines.push_back({"sweep", 0, 0, swept.error().to_string()});
    const Result<> unloaded = backend_.unload_modules();
    if (!unloaded && unloaded.error().code() != Errc::unsupported) {
      receipt.lines.push_back({"modules", 0, 0, unloaded.error().to_string()});
    }
  }

  for (const Allocation& block : held_blocks()) {
    receipt.balance_bytes += static_cast<std::int64_t>(block.bytes);
    ++receipt.balance_blocks;
  }
  receipt.balance_bytes -= static_cast<std::int64_t>(baseline_bytes_);
  receipt.balance_blocks -= static_cast<std::int64_t>(baseline_blocks_);
  receipt.abandoned_bytes = backend_.abandoned_bytes() - abandoned_before_;
  return receipt;
}

}  // namespace metrale
