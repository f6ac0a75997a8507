// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/host_call.h"

#include <utility>

#include "metrale/log.h"

namespace metrale::cuda {

void HostCall::run() noexcept {
  try {
    fn();
  } catch (...) {
    try {
      log(LogLevel::error, "a function given to enqueue_host threw; its stream goes on without it");
    } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for the text, and nobody to tell
    }
  }
}

HostCalls::Ticket* HostCalls::add(std::function<void()> fn) {
  auto owned = std::make_unique<Ticket>(Ticket{shared_from_this(), {std::move(fn)}});
  Ticket* ticket = owned.get();
  std::lock_guard lock(mutex_);
  waiting_.emplace(ticket, std::move(owned));
  return ticket;
}

std::unique_ptr<HostCalls::Ticket> HostCalls::remove(Ticket* ticket) noexcept {
  std::lock_guard lock(mutex_);
  const auto it = waiting_.find(ticket);
  if (it == waiting_.end()) return nullptr;
  std::unique_ptr<Ticket> owned = std::move(it->second);
  waiting_.erase(it);
  return owned;
}

void HostCalls::drop(Ticket* ticket) noexcept { remove(ticket).reset(); }

void HostCalls::clear() noexcept {
  std::unordered_map<Ticket*, std::unique_ptr<Ticket>> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(waiting_);
  }
  // Each holds the list, which the last of them may end: not under its lock.
  all.clear();
}

void HostCalls::run_once(void* ticket) noexcept {
  auto* asked = static_cast<Ticket*>(ticket);
  const std::shared_ptr<HostCalls> list = asked->list;
  if (const std::unique_ptr<Ticket> owned = list->remove(asked)) owned->call.run();
}

void HostCalls::run_again(void* call) noexcept { static_cast<HostCall*>(call)->run(); }

}  // namespace metrale::cuda
