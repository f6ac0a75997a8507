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
  // The blocks that went since it was last asked.
  const auto gone_now = [&] {
    std::vector<Allocation> left = held_blocks();
    const Gone gone = difference(held, left);
    held = std::move(left);
    return gone;
  };
  const auto book = [&](std::string label, const Gone& gone, const Result<>& result) {
    receipt.lines.push_back({std::move(label), gone.bytes, gone.blocks, result ? std::string() : result.error().to_string()});
  };
  const auto let_go = [&](Entry& entry, const Result<>& released, const Gone& before) {
    std::string label(entry.resource->label());
    entry.owned.reset();
    const Gone now = gone_now();
    book(std::move(label), {before.bytes + now.bytes, before.blocks + now.blocks}, released);
  };

  // Graphs name their memory until the last replay is done. A device that cannot be waited for shows in the steps that follow.
  (void)backend_.synchronize_device();
  // Resources whose memory a graph names wait until all others have let their own graphs go and the leftover ones are destroyed: if
  // they kept addresses that the sweep frees, they would later free whoever got them.
  struct Named {
    Entry entry;
    Gone gone;
  };
  std::vector<Named> named;
  while (!entries_.empty()) {
    Entry entry = std::move(entries_.back());
    entries_.pop_back();
    const Result<> result = entry.resource->release(backend_);
    if (!result && result.error().code() == Errc::in_use && extent_ == TeardownExtent::backend) {
      named.push_back({std::move(entry), gone_now()});
      continue;
    }
    let_go(entry, result, {});
  }
  if (extent_ == TeardownExtent::backend) {
    if (const Result<> destroyed = backend_.destroy_leftover_graphs(); !destroyed) book("graphs", {}, destroyed);
    for (Named& waiting : named) let_go(waiting.entry, waiting.entry.resource->release(backend_), waiting.gone);
    OpCache& ops = backend_.op_cache();
    const Result<> ops_released = ops.release(backend_);
    book(std::string(ops.label()), gone_now(), ops_released);

    const Result<std::uint64_t> swept = backend_.sweep_unreleased();
    const Gone gone = gone_now();
    receipt.swept_bytes = gone.bytes;
    receipt.swept_blocks = gone.blocks;
    if (!swept) book("sweep", {}, swept.error());
    const Result<> unloaded = backend_.unload_modules();
    if (!unloaded && unloaded.error().code() != Errc::unsupported) {
      book("modules", {}, unloaded);
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
