// SPDX-License-Identifier: Apache-2.0
#include "bridges/collective/world.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "bridges/collective/reduce.h"
#include "metrale/bridges/in_process.h"

namespace metrale::in_process {
namespace {

bool is_message(const StagedCall& call) {
  return call.call.kind == CollectiveKind::send || call.call.kind == CollectiveKind::receive;
}

/// What `rank` gets of the call of which `all` has each rank's side.
void compute(std::uint32_t rank, std::span<const StagedCall* const> all) noexcept {
  const StagedCall& mine = *all[rank];
  const Collective& call = mine.call;
  const std::uint64_t part = call.count * dtype_facts(call.dtype).block_bytes;
  std::array<const std::byte*, kMaxRanks> from{};
  for (std::size_t r = 0; r < all.size(); ++r) from[r] = all[r]->from.data();
  const std::span<const std::byte*> sources(from.data(), all.size());
  switch (call.kind) {
    case CollectiveKind::all_reduce: return reduce(call.op, call.dtype, sources, mine.to.data(), call.count);
    case CollectiveKind::reduce_scatter:
      for (const std::byte*& source : sources) source += part * rank;
      return reduce(call.op, call.dtype, sources, mine.to.data(), call.count);
    case CollectiveKind::all_gather:
      for (std::size_t r = 0; r < all.size(); ++r) std::memcpy(mine.to.data() + part * r, from[r], part);
      return;
    case CollectiveKind::broadcast: std::memcpy(mine.to.data(), from[call.peer], part); return;
    default: return;
  }
}

}  // namespace

void World::run(std::uint32_t rank, std::uint32_t channel, std::span<const StagedCall> calls) noexcept {
  try {
    Result<> done = run_calls(rank, channel, calls);
    if (done) return;
    fail(std::move(done).error());
  } catch (...) {
    fail(Error::no_memory());
  }
  for (const StagedCall& call : calls) std::ranges::fill(call.to, std::byte{0xff});
}

Result<> World::run_calls(std::uint32_t rank, std::uint32_t channel, std::span<const StagedCall> calls) {
  METRALE_TRY(failure());
  // What is sent is copied away, so no order of a group's calls can make two ranks wait for each other.
  std::vector<StagedCall> shared;
  for (const StagedCall& call : calls) {
    if (call.call.kind == CollectiveKind::send) METRALE_TRY(send(rank, channel, call));
    if (!is_message(call)) shared.push_back(call);
  }
  if (!shared.empty()) METRALE_TRY(meet(rank, channel, shared));
  for (const StagedCall& call : calls) {
    if (call.call.kind == CollectiveKind::receive) METRALE_TRY(receive(rank, channel, call));
  }
  return {};
}

template <class Ready, class Absent>
Result<> World::wait(Lock& lock, std::uint32_t rank, std::string_view what, Ready&& ready, Absent&& absent) {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  while (!ready()) {
    if (failure_) return *failure_;
    if (const std::optional<std::uint32_t> gone = absent())
      return Error(Errc::invalid_argument, fmt::format("{}: rank {} waits for rank {}, which has left", what, rank, *gone));
    if (changed_.wait_until(lock, deadline) == std::cv_status::timeout && !ready() && !failure_) {
      return Error(Errc::timeout, fmt::format("{}: rank {} waited {} ms for other ranks; every rank has to make the same calls",
                                              what, rank, timeout_.count()));
    }
  }
  return {};
}

Result<> World::check_step(const Step& step) const {
  const std::span<const StagedCall> first = step.calls[0];
  for (std::uint32_t rank = 1; rank < size_; ++rank) {
    const std::span<const StagedCall> other = step.calls[rank];
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const auto text = [&](std::span<const StagedCall> calls) {
        return i < calls.size() ? describe(calls[i].call) : std::string("no call");
      };
      const bool same = i < first.size() && i < other.size() && first[i].call.kind == other[i].call.kind &&
                        first[i].call.count == other[i].call.count && first[i].call.dtype == other[i].call.dtype &&
                        first[i].call.op == other[i].call.op && first[i].call.peer == other[i].call.peer;
      if (same) continue;
      return Error(Errc::invalid_argument,
                   fmt::format("rank 0 makes {} where rank {} makes {}; every rank has to make the same calls", text(first), rank,
                               text(other)));
    }
  }
  return {};
}

Result<> World::meet(std::uint32_t rank, std::uint32_t channel, std::span<const StagedCall> calls) {
  Lock lock(mutex_);
  if (failure_) return *failure_;
  const std::uint64_t number = next_[{rank, channel}]++;
  std::shared_ptr<Step>& slot = steps_[{channel, number}];
  if (!slot) {
    slot = std::make_shared<Step>();
    slot->calls.resize(size_);
    slot->has_come.resize(size_, false);
  }
  const std::shared_ptr<Step> step = slot;
  step->calls[rank] = calls;
  step->has_come[rank] = true;
  // From here to the end of the wait a failure is kept under the same lock: a rank that gives up takes its calls along, and none
  // may go on to read them. Once `complete`, all go on, whatever fails.
  if (++step->arrived == size_) {
    if (Result<> fits = check_step(*step); !fits) {
      fail_locked(fits.error());
      return fits;
    }
    step->complete = true;
    changed_.notify_all();
  } else {
    const auto absent = [&]() -> std::optional<std::uint32_t> {
      for (std::uint32_t r = 0; r < size_; ++r) {
        if (left_[r] && !step->has_come[r]) return r;
      }
      return std::nullopt;
    };
    if (Result<> came = wait(lock, rank, describe(calls[0].call), [&] { return step->complete; }, absent); !came) {
      fail_locked(came.error());
      return came;
    }
  }
  lock.unlock();

  std::array<const StagedCall*, kMaxRanks> all{};
  for (std::size_t i = 0; i < calls.size(); ++i) {
    for (std::uint32_t r = 0; r < size_; ++r) all[r] = &step->calls[r][i];
    compute(rank, std::span(all.data(), size_));
  }

  // The others read this rank's memory until they are done.
  lock.lock();
  if (++step->done == size_) {
    steps_.erase({channel, number});
    changed_.notify_all();
    return {};
  }
  changed_.wait(lock, [&] { return step->done == size_; });
  return {};
}

Result<> World::send(std::uint32_t rank, std::uint32_t channel, const StagedCall& call) {
  Message message{{call.from.begin(), call.from.end()}, call.call};
  std::lock_guard lock(mutex_);
  mail_[{channel, rank, call.call.peer}].push_back(std::move(message));
  changed_.notify_all();
  return {};
}

Result<> World::receive(std::uint32_t rank, std::uint32_t channel, const StagedCall& call) {
  const std::uint32_t peer = call.call.peer;
  Lock lock(mutex_);
  std::deque<Message>& box = mail_[{channel, peer, rank}];
  METRALE_TRY(wait(
      lock, rank, describe(call.call), [&] { return !box.empty(); },
      [&] { return left_[peer] ? std::optional(peer) : std::nullopt; }));
  const Message message = std::move(box.front());
  box.pop_front();
  lock.unlock();
  if (message.call.count != call.call.count || message.call.dtype != call.call.dtype) {
    return Error(Errc::invalid_argument,
                 fmt::format("rank {} makes {} where rank {} makes {}; both have to be of one size and type", peer,
                             describe(message.call), rank, describe(call.call)));
  }
  std::memcpy(call.to.data(), message.bytes.data(), message.bytes.size());
  return {};
}

Result<> World::failure() const {
  std::lock_guard lock(mutex_);
  if (failure_) return *failure_;
  return {};
}

void World::fail(Error error) noexcept {
  std::lock_guard lock(mutex_);
  fail_locked(std::move(error));
}

void World::fail_locked(Error error) noexcept {
  if (!failure_) failure_.emplace(std::move(error));
  changed_.notify_all();
}

void World::leave(std::uint32_t rank) noexcept {
  std::lock_guard lock(mutex_);
  left_[rank] = true;
  changed_.notify_all();
}

}  // namespace metrale::in_process
